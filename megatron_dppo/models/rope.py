"""Rotary positions: transformers computes the frequencies, Megatron-Core's rotary module uses them."""

from __future__ import annotations

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig

SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3")


def rope_frequencies(model: HFConfig, max_sequence_length: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` (fp32, on the CPU) and the factor that multiplies cos and sin.

    `dynamic` (NTK) scaling keeps the plain frequencies up to `max_position_embeddings`. Beyond it they depend on the
    length of each sequence, and a pack of sequences has no single length: longer ones are refused.
    """
    rope = dict(model.config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED:
        raise UserError(f"config.json: rope_type {kind!r} is not supported; there are {', '.join(SUPPORTED)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config.json: partial_rotary_factor is not supported; every head dimension is rotated")
    cpu = torch.device("cpu")
    if kind == "dynamic" and max_sequence_length > model.max_position_embeddings:
        raise UserError(
            f"config.json: dynamic rope scaling beyond max_position_embeddings {model.max_position_embeddings} depends "
            f"on each sequence's length and is not supported; {max_sequence_length} tokens were asked for. Shorten the "
            "sequences or use yarn"
        )
    if kind in ("default", "dynamic"):
        exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=cpu) / model.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    with cpu:  # whatever torch's default device is
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](model.config, cpu)
    return frequencies.to(torch.float32), float(factor)
