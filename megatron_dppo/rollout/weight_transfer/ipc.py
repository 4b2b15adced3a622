"""Weights to engines that share the trainer's GPUs: every rank fills buffers that the worker on its GPU reads."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.rollout.engine import EngineClient, RolloutEngine, TransferTerms
from megatron_dppo.rollout.weight_transfer.cuda_ipc import Shared, gpu_uuid, share, take_back
from megatron_dppo.rollout.weight_transfer.manifest import Packed, gathered
from megatron_dppo.rollout.weight_transfer.recipients import Pending, Recipients, WeightSender
from megatron_dppo.rollout.weight_transfer.turns import Filling, TurnsBroken


class IpcSender(WeightSender):
    """NCCL refuses two ranks on one GPU, CUDA's inter-process memory does not.

    Two buffers alternate: while a worker loads one bucket, the ranks bring the next together. A bucket that one worker
    of each engine alone needs is brought together on those workers' GPUs and, since it goes by broadcasts, on those of
    the other ranks that own some of it, which drop it. That saves most where `parallel.expert` is the workers of an
    engine: each rank's experts are then its own worker's. A buffer is read only after its writer's stream is done with
    it, and written again only after the worker on its GPU is; the two processes tell each other through a page of
    memory (`Filling`), and nobody calls anybody.
    Memory: two buckets on every GPU during a sync, three where a rank owns experts that the worker on its GPU does not
    need.
    """

    def __init__(
        self,
        buckets: WeightBuckets,
        device: torch.device,
        *,
        timeout_s: float,
        lent: bool = False,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        """
        timeout_s  for each bucket
        lent       whether the GPU changes hands afterwards, with all memory that torch keeps: giving it back here would
                   wait for the optimizer state that is on its way to the host
        control    of all ranks, over gloo: what NCCL brings a rank comes to its host behind that state. None: the world
        """
        self._buckets, self._device, self._timeout, self._lent = buckets, device, timeout_s, lent
        self._control = control
        self._shared: tuple[list[torch.Tensor], Filling, Shared] | None = None
        """Of the next sync."""
        self._told: set[str] = set()
        """Engines that know the layouts."""
        self._packed = Packed()
        rank, ranks, workers = dist.get_rank(), range(dist.get_world_size()), max(len(buckets.shares), 1)
        self._worker = rank % workers
        """Number in its engine of the worker on this GPU: engines have consecutive ranks' GPUs, in order."""
        self._groups: dict[int | None, dist.ProcessGroup | None] = {None: None}
        """Of the ranks that take part in buckets of each share; this rank's alone."""
        for number in buckets.shares:
            members = sorted({*ranks[number::workers], *buckets.owners_of(number)})
            group = dist.new_group(members)
            if rank in members:
                self._groups[number] = group

    def prepare(self) -> None:
        """Make the buffers, and share them: that records an event, behind which the GPU does nothing else until all
        copies are through that it had been given, gigabytes of optimizer state on their way to the host."""
        buffers = [torch.empty(self._buckets.largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        turns = Filling(len(buffers), self._timeout)
        self._shared = buffers, turns, share(buffers, turns.path, self._timeout)

    def send(self, version: int, to: Recipients | None) -> dict[int, int]:
        """See `WeightSender.send`."""
        device = self._device
        if self._shared is None:
            self.prepare()
        assert self._shared is not None
        buffers, turns, shared = self._shared
        self._shared = None
        handles: list[tuple[str, bytes]] = [("", b"")] * dist.get_world_size()
        dist.all_gather_object(handles, (gpu_uuid(device), pickle.dumps(shared)), group=self._control)
        loading: Pending[None] | None = None
        if to is not None:
            self._told |= to.wait(to.ask_each(lambda engine: self._terms(engine, dict(handles)))).keys()
            loading = to.ask(lambda engine: engine.receive_shared(version))  # now: each turn has its time limit
        dist.barrier(self._control)  # engines that take part have their ends of the turns
        try:
            self._fill(buffers, turns)
        except BaseException:
            turns.give_up()
            raise
        sums = gathered(self._packed.take(), self._control)  # while the last bucket is loaded
        if to is not None:
            to.wait(loading)
        dist.barrier(self._control)
        turns.close()
        take_back(shared)  # this GPU's engine may be down, or not among those that get these weights
        del buffers
        torch.cuda.ipc_collect()
        if not self._lent:
            torch.cuda.empty_cache()
        return sums

    def _fill(self, buffers: list[torch.Tensor], turns: Filling) -> None:
        attended, turn = turns.attended, 0
        aside: torch.Tensor | None = None
        for index, layout in enumerate(self._buckets.layouts):
            if layout.share not in self._groups:
                continue
            if not layout.goes_to(self._worker):
                aside = torch.empty_like(buffers[0]) if aside is None else aside
                self._buckets.spread(index, aside, self._groups[layout.share])
                self._packed.note(index, layout, aside)
                continue
            if attended:
                try:
                    turns.begin(turn)
                except TurnsBroken:  # its engine says why; the other ranks need this one's weights all the same
                    attended = False
            payload = buffers[turn % len(buffers)]
            self._buckets.spread(index, payload, self._groups[layout.share])
            self._packed.note(index, layout, payload)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            turns.end(turn)
            turn += 1

    def _terms(self, engine: EngineClient, handles: dict[str, bytes]) -> Callable[[RolloutEngine], None]:
        terms = TransferTerms(layouts=None if engine.name in self._told else self._buckets.layouts, buffers=handles)
        return lambda one: one.agree(terms)
