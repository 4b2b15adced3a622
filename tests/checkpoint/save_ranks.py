"""What every rank does in the tests of Hugging Face checkpoints written by Megatron-Core models."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint.hf_save import save_hf_checkpoint
from megatron_dppo.errors import UserError
from tests.megatron import build_from

SHARD_BYTES = 200_000


def import_and_save(
    rank: int, layout: dict[str, Any], source: Path, targets: list[Path], dtype: torch.dtype | None = None
) -> None:
    """Load `source` and write it to every target, in several files."""
    models, model, groups = build_from(source, layout)
    for target in targets:
        save_hf_checkpoint(
            target, models, model, groups, dtype=dtype, shard_bytes=SHARD_BYTES, bucket_bytes=30_000, overwrite=True
        )


def import_from(rank: int, layout: dict[str, Any], base: Path, others: list[tuple[Path, torch.dtype]]) -> list[bool]:
    """Whether the weights of each folder, loaded in a dtype, are those of `base` in that dtype, bit by bit."""
    equal = []
    for path, dtype in others:
        first, _, _ = build_from(base, layout, params_dtype=dtype)
        second, _, _ = build_from(path, layout, params_dtype=dtype)
        pairs = [
            (a, b)
            for one, two in zip(first, second, strict=True)
            for a, b in zip(one.parameters(), two.parameters(), strict=True)
        ]
        assert all(a.dtype == b.dtype == dtype for a, b in pairs)
        equal.append(all(torch.equal(a, b) for a, b in pairs))
    return equal


def load_refusal(rank: int, layout: dict[str, Any], source: Path) -> str:
    """Why `source` is not loaded."""
    try:
        build_from(source, layout)
    except UserError as error:
        return str(error)
    return ""


def fail_config_json() -> None:
    """From now on, in this process, a device fails where one is read."""
    read_bytes = Path.read_bytes

    def unreadable(self: Path) -> bytes:
        if self.name == "config.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(self)

    Path.read_bytes = unreadable  # type: ignore[method-assign]


def save_with_unreadable_config(rank: int, source: Path, target: Path) -> str:
    models, model, groups = build_from(source, {"expert": 2})
    fail_config_json()
    try:
        save_hf_checkpoint(target, models, model, groups)
    except (UserError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_with_little_room(rank: int, source: Path, target: Path, limit: int | None) -> str:
    """The error of a save when no file may grow beyond `limit` bytes (or the disk of `target` is small)."""
    models, model, groups = build_from(source, {"tensor": 2, "sequence_parallel": True})
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        save_hf_checkpoint(target, models, model, groups, bucket_bytes=30_000)
    except UserError as error:
        return str(error)
    finally:
        if limit is not None:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return ""


def save_and_die(rank: int, source: Path, target: Path) -> None:
    """Killed (as by the kernel) half way through the tensors."""
    models, model, groups = build_from(source, {})

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    save_hf_checkpoint(target, models, model, groups, bucket_bytes=30_000, progress=progress)
