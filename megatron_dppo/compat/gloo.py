"""What Megatron-Core asks of NCCL and gloo does not give, and what its token dispatcher expects of a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher


def patch_token_dispatcher() -> None:
    """All-to-all splits become numpy arrays: the stock helper converts CUDA tensors only, and the collective refuses
    tensors as split sizes."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def patch_collectives() -> None:
    """`all_gather` and `reduce_scatter` of shards of unequal height, which gloo lacks: pad to the highest, then trim.

    They occur where tensor-parallel ranks of one expert hold different numbers of tokens (TP x EP x ETP, all-to-all).
    """
    stock_gather, stock_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return stock_gather(input_, group, output_split_sizes, use_global_buffer)
        heights = [int(n) for n in output_split_sizes]
        padded = _pad_rows(input_, max(heights))
        parts = [torch.empty_like(padded) for _ in heights]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:height] for part, height in zip(parts, heights, strict=True)])

    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return stock_scatter(input_, group, input_split_sizes, use_global_buffer)
        heights = [int(n) for n in input_split_sizes]
        parts = [_pad_rows(part, max(heights)) for part in torch.split(input_, heights)]
        output = torch.empty_like(parts[0])
        dist.reduce_scatter(output, parts, group=group)
        return output[: heights[group.rank()]].contiguous()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded
