"""The contract between whoever trains or evaluates and whatever samples: typed calls, frozen messages, stated errors.

```
trainer (rank 0) ── RolloutFleet ──┬─ EngineClient ──► RolloutEngine (a process of its own)
  generate, weights, counts        └─ EngineClient ──► RolloutEngine
evaluate, doctor ────────────────────────────────────► RolloutEngine (this process)
```
Another engine is a function of a model's folder and the configuration that makes something with `RolloutEngine`'s
methods, named by `rollout.engine`. It blocks, and knows nothing of fleets, Ray or training ranks. What has a `Core`
gets the rest from `rollout/serving`: the gate, parts of cut responses, batches, the checks of a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_layout import Bucket, BucketLayout, pack
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.stored import LayerGroups, RolloutHandle


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. Training needs the engine's distribution to be the model's own at `temperature` (`log mu`
    is then exactly what the trainer recomputes), so what truncates it is accepted for evaluation only."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy (evaluation only)."""
    max_tokens: int = 1024
    """Most tokens sampled per request; a response cut there ends with finish reason "length"."""
    top_k_logprobs: int = 0
    """K: likeliest ids recorded per sampled token."""
    top_p: float = 1.0
    """Nucleus; must be 1 for training."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's end-of-sequence token. The stop token is part of the response."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sequence to sample. `request_id` is unique within a run; `seed` derives from (run, step, prompt, sample).
    Requests of one `affinity` go to one engine of a fleet, which may have the keys and values of their beginning,
    unless it has much more to do than the others."""

    request_id: str
    prompt_ids: np.ndarray = field(repr=False)
    seed: int
    affinity: str = ""
    known: int = 0
    """Tokens at the beginning of the prompt whose record whoever asks has, from turns before. A fleet answers what is
    `RolloutBatch.beyond` them: of an episode of many turns each row comes once."""


@dataclass(frozen=True)
class Rendezvous:
    """Where a communicator's members meet. `key` is new for each communicator, so that late members of an old one
    meet nobody."""

    host: str
    port: int
    key: str
    size: int
    timeout_s: float
    shares: Sequence[Sequence[int]] = ()
    """Members, by number, of further communicators: of buckets that one worker of each engine alone needs, by
    `BucketLayout.share`."""


@dataclass(frozen=True, kw_only=True)
class TransferTerms:
    """How the weights of the syncs to come will arrive; what is absent stays as it was."""

    layouts: Sequence[BucketLayout] | None = field(default=None, repr=False)
    """Of all buckets, by their numbers."""
    group: Rendezvous | None = None
    """The communicator to join, leaving the last one."""
    first_rank: int = 0
    """Number in the communicator of the engine's first worker."""
    source_rank: Mapping[int, int] = field(default_factory=dict)
    """Of each training rank that sends: its number in the communicator."""
    buffers: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Handles of the buffers of the next update, and of the turns in which they are used, by the UUID of the GPU that
    they are on."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What one worker of an engine measured of a weight sync."""

    load_s: float
    """Seconds to load, receiving included."""
    load_host_s: float | None = None
    """Of these, the host's own work; None where buckets came with calls."""
    by_views: float | None = None
    """Share of the bytes that were copied straight to their places; None where buckets came with calls."""
    finish_s: float
    """Seconds from the last bucket until the layers were whole."""
    gpu_used_gib: float | None = None
    """Memory used on its GPU; None on a CPU."""


@dataclass(frozen=True)
class Health:
    """An engine's core came back from a step."""

    ended: Mapping[str, int]
    """Tokens of the responses that have ended, by the call of `generate` that they belong to."""


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """What a fleet does at the moment, for people."""

    engines: int
    ready: int
    """Engines that can generate."""
    asked: int
    """Sequences of the calls of `generate` that are under way."""
    answered: int
    """Those of them that have come."""


