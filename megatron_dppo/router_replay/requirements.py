"""What router replay cannot work with on the trainer's side. Each refusal gives its reason; nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.router_replay.layout import LocalRoutes

REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "moe_router_fusion",
        bool,
        "the fused router returns before it consults the replay hook, so nothing would be replayed",
        "set it to false",
    ),
    (
        "moe_expert_capacity_factor",
        lambda value: value is not None,
        "experts with a capacity drop tokens, which the engine did not",
        "unset it",
    ),
    (
        "moe_token_dropping",
        bool,
        "dropped tokens have other experts than the engine recorded",
        "set it to false",
    ),
    (
        "moe_pad_expert_input_to_capacity",
        bool,
        "experts with a capacity drop tokens, which the engine did not",
        "set it to false",
    ),
    (
        "moe_expert_rank_capacity_factor",
        lambda value: value is not None,
        "ranks with a capacity drop tokens, which the engine did not",
        "unset it",
    ),
    (
        "mtp_num_layers",
        bool,
        "multi-token-prediction layers number themselves from 1 again, and the engine records no routes for them",
        "unset it",
    ),
    (
        "moe_router_topk_limited_devices",
        bool,
        "device-limited routing admits only experts of a few devices, which the engine knows nothing of",
        "unset it",
    ),
    (
        "moe_router_load_balancing_type",
        lambda value: bool({"sinkhorn", "quantile_balancing"} & set([value] if isinstance(value, str) else value)),
        "this router assigns experts over a whole batch and consults no replay hook",
        "use none or aux_loss",
    ),
    (
        "moe_router_force_load_balancing",
        bool,
        "random routing is for benchmarks: gate values would come from random logits",
        "set it to false",
    ),
    (
        "moe_router_force_biased",
        lambda value: value is not None,
        "biased random routing is for benchmarks: gate values would come from random logits",
        "unset it",
    ),
    (
        "moe_input_jitter_eps",
        lambda value: value is not None,
        "noise on the router's input gives other gate values than the engine's",
        "unset it",
    ),
    (
        "moe_enable_routing_replay",
        bool,
        "Megatron-Core's own replay would sit on the same hook",
        "set it to false, ours needs no flag",
    ),
    (
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "a captured graph replays the router of one microbatch for all of them",
        "set it to none",
    ),
)
"""Fields of a `TransformerConfig`: which values, why, and what to do."""


def check_trainer(config: Any) -> None:
    """Raise `UserError` with the first reason why routes cannot be replayed under a `TransformerConfig`.

    A config without experts passes: there is nothing to replay.
    """
    if config.num_moe_experts is None:
        return
    for field, refused, reason, instead in REFUSED:
        value = getattr(config, field, None)
        if refused(value):
            raise UserError(f"router replay cannot work with {field}={value!r}: {reason}; {instead}")


def check_same_model(routes: LocalRoutes, layer: int, router: Any) -> None:
    """Raise `UserError` unless routes were recorded by a model with this router's experts, top-k and layers.

    layer   index of the router among the layers that `routes` hold
    """
    experts, topk, layers = router.config.num_moe_experts, router.topk, routes.experts.shape[1]
    if routes.num_experts != experts:
        raise UserError(
            f"the engine's routes are of a model with {routes.num_experts} experts, the trainer's has {experts}; "
            "both must load the same model.path"
        )
    if routes.experts.shape[2] != topk:
        raise UserError(
            f"the engine's routes name {routes.experts.shape[2]} experts per token, the trainer's model routes to "
            f"{topk}; both must load the same model.path"
        )
    if layer >= layers:
        raise UserError(
            f"the engine's routes cover {layers} MoE layers of this rank, the trainer's model has more ({layer + 1}); "
            "both must load the same model.path"
        )
