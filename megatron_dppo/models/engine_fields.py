"""Fields of a config.json that make vLLM compute another function than transformers, by which the trainer goes.

vLLM takes some fields that transformers' class of the model type does not read, and leaves out some that it reads. Such
a model would be sampled by one function and trained by another, so it is refused, in a run as in a conversion. The
tables are of vLLM 0.26; `tests/rollout/test_engine_fields.py` compares them with all that the installed vLLM reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.models.family import Family

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "block_configs": (None, []),
    "canvas_length": (None,),
    "compression_config": (None,),
    "decoder": (None,),
    "dual_chunk_attention_config": (None,),
    "generator": (None,),
    "is_mm_prefix_lm": (None, False),
    "llm_config": (None,),
    "rotary_emb_fraction": (1.0,),
    "rotary_pct": (1.0,),
    "rswa_window": (None,),
    "speculators_config": (None,),
    "text_encoder": (None,),
    "thinker_config": (None,),
    "xdrope_section": (None,),
}
"""Of every model type: values with which the field changes nothing."""

SAME_AS: dict[str, str] = {
    "hidden_size_per_head": "head_dim",
    "n_head_kv": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "rotary_emb_base": "rope_theta",
}
"""Other names that vLLM prefers, or takes where the usual one is missing: only with the same value."""

NEUTRAL_OF_ROPE: dict[str, tuple[Any, ...]] = {
    "alpha": (None,),
    "extrapolation_factor": (1.0,),
    "mrope_section": (),  # the key alone makes it another rotation
    "rope_dim": (None, 0),
    "use_fope": (None, False),
}
"""In `rope_parameters` (`rope_scaling`)."""

YARN_SCALES = ("attn_factor", "apply_yarn_scaling", "attention_factor", "mscale", "mscale_all_dim")
"""Of which some are read by the one and some by the other."""


def refuse_engine_fields(raw: Mapping[str, Any], config: PreTrainedConfig, family: Family, where: str) -> None:
    """Raise `UserError` for the first field with which vLLM would not compute what transformers does.

    raw     content of config.json
    config  what transformers makes of it
    """
    refuse_neutral(raw, NEUTRAL | dict(family.engine), where)
    for name, value in raw.items():
        if name in SAME_AS and value != (usual := _usual(config, SAME_AS[name])):
            raise _refusal(where, name, value, f"vLLM reads in place of {SAME_AS[name]} {usual}")
    head_dim = _usual(config, "head_dim")
    if family.engine_divides_heads and head_dim * config.num_attention_heads != config.hidden_size:
        raise _refusal(where, "head_dim", head_dim, "vLLM takes for hidden_size / num_attention_heads")
    for name, taken in family.engine_takes.items():
        if (value := getattr(config, name)) != taken:
            raise _refusal(where, name, value, f"vLLM takes for {taken!r}")
    rope = dict(config.rope_parameters or {})
    if family.image_positions and (sections := rope.pop("mrope_section", None)) is not None:
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        if not isinstance(sections, list) or [*map(type, sections)] != [int] * 3 or sum(sections) != pairs:
            raise UserError(
                f"{where}: rope_parameters.mrope_section is {sections!r:.80}, it must be three numbers of the {pairs} "
                "pairs of dimensions that are rotated"
            )
    _refuse_rotations(rope, where, by_mscale=family.engine_scales_by_mscale)


def refuse_neutral(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise `UserError` for the first field that is not at one of the values with which it changes nothing."""
    for name, value in raw.items():
        # 1 is not true
        if name in neutral and (value, type(value) is bool) not in [(one, type(one) is bool) for one in neutral[name]]:
            raise _refusal(where, name, value, "vLLM reads and transformers does not")


def _refuse_rotations(rope: dict[str, Any], where: str, *, by_mscale: bool) -> None:
    for name, value in rope.items():
        if name in NEUTRAL_OF_ROPE and value not in NEUTRAL_OF_ROPE[name]:
            raise _refusal(where, f"rope_parameters.{name}", value, "vLLM reads and transformers does not")
    if rope.get("rope_type") != "yarn":
        return
    grows, mscale, all_dim = 0.1 * math.log(max(rope["factor"], 1.0)), rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None:
        trained = rope["attention_factor"]
    else:
        trained = (grows * mscale + 1) / (grows * all_dim + 1) if mscale and all_dim else grows + 1
    if by_mscale:
        if not (scaled := rope.get("apply_yarn_scaling", True)):
            raise _refusal(where, "rope_parameters.apply_yarn_scaling", scaled, "vLLM reads and transformers does not")
        if not (whole := rope.get("truncate", True)):
            raise _refusal(where, "rope_parameters.truncate", whole, "vLLM takes for True")
        base = (grows * rope.get("mscale", 1.0) + 1) / (grows * rope.get("mscale_all_dim", 0.0) + 1)
    else:
        base = grows + 1 if rope.get("apply_yarn_scaling", True) else 1.0
    sampled = rope.get("attn_factor", 1.0) * base
    if math.isclose(trained, sampled, rel_tol=1e-6):
        return
    name = next(name for name in YARN_SCALES if rope.get(name) is not None)
    by_vllm = name in ("attn_factor", "apply_yarn_scaling")
    remedy = f"attention_factor to {sampled:.9g}" if by_vllm else f"attn_factor to {trained / base:.9g}"
    raise UserError(
        f"{where}: rope_parameters.{name} is {rope[name]!r:.80}, so that transformers scales queries and keys by "
        f"{trained:.9g} and vLLM by {sampled:.9g}, for each reads other fields; set {remedy} beside it"
    )


def _usual(config: PreTrainedConfig, name: str) -> Any:
    if name == "rope_theta":
        return (config.rope_parameters or {}).get(name)
    if name == "head_dim":
        return getattr(config, name, None) or config.hidden_size // config.num_attention_heads
    return getattr(config, name)


def _refusal(where: str, name: str, value: Any, why: str) -> UserError:
    return UserError(
        f"{where}: {name} is {value!r:.80}, which {why}: it would sample from another model than is trained; remove it "
        "if the weights were made without it"
    )