class Generates(Protocol):
    """Whatever answers requests: an engine, or several behind one face."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool
    ) -> RolloutBatch:
        """Sample every request; the batch has the requests' order, and of each what is beyond its `known` tokens.
        `training=True` refuses what is not the model's own distribution and records top-K and routes; otherwise only
        tokens and `log mu` are needed.

        Raises `UserError` for what was asked wrongly, `EngineClosed`, `EngineDead`, `GenerationTimeout`,
        `MalformedOutput`, and `RouteError` for routes that cannot be.
        """
        ...


class RolloutEngine(Protocol):
    """One engine. Its methods block and may be called from several threads, as `Lane` says.

    It samples from the weights of `weight_version` and from nothing else. What comes between `begin_update` and
    `end_update` waits for the latter: a fleet that cuts responses may have sent it before. When an update was abandoned
    it refuses to generate. An error in any step of an update abandons it.
    """

    @property
    def weight_version(self) -> int:
        """Version that `generate` samples from; 0 is the checkpoint that the engine started with."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        """See `Generates.generate`; sequences are whole, whatever is `known` of them. `call` names it to `abandon`."""
        ...

    def abandon(self, call: str) -> None:
        """Give up a call of `generate` that another thread waits for. Nothing happens where it has ended."""
        ...

    def alive(self) -> Health:
        """Ask the core, which answers between two steps; a core that hangs never does."""
        ...

    def agree(self, terms: TransferTerms) -> None:
        """Take in how the weights of the update that is open will come. Raises `IncompleteSync` for layouts that are
        not those of its model."""
        ...

    def begin_update(self, version: int) -> None:
        """Refuse new requests, let running ones finish (or cut them, `rollout.partial_rollouts`), open an update."""
        ...

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        """Load a bucket that came with the call."""
        ...

    def receive_shared(self, version: int) -> None:
        """Load every bucket out of the shared buffers, as they come to be there; returns when all are loaded and the
        buffers are closed."""
        ...

    def receive_group(self, version: int) -> None:
        """Receive every bucket from the communicator; returns when all are loaded."""
        ...

    def end_update(self, version: int, checksums: Mapping[int, int]) -> list[WorkerReport]:
        """Check that every tensor came, and of buckets of layouts that each worker's checksums are `checksums`, the
        sender's, by number (`weight_transfer.manifest`); empty the prefix cache; generate again, from `version`. Raises
        `IncompleteSync`, `ChecksumMismatch`."""
        ...

    def abandon_update(self, version: int, reason: str) -> None:
        """Drop what came; refuse to generate until a whole update succeeds. Never raises."""
        ...

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache back. Without effect on a CPU, or asleep."""
        ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate again what `sleep` gave back; weights must be synced before anything is generated."""
        ...

    def pause(self) -> None:
        """Freeze running requests where they are, until `resume`."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None:
        """End its processes. Idempotent."""
        ...


Lane = Literal["work", "weights", "control"]
"""Calls of "work" run side by side. Those of "weights" run one after another in the order in which they were made:
updates, `agree`, `sleep`, `wake`. Those of "control" wait behind neither: `alive`, `abandon`, `abandon_update`."""


class EngineClient(Protocol):
    """An engine that lives in another process."""

    @property
    def name(self) -> str:
        """Unique in the run."""
        ...

    def ask[T](self, call: Callable[[RolloutEngine], T], lane: Lane) -> Future[T]:
        """Have a call made where the engine is: `ask(lambda engine: engine.begin_update(3), "weights")`.

        Returns at once. The future has what the call returned, or raises what it raised, and `EngineDead` where the
        process is gone. The call is pickled: it may hold messages and plain data, and nothing that belongs to here.
        """
        ...


