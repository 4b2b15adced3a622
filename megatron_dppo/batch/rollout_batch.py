"""What an engine returns: every sequence as it was sampled, indexed by token position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megatron_dppo.router_replay.routes import Routes

BY_TOKEN = ("token_ids", "loss_mask", "mu_logp", "topk_ids", "topk_logp", "weight_versions")


@dataclass(frozen=True)
class RolloutBatch:
    """`B` sequences, concatenated without padding. Row `t` of every array describes *token* `t` itself.

    With `N` tokens in all (prompts included) and `K` recorded ids per token:

    Arrays are read-only views where they come out of shared memory (Ray's object store).
    """

    token_ids: np.ndarray
    """int32 `[N]`: prompt and response of sequence `b` at rows `offsets[b]:offsets[b + 1]`"""
    offsets: np.ndarray
    """int64 `[B + 1]` first row of every sequence, then `N`."""
    prompt_lengths: np.ndarray
    """int32 `[B]`: tokens of each sequence that were given, not sampled."""
    loss_mask: np.ndarray
    """bool `[N]`: True for tokens the policy sampled (never prompt, tool or environment tokens)."""
    mu_logp: np.ndarray
    """float32 `[N]`: natural log of the probability it was drawn with; 0 where not sampled."""
    topk_ids: np.ndarray
    """int32 `[N, K]`: the engine's own K likeliest ids at that draw, likeliest first; -1 = absent."""
    topk_logp: np.ndarray
    """float32 `[N, K]` their log mu; -inf where absent."""
    routes: Routes | None
    """Routes of `N` tokens, or None when the engine did not record them."""
    request_ids: tuple[str, ...]
    """`B` strings, unique within a run: "train/{step}/{prompt}/{sample}", or "eval/..."."""
    finish_reasons: tuple[str, ...]
    """`B` strings: "stop" (end-of-sequence or stop token), "length" (cut at max_tokens), "abort"."""
    weight_versions: np.ndarray
    """int32 `[N]`: version of the weights whose forward sampled (or, for prompts, last prefilled) it."""

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids), len(self.request_ids)
        expected = {
            "offsets": (sequences + 1,),
            "prompt_lengths": (sequences,),
            "loss_mask": (tokens,),
            "mu_logp": (tokens,),
            "topk_ids": (tokens, self.top_k),
            "topk_logp": (tokens, self.top_k),
            "weight_versions": (tokens,),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"RolloutBatch.{name} has shape {getattr(self, name).shape}, expected {shape}")
        if len(self.finish_reasons) != sequences:
            raise ValueError(
                f"RolloutBatch.finish_reasons has {len(self.finish_reasons)} entries for {sequences} sequences"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != tokens or (np.diff(self.offsets) < 1).any():
            raise ValueError("RolloutBatch.offsets must rise from 0 to the number of tokens, with no empty sequence")
        if self.routes is not None and len(self.routes) != tokens:
            raise ValueError(f"RolloutBatch.routes covers {len(self.routes)} tokens, the batch has {tokens}")

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.request_ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, prompt included, int64 `[B]`."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        """Tokens per sequence after the prompt, int64 `[B]`."""
        return self.lengths - self.prompt_lengths

    @property
    def cut(self) -> np.ndarray:
        """bool `[B]`: sequences that ended at a limit."""
        return np.array(self.finish_reasons) == "length"

    @property
    def sampled_per_sequence(self) -> np.ndarray:
        """Tokens per sequence that the policy sampled, int64 `[B]`."""
        return np.add.reduceat(self.loss_mask.astype(np.int64), self.offsets[:-1])

    @property
    def routed_per_sequence(self) -> np.ndarray:
        """Tokens per sequence whose experts the engine recorded, int64 `[B]`; 0 where it recorded none."""
        if self.routes is None:
            return np.zeros(len(self), dtype=np.int64)
        return np.add.reduceat(self.routes.valid.astype(np.int64), self.offsets[:-1])

    def response_ids(self, sequence: int) -> np.ndarray:
        """Token ids of one sequence after its prompt."""
        start, stop = self.offsets[sequence], self.offsets[sequence + 1]
        return self.token_ids[start + self.prompt_lengths[sequence] : stop]

    def select(self, sequences: np.ndarray | list[int]) -> RolloutBatch:
        """The named sequences, in the order named (copies their rows)."""
        sequences = np.asarray(sequences, dtype=np.int64)
        return self.take(
            rows_of(self.offsets, sequences),
            offsets=np.concatenate([[0], np.cumsum(self.lengths[sequences])]),
            prompt_lengths=self.prompt_lengths[sequences],
            request_ids=tuple(self.request_ids[i] for i in sequences),
            finish_reasons=tuple(self.finish_reasons[i] for i in sequences),
        )

    def beyond(self, known: Sequence[int]) -> RolloutBatch:
        """What somebody lacks who has the first `known[b]` tokens of each sequence: its rows from the last of those on,
        whose route came with what follows it. Raises ValueError where more than a prompt is known."""
        if not any(known):
            return self
        first = np.maximum(np.asarray(known, dtype=np.int64) - 1, 0)
        if (np.asarray(known) > self.prompt_lengths).any():
            raise ValueError(f"{list(known)} tokens are known of prompts of {self.prompt_lengths.tolist()}")
        starts = self.offsets[:-1] + first
        rows = np.concatenate([np.arange(*span) for span in zip(starts, self.offsets[1:], strict=True)])
        return self.take(
            rows,
            offsets=np.concatenate([[0], np.cumsum(self.lengths - first)]),
            prompt_lengths=(self.prompt_lengths - first).astype(np.int32),
        )

    def take(self, rows: np.ndarray, **others: Any) -> RolloutBatch:
        """The named rows (copies them), and of the sequences that they are what `others` say."""
        routes = None if self.routes is None else self.routes.take(rows)
        return replace(self, **{name: getattr(self, name)[rows] for name in BY_TOKEN}, routes=routes, **others)

    @staticmethod
    def concatenate(batches: list[RolloutBatch]) -> RolloutBatch:
        """All sequences of all batches, in order. Batches must agree on K and on having routes."""
        if not batches:
            raise ValueError("RolloutBatch.concatenate needs at least one batch")
        if len({b.top_k for b in batches}) > 1:
            raise ValueError("RolloutBatch.concatenate: batches recorded different top-K sizes")
        if len({b.routes is None for b in batches}) > 1:
            raise ValueError("RolloutBatch.concatenate: some batches carry routes and some do not")
        joined = {
            f.name: np.concatenate([getattr(b, f.name) for b in batches])
            for f in fields(RolloutBatch)
            if f.name not in ("offsets", "routes", "request_ids", "finish_reasons")
        }
        return RolloutBatch(
            **joined,
            offsets=np.concatenate([[0], np.cumsum(np.concatenate([b.lengths for b in batches]))]),
            routes=None if batches[0].routes is None else Routes.concatenate([b.routes for b in batches if b.routes]),
            request_ids=tuple(r for b in batches for r in b.request_ids),
            finish_reasons=tuple(r for b in batches for r in b.finish_reasons),
        )


def rows_of(offsets: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Row numbers of the named sequences, concatenated."""
    if len(sequences) == 0:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in sequences])
