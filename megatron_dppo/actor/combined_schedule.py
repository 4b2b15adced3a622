"""One microbatch's forward beside another's backward (Megatron-Core's combined 1F1B), with routes replayed.

    two streams, one layer of each       time -->
    communication   combine, backward | dispatch, forward  dispatch, backward | combine, forward
    computation     attention, forward| experts, backward  experts, forward   | attention, backward

A layer's forward is cut into the parts of this drawing; only the first, attention, calls the router.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron_dppo.actor.layers import release


def schedule_plan(model: Any, around: AbstractContextManager[None], inputs: dict[str, Any]) -> Any:
    """The parts of the forward of a `GPTModel` with `inputs`, which the schedule runs later.

    around   what the routers' calls are to be inside of (`RouterReplayController.microbatch`); entered once a layer

    What a dispatcher holds of the microbatch is let go behind its layer's last part: layers are not called as modules
    here, so that the hook of `release_dispatched` does not run.
    """
    plan = model.build_schedule_plan(**inputs)
    for number in range(plan.num_layers()):
        layer = plan.get_layer(number)
        first, last = layer.pre_dispatch_computation, layer.moe_combine
        first.submodule = _inside(around, first.submodule)
        if hasattr(last, "submodule"):  # of a layer with experts
            last.submodule = _then_release(last.submodule, layer.layer.mlp)
    return plan


def _inside(around: AbstractContextManager[None], part: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with around:
            return part(*arguments)

    return run


def _then_release(part: Callable[..., Any], layer: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        result = part(*arguments)
        release(layer)
        return result

    return run