class RolloutFleet(Generates, Protocol):
    """The engines of a run on the controller, as one. Engines load in the background; those that die, hang or answer
    nonsense lose their work to the others and are replaced. Calls may come from several threads. What `generate` made
    comes to this process whole.

    Errors of a call: `UserError` for what was asked wrongly, `NoWeights` where no engine takes its first,
    `GenerationTimeout` for a request that took too long twice, `EnginesFailed` once engines failed too often.
    """

    def generate_stored(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingConfig,
        layer_groups: LayerGroups | None = None,
        *,
        samples: int | None = None,
        enough: int | None = None,
        arrived: Callable[[RolloutHandle], None] = lambda part: None,
    ) -> RolloutHandle:
        """Sample every request for training and leave the sequences in the object store, for any rank to pull
        (`rollout.start.open_rollout`). Release the handle when the step is over, or the store fills up.

        layer_groups  MoE layers whose routes are pulled together, one group per model chunk of the trainer's pipeline
                      (`MegatronActor.moe_layer_groups`); None is one group of all
        samples       requests of one prompt, where the same prompt may come again right after them
        enough        prompts after whose completion the others are dropped; None samples all
        arrived       called by this thread with each object of the handle as it comes: whole groups, in any order
        """
        ...

    def keep(self, batch: RolloutBatch, layer_groups: LayerGroups | None = None) -> RolloutHandle:
        """Leave sequences that were put together from several calls of `generate` in the object store; see
        `generate_stored`."""
        ...

    def release(self, handle: RolloutHandle) -> None:
        """Let the store forget a rollout as soon as nobody holds arrays of it."""
        ...

    def begin_run(self) -> None:
        """For engines that a run before this one had: its failures do not count any more."""
        ...

    def take_counts(self) -> dict[str, float]:
        """What happened since this was asked last: `rollout/...` metrics of faults and of dropped work."""
        ...

    def status(self) -> FleetStatus:
        """At once, whatever is under way."""
        ...

    def ready_members(self) -> Sequence[EngineClient]:
        """All engines, once they can generate; raises what a start-up raised."""
        ...

    def members_to_sync(self, version: int) -> Sequence[EngineClient]:
        """The engines that are to get the weights of `version`, of which there is at least one. Engines that load for
        the first time are waited for, others get the weights later. Until `synced` no engine is given work; what they
        have is finished first, unless `rollout.partial_rollouts` lets the sync cut it."""
        ...

    def members_behind(self) -> Sequence[EngineClient]:
        """Engines that wait for the weights of the last sync: those that were started again since."""
        ...

    def synced(self, version: int, members: Sequence[EngineClient], failed: Mapping[str, Exception]) -> None:
        """A sync of `members` has ended. Those named in `failed` did not get the weights; they are replaced."""
        ...

    def close(self) -> None:
        """End all engines. Idempotent; whoever still waits for work gets `EngineClosed`."""
        ...


def check_requests(requests: Sequence[GenerationRequest], sampling: SamplingConfig, config: RolloutConfig) -> None:
    """Raise `UserError` for requests that an engine of `config` cannot answer."""
    if not requests:
        raise UserError("generate was called without requests")
    if len({r.request_id for r in requests}) != len(requests):
        raise UserError("generate was called with the same request_id twice")
    if sampling.max_tokens < 1:
        raise UserError(f"max_tokens={sampling.max_tokens}: a response has at least one token")
    for request in requests:
        length = len(request.prompt_ids)
        if length == 0 or length > config.max_prompt_tokens:
            raise UserError(
                f"request {request.request_id}: the prompt has {length} tokens, "
                f"rollout.max_prompt_tokens allows 1 to {config.max_prompt_tokens}"
            )
        if length + sampling.max_tokens > config.max_model_len:
            raise UserError(
                f"request {request.request_id}: {length} prompt tokens and max_tokens={sampling.max_tokens} exceed "
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {config.max_model_len}"
            )


def update_weights(
    engine: RolloutEngine, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], *, bucket_mib: int
) -> None:
    """Replace all weights of an engine in this process, by Hugging Face name; `generate` then samples from `version`.

    Memory: two buckets. An error of the source, of a name or shape, or inside the engine abandons the update.
    """
    engine.begin_update(version)
    try:
        for bucket in pack(named_tensors, bucket_mib << 20):
            engine.receive_bucket(version, bucket)
        engine.end_update(version, {})
    except BaseException as error:
        engine.abandon_update(version, f"{type(error).__name__}: {error}")
        raise


class EngineClosed(RuntimeError):
    """The engine was closed, or it refuses to generate after a weight sync that did not finish."""


class EngineDead(RuntimeError):
    """The engine's core process ended or hung. Nothing can be asked of it any more; the reason is in its log."""


class GenerationTimeout(TimeoutError):
    """A request took longer than `rollout.request_timeout_s`; it was aborted with the others of its call."""


class EnginesFailed(RuntimeError):
    """Engines failed more often than `rollout.max_engine_failures` allows. No `UserError`: other machines, or the same
    ones later, may do, and a launcher starts the run again from what is saved."""


class NoWeights(UserError):
    """No engine takes its first weights: a fault of settings, of the run rather than of any request."""


class MalformedOutput(RuntimeError):
    """The engine answered with something other than what was asked for."""
