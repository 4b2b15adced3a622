"""Weight syncs as an engine lives through them: the gate shuts, buckets come, all of it is checked, the gate opens."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_dppo.checkpoint.weight_layout import TensorSlot
from megatron_dppo.rollout.bucket import Bucket
from megatron_dppo.rollout.engine import TransferTerms, WorkerReport
from megatron_dppo.rollout.vllm.gate import Gate
from megatron_dppo.rollout.vllm.start import CoreLoop
from megatron_dppo.rollout.weight_transfer.manifest import ChecksumMismatch, IncompleteSync, Manifest
from megatron_dppo.rollout.weight_transfer.segment import MemorySegment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class WeightUpdates:
    """The half of `VllmEngine` that lives through syncs; see `RolloutEngine`. One call at a time, but for
    `abandon_update`.

    ```
    gate    open ──begin_update──► shut ── buckets ──end_update──► open, at the new version
                                    └── an error, abandon_update ──► shut until a whole update succeeds
    ```
    """

    def __init__(
        self, engine: AsyncLLM, loop: CoreLoop, gate: Gate, manifest: Manifest, *, cut: bool, timeout_s: float
    ) -> None:
        """
        cut        whether responses under way are cut for a sync rather than waited for (`rollout.partial_rollouts`)
        timeout_s  `rollout.sync_timeout_s`
        """
        self._engine, self._loop, self._gate, self._manifest = engine, loop, gate, manifest
        self.cut, self._timeout = cut, timeout_s
        self._receiving = False
        """Whether vLLM's workers have a weight-update session open."""
        self._buckets = 0
        """How many the layouts of `agree` have."""
        self._came: set[int] = set()
        """Those that came in the sync under way."""

    @property
    def weight_version(self) -> int:
        return self._gate.version

    def agree(self, terms: TransferTerms) -> None:
        """See `RolloutEngine.agree`; the workers hear of it as `receiver.TransferInit`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._loop.check()
        if terms.layouts is not None:
            self._manifest.begin()
            for layout in terms.layouts:
                self._note(layout.slots)
            self._manifest.end()
            self._buckets = len(terms.layouts)
        info = {
            "layouts": None if terms.layouts is None else pickle.dumps(list(terms.layouts)),
            "group": None if terms.group is None else asdict(terms.group),
            "first_rank": terms.first_rank,
            "source_rank": list(terms.source_rank.items()),
            "buffers": list(terms.buffers.items()),
            "close": terms.close,
        }
        request = WeightTransferInitRequest(init_info=info)
        self._loop.run(self._engine.init_weight_transfer_engine(request), timeout=2 * self._timeout)

    def begin_update(self, version: int) -> None:
        """Shut the gate, let running requests finish (or cut them), and open a sync."""
        if version < 0:
            raise ValueError(f"weight version {version} is negative")
        self._loop.check()
        self._gate.shut = f"the sync to weight version {version} has not finished"
        self._gate.syncing = True
        with self._failure(version):
            if self.cut:
                # What the pause does to them: see `record_scheduler`.
                self._loop.run(self._engine.pause_generation(mode="abort", clear_cache=True))
                self._loop.run(self._gate.emptied())
            else:
                self._loop.run(self._gate.emptied())
                self._loop.run(self._engine.pause_generation(mode="wait", clear_cache=True))
            self._manifest.begin()
            self._came.clear()
            self._loop.run(self._engine.start_weight_update(), timeout=self._timeout)
            self._receiving = True

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        """Hand one bucket to vLLM's workers."""
        with self._failure(version):
            self._note(bucket.slots)
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

    def receive_shared(self, version: int, number: int) -> None:
        """Let the workers load bucket `number` of the layouts out of the shared buffers."""
        with self._failure(version):
            self._update({"version": version, "shared": number})
            self._came.add(number)

    def receive_group(self, version: int) -> None:
        """Let the workers receive every bucket of the layouts from the communicator."""
        with self._failure(version):
            self._update({"version": version, "group": True}, timeout=2 * self._timeout)
            self._came.update(range(self._buckets))

    def end_update(self, version: int, checksums: Mapping[int, int] | None = None) -> list[WorkerReport]:
        """Check that every tensor came, let vLLM finish, empty the prefix cache and open the gate.

        checksums  by bucket, which every worker's must equal
        """
        with self._failure(version):
            if not self._came:
                self._manifest.end()
            elif len(self._came) != self._buckets:
                raise IncompleteSync(f"{len(self._came)} of {self._buckets} buckets came")
            self._loop.run(self._engine.finish_weight_update(), timeout=self._timeout)
            self._receiving = False
            held = self._loop.run(self._engine.collective_rpc("held_weight_version"), timeout=self._timeout)
            if set(held) != {version}:
                raise RuntimeError(f"after the sync to weight version {version} the engine's workers hold {held}")
            if not self._loop.run(self._engine.reset_prefix_cache(), timeout=self._timeout):
                raise RuntimeError("the prefix cache could not be emptied after a weight sync")
            reports = self._loop.run(self._engine.collective_rpc("weight_sync_report"), timeout=self._timeout)
            for worker, (sums, _) in enumerate(reports):
                wrong = sorted(i for i, value in (checksums or {}).items() if dict(sums).get(i) != value)
                if wrong:
                    raise ChecksumMismatch(
                        f"weight version {version}: worker {worker} loaded other bytes than the trainer packed in "
                        f"buckets {wrong[:8]}, {len(wrong)} of {self._buckets}"
                    )
            if not self._gate.asleep:  # vLLM resumes by itself when the last part wakes
                self._loop.run(self._engine.resume_generation(), timeout=self._timeout)
        self._gate.version = version
        self._gate.shut = None
        self._gate.syncing = False
        return [WorkerReport(**dict(seconds)) for _, seconds in reports]

    def abandon_update(self, version: int, reason: str) -> None:
        """Give a sync up: the workers drop what they buffered, and the gate stays shut."""
        self._gate.shut = f"the sync to weight version {version} died ({reason}); a full sync opens it again"
        self._gate.syncing = False
        if not self._receiving:  # vLLM closes a session in which a bucket failed; the next sync clears up after it
            return
        self._receiving = False
        with suppress(Exception):  # the gate is shut whatever becomes of this; the first error is the one to report
            self._update({"version": version, "abandon": True})
            self._loop.run(self._engine.finish_weight_update(), timeout=self._timeout)

    @contextmanager
    def _failure(self, version: int) -> Iterator[None]:
        """Turn any error inside into a failed sync, and raise it on."""
        try:
            yield
        except BaseException as error:
            self.abandon_update(version, f"{type(error).__name__}: {error}")
            raise

    def _note(self, slots: Sequence[TensorSlot]) -> None:
        for slot in slots:
            for name in slot.names():
                self._manifest.check(name, slot.shape)

    def _update(self, info: dict[str, Any], *, timeout: float | None = None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=info)
        try:
            self._loop.run(self._engine.update_weights(request), timeout=timeout or self._timeout)
        except BaseException:
            self._receiving = False
            raise
