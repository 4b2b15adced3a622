"""What every rank does in the tests of training states."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_dppo.checkpoint.hf_export import weight_exporter
from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates
from megatron_dppo.errors import UserError
from megatron_dppo.models.parallel import ParallelConfig
from tests.megatron import build_from
from tests.system_faults import failing

EP2 = {"expert": 2}


def trainee_from(path: Path, layout: dict[str, Any], **options: Any) -> Trainee:
    """A model with Megatron-Core's DDP and distributed optimizer (Adam, lr 1e-3)."""
    models, model, groups = build_from(path, layout, **options)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    chunks = [DistributedDataParallel(gpt.config, ddp, gpt) for gpt in models]
    config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.01, use_distributed_optimizer=True, clip_grad=0)
    optimizer = get_megatron_optimizer(config, chunks)
    return Trainee(model=model, models=chunks, groups=groups, parallel=ParallelConfig(**layout), optimizer=optimizer)


def adam_step(trainee: Trainee, number: int) -> None:
    """One optimizer step on gradients that depend on the parameter's place in the whole model, not on the layout: a
    fixed function of the current weight, so that equal weights and moments give equal steps anywhere."""
    optimizer = trainee.optimizer
    assert isinstance(optimizer, MegatronOptimizer)
    for chunk in trainee.models:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.sin(parameter.detach() * 10 + number))
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


def weights(trainee: Trainee) -> dict[str, str]:
    """Digest of every exported tensor (rank 0; empty elsewhere)."""
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in weight_exporter(trainee.models, trainee.model, trainee.groups).stream()
        if tensor is not None
    }


def train_and_save(rank: int, path: Path, root: Path, layout: dict[str, Any]) -> list[dict[str, str]]:
    """Three steps, a save, a fourth step; the weights before and after the fourth."""
    trainee = trainee_from(path, layout)
    for number in range(3):
        adam_step(trainee, number)
    TrainingStates(root, trainee).save(3, {"position": 12, "weight_version": 3})
    before = weights(trainee)
    adam_step(trainee, 3)
    return [before, weights(trainee)]


def load_and_step(rank: int, path: Path, root: Path, layout: dict[str, Any]) -> tuple[list[dict[str, str]], Any]:
    """The same two sets of weights from a loaded state, what it said, and whether it brought generators along."""
    trainee = trainee_from(path, layout, load=False)
    for chunk in trainee.models:
        for parameter in chunk.parameters():
            parameter.data.fill_(7.0)
    random.seed(11)
    undisturbed = random.getstate()
    resumed = TrainingStates(root, trainee).load()
    restored = random.getstate() != undisturbed
    before = weights(trainee)
    adam_step(trainee, 3)
    return [before, weights(trainee)], (resumed.step, resumed.progress, restored)


def save_several(rank: int, path: Path, root: Path) -> None:
    """States of steps 1 to 4, two kept."""
    trainee = trainee_from(path, {"tensor": 2, "expert": 2, "sequence_parallel": True})
    states = TrainingStates(root, trainee, keep=2)
    for number in range(1, 5):
        adam_step(trainee, number)
        states.save(number, {"position": number})


def load_only(rank: int, path: Path, root: Path, layout: dict[str, Any], options: dict[str, Any]) -> Any:
    """The weights after loading, or the refusal."""
    trainee = trainee_from(path, layout, load=False, **options)
    try:
        resumed = TrainingStates(root, trainee).load()
    except UserError as error:
        return str(error)
    return weights(trainee), resumed.step


def generators_after(rank: int, path: Path, root: Path) -> list[float]:
    """Random numbers drawn after a save, and again after loading it."""
    layout = {"tensor": 2, "expert": 2, "sequence_parallel": True}
    trainee = trainee_from(path, layout)
    TrainingStates(root, trainee).save(1, {})
    first = draw()
    TrainingStates(root, trainee).load()
    return [*first, *draw()]


def draw() -> list[float]:
    with get_cuda_rng_tracker().fork():
        region = torch.rand(1).item()
    return [random.random(), np.random.rand(), torch.rand(1).item(), region]  # noqa: NPY002


def save_until_killed(rank: int, path: Path, root: Path) -> None:
    """One complete state, then a kill while the second one's files are written but not yet published."""
    trainee = trainee_from(path, {})
    states = TrainingStates(root, trainee)
    states.save(1, {})
    states._publish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    states.save(2, {})


def save_and_list_flushed(rank: int, path: Path, root: Path) -> list[str]:
    """What a save flushes to the disk, and `FROM -> TO` for each renaming of a folder."""
    trainee = trainee_from(path, {})
    flushed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def recorded_rename(self: Path, target: Path) -> Path:
        if self.is_dir():
            flushed.append(f"{self} -> {target}")
        return rename(self, target)

    os.fsync, Path.rename = recorded_fsync, recorded_rename  # type: ignore[assignment, method-assign]
    TrainingStates(root, trainee).save(1, {})
    return flushed


class UnwritableFile(io.FileIO):
    """On a disk whose device has failed."""

    write = failing(errno.EIO)


def save_into(rank: int, path: Path, root: Path, limit: int | None, device_fails: bool = False) -> str:
    """The refusal of a save into `root`, with files limited to `limit` bytes, or on rank 1 none that can be written."""
    trainee = trainee_from(path, {"expert": 2})
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if device_fails and rank == 1:
        io.FileIO = UnwritableFile  # type: ignore[misc]
    try:
        TrainingStates(root, trainee).save(2, {})
    except (UserError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return ""


def load_views(rank: int, path: Path, roots: list[Path]) -> str:
    """The folder that this rank loads the latest state from, where each has another view of the states."""
    resumed = TrainingStates(roots[rank], trainee_from(path, {"expert": 2})).load()
    return f"{resumed.folder} {resumed.step}"
