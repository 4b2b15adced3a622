"""Imports of large packages, made shorter, and of a user's own code, by its path."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError


@contextmanager
def uncollected() -> Iterator[None]:
    """Import inside without Python's garbage collector.

    Importing torch, Megatron-Core or vLLM makes a million objects that stay, and the collector looks through them again
    and again: a fifth of ten seconds, in every rank and engine.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_NOBODYS = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""What libraries log at every start that no user can do anything about, by logger: how it begins."""


def ignore_warnings_of_libraries() -> None:
    """Megatron-Core and torch warn on every rank, at import and once per layer, of what they would rather have (Apex, a
    fused norm, an environment variable), and of their own calls that are to be replaced."""
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(megatron|megatron_dppo\.compat|torch)\b")
    warnings.filterwarnings("ignore", "Detected a Jax installation", RuntimeWarning, r"transformer_engine\b")
    for name in _NOBODYS:
        logging.getLogger(name).addFilter(_is_somebodys)


def _is_somebodys(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOBODYS[record.name])


def look_first_in(folder: str) -> None:
    """Modules are looked for there before anywhere else."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


_loaded: dict[tuple[str, str], Callable[..., Any]] = {}


def load_callable(path: str, *, named: str, folder: str | None = None) -> Callable[..., Any]:
    """The callable that `package.module:name` or `file.py:name` names, once for each process.

    named   what stands before the path in errors, such as the setting it came from
    folder  where files and, after the installed packages, modules are looked for; the working folder when absent

    Raises UserError with the reason where it cannot be had.
    """
    folder = folder or os.getcwd()
    if (folder, path) in _loaded:
        return _loaded[folder, path]
    module_name, _, name = path.rpartition(":")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        if module_name.endswith(".py"):
            file = Path(folder, Path(module_name).expanduser()).resolve()
            spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up there
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a program that reads its arguments ends where there are none
        raise UserError(f"{named}{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{named}{path} cannot be used: {module_name} has no callable {name}")
    _loaded[folder, path] = found
    return found
