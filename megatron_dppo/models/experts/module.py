"""Megatron-Core's grouped experts and their dispatcher, without a wait for the number of tokens of an expert."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_dppo.models.experts.activation import WeightedSwiGLU, recompute_for_backward, weighted_swiglu
from megatron_dppo.models.experts.biased import AddBias, ClampedSwiGLU, clamped_swiglu
from megatron_dppo.models.experts.grouped import GroupedLinear, stacked, unusable
from megatron_dppo.models.live import ADAPTER


def take_over_experts(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the grouped experts of newly built chunks, and their dispatchers, those of this module.

    Parameters keep their names and shapes. Those of a layer are put next to each other in memory, expert 0 first, and
    registered from the last to the first: DistributedDataParallel fills its buffers from the last parameter on, so
    that they lie in the same order there.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if type(module) is TEGroupedMLP:
                module.__class__ = OneLaunchExperts
                linears: list[Any] = [module.linear_fc1, module.linear_fc2]
                for linear in linears:
                    linear.__class__ = _one_launch(linear.__class__)
                    _line_up(linear)
            dispatcher: Any = getattr(module, "token_dispatcher", None)
            if type(dispatcher) is MoEAlltoAllTokenDispatcher:
                dispatcher.__class__ = UnwaitingDispatcher


def recompute_cheap_parts(layers: Iterable[torch.nn.Module]) -> None:
    """Have the experts of these layers, which `take_over_experts` has taken, keep neither their rows nor their gated
    SiLU for the backward, which makes both again from what is kept anyway: of a layer of Qwen3-30B-A3B, two fifths of
    what it would keep and a fiftieth of its time."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, OneLaunchExperts):
                module.activation_recompute = True
            dispatcher = getattr(module, "token_dispatcher", None)
            if isinstance(dispatcher, UnwaitingDispatcher):
                dispatcher.recompute_rows = True


def _weights(linear: Any, kind: str = "weight") -> tuple[torch.nn.Parameter, ...]:
    found: Any = _by_expert(kind, linear.num_gemms)(linear._parameters)
    return found if isinstance(found, tuple) else (found,)


@functools.cache
def _by_expert(kind: str, experts: int) -> Any:
    return itemgetter(*(f"{kind}{expert}" for expert in range(experts)))


def _biases(linear: Any) -> tuple[Any, ...]:
    """The last arguments of `ClampedSwiGLU` and `AddBias`."""
    biases = _weights(linear, "bias")
    return torch.stack(biases).detach(), bool(linear.fuse_wgrad_accumulation), biases


@torch.no_grad()
def _line_up(linear: Any) -> None:
    weights = _weights(linear)
    shape, like = (len(weights), *weights[0].shape), weights[0].new_empty(0)
    for weight in weights:  # or both would be there at once: 14 GiB of DeepSeek-V3's first matrices
        weight.data = like
    stack = like.new_empty(shape)
    for weight, place in zip(weights, stack, strict=True):
        weight.data = place
    parameters = linear._parameters
    for expert in reversed(range(len(weights))):
        parameters[f"weight{expert}"] = parameters.pop(f"weight{expert}")


class OneLaunchExperts(TEGroupedMLP):
    """`TEGroupedMLP` whose products take all experts in one launch (`GroupedLinear`), activation and probabilities in
    another, biases behind the second matrix in a third. Where the tensors do not allow that (`why_not`), it is the
    stock class."""

    def why_not(self, hidden: Tensor) -> str | None:
        """Why TransformerEngine's loop over the experts computes this, or None."""
        if self.config.moe_apply_probs_on_input:
            return "probabilities on the input"
        biased, wanted = self.config.add_bias_linear, self.config.activation_func
        if not self.config.gated_linear_unit or wanted is not (quick_gelu if biased else torch.nn.functional.silu):
            return "an activation that is neither gated SiLU nor, with biases, the clamped SwiGLU"
        if self.offload_expert_fc1 or self.offload_moe_act:
            return "offloaded activations"
        for linear in (self.linear_fc1, self.linear_fc2):
            if linear.stack() is None:
                return "weights that do not lie next to each other"
            if reason := unusable(hidden, linear.weight0):
                return reason
        return None

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        output_buffer: Tensor | None = None,
        grad_input_buffer: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """`[T, hidden]` of the tokens sorted by expert, each weighted with its probability `[T]`.

        tokens_per_expert: int `[local experts]`, on any device; the device's own is not waited for.
        """
        hidden = permuted_local_hidden_states
        if output_buffer is not None or grad_input_buffer is not None or self.why_not(hidden):
            return super().forward(hidden, tokens_per_expert, permuted_probs, output_buffer, grad_input_buffer)
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate_up, _ = self.linear_fc1(hidden, ends)
        again: Any = weighted_swiglu
        others: tuple[Any, ...] = ()
        if self.config.add_bias_linear:
            limit = self.config.activation_func_clamp_value
            clamp = (math.inf if limit is None else limit), self.config.glu_linear_offset
            bias, add, biases = _biases(self.linear_fc1)
            weighted = ClampedSwiGLU.apply(gate_up, permuted_probs, ends, bias, *clamp, add, *biases)
            again, others = clamped_swiglu, (ends, bias, *clamp)
        else:
            weighted = WeightedSwiGLU.apply(gate_up, permuted_probs)
        output, _ = self.linear_fc2(weighted, ends)
        if self.config.add_bias_linear:
            bias, add, biases = _biases(self.linear_fc2)
            output = AddBias.apply(output, permuted_probs, ends, bias, add, *biases)
        if self.activation_recompute and output.requires_grad:
            inner, outer = gate_up.detach(), permuted_probs.detach()
            recompute_for_backward(output, weighted, lambda out: again(inner, outer, *others, out))
        return output, None


