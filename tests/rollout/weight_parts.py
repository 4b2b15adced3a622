"""Weights of experts that two workers divide, buckets of them on a few ranks, and workers that keep what they get."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix
from megatron_dppo.checkpoint.weight_layout import unpack
from megatron_dppo.rollout.engine import TransferTerms, WorkerReport
from megatron_dppo.rollout.serving.core import WorkerSync
from megatron_dppo.rollout.weight_transfer.incoming import Incoming
from tests.distributed import PATIENCE_S

CPU = torch.device("cpu")
EXPERTS = 5
OWN = ({0, 1, 2}, {3, 4})
"""Experts of each of two workers, as vLLM divides five."""


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ["embed.weight", "model.layers.0.o_proj.weight"]
    names += [f"model.layers.0.mlp.experts.{e}.{m}_proj.weight" for e in range(EXPERTS) for m in ("up", "down")]
    return {name: torch.randn((4, 6), generator=generator) for name in [*names, "norm.weight"]}


def buckets_on(rank: int, ranks: int, *, sliced: bool = False) -> WeightBuckets:
    """Of four ranks every one owns something: experts go round, so that no rank has those of its own worker alone."""
    whole = ((0, 4), (0, 6))
    model = tensors()
    sources = {name: [Source((3 * number + 1) % ranks, whole)] for number, name in enumerate(model)}
    local = {
        (name, whole): partial(torch.Tensor.view, tensor, -1)
        for name, tensor in model.items()
        if sources[name][0].rank == rank
    }
    described = [(name, (4, 6), torch.float32) for name in by_matrix(model)]
    return WeightBuckets(described, sources, local, rank=rank, bucket_bytes=200, shares=2, sliced=sliced)


class Summed:
    """A core whose two workers loaded everything, and say which sums they have."""

    def __init__(self, *sums: dict[int, int]) -> None:
        self._sums = sums

    async def nothing(self, *_: Any, **__: Any) -> None: ...

    agree = hold = start_update = load = abandon_update = resume = nothing

    async def finish_update(self, version: int) -> list[WorkerSync]:
        return [WorkerSync(sums, WorkerReport(load_s=0.0, finish_s=0.0)) for sums in self._sums]


class Collected(Incoming):
    """A worker that keeps what it gets."""

    def __init__(self, worker: int, terms: TransferTerms) -> None:
        super().__init__(CPU)
        self.agree(terms, worker)
        self.came: dict[str, torch.Tensor] = {}

    def keep(self, slots: Any, payload: torch.Tensor) -> None:
        for slot, tensor in unpack(slots, payload):
            for name, single in zip(slot.names(), tensor if slot.experts else [tensor], strict=True):
                assert name not in self.came
                self.came[name] = single.clone()

    def wrong(self, worker: int) -> list[str]:
        """What is not as it should be."""
        due = {n: t for n, t in tensors().items() if ".experts." not in n or int(n.split(".")[5]) in OWN[worker]}
        found = [name for name in due if not torch.equal(self.came.get(name, torch.zeros(1)), due[name])]
        return found + sorted(self.came.keys() - due.keys())


class Engine:
    """An engine of two workers, threads of this process, as far as a sync sees it; its own client. `fault`: its second
    worker ends at its second bucket ("gone"), it cannot open an update ("refuses"), it joins no communicator ("alone"),
    or something breaks when all has come, so many times ("breaks once", "breaks twice")."""

    def __init__(self, name: str) -> None:
        self.name, self.fault = name, ""
        self.version = 0
        self.workers = [Collected(worker, TransferTerms()) for worker in (0, 1)]
        self._calls = ThreadPoolExecutor(1)
        self._threads = ThreadPoolExecutor(2)

    def ask(self, call: Callable[[Any], Any], lane: str) -> Future[Any]:
        return self._calls.submit(call, self)

    def begin_update(self, version: int) -> None:
        self.version = 0
        if self.fault == "refuses":
            raise RuntimeError("refuses")
        self.version = version
        for worker in self.workers:
            worker.begin()
            worker.came = {}

    def agree(self, terms: TransferTerms) -> None:
        if self.fault == "alone":
            raise RuntimeError("alone")
        self._both(lambda number: self.workers[number].agree(terms, number))

    def receive_group(self, version: int) -> None:
        assert version == self.version
        self._both(self._receive)
        if self.fault.startswith("breaks"):
            self.fault = "breaks once" if self.fault == "breaks twice" else ""
            raise RuntimeError("broke")

    def _receive(self, number: int) -> None:
        worker, seen = self.workers[number], []

        def load(slots: Any, payload: torch.Tensor) -> None:
            seen.append(slots)
            if self.fault == "gone" and number == 1 and len(seen) == 2:
                worker.leave()
                raise RuntimeError("gone")
            worker.keep(slots, payload)

        worker.take("group", load)

    def _both(self, call: Callable[[int], None]) -> None:
        for done in [self._threads.submit(call, number) for number in (0, 1)]:
            done.result(PATIENCE_S)
