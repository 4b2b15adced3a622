"""vLLM's AsyncLLM behind the RolloutEngine protocol, its core in a process of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, SamplingLaw, check_requests
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.vllm.convert import join_parts, to_batch
from megatron_dppo.rollout.vllm.gate import Gate
from megatron_dppo.rollout.vllm.sampler import Sampler
from megatron_dppo.rollout.vllm.sampling import refuse_bent_law, sampling_params
from megatron_dppo.rollout.vllm.start import check_expert_parallel, start_vllm
from megatron_dppo.rollout.vllm.weight_updates import WeightUpdates
from megatron_dppo.rollout.weight_transfer.bucket import Bucket, pack
from megatron_dppo.rollout.weight_transfer.manifest import Manifest, read_shapes

if TYPE_CHECKING:
    from vllm import SamplingParams


class VllmEngine:
    """One engine on this machine. Blocking; calls may come from several threads (pausing while generating).

    `generate` samples from the weights of `weight_version` and from nothing else: the gate is shut from the beginning
    of a weight sync until its end, and stays shut when a sync dies half-way.
    """

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
        self._gate = Gate("the engine has random weights until its first weight sync" if dummy else None)
        self._loop = EventLoop("vllm-engine")
        try:
            self._engine = self._loop.run(start_vllm(self.facts, config), timeout=config.start_timeout_s)
            self._sampler = Sampler(self._engine, self._gate, timeout_s=config.request_timeout_s)
            self.weights = WeightUpdates(
                *(self._engine, self._loop, self._gate, manifest),
                cut=config.partial_rollouts,
                timeout_s=config.sync_timeout_s,
            )
            """Its side of weight syncs."""
        except BaseException:
            self._loop.stop()
            raise

    def generate(
        self, requests: Sequence[GenerationRequest], law: SamplingLaw, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        """Sample every request; see `RolloutEngine.generate`. `training=False` drops routes. `call` names it to
        `abandon`.

        Raises `UserError` for a bent law, a prompt that is empty or too long, or twice the same request id;
        `EngineClosed` while the gate is shut; `GenerationTimeout`; `MalformedOutput` and `RouteError` for what the
        engine may not answer.
        """
        self._check_open()
        check_requests(requests, law, self.config)
        recorded = min(law.top_k_logprobs, self.facts.vocab_size)
        stops = sorted({*self.facts.stop_token_ids, *self.config.stop_token_ids, *law.stop_token_ids})

        def law_of(request: GenerationRequest, max_tokens: int) -> SamplingParams:
            drawn = replace(law, max_tokens=max_tokens)
            return sampling_params(drawn, request.seed, top_k_logprobs=recorded, stop_token_ids=stops)

        if training:
            refuse_bent_law(law_of(requests[0], law.max_tokens))
        responses = self._loop.run(
            self._sampler.sample(requests, law_of, law.max_tokens, call=call or uuid.uuid4().hex)
        )
        parts = [part for response in responses for part in response]
        batch = to_batch(
            [part.request for part in parts],
            [part.output for part in parts],
            recorded=recorded,
            top_k=law.top_k_logprobs,
            schema=self.facts.routes if training else None,
            weight_versions=[part.version for part in parts],
        )
        return join_parts(requests, [len(response) for response in responses], batch)

    def abandon(self, call: str) -> None:
        """Give up a call of `generate` that another thread waits for."""
        self._loop.call(self._sampler.abandon, call)

    def alive(self) -> dict[str, int]:
        """Ask the core, which answers between two steps; a core that hangs never does. Returns the tokens of ended
        responses by call under way."""
        self._loop.check()
        self._loop.run(self._engine.is_paused())
        return dict(self._sampler.ended)

    @property
    def weight_version(self) -> int:
        """Version that `generate` samples from; 0 is the checkpoint the engine started with."""
        return self._gate.version

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, by Hugging Face name; `generate` then samples from `version`.

        Memory: two buckets of `rollout.weight_sync_bucket_mib`. Running requests are finished first; the prefix cache
        is emptied. An error of the source, of a name or shape, or inside vLLM leaves the gate shut until a full sync.
        """
        self.update_weights_from_buckets(version, pack(named_tensors, self.config.weight_sync_bucket_mib << 20))

    def update_weights_from_buckets(self, version: int, buckets: Iterable[Bucket]) -> None:
        """`update_weights` for weights that are packed already."""
        self._loop.check()
        self.weights.begin(version)
        with self.weights.failure(version):
            for bucket in buckets:
                self.weights.receive_bucket(version, bucket)
            self.weights.end(version)

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache back. Without effect on a CPU, or asleep."""
        self._loop.check()
        if self._gate.asleep:
            return
        self._loop.run(self._engine.sleep(level=2))
        self._gate.asleep = {"weights", "kv_cache"}
        self._gate.shut = "its weights went when it slept; wake them and sync"

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate again what `sleep` gave back; weights must be synced after, before anything is generated."""
        self._loop.check()
        if what not in self._gate.asleep:
            return
        self._loop.run(self._engine.wake_up(tags=[what]))
        self._gate.asleep.discard(what)
        if what == "weights":
            self._gate.shut = "the engine woke without weights; sync them"

    def pause(self) -> None:
        """Freeze running requests where they are, until `resume`."""
        self._loop.check()
        self._loop.run(self._engine.pause_generation(mode="keep", clear_cache=False))

    def resume(self) -> None:
        self._check_open()
        self._loop.run(self._engine.resume_generation())

    def close(self) -> None:
        """Stop the core process and its workers. Idempotent."""
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
            del self._engine, self._sampler, self.weights

    async def _stop_reading(self) -> None:
        if (reader := self._engine.output_handler) is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _check_open(self) -> None:
        self._loop.check()
        self._gate.check()
