"""Rotary positions: transformers computes the frequencies, Megatron-Core's rotary module uses them."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dppo.errors import UserError

SUPPORTED = ("default", "linear", "yarn", "llama3")
"""Not `dynamic`: transformers scales by the length of each sequence, vLLM always by the longest."""


def check_rope(config: PreTrainedConfig, where: str, factor: float = 1.0) -> None:
    """`UserError` where the rotary settings of a configuration are not supported or give no frequencies. `factor`: the
    share of a head's dimensions that the model rotates."""
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED:
        raise UserError(f"{where}: rope_type {kind!r} is not supported; there are {', '.join(SUPPORTED)}")
    if rope.get("partial_rotary_factor", 1.0) != factor:
        raise UserError(
            f"{where}: partial_rotary_factor is not supported; this model type rotates every dimension of a head"
        )
    theta = rope.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise UserError(f"{where}: rope_theta is {theta!r}, it must be a number above 0")
    try:
        frequencies, scale = _frequencies(config, kind, theta)
    except Exception as error:  # what a missing or odd field of the scaling gives there
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{where}: rope_parameters {rope} give no frequencies ({reason})") from None
    if not (frequencies.isfinite().all() and math.isfinite(scale)):
        raise UserError(f"{where}: rope_parameters {rope} give frequencies that are not finite")


def _frequencies(config: PreTrainedConfig, kind: str, theta: float) -> tuple[torch.Tensor, float]:
    cpu = torch.device("cpu")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=cpu) / rotated
        return 1.0 / (theta**exponents), 1.0
    with cpu:  # whatever torch's default device is
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, cpu)
    return frequencies.to(torch.float32), float(factor)


def rope_frequencies(config: PreTrainedConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[rotated dimensions / 2]` (fp32, on the CPU) and the factor that multiplies cos and sin."""
    rope = config.rope_parameters
    return _frequencies(config, rope["rope_type"], rope["rope_theta"])
