"""The random generators of one rank as plain data (tensors, numbers, lists), so that loading runs no code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def collect_rng() -> dict[str, Any]:
    """Python's, numpy's, torch's and the device's generators, and Megatron-Core's per-region states."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (the global generator, for libraries)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "regions": dict(get_cuda_rng_tracker().get_states()),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Undo everything that drew random numbers since `collect_rng`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    torch.cuda.set_rng_state(state["device"].cpu())
    get_cuda_rng_tracker().set_states({name: value.cpu() for name, value in state["regions"].items()})
