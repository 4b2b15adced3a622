"""Random weights for a model that has a config.json and nothing to load: for trying out and measuring large shapes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import owned_parameters
from megatron_dppo.models.names import Block, Shape


@torch.no_grad()
def fill_random(models: Sequence[torch.nn.Module], model: HFConfig, groups: ProcessGroupCollection, seed: int) -> None:
    """Fill every parameter of this rank's chunks: norms 1, biases 0, everything else normal with the config's
    `initializer_range`. Rows of the padded vocabulary become zero.

    Each Hugging Face tensor is drawn from a generator of its own (of `seed` and its name), so the weights are the same
    under every layout on the same kind of device. Memory: one whole tensor beside the shard. No collectives.
    """
    spread = float(getattr(model.config, "initializer_range", None) or 0.02)
    for owned in owned_parameters(models, model, groups):
        owned.parameter.zero_()
        for piece in owned.pieces:
            target = owned.parameter[_slices(piece.local)]
            name = piece.hf_name
            if "norm" in name.rsplit(".", 2)[-2]:
                target.fill_(1.0)
            elif not name.endswith(".bias"):
                drawn = _draw(name, model.tensors[name], seed, owned.parameter.device)
                target.copy_((spread * drawn)[_slices(piece.source)].reshape(target.shape))


def _draw(name: str, shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    words = np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1, np.uint64)
    generator = torch.Generator(device=device).manual_seed(int(words[0] >> np.uint64(1)))
    return torch.randn(shape, generator=generator, device=device)


def _slices(block: Block) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in block)
