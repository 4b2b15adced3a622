"""What recording routes cannot work with on the engine's side. Each refusal gives its reason; nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.router_replay.record import RouteSchema

_REFUSED: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    (
        "parallel_config",
        "enable_eplb",
        bool,
        "a load balancer of experts works with physical ids, several for one expert; the trainer knows logical ones",
    ),
    (
        "parallel_config",
        "pipeline_parallel_size",
        lambda value: value > 1,
        "vLLM records the layers of the last pipeline stage only; use tensor parallelism",
    ),
    (
        "parallel_config",
        "decode_context_parallel_size",
        lambda value: value > 1,
        "vLLM finds routes by the slot of a token in the key-value cache, which context parallelism splits; use 1",
    ),
    (
        "parallel_config",
        "prefill_context_parallel_size",
        lambda value: value > 1,
        "vLLM finds routes by the slot of a token in the key-value cache, which context parallelism splits; use 1",
    ),
    (
        "parallel_config",
        "use_ubatching",
        bool,
        "the halves of a split batch write their routes over each other; switch dual-batch overlap off",
    ),
    (
        "",
        "kv_transfer_config",
        lambda value: value is not None,
        "a connector brings key-value blocks from elsewhere, but not the routes of their tokens; start without one",
    ),
    (
        "",
        "speculative_config",
        lambda value: value is not None,
        "drafting layers (MTP, EAGLE) have routes of their own, which the trainer's layers lack; start without it",
    ),
)


def check_version(version: str, engine_options: Collection[str]) -> None:
    """Raise `UserError` unless this vLLM can record routes and takes our scheduler.

    engine_options   names of the fields of its `AsyncEngineArgs`
    """
    for option in ("enable_return_routed_experts", "scheduler_cls"):
        if option not in engine_options:
            raise UserError(
                f"vLLM {version} has no option {option}, without which routes cannot be recorded; install vLLM 0.26 "
                "(constraints/ pins it), or set rollout.router_replay=false and actor.router_replay=none"
            )


def check_engine(vllm_config: Any, schema: RouteSchema) -> None:
    """Raise `UserError` with the first reason why an engine's routes could not be replayed.

    vllm_config   of the engine as it was built
    schema        layer pattern, experts and top-k that the trainer's model has
    """
    for section, field, refused, reason in _REFUSED:
        owner = getattr(vllm_config, section) if section else vllm_config
        value = getattr(owner, field)
        if refused(value):
            raise UserError(f"rollout.router_replay cannot work with vLLM's {field}={value!r}: {reason}")
    if not vllm_config.model_config.enable_return_routed_experts:
        raise UserError("rollout.router_replay is on, but the engine was started without enable_return_routed_experts")
    model = vllm_config.model_config.hf_text_config
    held = {
        "experts": (vllm_config.model_config.get_num_experts(), schema.num_experts),
        "experts per token": (model.num_experts_per_tok, schema.topk),
        "layers": (model.num_hidden_layers, schema.hidden_layers),
    }
    for what, (engine, trainer) in held.items():
        if engine != trainer:
            raise UserError(
                f"the engine's model has {engine} {what}, the trainer's {trainer}: routes of one mean nothing to the "
                "other; both must load the same model.path"
            )
