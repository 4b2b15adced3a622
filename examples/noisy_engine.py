"""vLLM with noise on its weights, an engine of the studies' own: a larger mismatch of trainer and engine.

    rollout.engine=examples/noisy_engine.py:noise_10000_seed_3 rollout.weight_transfer=object_store

Every weight gets Gaussian noise of 10,000 millionths of the root mean square of its tensor, drawn from seed 3.

To the configuration it is an engine of one's own: `rollout.vllm` is refused, what vLLM refuses of the model is said
when it starts and not by `doctor`, and `plan` warns that it takes it for vLLM, which here is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron_dppo.checkpoint.random_weights import normal
from megatron_dppo.checkpoint.weight_layout import Bucket, unpack
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import RolloutEngine


def __getattr__(name: str) -> Callable[[Path, RolloutConfig], RolloutEngine]:
    found = re.fullmatch(r"noise_(\d+)_seed_(\d+)", name)
    if found is None:
        raise AttributeError(name)
    return partial(open_noisy, noise=int(found[1]) / 1e6, seed=int(found[2]))


def open_noisy(model: Path, config: RolloutConfig, *, noise: float, seed: int) -> RolloutEngine:
    """Refused where weights do not come through the object store: nothing else gives the engine bytes of its own."""
    from megatron_dppo.rollout.vllm import start

    if config.weight_transfer != "object_store":
        raise UserError("noise on the engine's weights needs rollout.weight_transfer=object_store; set it")
    engine = start.open_engine(model, config)
    receive = engine.receive_bucket

    def receive_noisy(version: int, bucket: Bucket) -> None:
        payload = torch.from_numpy(bucket.payload.copy())
        for slot, tensor in unpack(bucket.slots, payload):
            if slot.blocks:
                raise NotImplementedError(f"{slot.name} lies in blocks, and a changed copy has no place")
            for name, single in zip(slot.names(), tensor if slot.experts else [tensor], strict=True):
                single.copy_(perturbed(name, single, noise=noise, seed=seed))
        receive(version, Bucket(bucket.slots, payload.numpy()))

    engine.receive_bucket = receive_noisy  # type: ignore[method-assign]
    return engine


def perturbed(name: str, tensor: torch.Tensor, *, noise: float, seed: int) -> torch.Tensor:
    """A weight with Gaussian noise of `noise` times its root mean square. The noise of a name is the same in every sync
    of a run: like another kernel's rounding it leans one way, rather than averaging out over steps."""
    values = tensor.float()
    drawn = normal(name, tuple(tensor.shape), seed, tensor.device)
    return (values + noise * values.square().mean().sqrt() * drawn).to(tensor.dtype)
