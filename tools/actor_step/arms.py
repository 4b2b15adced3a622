"""Ways to train one step of the same model on the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_dppo.actor.actor import MegatronActor, TrainingSignal
from megatron_dppo.actor.optimizer import guarded_step
from megatron_dppo.algorithm import presets
from megatron_dppo.batch import Columns, InMemorySource
from megatron_dppo.models.packed_logits import pack_params

Arm = Callable[[], None]


def policy_arm(
    actor: MegatronActor, source: InMemorySource, signal: TrainingSignal, preset: str, *, replay: bool
) -> Arm:
    """The actor's own `update`: microbatches made on the host, schedule, objective, metrics, optimizer."""
    overrides = {"topk": 20} if "topk" in preset else {}
    rule = presets.get(preset, **overrides)

    def run() -> None:
        actor._preset = rule
        actor._passes._builder = dataclasses.replace(actor._passes._builder, topk=rule.needs_topk)
        actor._config = actor._config.model_copy(update={"router_replay": "r3" if replay else "none"})
        actor.update(source, signal)

    return run


def cross_entropy_arm(actor: MegatronActor, source: InMemorySource, packs: list[np.ndarray], fused: bool) -> Arm:
    """Plain language-model training: labels given to `GPTModel`, whose own vocabulary-parallel cross-entropy makes the
    loss. Same packs, schedule, gradient reduction, clipping and optimizer as the actor's; no replay, no metrics.

    fused: Megatron-Core's fused (TransformerEngine) cross-entropy in place of its default one.
    """
    device = actor.runtime.device
    denominator = float(len(packs) * actor.runtime.groups.dp.size())

    def forward_step(data: Iterator[np.ndarray], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        batch = source.rows(next(data), Columns(topk=False, moe_layers=()))
        assert batch.policy is not None
        lengths = [int(n) for n in batch.lengths]
        ids = torch.from_numpy(batch.input_ids).long().to(device)[None]
        labels = torch.from_numpy(batch.policy.target_ids).long().to(device)[None]
        positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)[None]
        mask = torch.from_numpy(batch.policy.loss_mask).to(device)
        output = model(ids, positions, None, labels=labels, packed_seq_params=pack_params(lengths, device))

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            value = (losses.view(-1).float() * mask).sum() / (denominator * mask.numel())
            return value, torch.zeros((), dtype=torch.int, device=device), {"loss": value.detach()}

        return output, loss_function

    def run() -> None:
        config = get_model_config(actor.model[0])
        config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = fused, "te"
        for chunk in actor.chunks:
            chunk.zero_grad_buffer()
        actor.optimizer.zero_grad()
        with actor.phases("forward and backward"):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(packs),
                model=list(actor.chunks),
                num_microbatches=len(packs),
                seq_length=sum(int(source.lengths[i]) for i in packs[0]),
                micro_batch_size=1,
                forward_only=False,
            )
        with actor.phases("optimizer"):
            guarded_step(actor.optimizer, actor.scheduler, loss_is_finite=True)

    return run
