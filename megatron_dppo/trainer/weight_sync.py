"""The actor's weights to the engines, after a step or for an engine that was started again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.config.schema import Config
from megatron_dppo.rollout.engine import EngineClient, WorkerReport
from megatron_dppo.rollout.start import weight_sender
from megatron_dppo.rollout.weight_transfer.recipients import Recipients, WeightSender
from megatron_dppo.trainer.clock import Clock

_LOADING = 4 << 30
"""Bytes for layers that an engine loads, and for its allocator."""


@dataclass(frozen=True)
class SyncReport:
    """What became of a sync."""

    failed: dict[str, Exception] = field(default_factory=dict)
    """Engines that did not get the weights, by name, and why."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`sync/...`: seconds of its parts, bytes, and rates."""


class WeightSync:
    """Every rank has one and calls its methods together; the controller, rank 0, names the engines.

    Where engines on the trainer's GPUs take turns with it (`rollout.takes_turns`) the GPUs change hands here:
    `before_update` puts the engines to sleep and brings the actor back, `sync` lends the GPUs to the engines again.
    """

    def __init__(self, runtime: Runtime, actor: MegatronActor, config: Config) -> None:
        self._runtime, self._actor, self._config = runtime, actor, config
        self._rollout = config.rollout
        self.takes_turns = config.rollout.takes_turns
        """Whether GPUs change hands between engines and trainer."""
        self._buckets: WeightBuckets | None = None
        self._sender: WeightSender | None = None
        self._awake = False
        """Whether the engines have the GPUs, if they take turns."""

    def before_update(self, members: Sequence[EngineClient] | None) -> None:
        """The GPUs to the trainer, with which the engines take turns."""
        if members is not None:
            # A dead engine holds no memory; the fleet finds out about it by itself.
            engines = Recipients(members, timeout_s=self._rollout.sync_timeout_s)
            engines.wait(engines.ask(lambda engine: engine.sleep()))
        self.reclaim()

    def reclaim(self) -> None:
        """Bring the actor back to GPUs that the engines left. Collective; nothing where nothing was lent."""
        if self.takes_turns:
            self._runtime.barrier()
            self._awake = False
            self._actor.onload()

    def sync(self, version: int, members: Sequence[EngineClient] | None) -> SyncReport:
        """Replace the weights of `members` (on the controller; None elsewhere) by the actor's, under `version`.

        An engine that fails is reported and the others go on. Raises where the trainer's side fails; every engine's
        gate is then shut. Collective.
        """
        clock = Clock("sync")
        to = None
        if members is not None:
            to = Recipients(members, timeout_s=self._rollout.sync_timeout_s)
        if self.takes_turns:
            with clock("lend"):
                self._lend(to, clock)
        try:
            self._transfer(version, to, clock)
        except BaseException as error:
            if to is not None:
                to.give_up(version, f"{type(error).__name__}: {error}")
            raise
        if self.takes_turns:
            with clock("lend"):
                with clock("lend_copy"):
                    self._actor.offloader.wait()
                with clock("lend_free"):
                    self._actor.offload(("weights",))
                self._runtime.barrier()  # every rank's part of a GPU is free before an engine takes it
                with clock("lend_cache"):
                    if to is not None:
                        to.wait(to.ask(lambda engine: engine.wake("kv_cache")))
                self._awake = True
                self._actor.offloader.prepare()
        if to is None:
            return SyncReport()
        return SyncReport(to.errors, clock.metrics | _memory(self._runtime.device))

    def close(self) -> None:
        """Leave communicators."""
        if self._sender is not None:
            self._sender.close()

    def _lend(self, to: Recipients | None, clock: Clock) -> None:
        """Make room for the engines' weights, and let them have it: optimizer state goes to the host while they are
        sent, and behind it these weights, which stay here until they are."""
        lent, offloader = 0, self._actor.offloader
        with clock("lend_room"):
            if self._awake:  # engines that were started again get weights while the others have theirs
                self._actor.onload(("weights",))
            else:
                # The sender's buffers need room beside all optimizer state, which leaves behind them.
                offloader.offload(("gradients",))
                # What a step's tensors had, of which those buffers would keep whole blocks from the engines.
                torch.cuda.empty_cache()
            sender, buckets = self._planned()
            sender.prepare()
            if not self._awake:
                lent = offloader.make_room(("optimizer",), lambda: self._missing(buckets))
            lent += offloader.leave(("weights",))
        clock.metrics["sync/lent_bytes"] = float(lent)
        self._runtime.barrier()
        with clock("lend_weights"):
            if to is not None:
                to.wait(to.ask(lambda engine: engine.wake("weights")))

    def _missing(self, buckets: WeightBuckets) -> int:
        """Bytes that this GPU lacks for an engine's weights, and what loading takes beside the sender's buffers."""
        device = self._runtime.device
        if device.type != "cuda":
            return 0
        rollout = self._rollout
        held = buckets.nbytes * (2 if rollout.dtype == "float32" else 1) // rollout.tensor_parallel
        aside = buckets.largest if buckets.shares else 0  # where a rank owns what the worker on its GPU does not need
        return held + held // 4 + aside + _LOADING - torch.cuda.mem_get_info(device)[0]

    def _planned(self) -> tuple[WeightSender, WeightBuckets]:
        """Made at the first sync, while the weights are here."""
        if self._sender is None or self._buckets is None:
            rollout, sliced = self._rollout, not self._rollout.expert_parallel
            shares = rollout.weight_shares(self._runtime.device.type)
            if sliced and self._config.lora is not None:  # an adapter would be merged into a matrix for every slice
                shares = 1
            self._buckets = self._actor.weight_buckets(rollout.weight_sync_bucket_mib << 20, shares, sliced=sliced)
            control = self._runtime.control
            self._sender = weight_sender(self._rollout, self._buckets, self._runtime.device, control)
        return self._sender, self._buckets

    def _transfer(self, version: int, to: Recipients | None, clock: Clock) -> None:
        sender, buckets = self._planned()
        with clock("begin"):
            sender.begin(version, to)
        with clock("transfer"):
            packed = sender.send(version, to)
        with clock("end"):
            if to is None:
                return
            for workers in to.wait(to.ask(lambda engine: engine.end_update(version, packed))).values():
                for worker in workers:
                    _add_worker(clock.metrics, worker)
        clock.metrics |= {"sync/bytes": float(buckets.nbytes), "sync/worker_bytes": float(buckets.worker_nbytes)}
        if clock.metrics["sync/transfer_s"] > 0:
            clock.metrics["sync/gb_per_s"] = buckets.nbytes / clock.metrics["sync/transfer_s"] / 1e9


def _add_worker(metrics: dict[str, float], report: WorkerReport) -> None:
    """The largest of the workers' times, and of the memory used on their GPUs."""
    for name, value in asdict(report).items():
        if value is not None:
            key = f"sync/worker_{name}"
            metrics[key] = max(metrics.get(key, 0.0), value)


def _memory(device: torch.device) -> dict[str, float]:
    """What this rank, and everybody on its GPU, holds after a sync: flat over steps unless something leaks."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "memory/rank_allocated_gib": torch.cuda.memory_allocated(device) / 2**30,
        "memory/rank_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "memory/gpu_used_gib": (total - free) / 2**30,
    }
