"""Routes: which experts every token went to, in every MoE layer, and which weights decided it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UNSTATED_VERSION = -1
"""Weight version of rows whose record does not say."""


def route_dtype(num_experts: int) -> np.dtype:
    """The narrowest unsigned type that holds every expert id of the model (of the model: never of the data at hand)."""
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    return np.dtype(np.uint8 if num_experts <= 2**8 else np.uint16 if num_experts <= 2**16 else np.uint32)


def _one_span() -> np.ndarray:
    return np.array([[0, UNSTATED_VERSION]], dtype=np.int64)


@dataclass(frozen=True)
class Routes:
    """Logical expert ids chosen by the engine, `[tokens, moe_layers, topk]`, with a validity mask per token.

    Size: `L * k * itemsize + 1` bytes per token (385 for Qwen3-30B-A3B: 48 layers, top-8, 128 experts) and 16 per span.
    Plain arrays in a frozen dataclass: Ray and pickle protocol 5 hand them over without a copy, as read-only views.
    """

    experts: np.ndarray
    """`[N, L, k]` of `route_dtype(num_experts)`; MoE layers only, in model order; all-zero where not valid."""
    valid: np.ndarray
    """bool `[N]`; False where the engine never routed the token (the last sampled token of a sequence)."""
    num_experts: int
    """Experts per layer of the model."""
    spans: np.ndarray = field(default_factory=_one_span)
    """int64 `[S, 2]`, (first token, weight version whose forward routed it), one row per run of tokens with one
    version; the first starts at token 0."""

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
        if self.spans.ndim != 2 or self.spans.shape[1] != 2 or self.spans.dtype != np.int64:
            raise ValueError(f"Routes.spans must be int64 [spans, 2], got {self.spans.dtype} {self.spans.shape}")
        starts = self.spans[:, 0]
        if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= max(len(self.valid), 1):
            raise ValueError(
                f"Routes.spans must start at token 0 and rise within {len(self.valid)} tokens, got {starts.tolist()}"
            )

    @staticmethod
    def gaps(tokens: int, moe_layers: int, topk: int, num_experts: int) -> Routes:
        """A record without a single route: every row goes where the live router sends it."""
        experts = np.zeros((tokens, moe_layers, topk), dtype=route_dtype(num_experts))
        return Routes(experts, np.zeros(tokens, dtype=np.bool_), num_experts)

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
        return self.experts.nbytes + self.valid.nbytes + self.spans.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Of the experts and the validity mask."""
        return self.moe_layers * self.topk * self.experts.itemsize + self.valid.itemsize

    @property
    def weight_versions(self) -> np.ndarray:
        """Version whose forward routed each token, int64 `[N]`."""
        stops = np.append(self.spans[1:, 0], len(self))
        return np.repeat(self.spans[:, 1], stops - self.spans[:, 0])

    def routed_under(self, versions: np.ndarray) -> Routes:
        """The same routes (no copy) with the weight version of each token, int `[N]`, stated."""
        if len(versions) != len(self):
            raise ValueError(f"{len(versions)} weight versions for {len(self)} tokens")
        return Routes(self.experts, self.valid, self.num_experts, _runs(versions))

    def take(self, rows: np.ndarray, layers: Sequence[int] | None = None) -> Routes:
        """The named token rows and MoE layers (all when None), in the order named (copies them)."""
        every = layers is None or list(layers) == list(range(self.moe_layers))
        experts = self.experts.take(rows, axis=0) if every else self.experts[rows[:, None], np.array(layers)]
        versions = self.spans[np.searchsorted(self.spans[:, 0], rows, side="right") - 1, 1]
        return Routes(experts, self.valid[rows], self.num_experts, _runs(versions))

    def between(self, start: int, stop: int) -> Routes:
        """Tokens `start..stop-1`, as views of the same memory."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens {start}..{stop} are not within the {len(self)} of these routes")
        versions = self.weight_versions[start:stop]
        return Routes(self.experts[start:stop], self.valid[start:stop], self.num_experts, _runs(versions))

    @staticmethod
    def concatenate(parts: list[Routes]) -> Routes:
        """All tokens of all parts, in order. The parts must come from one model."""
        kinds = {p._kind for p in parts}
        if len(kinds) != 1:
            raise ValueError(
                f"Routes.concatenate needs parts of one model, got (experts, layers, topk) = {sorted(kinds)}"
            )
        return Routes(
            np.concatenate([p.experts for p in parts]),
            np.concatenate([p.valid for p in parts]),
            parts[0].num_experts,
            _runs(np.concatenate([p.weight_versions for p in parts])),
        )

    @property
    def _kind(self) -> tuple[int, int, int]:
        return self.num_experts, self.moe_layers, self.topk


def _runs(versions: np.ndarray) -> np.ndarray:
    """Spans of equal versions; an empty record has one span of an unstated version."""
    if len(versions) == 0:
        return _one_span()
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return np.stack([starts, versions[starts]], axis=1).astype(np.int64)
