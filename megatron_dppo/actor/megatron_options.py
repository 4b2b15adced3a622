"""`actor.megatron`: options of Megatron-Core that have no setting here. They change how a step is computed, not what
it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.errors import UserError, did_you_mean
from megatron_dppo.router_replay.requirements import REFUSED

_TAKEN: dict[type, frozenset[str]] = {
    MLATransformerConfig: frozenset({
        "pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage", "batch_p2p_sync",
        "deallocate_pipeline_outputs", "overlap_p2p_comm_warmup_flush",
        "attention_backend", "flash_attention_version", "apply_rope_fusion", "masked_softmax_fusion",
        "moe_permute_fusion", "deterministic_mode", "disable_bf16_reduced_precision_matmul",
        "high_priority_a2a_comm_stream", "recompute_modules", "distribute_saved_activations",
    }),
    DistributedDataParallelConfig: frozenset({
        "bucket_size", "num_buckets", "pad_buckets_for_high_nccl_busbw", "align_param_gather",
    }),
    OptimizerConfig: frozenset({"use_torch_optimizer_for_cpu_offload", "pin_cpu_grads", "pin_cpu_params"}),
}  # fmt: skip
"""Of each of Megatron-Core's configurations what it gets. What is not here would change the model (which is
config.json's), the objective or the optimizer, or is for parts of Megatron-LM that this trainer does not run."""
_SETTINGS = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence_parallel",
    "overlap_moe_expert_parallel_comm": "parallel.overlap_expert_exchange",
    **dict.fromkeys(("bf16", "fp16"), "actor.dtype"),
    "moe_token_dispatcher_type": "actor.token_dispatcher",
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_router_load_balancing_type"), "actor.load_balancing_loss"),
    "moe_z_loss_coeff": "actor.router_z_loss",
    "moe_router_bias_update_rate": "actor.router_bias_update_rate",
    "recompute_granularity": "actor.recompute",
    "recompute_num_layers": "actor.recompute_layers",
    **dict.fromkeys(("check_for_nan_in_grad", "check_for_large_grads"), "actor.max_skipped_steps"),
    **{name: f"optimizer.{name}" for name in ("lr", "min_lr", "weight_decay", "clip_grad", "initial_loss_scale")},
    **{name: f"optimizer.{name}" for name in ("min_loss_scale", "loss_scale_window")},
    **{name: f"optimizer.{name}" for name in ("overlap_grad_reduce", "overlap_param_gather")},
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.epsilon",
    "hysteresis": "optimizer.loss_scale_hysteresis",
    "loss_scale": "optimizer.initial_loss_scale",
    "grad_reduce_in_fp32": "optimizer.grad_reduce_dtype",
    **dict.fromkeys(("optimizer_cpu_offload", "optimizer_offload_fraction"), "optimizer.cpu_offload_fraction"),
}
"""What a setting of this package decides: of what is not taken, the names that have another here, or a counterpart."""
_ON = {"apply_rope_fusion", "masked_softmax_fusion", "moe_permute_fusion"}
"""What can only be switched off, to see whether a kernel is at fault."""


@dataclass(frozen=True)
class MegatronOptions:
    """Fields of Megatron-Core's `TransformerConfig`, `DistributedDataParallelConfig` and `OptimizerConfig`."""

    transformer: dict[str, Any]
    data_parallel: dict[str, Any]
    optimizer: dict[str, Any]


def megatron_options(given: Mapping[str, Any], *, recompute: str) -> MegatronOptions:
    """`actor.megatron`, each option where it belongs. `recompute`: `actor.recompute`.

    Raises UserError for one that Megatron-Core does not have, that a setting decides, that is not taken, or whose value
    is none of its kind."""
    known = {field.name for kind in _TAKEN for field in fields(kind)}
    taken = sorted(frozenset().union(*_TAKEN.values()))
    for name in given:
        if name not in known:
            hint = did_you_mean(name, taken) or did_you_mean(name, known) or f"; taken are {', '.join(taken)}"
            raise UserError(f"actor.megatron.{name}: Megatron-Core has no such option{hint}")
        if name in _SETTINGS:
            raise UserError(f"actor.megatron.{name}: {_SETTINGS[name]} decides it; set that")
    found: dict[type, dict[str, Any]] = {kind: {} for kind in _TAKEN}
    for name, value in given.items():
        kinds = [kind for kind, names in _TAKEN.items() if name in names]
        if not kinds:
            unlike = {field: f"routes cannot be replayed with it: {reason}" for field, _, reason, _ in REFUSED}
            why = unlike.get(name, "it changes what is computed, or nothing here makes use of it")
            raise UserError(f"actor.megatron.{name} is not taken: {why}; remove it")
        found[kinds[0]][name] = _as_meant(kinds[0], name, value)
    for name in sorted(_ON & given.keys()):
        if given[name]:
            raise UserError(f"actor.megatron.{name}=true: it is on wherever the model and the device allow; remove it")
    if "recompute_modules" in given and recompute != "selective":
        raise UserError(
            f"actor.megatron.recompute_modules: they are computed again with actor.recompute=selective, not "
            f"{recompute}; set that"
        )
    return MegatronOptions(*found.values())


def _as_meant(kind: type, name: str, value: Any) -> Any:
    hint = get_type_hints(kind)[name]
    try:
        if isinstance(hint, type) and issubclass(hint, Enum):
            return hint[value]
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except KeyError:
        raise UserError(f"actor.megatron.{name}={value}: is one of {', '.join(hint.__members__)}") from None
    except ValidationError as error:
        raise UserError(f"actor.megatron.{name}={value}: {error.errors()[0]['msg']}") from None
