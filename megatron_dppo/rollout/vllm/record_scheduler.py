"""A vLLM scheduler that sends each response once, with its whole record as one block of bytes.

vLLM's core sends, for every request and every step, a token, three small arrays of log-probabilities and one of routes:
objects that one process encodes and another decodes, at 256 sequences and 16 layers several milliseconds of Python per
step, beside a GPU that needs about 17. A training rollout wants nothing before a response is complete. This scheduler
(vLLM's `scheduler_cls` option) lets vLLM's own scheduling and bookkeeping run as they are and keeps what it would have
sent of such requests until their last token; then the one output carries all tokens and a `ResponseRecord` frame in the
field of the routes. Nothing is computed here: tokens, log-probabilities and routes are vLLM's own.

The record has no field of its own name: vLLM's client decodes outputs by place, and of what belongs to one completion
it hands on the routes alone as an array.

A request asks for it by `SamplingParams.extra_args = HOLD`. Others are served as ever. A request that its client aborts
leaves nothing. A pause of mode "abort" cuts: who has sampled something ends with the next token, as if it had
come to its `max_tokens`, and is sent with its record; who has not, or lost its place to others and waits, is aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput

from megatron_dppo.rollout.vllm.record_frame import HOLD, ResponseRecord

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class _Held:
    """What one request would have been sent so far."""

    __slots__ = ("events", "experts", "ids", "logp", "prefill_stats", "tokens", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.tokens: list[int] = []
        self.ids: list[np.ndarray] = []
        self.logp: list[np.ndarray] = []
        self.experts: list[np.ndarray] = []
        self.events: list[Any] = []
        self.prefill_stats: Any = None

    def add(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        if (logprobs := output.new_logprobs) is not None:
            self.ids.append(logprobs.logprob_token_ids[:, : self.width])
            self.logp.append(logprobs.logprobs[:, : self.width])
        if output.routed_experts is not None:
            self.experts.append(output.routed_experts)
        if output.events:
            self.events += output.events
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats

    def whole(self, last: EngineCoreOutput) -> EngineCoreOutput:
        """`last` with everything in it."""
        nothing = np.zeros((0, self.width))
        record = ResponseRecord(
            ids=np.concatenate(self.ids) if self.ids else nothing,
            logp=np.concatenate(self.logp) if self.logp else nothing,
            experts=np.concatenate(self.experts) if self.experts else None,
        )
        last.new_token_ids = self.tokens
        last.new_logprobs = None
        last.routed_experts = record.to_frame()
        last.events = self.events or None
        last.prefill_stats = self.prefill_stats
        return last


class _HoldsRecords(Scheduler):
    """What both schedulers add to vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        if params is not None and params.extra_args == HOLD:
            self._held[request.request_id] = _Held(1 + (params.num_logprobs or 0))

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Request]:
        if request_ids is None:  # all of them: a pause, or the end of the engine
            cut = {r.request_id for r in self.running if r.request_id in self._held and r.num_output_tokens > 0}
            for name in cut:
                request = self.requests[name]
                request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
            request_ids = [name for name in self.requests if name not in cut]
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        batches = super().update_from_output(scheduler_output, model_runner_output)
        if not self._held:
            return batches
        for client, batch in list(batches.items()):
            batch.outputs = [sent for output in batch.outputs if (sent := self._keep(output)) is not None]
            if not batch.outputs and batch.scheduler_stats is None and batch.finished_requests is None:
                del batches[client]
        return batches

    def _keep(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The output as it is for others, None while a held request goes on, everything at its end."""
        held = self._held.get(output.request_id)
        if held is None:
            return output
        held.add(output)
        if output.finish_reason is None:
            return None
        del self._held[output.request_id]
        return held.whole(output)


class _HoldsRecordsAhead(_HoldsRecords, AsyncScheduler):
    """For engines that schedule ahead of the GPU (vLLM's default there)."""


def record_scheduler(*, vllm_config: VllmConfig, **options: Any) -> Scheduler:
    """What vLLM's core calls for its scheduler: the kind its configuration asks for (a CPU schedules synchronously)."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (_HoldsRecordsAhead if ahead else _HoldsRecords)(vllm_config=vllm_config, **options)
