"""`RolloutEngine` by vLLM's AsyncLLM, its core in a process of its own.

```
a caller's thread ─ generate ─► CoreLoop: one task a request ─ inside the Gate ─► AsyncLLM ─► core process: scheduler,
         waits for its batch ◄── convert ◄── the last output, with its record ◄──┘            workers
another's ─ begin_update ─► shuts the Gate, waits until nobody is inside, then talks to the workers through the core
```
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, Health, SamplingConfig, check_requests
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.vllm.convert import join_parts, to_batch
from megatron_dppo.rollout.vllm.gate import Gate
from megatron_dppo.rollout.vllm.sampler import Sampler
from megatron_dppo.rollout.vllm.sampling import refuse_other_distributions, sampling_params
from megatron_dppo.rollout.vllm.start import CoreLoop, check_expert_parallel, start_vllm
from megatron_dppo.rollout.vllm.weight_updates import WeightUpdates
from megatron_dppo.rollout.weight_transfer.manifest import Manifest, read_shapes

if TYPE_CHECKING:
    from vllm import SamplingParams


class VllmEngine(WeightUpdates):
    """One engine on this machine. Blocking; calls may come from several threads (pausing while generating)."""

    def __init__(self, model: Path, config: RolloutConfig) -> None:
        self.config = config
        self.facts = ModelFacts.read(Path(model), router_replay=config.router_replay)
        if not self.facts.stop_token_ids and not config.stop_token_ids:
            raise UserError(
                f"{self.facts.folder}/config.json names no eos_token_id, so no response would end before "
                f"{config.max_response_tokens} tokens; set rollout.stop_token_ids"
            )
        check_expert_parallel(self.facts, config)
        dummy = config.load_format == "dummy"
        manifest = Manifest(
            None if dummy else read_shapes(self.facts.folder), tied_embeddings=self.facts.tied_embeddings
        )
        gate = Gate("the engine has random weights until its first weight sync" if dummy else None)
        loop = CoreLoop("vllm-engine")
        try:
            engine = loop.run(start_vllm(self.facts, config), timeout=config.start_timeout_s)
        except TimeoutError as error:
            loop.stop()
            raise UserError(
                f"the engine was not ready within rollout.start_timeout_s={config.start_timeout_s:g} s; raise that"
            ) from error
        except BaseException:
            loop.stop()
            raise
        super().__init__(engine, loop, gate, manifest, cut=config.partial_rollouts, timeout_s=config.sync_timeout_s)
        self._sampler = Sampler(engine, gate, timeout_s=config.request_timeout_s)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        """See `RolloutEngine.generate`."""
        self._check_open()
        check_requests(requests, sampling, self.config)
        recorded = min(sampling.top_k_logprobs, self.facts.vocab_size)
        stops = sorted({*self.facts.stop_token_ids, *self.config.stop_token_ids, *sampling.stop_token_ids})

        def params_of(request: GenerationRequest, max_tokens: int) -> SamplingParams:
            drawn = replace(sampling, max_tokens=max_tokens)
            return sampling_params(drawn, request.seed, top_k_logprobs=recorded, stop_token_ids=stops)

        if training:
            refuse_other_distributions(params_of(requests[0], sampling.max_tokens))
        responses = self._loop.run(
            self._sampler.sample(requests, params_of, sampling.max_tokens, call=call or uuid.uuid4().hex)
        )
        parts = [part for response in responses for part in response]
        batch = to_batch(
            [part.request for part in parts],
            [part.output for part in parts],
            recorded=recorded,
            top_k=sampling.top_k_logprobs,
            schema=self.facts.routes if training else None,
            weight_versions=[part.version for part in parts],
        )
        return join_parts(requests, [len(response) for response in responses], batch)

    def abandon(self, call: str) -> None:
        self._loop.call(self._sampler.abandon, call)

    def alive(self) -> Health:
        self._loop.check()
        self._loop.run(self._engine.is_paused())
        return Health(dict(self._sampler.ended))

    def sleep(self) -> None:
        self._loop.check()
        if self._gate.asleep:
            return
        self._loop.run(self._engine.sleep(level=2))
        self._gate.asleep = {"weights", "kv_cache"}
        self._gate.shut = "its weights went when it slept; wake them and sync"

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._loop.check()
        if what not in self._gate.asleep:
            return
        self._loop.run(self._engine.wake_up(tags=[what]))
        self._gate.asleep.discard(what)
        if what == "weights":
            self._gate.shut = "the engine woke without weights; sync them"

    def pause(self) -> None:
        self._loop.check()
        self._loop.run(self._engine.pause_generation(mode="keep", clear_cache=False))

    def resume(self) -> None:
        self._check_open()
        self._loop.run(self._engine.resume_generation())

    def close(self) -> None:
        if self._loop.closed:
            return
        self._gate.shut = "the engine is closed"
        try:
            # First its reader of outputs, which would take the end of the core for a crash and log one.
            self._loop.run(self._stop_reading(), timeout=5.0)
            self._engine.shutdown(timeout=5.0)
        finally:
            self._loop.stop()
            # AsyncLLM's finalizer must run while the modules it uses still exist.
            del self._engine, self._sampler

    async def _stop_reading(self) -> None:
        if (reader := self._engine.output_handler) is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _check_open(self) -> None:
        self._loop.check()
        self._gate.check()
