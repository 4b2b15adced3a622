"""Kinds of arguments (`type=` of argparse) of commands, tools and examples: a wrong one is refused by its name, with
exit status 2, before anything is begun."""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dppo.errors import SystemFault, UserError
from megatron_dppo.launch.folders import require_writable

SEEDS = 2**32
"""Seeds are below it: as the generators of all libraries take them."""


def whole(least: int = 1, below: float = math.inf) -> Callable[[str], int]:
    """A whole number from `least` on and less than `below`."""
    return _number(int, least, below)


def real(least: float = 0.0, below: float = math.inf) -> Callable[[str], float]:
    """The same of any finite number."""
    return _number(float, least, below)


def _number[N: (int, float)](kind: Callable[[str], N], least: float, below: float) -> Callable[[str], N]:
    def value(text: str) -> N:
        try:
            found = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number") from None
        if not least <= found < below:
            end = "" if below == math.inf else f" and less than {below:g}"
            raise ArgumentTypeError(f"{text} must be {least:g} or more{end}")
        return found

    return value


def several[T](kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Of a word that holds several, such as "0 1 2"."""

    def values(text: str) -> list[T]:
        if not text.split():
            raise ArgumentTypeError("it is empty; name at least one")
        return [kind(word) for word in text.split()]

    return values


def new_folder(text: str) -> Path:
    """One that is not there yet, or empty, and can be made: what takes minutes is not lost at its end."""
    path = _named(text)
    with _refused():
        require_writable(path, named=text)
    if path.exists() and any(path.iterdir()):
        raise ArgumentTypeError(f"{text} exists already; name another folder or remove it")
    return path


def out_folder(text: str) -> Path:
    """Made when absent."""
    path = _named(text)
    with _refused():
        require_writable(path, named=text, make=True)
    return path


def model_folder(text: str) -> Path:
    """That of a Hugging Face checkpoint."""
    path = _named(text)
    if not os.path.isfile(path / "config.json"):  # Path.is_file raises for a name that no file system takes
        raise ArgumentTypeError(f"{text} is no folder of a Hugging Face model: it has no config.json")
    return path


def _named(text: str) -> Path:
    if not text:  # of a variable that is not set
        raise ArgumentTypeError("it is empty; name a folder")
    return Path(text)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (UserError, SystemFault) as error:
        raise ArgumentTypeError(str(error)) from None


def require_gpu(parser: ArgumentParser, *, tiny: bool) -> None:
    """Refuse what measures GPUs where there is none, but for a `tiny` run."""
    from torch.cuda import is_available  # takes seconds to import

    if not tiny and not is_available():
        parser.error("it measures GPUs and found none; --tiny runs on a CPU")
