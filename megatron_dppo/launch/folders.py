"""Whether a folder can be written: tried by a file, before what takes minutes is begun."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from megatron_dppo.errors import UserError, of_file


def require_writable(folder: Path, *, named: str, make: bool = False) -> None:
    """Try `folder`, which may be made first, or the nearest above it that is there. Errors: UserError, or SystemFault,
    that calls it `named`."""
    where = ""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        there = existing(folder)
        where = "" if there == folder else f" in {there}"
        with tempfile.TemporaryFile(dir=there):  # without a name, where the file system has such
            pass
    except OSError as error:
        raise of_file(
            error, f"{named} cannot be written{where}: {error.strerror or error}; choose another folder"
        ) from error


def require_shared_memory(wanted_mib: int = 32, *, instead: str = "") -> None:
    """UserError where /dev/shm cannot be written or has less free: Python's locks, Ray, NCCL and the workers of an
    engine share memory there, and without room SIGBUS ends them. `instead` is what else may be done."""
    try:
        with tempfile.TemporaryFile(dir="/dev/shm"):
            free = shutil.disk_usage("/dev/shm").free >> 20
        problem = "" if free >= wanted_mib else f"has {free} MiB free of {wanted_mib} wanted"
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    if problem:
        how = "mount a tmpfs of that size, in a container by --shm-size (Kubernetes: an emptyDir in memory)"
        raise UserError(f"/dev/shm {problem}; {how}{instead}")


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