@functools.cache
def _one_launch(stock: Any) -> Any:
    """`stock` (a TransformerEngine GroupedLinear) that also takes `ends` (see `GroupedLinear`) in place of counts."""

    class OneLaunchLinear(stock):
        _stack: tuple[tuple[int, int], Tensor | None] = (0, 0), None

        def stack(self) -> Tensor | None:
            """All weights as one tensor (`stacked`). Looked for again when the first or the last of them has moved:
            asking 128 of them takes the host longer than a product takes the device."""
            weights = _weights(self)
            outermost = weights[0].data_ptr(), weights[-1].data_ptr()
            if self._stack[0] != outermost or not outermost[0]:
                self._stack = outermost, stacked(weights)
            return self._stack[1]

        def forward(self, x: Tensor, splits: Any) -> tuple[Tensor, Any]:
            if not isinstance(splits, Tensor):
                return super().forward(x, splits)
            stack, weights = self.stack(), _weights(self)
            assert stack is not None
            if not weights[0].requires_grad:
                adapter = getattr(self, ADAPTER, None)
                if adapter is not None and adapter.joins(x, splits):
                    return adapter.product(x, splits, stack), None
                weights = weights[:1]  # autograd has nothing to do with them
            return GroupedLinear.apply(x, splits, stack, bool(self.fuse_wgrad_accumulation), *weights), None

    OneLaunchLinear.__name__ = f"OneLaunch{stock.__name__}"
    return OneLaunchLinear


class UnwaitingDispatcher(MoEAlltoAllTokenDispatcher):
    """`MoEAlltoAllTokenDispatcher` that leaves the number of tokens of each expert on the device.

    Where experts are not divided among ranks the host needs nothing, and the rows, sorted by expert already, are not
    sorted again. Where they are, only the numbers of rows that ranks exchange come to the host, for NCCL.
    """

    recompute_rows = False
    """Whether rows sorted by expert are freed after the forward and sorted anew for the backward, which keeps what they
    were sorted from. Without effect where experts are divided: rows come from other ranks then."""

    @property
    def _undivided(self) -> bool:
        return self.ep_size == 1 and self.tp_size == 1

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if not self._undivided:
            super()._maybe_dtoh_and_synchronize(point, None)
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self._undivided:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        counts: Tensor = self.tokens_per_expert  # type: ignore[has-type]
        self.tokens_per_expert = None
        self.sorted_rows = global_input_tokens
        return global_input_tokens, counts, global_probs

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.rows = hidden_states.detach().view(-1, hidden_states.shape[-1])
        sent: tuple[Tensor, Tensor] = super().dispatch_preprocess(hidden_states, routing_map, probs)
        return sent

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        if not self._undivided:
            return super().combine_preprocess(hidden_states)
        if self.recompute_rows and hidden_states.requires_grad:
            sort = functools.partial(
                permute,
                self.rows,
                self.routing_map,
                probs=self.probs.detach(),
                num_out_tokens=self.num_out_tokens,
                fused=self.config.moe_permute_fusion,
            )
            recompute_for_backward(hidden_states, self.sorted_rows, lambda out: out.copy_(sort()[0]))
        return hidden_states
