"""Weight syncs as an engine lives through them: the gate shuts, buckets come, all of it is checked, the gate opens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from megatron_dppo.checkpoint.weight_layout import Bucket, BucketLayout, TensorSlot
from megatron_dppo.rollout.engine import EngineClosed, TransferTerms, WorkerReport
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.serving.core import Core
from megatron_dppo.rollout.weight_transfer.manifest import ChecksumMismatch, IncompleteSync, Manifest


class Gate:
    """Requests are inside while the core samples them; the weights change only while nobody is.

    So the version read on entering is that of every token sampled inside. Attributes may be set from any thread; who
    enters and leaves does so on the engine's event loop.
    """

    def __init__(self, shut: str | None) -> None:
        self.shut = shut
        """Why nobody may enter; None while the gate is open."""
        self.syncing = False
        """Whether it is shut for a weight sync that may still end well: who was cut for it waits to go on."""
        self.died: str | None = None
        """Why it is shut where that is a sync that died: who was cut waits on, since the sync may be repeated."""
        self.version = 0
        """Version of the weights behind the gate."""
        self.asleep: set[str] = set()
        """What the engine gave back of its memory and has not taken again: "weights", "kv_cache"."""
        self._inside = 0

    def check(self) -> None:
        """Raise `EngineClosed` where nothing may be sampled now and no sync is under way, for which `passable` waits:
        work that a fleet gave out before it may come after its beginning."""
        self._check_shut()
        if self.asleep:
            raise EngineClosed(f"the engine refuses to generate: its {' and '.join(sorted(self.asleep))} are asleep")

    async def passable(self) -> None:
        """Wait for a sync that ends well. Raises `EngineClosed` where the gate is shut for another reason."""
        while self.shut is not None:
            if self.shut is not self.died:
                self._check_shut()
            await asyncio.sleep(0.01)

    @contextmanager
    def inside(self) -> Iterator[int]:
        """Be inside; gives the version of the weights. Only after `passable`, without an `await` in between."""
        self._inside += 1
        try:
            yield self.version
        finally:
            self._inside -= 1

    def _check_shut(self) -> None:
        shut = self.shut
        if shut is not None and not self.syncing and self.shut is shut:  # else a sync has just ended
            raise EngineClosed(f"the engine refuses to generate: {shut}")

    async def emptied(self) -> None:
        """Wait until nobody is inside."""
        while self._inside:
            await asyncio.sleep(0.005)


class WeightUpdates[C: Core]:
    """The half of `ServedEngine` that lives through syncs; see `RolloutEngine`. One call at a time, but for
    `abandon_update`.

    ```
    gate    open ──begin_update──► shut ── buckets ──end_update──► open, at the new version
                                    └── an error, abandon_update ──► shut until a whole update succeeds
    ```
    """

    def __init__(
        self, core: C, loop: EventLoop, gate: Gate, manifest: Manifest, *, cut: bool, timeout_s: float
    ) -> None:
        """
        cut        whether responses under way are cut for a sync rather than waited for (`rollout.partial_rollouts`)
        timeout_s  `rollout.sync_timeout_s`
        """
        self._core, self._loop, self._gate, self._manifest = core, loop, gate, manifest
        self.cut, self._timeout = cut, timeout_s
        self._layouts: Sequence[BucketLayout] = ()
        """Those of `agree`."""
        self._coming = 0
        """Version of the last sync that began."""
        self._came = False
        """Whether they came in the sync under way."""

    @property
    def weight_version(self) -> int:
        return self._gate.version

    def agree(self, terms: TransferTerms) -> None:
        """See `RolloutEngine.agree`."""
        self._loop.check()
        with self._failure(self._coming):
            if terms.layouts is not None:
                self._manifest.check_layouts(terms.layouts)
                self._layouts = terms.layouts
            self._loop.run(self._core.agree(terms), timeout=2 * self._timeout)

    def begin_update(self, version: int) -> None:
        """Shut the gate, let running requests finish (or cut them), and open a sync."""
        if version < 0:
            raise ValueError(f"weight version {version} is negative")
        self._loop.check()
        self._gate.syncing = True  # first: `Gate.check` may look in between
        self._gate.shut = f"the sync to weight version {version} has not finished"
        with self._failure(version):
            if self.cut:
                self._loop.run(self._core.hold(cut=True))
                self._loop.run(self._gate.emptied())
            else:
                self._loop.run(self._gate.emptied())
                self._loop.run(self._core.hold(cut=False))
            self._manifest.begin()
            self._coming, self._came = version, False
            self._loop.run(self._core.start_update(), timeout=self._timeout)

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        """Hand one bucket to the core."""
        with self._failure(version):
            self._note(bucket.slots)
            self._loop.run(self._core.load(version, bucket), timeout=self._timeout)

    def receive_shared(self, version: int) -> None:
        """Let the core load every bucket of the layouts out of the shared buffers."""
        self._receive(version, "shared")

    def receive_group(self, version: int) -> None:
        """Let the core receive every bucket of the layouts from the communicator."""
        self._receive(version, "group")

    def end_update(self, version: int, checksums: Mapping[int, int]) -> list[WorkerReport]:
        """Check that every tensor came, let the core finish, compare checksums and open the gate.

        checksums  the trainer's, of every bucket of the layouts where these came, which every worker's must equal
        """
        with self._failure(version):
            if not self._came:
                self._manifest.end()
            synced = self._loop.run(self._core.finish_update(version), timeout=self._timeout)
            shares = {layout.share for layout in self._layouts} - {None}
            if self._came and len(shares) > len(synced):
                raise IncompleteSync(f"{len(shares)} workers were sent weights of their own, {len(synced)} answer")
            if self._came and (without := sorted(set(range(len(self._layouts))) - checksums.keys())):
                raise IncompleteSync(
                    f"weight version {version}: the trainer sent no checksum of buckets {without[:8]}, {len(without)} "
                    f"of {len(self._layouts)}"
                )
            for worker, one in enumerate(synced):
                due = [i for i, layout in enumerate(self._layouts) if self._came and layout.goes_to(worker)]
                if unread := [i for i in due if i not in one.checksums]:
                    raise IncompleteSync(
                        f"weight version {version}: worker {worker} has no checksum of buckets {unread[:8]}, "
                        f"{len(unread)} of {len(due)}: it did not load them"
                    )
                if wrong := [i for i in due if checksums[i] != one.checksums[i]]:
                    raise ChecksumMismatch(
                        f"weight version {version}: worker {worker} loaded other bytes than the trainer packed in "
                        f"buckets {wrong[:8]}, {len(wrong)} of {len(due)}"
                    )
            if not self._gate.asleep:  # else it resumes when the last part wakes
                self._loop.run(self._core.resume(), timeout=self._timeout)
        self._gate.version = version
        self._gate.shut = None
        self._gate.syncing = False
        return [one.report for one in synced]

    def abandon_update(self, version: int, reason: str) -> None:
        """Give a sync up: the core drops what it buffered, and the gate stays shut."""
        why = f"the sync to weight version {version} died ({reason}); a full sync opens it again"
        self._gate.died = self._gate.shut = why  # in this order
        self._gate.syncing = False
        with suppress(Exception):  # the gate is shut whatever becomes of this; the first error is the one to report
            self._loop.run(self._core.abandon_update(version), timeout=self._timeout)

    def _receive(self, version: int, way: Literal["shared", "group"]) -> None:
        with self._failure(version):
            self._loop.run(self._core.load(version, way), timeout=2 * self._timeout)
            self._came = True

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
