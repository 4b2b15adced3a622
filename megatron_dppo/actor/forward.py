"""One pass of the pipeline schedule over packed microbatches, with or without a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_dppo.actor.combined_schedule import schedule_plan
from megatron_dppo.actor.microbatch import Microbatch, MicrobatchStream
from megatron_dppo.router_replay.replay import RouterReplayController
from megatron_dppo.vocab_parallel.megatron_hook import TokenStatsRequest, token_stats_processor
from megatron_dppo.vocab_parallel.stats import TokenStats

type LossFunction[Report] = Callable[[int, Microbatch, TokenStats], tuple[torch.Tensor, Report]]
"""(index of the microbatch, microbatch, its statistics) to (this microbatch's share of the loss, anything to keep)."""


def run_schedule[Report](
    chunks: Sequence[torch.nn.Module],
    microbatches: MicrobatchStream,
    loss: LossFunction[Report],
    *,
    vocab_size: int,
    device: torch.device,
    tensor_group: torch.distributed.ProcessGroup,
    temperature: float,
    replay: RouterReplayController | None,
    forward_only: bool,
) -> list[Report]:
    """Run every microbatch through Megatron-Core's schedule for this pipeline layout.

    The last stage makes `TokenStats` (never logits), and `loss` of them a scalar, the model's output, whose sum over
    microbatches and ranks is the loss of the mini-batch. Gradients are accumulated in the chunks' buffers and
    reduced by a plain sum (`calculate_per_token_loss`; the schedule's own division is switched off by reporting no
    tokens: `_finalise_by_sum`). Returns the reports of `loss` in order on the last pipeline stage, [] elsewhere.

    Collectives: those of the layout; every rank must call this with the same number of microbatches.
    """

    def forward_step(
        data: Iterator[tuple[int, Microbatch]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        index, microbatch = next(data)
        rows = microbatch.rows
        request = None
        if rows is not None:
            request = TokenStatsRequest(
                token_ids=rows.targets,
                vocab_size=vocab_size,
                group=tensor_group,
                topk_ids=rows.topk_ids,
                loss_mask=rows.loss_mask,
                temperature=temperature,
            )
        around: AbstractContextManager[None] = nullcontext()
        if replay is not None and microbatch.routes is not None:
            around = replay.microbatch(index, microbatch.routes, device, training=not forward_only)
        reports: list[Report] = []

        def loss_of_rows(**given: Any) -> torch.Tensor:
            value, report = loss(index, microbatch, token_stats_processor(**given))
            reports.append(report)
            return value.clone()  # a combined schedule frees what it is given, which the report may hold

        def loss_function(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
            return value, torch.zeros((), dtype=torch.int, device=device), reports[0]

        inputs: dict[str, Any] = {
            "input_ids": microbatch.input_ids,
            "position_ids": microbatch.position_ids,
            "attention_mask": None,
            "packed_seq_params": microbatch.packed,
            "output_processor": None if request is None else loss_of_rows,
            "output_processor_context": request,
        }
        if return_schedule_plan:
            return schedule_plan(model, around, inputs), loss_function
        with around:
            return model(**inputs), loss_function

    iterators = list(microbatches.iterators(len(chunks)))
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=max(microbatches.pack_rows),
        micro_batch_size=1,
        forward_only=forward_only,
    )
