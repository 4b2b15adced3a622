"""Local statistics and gradients on Hopper GPUs: matrix products that work on their accumulators (hopper_kernels).

Same functions as ``chunked``. Forward: one pass over the weight, which leaves the wanted logits and statistics of
256-column tiles, and then their merge. Backward: by vocabulary chunk, gradients of the logits in half precision by one
pass (and, where a loss uses the top K, of its entries by a small kernel), then two cuBLAS products. Memory beyond
results: forward ``16 T ceil(V / 256)`` bytes for up to 32,768 tokens at a time; backward one ``[T, chunk]`` in half
precision of 512 MiB, or 4,096 columns where that is more.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dppo.vocab_parallel.matmul import HALF, add_product, product
from megatron_dppo.vocab_parallel.rows import check_ids
from megatron_dppo.vocab_parallel.stats import Partials, concatenate
from megatron_dppo.vocab_parallel.weight_grad import WeightGrad

HOPPER = (9, 0)
"""The compute capability that these kernels, and those of `models/experts`, are for."""
_TOKEN_CHUNK = 1 << 15
_CHUNK_BYTES = 1 << 29
# Each chunk reads and writes the fp32 hidden gradient once: narrower ones would be bound by that.
_LEAST_COLUMNS = 4096
_BLOCK_T, _BLOCK_V, _BLOCK_H = 128, 256, 64
_STAGES = 4
# Token tiles that walk over the vocabulary together: their hidden states (16 MB) stay in the 50 MB L2.
_GROUP_BYTES = 16 << 20


def unusable(hidden: Tensor, weight: Tensor) -> str | None:
    """Why these tensors cannot take this path, or None."""
    if not (hidden.is_cuda and weight.is_cuda):
        return "it needs CUDA tensors"
    if torch.cuda.get_device_capability(hidden.device) != HOPPER:
        return "its kernels are for compute capability 9.0 (Hopper)"
    if hidden.dtype not in HALF:
        return f"it takes bfloat16 or float16, not {hidden.dtype}"
    if hidden.shape[1] % 8 or not weight.is_contiguous() or weight.data_ptr() % 16 or hidden.data_ptr() % 16:
        return "it needs a contiguous weight, 16-byte aligned tensors and a hidden size divisible by 8"
    return None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def _descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """TMA descriptor of blocks ``[rows, columns]`` of a matrix."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, [rows, columns], _layout(rows, columns, tensor.dtype))


