"""An engine that is wrong on purpose, to study what a larger training-inference mismatch does."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch


def perturbed(
    weights: Iterable[tuple[str, torch.Tensor]], noise: float, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` with Gaussian noise of `noise` times each tensor's root mean square. The noise of a name is the same in
    every sync of a run: like another kernel's rounding it leans one way, rather than averaging out over steps."""
    for name, tensor in weights:
        words = np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1, np.uint64)
        generator = torch.Generator(device=tensor.device).manual_seed(int(words[0] >> np.uint64(1)))
        values = tensor.float()
        drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        yield name, (values + noise * values.square().mean().sqrt() * drawn).to(tensor.dtype)
