"""Token statistics as the output of a Megatron-Core ``GPTModel``, through its public ``output_processor`` hook.

Nothing here imports Megatron-Core: the hook receives what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.vocab_parallel.op import token_stats
from megatron_dppo.vocab_parallel.shard import VocabShard
from megatron_dppo.vocab_parallel.stats import TokenStats


@dataclass(frozen=True, kw_only=True)
class TokenStatsRequest:
    """The ``output_processor_context`` of one microbatch. Rows are sequence-major: row ``s * B + b``, ``T = S B``."""

    token_ids: Int[Tensor, " T"]
    """The token each row predicts; ``-1`` for none."""
    vocab_size: int
    """True vocabulary size, without Megatron's padding."""
    group: ProcessGroup | None
    """Tensor-parallel group the LM head is split over; None for one rank."""
    topk_ids: Int[Tensor, "T K"] | None = None
    """The rollout engine's ids of each row; ``-1`` for absent."""
    loss_mask: Bool[Tensor, " T"] | None = None
    """Rows to compute; None for all."""
    temperature: float = 1.0


def token_stats_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    config: Any,
    context: TokenStatsRequest,
    **_: Any,
) -> TokenStats:
    """``model(..., output_processor=token_stats_processor, output_processor_context=TokenStatsRequest(...))``.

    The last pipeline stage then returns :class:`TokenStats` of shape ``[S * B]`` instead of logits; other stages never
    call it. ``hidden_states`` is ``[S, B, H]``, or this rank's ``[S / tp, B, H]`` under sequence parallelism, which
    ``output_layer.sequence_parallel`` tells. The op reduces the hidden gradient over the group, once, in both cases
    (``output_layer``'s own reduction is not run, because its forward is not).

    Raises ``ValueError`` for an output layer with bias, multi-token prediction or MuP logit scaling.
    """
    if getattr(output_layer, "bias", None) is not None:
        raise ValueError("output_layer has a bias, token_stats is for a bias-free LM head: build the model without it")
    if getattr(config, "mtp_num_layers", None):
        raise ValueError(f"mtp_num_layers={config.mtp_num_layers}: multi-token prediction must be off (None)")
    if getattr(config, "use_mup", False):
        raise ValueError("use_mup=True scales the logits, which token_stats does not: turn it off")
    # Megatron's overlapped parameter gather waits for a module's weights in its forward pre-hook. The forward of the
    # output layer is not run, so its pre-hooks are.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    weight = output_layer.weight if output_weight is None else output_weight
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    return token_stats(
        hidden,
        weight,
        context.token_ids,
        context.topk_ids,
        shard=VocabShard.even(weight.shape[0], context.vocab_size, context.group),
        temperature=context.temperature,
        hidden_layout="sequence_sharded" if output_layer.sequence_parallel else "replicated",
        loss_mask=context.loss_mask,
    )