def _launch(hidden: Tensor, columns: int) -> tuple[tuple[int], int, int, int, int]:
    """Grid, token tiles, column tiles, steps along the hidden size, token tiles of a group."""
    rows, width = hidden.shape
    tiles_t, tiles_v, steps = -(-rows // _BLOCK_T), -(-columns // _BLOCK_V), -(-width // _BLOCK_H)
    group = max(4, _GROUP_BYTES // (_BLOCK_T * width * 2))
    return (min(_processors(hidden.device), tiles_t * tiles_v),), tiles_t, tiles_v, steps, group


def forward(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    wanted: Int[Tensor, "N I"],
    *,
    start: int,
    vocab_size: int,
    temperature: float,
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Partials:
    """Statistics of the columns ``[start, start + V)``, whose weights are ``weight``. ``vocab_chunk`` is not used.

    Raises ``ValueError`` for ids outside ``[-1, vocab_size)``. That is found out while the products already run.
    """
    chunk = token_chunk or _TOKEN_CHUNK
    return concatenate(
        [
            _forward_block(h, weight, ids, start, vocab_size, temperature)
            for h, ids in zip(hidden.split(chunk), wanted.split(chunk), strict=True)
        ]
    )


def _forward_block(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    wanted: Int[Tensor, "N I"],
    start: int,
    vocab_size: int,
    temperature: float,
) -> Partials:
    from megatron_dppo.vocab_parallel import hopper_kernels
    from megatron_dppo.vocab_parallel.row_kernels import merge_tiles

    rows, columns = hidden.shape[0], weight.shape[0]
    if rows == 0 or columns == 0:
        check_ids(wanted, vocab_size)
        zero = hidden.new_zeros(rows, dtype=torch.float32)
        z = zero.new_full(wanted.shape, -math.inf)
        return Partials(zero - math.inf, zero, zero, z)

    grid, tiles_t, tiles_v, steps, group = _launch(hidden, columns)
    fault = torch.zeros(1, dtype=torch.int32, device=hidden.device)
    ids, places, first_slot = _sorted_ids(wanted, start, columns, tiles_v, vocab_size, fault)
    host_fault, known = torch.empty(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
    host_fault.copy_(fault, non_blocking=True)
    known.record()
    z = hidden.new_full(wanted.shape, -math.inf, dtype=torch.float32)
    tiles = z.new_empty((3, tiles_v, rows))
    hopper_kernels.tile_stats[grid](
        _descriptor(hidden, _BLOCK_T, _BLOCK_H),
        _descriptor(weight, _BLOCK_V, _BLOCK_H),
        tiles,
        ids,
        places,
        first_slot,
        z,
        rows,
        columns,
        start,
        wanted.shape[1],
        tiles_t,
        tiles_v,
        steps,
        1.0 / temperature,
        STAGES=_STAGES,
        GROUP=group,
        num_warps=4,
    )
    total = tiles.new_empty((3, rows))
    merge_tiles[(-(-rows // 32),)](tiles, total, rows, tiles_v, BLOCK_TILES=32, BLOCK_ROWS=32)
    known.synchronize()
    if host_fault.item():
        check_ids(wanted, vocab_size)
    return Partials(total[0], total[1], total[2], z)


def _sorted_ids(
    wanted: Int[Tensor, "N I"], start: int, columns: int, tiles: int, vocab_size: int, fault: Tensor
) -> tuple[Int[Tensor, "N I"], Int[Tensor, "N I"], Int[Tensor, "N tiles_1"]]:
    """Each row's ids rising, the places they had, and the first slot of each column tile; sets ``fault`` on bad ids."""
    from megatron_dppo.vocab_parallel.row_kernels import sort_ids

    rows, slots = wanted.shape
    wanted = wanted.to(torch.int64).contiguous()
    ids = wanted.new_empty((rows, slots), dtype=torch.int32)
    places, first_slot = torch.empty_like(ids), ids.new_empty((rows, tiles + 1))
    block_slots = max(2, 1 << (slots - 1).bit_length())
    block_rows = max(1, 256 // block_slots)
    sort_ids[(-(-rows // block_rows),)](
        wanted,
        ids,
        places,
        first_slot,
        fault,
        rows,
        slots,
        tiles,
        start,
        columns,
        vocab_size,
        TILE=_BLOCK_V,
        BLOCK_ROWS=block_rows,
        BLOCK_SLOTS=block_slots,
        BLOCK_TILES=max(1, 4096 // (block_rows * block_slots)),
    )
    return ids, places, first_slot


def backward(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    ids: Int[Tensor, "N I"],
    logp: Float[Tensor, "N I"],
    lse: Float[Tensor, " N"],
    entropy: Float[Tensor, " N"],
    grad_logp: Float[Tensor, "N I"],
    grad_entropy: Float[Tensor, " N"] | None,
    *,
    start: int,
    temperature: float,
    weight_grad: WeightGrad | None,
    need_hidden: bool,
    vocab_chunk: int | None = None,
) -> Float[Tensor, "N H"] | None:
    """This shard's part of the gradients: the weight's go to ``weight_grad``, the hidden's come back, unrounded.

    The logits are recomputed by the forward's products, so ``p`` is the same to the bit. With one id a row (I = 1, the
    token) the pass adds its gradient on the way. With more the pass leaves ``-(sum_i g_i) p_j`` everywhere, and the
    entries of the ids are written over from their ``logp``: added to what is rounded already, a near-certain token's
    gradient, ``g (1 - p)``, would be lost.
    """
    from megatron_dppo.vocab_parallel import hopper_kernels
    from megatron_dppo.vocab_parallel.row_kernels import put_gradients

    rows, columns = hidden.shape[0], weight.shape[0]
    if rows == 0 or columns == 0:
        return torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
    with_entropy = grad_entropy is not None
    slots = ids.shape[1]
    total, token_ids = grad_logp.sum(1), ids[:, 0] if slots == 1 else torch.full_like(ids[:, 0], -1)
    per_row = [token_ids, lse, entropy, total, lse if grad_entropy is None else grad_entropy]
    per_row = [x.contiguous() for x in per_row]
    ids, logp, grad_logp = (x.contiguous() for x in (ids, logp, grad_logp))
    block_slots = max(2, 1 << (slots - 1).bit_length())
    block_rows = max(1, 256 // block_slots)

    chunk = vocab_chunk or max(_LEAST_COLUMNS, _CHUNK_BYTES // (rows * hidden.element_size()))
    # Chunks of one size: the last would otherwise be a fraction that fills the GPU badly.
    chunk = -(-columns // -(-columns // chunk))
    chunk = -(-chunk // _BLOCK_V) * _BLOCK_V
    hidden_grad = None
    buffer = hidden.new_empty((rows, min(chunk, -(-columns // _BLOCK_V) * _BLOCK_V)))
    for j in range(0, columns, chunk):
        part = weight[j : j + chunk]
        grads = buffer[:, : part.shape[0]]
        grid, tiles_t, tiles_v, steps, group = _launch(hidden, part.shape[0])
        hopper_kernels.tile_grads[grid](
            _descriptor(hidden, _BLOCK_T, _BLOCK_H),
            _descriptor(part, _BLOCK_V, _BLOCK_H),
            _descriptor(grads, _BLOCK_T // 2, _BLOCK_V // 2),
            *per_row,
            rows,
            start + j,
            tiles_t,
            tiles_v,
            steps,
            1.0 / temperature,
            STAGES=_STAGES,
            GROUP=group,
            WITH_ENTROPY=with_entropy,
            num_warps=4,
        )
        if slots > 1:
            put_gradients[(-(-rows // block_rows),)](
                grads,
                ids,
                logp,
                grad_logp,
                *per_row[2:],
                rows,
                slots,
                grads.stride(0),
                start + j,
                part.shape[0],
                1.0 / temperature,
                WITH_ENTROPY=with_entropy,
                BLOCK_ROWS=block_rows,
                BLOCK_SLOTS=block_slots,
            )
        if need_hidden and hidden_grad is None:
            hidden_grad = product(grads, part)
        elif hidden_grad is not None:
            add_product(hidden_grad, grads, part)
        if weight_grad is not None:
            weight_grad.add(j, j + part.shape[0], grads, hidden)
    return hidden_grad
