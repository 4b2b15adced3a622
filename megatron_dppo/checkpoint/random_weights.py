"""Random weights for a model that has a config.json and nothing to load: for trying out and measuring large shapes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import owned_parameters
from megatron_dppo.models.names import Block, Piece, Shape


@torch.no_grad()
def fill_random(models: Sequence[torch.nn.Module], model: HFConfig, groups: ProcessGroupCollection, seed: int) -> None:
    """Fill every parameter of this rank's chunks with its part of `random_tensor`. Rows of the padded vocabulary become
    zero. Memory: one whole tensor beside the shard. No collectives.
    """
    places: dict[str, list[tuple[torch.Tensor, Piece]]] = {}
    for owned in owned_parameters(models, model, groups):
        owned.parameter.zero_()
        for piece in owned.pieces:
            places.setdefault(piece.hf_name, []).append((owned.parameter, piece))
    for name, pieces in places.items():
        drawn = random_tensor(name, model, seed, pieces[0][0].device)
        for parameter, piece in pieces:
            parameter[_slices(piece.local)].copy_(piece.from_tensor(drawn[_slices(piece.source)]))


def random_tensors(model: HFConfig, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """What `fill_random` fills a model on such a device with, whole, one tensor after another."""
    return ((name, random_tensor(name, model, seed, device)) for name in model.tensors)


def random_tensor(name: str, model: HFConfig, seed: int, device: torch.device) -> torch.Tensor:
    """A Hugging Face tensor as a checkpoint of the config's dtype would hold it. Norms are 1, or 0 where the model adds
    1; the rest is normal around 0, with this standard deviation (s: the config's `initializer_range`):

        weights, and biases of sums that go to the residual stream    s
        biases of products with what a norm gives                     s sqrt(hidden size) / 4, a quarter of a product
        scores of attention sinks                                     1, about what tokens score
        correction biases of routers                                  0.02, of scores between 0 and 1

    Each is drawn from a generator of its own (of `seed` and its name), so the weights are the same under every layout
    on the same kind of device.
    """
    shape, dtype = model.tensors[name], getattr(model.config, "dtype", None) or torch.float32
    dtype = torch.float32 if name in model.float32_tensors else dtype
    if "norm" in name.rsplit(".", 2)[-2]:
        neutral = torch.zeros if model.centred_norms and ".linear_attn." not in name else torch.ones
        return neutral(shape, dtype=dtype, device=device)
    return (_spread(name, model) * normal(name, shape, seed, device)).to(dtype)


def _spread(name: str, model: HFConfig) -> float:
    weights = float(getattr(model.config, "initializer_range", None) or 0.02)
    if name.endswith(".sinks"):
        return 1.0
    if name.endswith("correction_bias"):
        return 0.02
    if name.endswith((".bias", "_proj_bias")) and not name.endswith(("o_proj.bias", "down_proj_bias")):
        return weights * model.hidden_size**0.5 / 4
    return weights


def normal(name: str, shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers in float32, from a generator of `seed` and a tensor's name."""
    words = np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1, np.uint64)
    generator = torch.Generator(device=device).manual_seed(int(words[0] >> np.uint64(1)))
    return torch.randn(shape, generator=generator, device=device)


def _slices(block: Block) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in block)
