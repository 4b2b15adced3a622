"""Random weights for a model that has a config.json and nothing to load: for trying out and measuring large shapes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import owned_parameters
from megatron_dppo.models.names import Block, Shape


@torch.no_grad()
def fill_random(models: Sequence[torch.nn.Module], model: HFConfig, groups: ProcessGroupCollection, seed: int) -> None:
    """Fill every parameter of this rank's chunks with its part of `random_tensor`. Rows of the padded vocabulary become
    zero. Memory: one whole tensor beside the shard. No collectives.
    """
    for owned in owned_parameters(models, model, groups):
        owned.parameter.zero_()
        for piece in owned.pieces:
            target = owned.parameter[_slices(piece.local)]
            drawn = random_tensor(piece.hf_name, model, seed, owned.parameter.device)
            target.copy_(piece.from_tensor(drawn[_slices(piece.source)]))


def random_tensors(model: HFConfig, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """What `fill_random` fills a model on such a device with, whole, one tensor after another."""
    return ((name, random_tensor(name, model, seed, device)) for name in model.tensors)


def random_tensor(name: str, model: HFConfig, seed: int, device: torch.device) -> torch.Tensor:
    """A Hugging Face tensor as a checkpoint of the config's dtype would hold it: norms 1 (0 where the model
    adds 1), biases 0, everything else normal with the config's `initializer_range`.

    Each is drawn from a generator of its own (of `seed` and its name), so the weights are the same under every layout
    on the same kind of device.
    """
    shape, dtype = model.tensors[name], getattr(model.config, "dtype", None) or torch.float32
    dtype = torch.float32 if name in model.float32_tensors else dtype
    if "norm" in name.rsplit(".", 2)[-2]:
        neutral = torch.zeros if model.centred_norms and ".linear_attn." not in name else torch.ones
        return neutral(shape, dtype=dtype, device=device)
    if name.endswith((".bias", "_proj_bias")):
        return torch.zeros(shape, dtype=dtype, device=device)
    spread = float(getattr(model.config, "initializer_range", None) or 0.02)
    return (spread * _draw(name, shape, seed, device)).to(dtype)


def _draw(name: str, shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    words = np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1, np.uint64)
    generator = torch.Generator(device=device).manual_seed(int(words[0] >> np.uint64(1)))
    return torch.randn(shape, generator=generator, device=device)


def _slices(block: Block) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in block)
