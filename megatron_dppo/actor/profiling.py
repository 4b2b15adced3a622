"""Where the time and the memory of one training step go."""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

PHASE = "phase: "
"""Prefix of the ranges that `Phases` puts into traces."""


@dataclass
class PhaseUse:
    """What one phase of a step took: wall-clock seconds; peak bytes of the device's allocator in it (on a CPU: the
    process's resident bytes at its end)."""

    seconds: float = 0.0
    peak_bytes: int = 0


class Phases:
    """Names the parts of a step. A name costs microseconds, unless `measure` is on: then the device is waited for on
    both sides of every phase, which serialises host and device."""

    def __init__(self) -> None:
        self._uses: dict[str, PhaseUse] | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Around a phase; phases of the same name add up. They do not nest."""
        with record_function(PHASE + name):
            if self._uses is None:
                yield
                return
            use = self._uses.setdefault(name, PhaseUse())
            _synchronise(reset_peak=True)
            start = time.perf_counter()
            yield
            _synchronise()
            use.seconds += time.perf_counter() - start
            use.peak_bytes = max(use.peak_bytes, _memory())

    @contextmanager
    def measure(self) -> Iterator[dict[str, PhaseUse]]:
        """Measure every phase inside; the result by name."""
        self._uses = {}
        try:
            yield self._uses
        finally:
            self._uses = None


@dataclass
class StepProfile:
    """One profiled step of one rank. Profiling itself makes a step slower; shares are what to read."""

    seconds: float = 0.0
    """Wall clock of the whole step."""
    phases: dict[str, PhaseUse] = field(default_factory=dict)
    """By name, in order."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds of device work by kind (on a CPU: of operators); streams overlap, so the sum may exceed `busy`."""
    busy: float = 0.0
    """Seconds in which at least one kernel ran (on a CPU: the sum of `work`)."""

    def tables(self, *, flops: float, peak_flops: float | None) -> list[Table]:
        """Phases and kinds of work.

        flops       this rank's share of the step's
        peak_flops  a second, of the device; None where that is not known
        """
        phases = Table("phase", "seconds", "share", "peak memory, GiB", title="One step by phase")
        for name, use in self.phases.items():
            share = use.seconds / max(self.seconds, 1e-9)
            phases.add_row(name, f"{use.seconds:.4f}", f"{share:.1%}", f"{use.peak_bytes / 2**30:.2f}")
        rate = flops / max(self.seconds, 1e-9)
        utilisation = f"MFU {rate / peak_flops:.2%}" if peak_flops else "MFU unknown on this device"
        phases.caption = f"{self.seconds:.4f} s in all; {rate / 1e12:.3g} TFLOP/s a rank; {utilisation}"
        work = Table("work", "seconds", "share of the step", title="One step by kind of work")
        for name, seconds in sorted(self.work.items(), key=lambda item: -item[1]):
            work.add_row(name, f"{seconds:.4f}", f"{seconds / max(self.seconds, 1e-9):.1%}")
        work.add_row("nothing running", f"{self.seconds - self.busy:.4f}", f"{1 - self.busy / self.seconds:.1%}")
        return [phases, work]


@contextmanager
def profiled(phases: Phases | None, *, trace: Path | None = None) -> Iterator[StepProfile]:
    """Profile what runs inside; the result is filled at the end. Without `phases` nothing waits for the device
    inside. `trace` (a name ending in .json.gz) receives a Chrome trace, to be opened in Perfetto or
    chrome://tracing."""
    result = StepProfile()
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with ExitStack() as stack:
        measured = stack.enter_context(phases.measure()) if phases else {}
        profiler = stack.enter_context(profile(activities=activities))
        _synchronise()
        start = time.perf_counter()
        yield result
        _synchronise()
        result.seconds = time.perf_counter() - start
    result.phases = measured
    result.work, result.busy = work_by_kind(profiler.events(), on_gpu=on_gpu)
    if trace is not None:
        _write_trace(profiler, trace)


def work_by_kind(events: Iterable[Any], *, on_gpu: bool) -> tuple[dict[str, float], float]:
    """(seconds by kind, busy seconds) of a profiler's `FunctionEvent`s."""
    work: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation:
                spans.append((event.time_range.start, event.time_range.end))
            continue
        if event.is_async:
            continue
        if on_gpu:
            parts = [(k.name, k.duration) for k in event.kernels if k.name != event.name]  # annotations have a GPU twin
        else:
            parts = [("", event.self_cpu_time_total)]
        if not parts:
            continue
        chain = " ".join(_ancestry(event))
        for kernel, microseconds in parts:
            kind = kind_of(kernel, chain)
            work[kind] = work.get(kind, 0.0) + microseconds / 1e6
    return work, covered(spans) / 1e6 if on_gpu else sum(work.values())


_COLLECTIVES = (
    ("expert all-to-all", ("_AllToAll",)),
    ("context-parallel exchange", ("AttnFuncWithCP",)),
    ("LM head: collectives", ("_TokenStats", "CrossEntropy")),
    (
        "tensor-parallel collectives",
        ("_Linear", "_LayerNormLinear", "SequenceParallelRegion", "ModelParallelRegion", "LinearWithGradAccumulation"),
    ),
    ("optimizer: collectives", (PHASE + "optimizer",)),
    ("pipeline messages", ("send", "recv", "SendRecv")),
)
_COMPUTE = (
    ("LM head", ("_TokenStats", "CrossEntropy", "LinearWithGradAccumulation")),
    ("attention core", ("FusedAttnFunc", "AttnFuncWithCP", "FlashAttn", "FlashWithSinks", "scaled_dot_product")),
    ("experts: grouped GEMM", ("GroupedLinear",)),
    ("experts: activation", ("SwiGLU", "AddBias")),
    ("experts: permutation", ("moe_permute", "moe_unpermute", "moe_chunk_sort", "_AllToAll")),
    ("router", ("RouterGatingLinear",)),
    ("linear layers and norms", ("_Linear", "_LayerNormLinear", "RMSNorm", "LayerNormFn", "aten::linear")),
    ("adding gradients up", ("AccumulateGrad",)),
    ("optimizer", (PHASE + "optimizer",)),
    ("making microbatches", (PHASE + "microbatches",)),
)


def kind_of(kernel: str, chain: str) -> str:
    """What a kernel belongs to. `chain`: names of the operators around its launch, innermost first, in one string.

    Matrix products of experts, attention and the LM head run under the same kernel names; only the operator that
    launched one tells them apart.
    """
    collective = kernel.startswith("nccl") or "nccl:" in chain or "gloo:" in chain
    for kind, marks in _COLLECTIVES if collective else _COMPUTE:
        if any(mark in chain or (collective and mark in kernel) for mark in marks):
            return kind
    return "gradient reduction and other collectives" if collective else "other"


def _ancestry(event: Any) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time lies in at least one of these spans, in their unit."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _write_trace(profiler: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=5) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def _synchronise(*, reset_peak: bool = False) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if reset_peak:
            torch.cuda.reset_peak_memory_stats()


def _memory() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss
