"""vLLM's AsyncLLM behind the RolloutEngine protocol, its core in a process of its own."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from megatron_dppo.batch import RolloutBatch, join_turns
from megatron_dppo.checkpoint.weight_layout import BucketLayout
from megatron_dppo.compat.vllm_cpu import engine_environment, engine_options
from megatron_dppo.errors import UserError
from megatron_dppo.launch.imports import uncollected
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.convert import to_batch
from megatron_dppo.rollout.errors import EngineClosed, EngineDead
from megatron_dppo.rollout.gate import Gate
from megatron_dppo.rollout.law import refuse_bent_law, refuse_engine_defaults, sampling_params
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.protocol import GenerationRequest, SamplingLaw
from megatron_dppo.rollout.route_requirements import check_engine, check_version
from megatron_dppo.rollout.sampler import Part, Sampler
from megatron_dppo.rollout.weight_transfer.backend import BACKEND
from megatron_dppo.rollout.weight_transfer.bucket import Bucket, pack
from megatron_dppo.rollout.weight_transfer.manifest import ChecksumMismatch, IncompleteSync, Manifest, read_shapes
from megatron_dppo.rollout.weight_transfer.segment import MemorySegment

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_T = TypeVar("_T")


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
        dummy = config.load_format == "dummy"
        self._manifest = Manifest(
            None if dummy else read_shapes(self.facts.folder), tied_embeddings=self.facts.tied_embeddings
        )
        self._gate = Gate("the engine has random weights until its first weight sync" if dummy else None)
        self._asleep: set[str] = set()
        """What `sleep` gave back and `wake` has not brought back."""
        self._receiving = False
        """Whether vLLM's workers have a weight-update session open."""
        self._buckets = 0
        """How many the layouts of `init_transfer` have."""
        self._came: set[int] = set()
        """Those that came in the sync under way."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            self._engine = self._run(self._start(), timeout=config.start_timeout_s)
            self._sampler = Sampler(self._engine, self._gate, timeout_s=config.request_timeout_s)
        except BaseException:
            self._stop_loop()
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
        self._check_requests(requests, law)
        recorded = min(law.top_k_logprobs, self.facts.vocab_size)
        stops = sorted({*self.facts.stop_token_ids, *self.config.stop_token_ids, *law.stop_token_ids})

        def law_of(request: GenerationRequest, max_tokens: int) -> SamplingParams:
            drawn = replace(law, max_tokens=max_tokens)
            return sampling_params(drawn, request.seed, top_k_logprobs=recorded, stop_token_ids=stops)

        if training:
            refuse_bent_law(law_of(requests[0], law.max_tokens))
        responses = self._run(self._sampler.sample(requests, law_of, law.max_tokens, call=call or uuid.uuid4().hex))
        parts = [part for response in responses for part in response]
        batch = to_batch(
            [part.request for part in parts],
            [part.output for part in parts],
            recorded=recorded,
            top_k=law.top_k_logprobs,
            schema=self.facts.routes if training else None,
            weight_versions=[part.version for part in parts],
        )
        return batch if len(parts) == len(requests) else _whole(requests, responses, batch)

    def abandon(self, call: str) -> None:
        """Give up a call of `generate` that another thread waits for."""
        self._loop.call_soon_threadsafe(self._sampler.abandon, call)

    def alive(self) -> dict[str, int]:
        """Ask the core, which answers between two steps; a core that hangs never does. Returns the tokens of ended
        responses by call under way."""
        self._check_alive()
        self._run(self._engine.is_paused())
        return dict(self._sampler.ended)

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, by Hugging Face name; `generate` then samples from `version`.

        Memory: two buckets of `rollout.weight_sync_bucket_mib`. Running requests are finished first; the prefix cache
        is emptied. An error of the source, of a name or shape, or inside vLLM leaves the gate shut until a full sync.
        """
        self.update_weights_from_buckets(version, pack(named_tensors, self.config.weight_sync_bucket_mib << 20))

    def update_weights_from_buckets(self, version: int, buckets: Iterable[Bucket]) -> None:
        """`update_weights` for weights that are packed already."""
        self.begin_update(version)
        with self.update_failure(version):
            for bucket in buckets:
                self.receive_bucket(version, bucket)
            self.end_update(version)

    def begin_update(self, version: int) -> None:
        """Shut the gate, let running requests finish (or cut them: `rollout.partial_rollouts`), and open a sync. Always
        followed by buckets and `end_update`, or by `fail_update`."""
        if version < 0:
            raise ValueError(f"weight version {version} is negative")
        self._check_alive()
        self._shut = f"the sync to weight version {version} has not finished"
        self._gate.syncing = True
        with self.update_failure(version):
            if self.config.partial_rollouts:
                self._run(self._engine.pause_generation(mode="abort", clear_cache=True))  # cuts, see record_scheduler
                self._run(self._gate.emptied())
            else:
                self._run(self._gate.emptied())
                self._run(self._engine.pause_generation(mode="wait", clear_cache=True))
            self._manifest.begin()
            self._came.clear()
            self._run(self._engine.start_weight_update(), timeout=self.config.sync_timeout_s)
            self._receiving = True

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        """Hand one bucket to vLLM's workers."""
        for slot in bucket.slots:
            for name in slot.names():
                self._manifest.check(name, slot.shape)
        with MemorySegment() as segment:
            segment.write(bucket.payload)
            self._update(
                {
                    "version": version,
                    "segment": segment.path,
                    "size": len(bucket.payload),
                    "slots": pickle.dumps(bucket.slots),
                }
            )

    def init_transfer(
        self,
        *,
        layouts: Sequence[BucketLayout] | None = None,
        group: dict[str, Any] | None = None,
        first_rank: int = 0,
        source_rank: Mapping[int, int] | None = None,
        buffers: Mapping[str, bytes] | None = None,
        close: bool = False,
    ) -> None:
        """Agree on how weights will come, see `receiver.TransferInit`: the buckets' layouts (checked against the
        engine's model), a communicator to join, buffers of a process on the same card. What is absent stays."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._check_alive()
        if layouts is not None:
            self._manifest.begin()
            for layout in layouts:
                for slot in layout.slots:
                    for name in slot.names():
                        self._manifest.check(name, slot.shape)
            self._manifest.end()
            self._buckets = len(layouts)
        info = {
            "layouts": None if layouts is None else pickle.dumps(list(layouts)),
            "group": group,
            "first_rank": first_rank,
            "source_rank": list((source_rank or {}).items()),
            "buffers": list((buffers or {}).items()),
            "close": close,
        }
        request = WeightTransferInitRequest(init_info=info)
        self._run(self._engine.init_weight_transfer_engine(request), timeout=2 * self.config.sync_timeout_s)

    def receive_shared(self, version: int, number: int) -> None:
        """Let the workers load bucket `number` of the layouts out of the shared buffers; they may be written again when
        this returns."""
        self._update({"version": version, "shared": number})
        self._came.add(number)

    def receive_group(self, version: int) -> None:
        """Let the workers receive every bucket of the layouts from the communicator; returns when they have."""
        self._update({"version": version, "group": True}, timeout=2 * self.config.sync_timeout_s)
        self._came.update(range(self._buckets))

    def end_update(self, version: int, packed: Mapping[int, int] | None = None) -> list[dict[str, float]]:
        """Check that every tensor came, let vLLM finish, empty the prefix cache and open the gate.

        packed  checksums by bucket, which every worker's must equal

        Returns what each worker measured: seconds to load (receiving included) and to finish, memory used on its card.
        """
        if not self._came:
            self._manifest.end()
        elif len(self._came) != self._buckets:
            raise IncompleteSync(f"{len(self._came)} of {self._buckets} buckets came")
        timeout = self.config.sync_timeout_s
        self._run(self._engine.finish_weight_update(), timeout=timeout)
        self._receiving = False
        held = self._run(self._engine.collective_rpc("held_weight_version"), timeout=timeout)
        if set(held) != {version}:
            raise RuntimeError(f"after the sync to weight version {version} the engine's workers hold {held}")
        if not self._run(self._engine.reset_prefix_cache(), timeout=timeout):
            raise RuntimeError("the prefix cache could not be emptied after a weight sync")
        reports = self._run(self._engine.collective_rpc("weight_sync_report"), timeout=timeout)
        for worker, (sums, _) in enumerate(reports):
            wrong = sorted(i for i, value in (packed or {}).items() if dict(sums).get(i) != value)
            if wrong:
                raise ChecksumMismatch(
                    f"weight version {version}: worker {worker} loaded other bytes than the trainer packed in buckets "
                    f"{wrong[:8]}, {len(wrong)} of {self._buckets}"
                )
        if not self._asleep:  # vLLM resumes by itself when the last part wakes
            self._run(self._engine.resume_generation(), timeout=timeout)
        self._gate.version = version
        self._shut = None
        self._gate.syncing = False
        return [dict(seconds) for _, seconds in reports]

    def fail_update(self, version: int, reason: str) -> None:
        """Give a sync up: the workers drop what they buffered, and the gate stays shut."""
        self._shut = f"the sync to weight version {version} died ({reason}); a full sync opens it again"
        self._gate.syncing = False
        if not self._receiving:  # vLLM closes a session in which a bucket failed; the next sync clears up after it
            return
        self._receiving = False
        with suppress(Exception):  # the gate is shut whatever becomes of this; the first error is the one to report
            self._update({"version": version, "abandon": True})
            self._run(self._engine.finish_weight_update(), timeout=self.config.sync_timeout_s)

    @contextmanager
    def update_failure(self, version: int) -> Iterator[None]:
        """Turn any error inside into a failed sync, and raise it on."""
        try:
            yield
        except BaseException as error:
            self.fail_update(version, f"{type(error).__name__}: {error}")
            raise

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache back. Without effect on a CPU, or asleep."""
        self._check_alive()
        if self._asleep:
            return
        self._run(self._engine.sleep(level=2))
        self._asleep = {"weights", "kv_cache"}
        self._shut = "its weights went when it slept; wake them and sync"

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate again what `sleep` gave back; weights must be synced after, before anything is generated."""
        self._check_alive()
        if what not in self._asleep:
            return
        self._run(self._engine.wake_up(tags=[what]))
        self._asleep.discard(what)
        if what == "weights":
            self._shut = "the engine woke without weights; sync them"

    def pause(self) -> None:
        """Freeze running requests where they are, until `resume`."""
        self._check_alive()
        self._run(self._engine.pause_generation(mode="keep", clear_cache=False))

    def resume(self) -> None:
        self._check_open()
        self._run(self._engine.resume_generation())

    def close(self) -> None:
        """Stop the core process and its workers. Idempotent."""
        if self._loop.is_closed():
            return
        self._shut = "the engine is closed"
        try:
            # First its reader of outputs, which would take the end of the core for a crash and log one.
            self._run(self._stop_reading(), timeout=5.0)
            self._engine.shutdown(timeout=5.0)
        finally:
            self._stop_loop()
            del self._engine  # its finalizer must run while the modules it uses still exist

    async def _start(self) -> AsyncLLM:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(self.config.start_timeout_s)))
        from importlib.metadata import entry_points

        with uncollected():
            os.environ.update(engine_environment(self.config))
            import vllm
            from vllm import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

        config = self.config
        if self.facts.routes is not None:
            check_version(vllm.__version__, {field.name for field in fields(AsyncEngineArgs)})
        options: dict[str, Any] = {
            "model": str(self.facts.folder),
            "dtype": config.dtype,
            "load_format": config.load_format,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if config.kv_cache_mib is None else config.kv_cache_mib << 20,
            "tensor_parallel_size": config.tensor_parallel,
            "enforce_eager": config.enforce_eager,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enable_sleep_mode": config.enable_sleep,
            "enable_return_routed_experts": self.facts.routes is not None,
            "scheduler_cls": "megatron_dppo.rollout.record_scheduler.record_scheduler",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "weight_transfer_config": {"backend": BACKEND},
            "worker_extension_cls": "megatron_dppo.rollout.weight_transfer.receiver.ReportsWeights",
            "disable_log_stats": True,
        }
        arguments = AsyncEngineArgs(**(options | engine_options(config)))
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if self.facts.routes is not None:
            check_engine(vllm_config, self.facts.routes)
        engine = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        refuse_engine_defaults(
            engine.model_config.get_diff_sampling_param(),
            [entry.value for entry in entry_points(group="vllm.logits_processors")],
        )
        return engine

    async def _stop_reading(self) -> None:
        if (reader := self._engine.output_handler) is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _end_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _update(self, info: dict[str, Any], *, timeout: float | None = None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=info)
        try:
            self._run(self._engine.update_weights(request), timeout=timeout or self.config.sync_timeout_s)
        except BaseException:
            self._receiving = False
            raise

    def _check_requests(self, requests: Sequence[GenerationRequest], law: SamplingLaw) -> None:
        if not requests:
            raise UserError("generate was called without requests")
        if len({r.request_id for r in requests}) != len(requests):
            raise UserError("generate was called with the same request_id twice")
        if law.max_tokens < 1:
            raise UserError(f"max_tokens={law.max_tokens}: a response has at least one token")
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0 or length > self.config.max_prompt_tokens:
                raise UserError(
                    f"request {request.request_id}: the prompt has {length} tokens, "
                    f"rollout.max_prompt_tokens allows 1 to {self.config.max_prompt_tokens}"
                )
            if length + law.max_tokens > self.config.max_model_len:
                raise UserError(
                    f"request {request.request_id}: {length} prompt tokens and max_tokens={law.max_tokens} exceed "
                    f"rollout.max_prompt_tokens + rollout.max_response_tokens = {self.config.max_model_len}"
                )

    @property
    def weight_version(self) -> int:
        """Version that `generate` samples from; 0 is the checkpoint the engine started with."""
        return self._gate.version

    @property
    def _shut(self) -> str | None:
        return self._gate.shut

    @_shut.setter
    def _shut(self, reason: str | None) -> None:
        self._gate.shut = reason

    def _check_alive(self) -> None:
        if self._loop.is_closed():
            raise EngineClosed("the engine is closed")

    def _check_open(self) -> None:
        self._check_alive()
        if self._shut is not None:
            raise EngineClosed(f"the engine refuses to generate: {self._shut}")
        if self._asleep:
            raise EngineClosed(f"the engine refuses to generate: its {' and '.join(sorted(self._asleep))} are asleep")

    def _run(self, coroutine: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Run on the engine's event loop and wait."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException as error:
            future.cancel()
            if type(error).__name__ == "EngineDeadError":  # by name: whoever unpickles ours needs no vLLM
                raise EngineDead(str(error)) from None
            raise

    def _stop_loop(self) -> None:
        with suppress(TimeoutError):
            self._run(self._end_tasks(), timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _whole(
    requests: Sequence[GenerationRequest], responses: Sequence[Sequence[Part]], batch: RolloutBatch
) -> RolloutBatch:
    """One sequence per request, from the parts of all of them in `batch`."""
    joined, first = [], 0
    for request, parts in zip(requests, responses, strict=True):
        turns = [batch.select([first + number]) for number in range(len(parts))]
        reason = turns[-1].finish_reasons[0]
        joined.append(join_turns(turns, request_id=request.request_id, finish_reason=reason, latest_prompt=True))
        first += len(parts)
    return RolloutBatch.concatenate(joined)
