"""`RolloutEngine` around a `Core`.

```
a caller's thread ─ generate ─► event loop: one task a request ─ inside the Gate ─► Core.draw ─► whatever samples
         waits for its batch ◄─ to_batch ◄── the answer, with its record ◄────────────┘
another's ─ begin_update ─► shuts the Gate, waits until nobody is inside, then brings the weights to the core
```
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, Health, SamplingConfig, check_requests
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.model_facts import ModelFacts, check_end, check_lengths
from megatron_dppo.rollout.serving.core import Core, refuse_other_distributions
from megatron_dppo.rollout.serving.sampler import Sampler, join_parts, to_batch
from megatron_dppo.rollout.serving.weight_updates import Gate, WeightUpdates
from megatron_dppo.rollout.weight_transfer.manifest import Manifest, read_shapes


class ServedEngine[C: Core](WeightUpdates[C]):
    """One engine on this machine. Blocking; calls may come from several threads (pausing while generating)."""

    def __init__(
        self, facts: ModelFacts, config: RolloutConfig, loop: EventLoop, start: Callable[[], Coroutine[Any, Any, C]]
    ) -> None:
        """
        facts  of the model, read beforehand
        loop   where the core's coroutines run; it belongs to the engine
        start  the core's start, which ends when it can sample
        """
        try:
            check_end(facts, config)
            if facts.model:
                check_lengths(facts.model, config)
            dummy = config.load_format == "dummy"
            stored = None if dummy else read_shapes(facts.folder)
            expected = facts.model.tensors if stored and facts.model else stored
            manifest = Manifest(expected, tied_embeddings=facts.tied_embeddings)
            gate = Gate("the engine has random weights until its first weight sync" if dummy else None)
            try:
                core = loop.run(start(), timeout=config.start_timeout_s)
            except TimeoutError as error:
                raise UserError(
                    f"the engine was not ready within rollout.start_timeout_s={config.start_timeout_s:g} s; raise that"
                ) from error
        except BaseException:
            loop.stop()
            raise
        super().__init__(core, loop, gate, manifest, cut=config.partial_rollouts, timeout_s=config.sync_timeout_s)
        self.facts, self.config = facts, config
        self._sampler = Sampler(core, gate, timeout_s=config.request_timeout_s)

    @property
    def core(self) -> C:
        return self._core

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        """See `RolloutEngine.generate`."""
        self._check_open()
        check_requests(requests, sampling, self.config)
        drawn = replace(
            sampling,
            top_k_logprobs=min(sampling.top_k_logprobs, self.facts.vocab_size),
            stop_token_ids=tuple(
                sorted({*self.facts.stop_token_ids, *self.config.stop_token_ids, *sampling.stop_token_ids})
            ),
        )
        if training:
            refuse_other_distributions(drawn)
        responses = self._loop.run(self._sampler.sample(requests, drawn, call=call or uuid.uuid4().hex))
        parts = [part for response in responses for part in response]
        batch = to_batch(
            [part.request for part in parts],
            [part.answer for part in parts],
            recorded=drawn.top_k_logprobs,
            top_k=sampling.top_k_logprobs,
            schema=self._core.routes if training else None,
            weight_versions=[part.version for part in parts],
        )
        return join_parts(requests, [len(response) for response in responses], batch)

    def abandon(self, call: str) -> None:
        self._loop.call(self._sampler.abandon, call)

    def alive(self) -> Health:
        self._loop.check()
        self._loop.run(self._core.turn())
        return Health(dict(self._sampler.ended))

    def sleep(self) -> None:
        self._loop.check()
        if self._gate.asleep:
            return
        self._loop.run(self._core.sleep())
        self._gate.asleep = {"weights", "kv_cache"}
        self._gate.shut = "its weights went when it slept; wake them and sync"

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._loop.check()
        if what not in self._gate.asleep:
            return
        self._loop.run(self._core.wake(what))
        self._gate.asleep.discard(what)
        if what == "weights":
            self._gate.shut = "the engine woke without weights; sync them"
        if not self._gate.asleep:
            self._loop.run(self._core.resume())

    def pause(self) -> None:
        self._loop.check()
        self._loop.run(self._core.pause())

    def resume(self) -> None:
        self._check_open()
        self._loop.run(self._core.resume())

    def close(self) -> None:
        if self._loop.closed:
            return
        self._gate.shut = "the engine is closed"
        try:
            self._loop.run(self._core.close())
        finally:
            self._loop.stop()
            # What the core is made of must be finalised while the modules that it uses still exist.
            del self._core, self._sampler

    def _check_open(self) -> None:
        self._loop.check()
        self._gate.check()
