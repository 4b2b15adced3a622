"""Which experts a token went to, as transformers' modules are told."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_dppo.errors import UserError
from megatron_dppo.router_replay.record import RouteSchema


class RouteRecorder:
    """Hooks on the experts of every layer, which get the router's choice as their second argument, `[tokens, k]`.

    transformers marks such a module itself: what `use_experts_implementation` decorates knows whether its matrices are
    transposed (`is_transposed`). So no family has a line here, and what is recorded is what is computed, whatever the
    router does before (softmax, sigmoid, bias, groups).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UserError` for a model with experts that are not marked."""
        self._experts: dict[int, torch.nn.Module] = {}
        self._taken: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
                layer = int(re.findall(r"\.(\d+)\.", f".{name}.")[0])
                self._experts[layer] = module
                module.register_forward_pre_hook(self._hook(layer, module), with_kwargs=True)
        if not self._experts and any("expert" in name for name, _ in model.named_parameters()):
            raise UserError(
                f"rollout.engine=reference cannot record the experts of {type(model).__name__}: transformers' module "
                "does not get the router's choice as an argument; set rollout.router_replay=false"
            )

    def schema(self, layers: int) -> RouteSchema | None:
        """What the record of a model of so many layers looks like, once it has seen a token; None without experts."""
        if not self._experts:
            return None
        chosen = self.take(1, 1)
        sizes = {int(getattr(module, "num_experts")) for module in self._experts.values()}  # noqa: B009
        if len(sizes) > 1:
            raise UserError(
                f"rollout.engine=reference cannot record layers of {sorted(sizes)} experts in one model; set "
                "rollout.router_replay=false"
            )
        return RouteSchema(layers, tuple(sorted(self._experts)), sizes.pop(), chosen.shape[-1])

    def in_all_layers(self, sequences: int, tokens: int, schema: RouteSchema) -> np.ndarray:
        """int32 `[sequences, tokens, layers, k]` of the last forward, on the host; layers that do not route are 0."""
        experts = np.zeros((sequences, tokens, schema.hidden_layers, schema.topk), dtype=np.int32)
        experts[:, :, list(schema.moe_layers)] = self.take(sequences, tokens).to(torch.int32).cpu().numpy()
        return experts

    def take(self, sequences: int, tokens: int) -> torch.Tensor:
        """`[sequences, tokens, MoE layers, k]` of the last forward, on its device."""
        taken = torch.stack([self._taken.pop(layer) for layer in sorted(self._experts)], dim=1)
        return taken.view(sequences, tokens, *taken.shape[1:])

    def _hook(self, layer: int, module: torch.nn.Module) -> Any:
        signature = inspect.signature(module.forward)

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = list(signature.bind(*args, **kwargs).arguments.values())
            self._taken[layer] = given[1]

        return hook
