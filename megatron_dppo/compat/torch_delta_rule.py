"""The gated delta rule of packed sequences in plain torch, where flash-linear-attention's kernels do not run."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common, gdn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_next import modeling_qwen3_next

from megatron_dppo.compat.packed_attention import grid_position

_log = logging.getLogger(__name__)

# The decorated function calls flash-linear-attention where that is installed, whose backward may refuse to run.
plain_rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


def patch_delta_rule() -> None:
    """Megatron-Core's layer takes these functions for flash-linear-attention's: without that it refuses to be built,
    and its own torch rule takes no packed sequences. Where that is installed and there is a GPU its kernels stay, but
    for a rule whose backward does not run (`rule_runs`)."""
    gpu = torch.cuda.is_available()
    if not (gpu and common.HAVE_FLA):
        common.HAVE_FLA = True
        common.l2norm = l2norm
        gdn.causal_conv1d = causal_conv1d
    elif rule_runs():
        return
    if gpu:
        _log.warning(
            "gated delta layers are computed in plain torch, slowly: flash-linear-attention is not installed, or on a "
            "Hopper GPU tilelang, without which its backward refuses to run"
        )
    gdn.chunk_gated_delta_rule = chunk_gated_delta_rule


def rule_runs() -> bool:
    """Whether the installed kernels have a backward on this GPU. Triton from 3.4 to 3.7 miscompiles it on Hopper, so
    flash-linear-attention refuses unless tilelang is there to compile it (fla-org/flash-linear-attention#640)."""
    return torch.cuda.get_device_capability() != (9, 0) or importlib.util.find_spec("tilelang") is not None


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last dimension."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str,
    cu_seqlens: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Each channel convolved over the tokens up to each, then SiLU; x `[1, T, D]` packed or `[B, T, D]`, weight
    `[D, W]`."""
    if activation not in ("silu", "swish"):
        raise NotImplementedError(f"causal_conv1d is followed by SiLU; the layer asks for {activation}")
    grid = _to_grid(x, cu_seqlens)
    width = weight.shape[1]
    out = F.conv1d(grid.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[-1])
    return _from_grid(F.silu(out[..., : grid.shape[1]]).transpose(1, 2), cu_seqlens), None


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """`models.architecture.DeltaRule`'s formula from a state of zeros in each sequence; query and key
    `[1, T, heads, key_dim]` packed (or `[B, T, ...]`), of length 1, value `[..., heads, value_dim]`, g and beta
    `[..., heads]`. float32 inside. Gradients flow to all five; the backward computes everything again, of which the
    forward keeps nothing but these."""

    def rule(*packed: torch.Tensor) -> torch.Tensor:
        out, _ = plain_rule(*[_to_grid(x, cu_seqlens) for x in packed])
        return _from_grid(out, cu_seqlens)

    return checkpoint(rule, query, key, value, g, beta, use_reentrant=False, preserve_rng_state=False), None


def _to_grid(packed: torch.Tensor, cu: torch.Tensor | None) -> torch.Tensor:
    """`[sequences, longest, ...]`, zeros behind every sequence; each then is a sequence of a batch of its own."""
    if cu is None:
        return packed
    batch, longest = len(cu) - 1, int(cu.diff().max())
    grid = packed.new_zeros(batch * longest, *packed.shape[2:])
    return grid.index_copy(0, grid_position(cu), packed[0]).view(batch, longest, *packed.shape[2:])


def _from_grid(grid: torch.Tensor, cu: torch.Tensor | None) -> torch.Tensor:
    return grid if cu is None else grid.flatten(0, 1).index_select(0, grid_position(cu)).unsqueeze(0)
