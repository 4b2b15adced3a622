"""Settings of the adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megatron_dppo.config_base import ConfigModel, Folder

Target = Literal["qkv", "o", "mlp", "experts"]
TARGETS: tuple[Target, ...] = ("qkv", "o", "mlp", "experts")


class LoraConfig(ConfigModel):
    """Train adapters in place of the weights: `W + (alpha / rank) B A`, W frozen, A random, B zero at first.

    Each projection of a Hugging Face model has an A `[rank, in]` and a B `[out, rank]` of its own, as PEFT has them:
    query, key and value, gate and up are not one adapter because Megatron-Core computes them in one product.
    """

    rank: int = Field(default=32, ge=1)
    """Rows of A and columns of B. On a GPU a multiple of 8 lets all experts of a rank share one grouped product."""
    alpha: float = Field(default=64.0, gt=0.0)
    """The adapter's output is multiplied by `alpha / rank`."""
    targets: tuple[Target, ...] = TARGETS
    """Layers that get adapters: query, key and value, with latent attention all matrices that they are made by ("qkv"),
    the attention's output projection ("o"), dense MLPs and the experts that every token passes ("mlp"), and every
    expert that is chosen ("experts"). The router, the norms, the embedding and the LM head stay as they are."""
    adapter: Folder | None = None
    """Folder of a PEFT adapter (adapter_config.json, adapter_model.safetensors) to start from, of the same rank, alpha
    and targets; null starts from the base model."""

    @field_validator("targets")
    @classmethod
    def _some_once(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(f"name at least one of {', '.join(TARGETS)}, each once")
        return targets

    @property
    def scale(self) -> float:
        """What `B A x` is multiplied by."""
        return self.alpha / self.rank
