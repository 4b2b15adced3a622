"""Routes: which experts every token went to, in every MoE layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def route_dtype(num_experts: int) -> np.dtype:
    """The narrowest unsigned type that holds every expert id of the model (of the model: never of the data at hand)."""
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    return np.dtype(np.uint8 if num_experts <= 2**8 else np.uint16 if num_experts <= 2**16 else np.uint32)


@dataclass(frozen=True)
class Routes:
    """Logical expert ids chosen by the engine, `[tokens, moe_layers, topk]`, with a validity mask per token.

    experts     `[N, L, k]` of `route_dtype(num_experts)`; MoE layers only, in model order; all-zero where not valid
    valid       bool `[N]`; False where the engine never routed the token (the last sampled token of a sequence)
    num_experts experts per layer of the model

    Size: `L * k * itemsize + 1` bytes per token (385 for Qwen3-30B-A3B: 48 layers, top-8, 128 experts).
    """

    experts: np.ndarray
    valid: np.ndarray
    num_experts: int

    def __post_init__(self) -> None:
        if self.experts.ndim != 3:
            raise ValueError(f"Routes.experts must be [tokens, moe_layers, topk], got shape {self.experts.shape}")
        if self.experts.dtype != route_dtype(self.num_experts):
            raise ValueError(
                f"Routes.experts of a model with {self.num_experts} experts must be {route_dtype(self.num_experts)}, "
                f"got {self.experts.dtype}"
            )
        if self.valid.shape != self.experts.shape[:1] or self.valid.dtype != np.bool_:
            raise ValueError(
                f"Routes.valid must be bool [{len(self.experts)}], got {self.valid.dtype} {self.valid.shape}"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.experts)

    @property
    def moe_layers(self) -> int:
        return self.experts.shape[1]

    @property
    def topk(self) -> int:
        return self.experts.shape[2]

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes + self.valid.nbytes

    def take(self, rows: np.ndarray) -> Routes:
        """The named token rows, in the order named."""
        return Routes(self.experts[rows], self.valid[rows], self.num_experts)

    @staticmethod
    def concatenate(parts: list[Routes]) -> Routes:
        """All tokens of all parts, in order. The parts must come from one model."""
        kinds = {(p.num_experts, p.moe_layers, p.topk) for p in parts}
        if len(kinds) != 1:
            raise ValueError(
                f"Routes.concatenate needs parts of one model, got (experts, layers, topk) = {sorted(kinds)}"
            )
        return Routes(
            np.concatenate([p.experts for p in parts]),
            np.concatenate([p.valid for p in parts]),
            parts[0].num_experts,
        )
