"""vLLM's AsyncLLM as the core of an engine; what computes is in a process of its own.

```
draw ─► AsyncLLM ─► core process: scheduler, workers          load ─► workers: receiver
    ◄── the last output, with its record in one frame ◄──┘
```
"""

from __future__ import annotations

import asyncio
import pickle
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.rollout.engine import (
    GenerationRequest,
    MalformedOutput,
    SamplingConfig,
    TransferTerms,
    WorkerReport,
)
from megatron_dppo.rollout.serving.core import Answer, WorkerSync
from megatron_dppo.rollout.vllm.record_frame import BadFrame, ResponseRecord
from megatron_dppo.rollout.vllm.sampling import sampling_params
from megatron_dppo.rollout.weight_transfer.manifest import IncompleteSync
from megatron_dppo.rollout.weight_transfer.segment import MemorySegment
from megatron_dppo.router_replay.record import RouteSchema

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmCore:
    """See `Core`."""

    def __init__(self, engine: AsyncLLM, routes: RouteSchema | None) -> None:
        self.engine, self.routes = engine, routes
        self._receiving = False
        """Whether vLLM's workers have a weight-update session open."""

    async def draw(self, request: GenerationRequest, sampling: SamplingConfig) -> Answer:
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(np.asarray(request.prompt_ids).tolist())
        async for output in self.engine.generate(prompt, sampling_params(sampling, request.seed), request.request_id):
            final = output
        return answer_of(final)

    async def turn(self) -> None:
        await self.engine.is_paused()

    async def hold(self, *, cut: bool) -> None:
        # What the pause does to those that are cut: see `record_scheduler`. AsyncLLM's own would then sleep for 20 ms,
        # for callers that look at once for what ended. The prefix cache is emptied at the end of the sync.
        await self.engine.engine_core.pause_scheduler_async(mode="abort" if cut else "wait", clear_cache=False)

    async def pause(self) -> None:
        await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self.engine.resume_generation()

    async def sleep(self) -> None:
        await self.engine.sleep(level=2)

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        await self.engine.wake_up(tags=[what])

    async def agree(self, terms: TransferTerms) -> None:
        """The workers get them as `receiver.TransferInit`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={"terms": pickle.dumps(terms)})
        await self.engine.init_weight_transfer_engine(request)

    async def start_update(self) -> None:
        await self.engine.collective_rpc("begin_weight_sync")
        self._receiving = True

    async def load(self, version: int, what: Bucket | Literal["shared", "group"]) -> None:
        info: dict[str, Any] = {"version": version}
        with closing(MemorySegment()) if isinstance(what, Bucket) else nullcontext() as segment:
            if isinstance(what, Bucket):
                assert segment is not None
                segment.write(what.payload)
                info |= {"segment": segment.path, "size": len(what.payload), "slots": pickle.dumps(what.slots)}
            else:
                info["way"] = what
            await self._update(info)

    async def finish_update(self, version: int) -> list[WorkerSync]:
        reports = await self.engine.collective_rpc("end_weight_sync")
        self._receiving = False
        versions, incomplete, sums, measured = zip(*reports, strict=True)
        for worker, layers in enumerate(incomplete):
            if layers:
                raise IncompleteSync(
                    f"weight version {version}: worker {worker} has {len(layers)} layers without all of their weights; "
                    + "; ".join(layers[:4])
                )
        if set(versions) != {version}:
            raise RuntimeError(f"after the sync to weight version {version} the engine's workers hold {list(versions)}")
        if not await self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied after a weight sync")
        return [WorkerSync(dict(one), WorkerReport(**dict(of))) for one, of in zip(sums, measured, strict=True)]

    async def abandon_update(self, version: int) -> None:
        if not self._receiving:  # vLLM closes a session in which a bucket failed; the next sync clears up after it
            return
        self._receiving = False
        await self._update({"version": version, "abandon": True})
        await self.engine.finish_weight_update()

    async def close(self) -> None:
        # First its reader of outputs, which would take the end of the core for a crash and log one.
        if (reader := self.engine.output_handler) is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        await asyncio.to_thread(self.engine.shutdown, timeout=5.0)
        del self.engine

    async def _update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self.engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        except BaseException:
            self._receiving = False
            raise


def answer_of(output: RequestOutput) -> Answer:
    """The frame of a request's last output. Raises `MalformedOutput` where there is none, or no whole one."""
    completion = output.outputs[0]
    tokens, reason = np.asarray(completion.token_ids, dtype=np.int32), str(completion.finish_reason)
    if completion.routed_experts is None:
        if reason == "abort" and not len(tokens):
            nothing = np.zeros((0, 0))
            return Answer(output.request_id, tokens, reason, nothing, nothing, None)
        raise MalformedOutput(
            f"request {output.request_id}: the engine answered {len(tokens)} tokens without a record of them; "
            "it must run with megatron_dppo's scheduler"
        )
    try:
        record = ResponseRecord.from_frame(completion.routed_experts)
    except BadFrame as error:
        raise MalformedOutput(f"request {output.request_id}: {error}") from error
    return Answer(output.request_id, tokens, reason, record.ids, record.logp, record.experts)
