"""The one place where token-indexed rollout data is shifted onto the rows that predict it, and where a rank gets the
sequences it trains on: everybody knows the sizes, each rank pulls only what it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from megatron_dppo.batch.rollout_batch import RolloutBatch, rows_of
from megatron_dppo.router_replay.routes import Routes


class _Arrays:
    """A dataclass of arrays only."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in vars(self).values())


@dataclass(frozen=True)
class PolicyColumns(_Arrays):
    """What the objective needs of each row, `N` rows."""

    target_ids: np.ndarray
    """int32 `[N]`: token that follows the row's input token."""
    loss_mask: np.ndarray
    """bool `[N]`: True where the target was sampled by the policy."""
    mu_logp: np.ndarray
    """float32 `[N]`: log mu(target); 0 where not sampled."""


@dataclass(frozen=True)
class TopKColumns(_Arrays):
    """The engine's likeliest tokens of each row, `N` rows of `K + 1` columns."""

    ids: np.ndarray
    """int32 `[N, K + 1]`: the engine's K ids in rank order, then the target; -1 = absent."""
    member: np.ndarray
    """bool `[N, K + 1]`: which columns count: present ids, and the target unless the K hold it already."""
    mu_logp: np.ndarray
    """float32 `[N, K + 1]` log mu of the columns; -inf where they do not count."""


@dataclass(frozen=True)
class Columns:
    """What of a batch a rank works with. Token ids always come."""

    policy: bool = True
    topk: bool = True
    moe_layers: tuple[int, ...] | None = None
    """Numbers, among the model's MoE layers, of those whose routes are wanted, in the order wanted; None is all,
    () is no routes at all."""


@dataclass(frozen=True)
class AlignedBatch:
    """`B` sequences as the trainer sees them: row `t` is the *input* token `t` and what it predicts.

    The last row of each sequence predicts nothing: its `loss_mask` is False and its targets are the row's own token.
    """

    input_ids: np.ndarray
    """int32 `[N]`: token fed to the model."""
    offsets: np.ndarray
    """int64 `[B + 1]`"""
    policy: PolicyColumns | None
    """Of every row; None where not wanted (`Columns`)."""
    topk: TopKColumns | None
    """Of every row; None where not wanted."""
    routes: Routes | None
    """Routes `[N]`: experts of the *input* token of the row (not shifted); None where not recorded or wanted."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Rows per sequence, int64 `[B]`."""
        return np.diff(self.offsets)

    @property
    def trained_per_sequence(self) -> np.ndarray:
        """Rows per sequence whose target the policy sampled, int64 `[B]`."""
        if self.policy is None:
            raise ValueError("the policy columns of this batch were not pulled, so nobody knows its trained rows")
        return np.add.reduceat(self.policy.loss_mask.astype(np.int64), self.offsets[:-1])

    @property
    def routed_per_sequence(self) -> np.ndarray:
        """Rows per sequence for which the engine recorded a route, int64 `[B]`."""
        if self.routes is None:
            return np.zeros(len(self), dtype=np.int64)
        return np.add.reduceat(self.routes.valid.astype(np.int64), self.offsets[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        parts = (self.input_ids, self.offsets, self.policy, self.topk, self.routes)
        return sum(part.nbytes for part in parts if part is not None)

    def select(self, sequences: np.ndarray, columns: Columns | None = None) -> AlignedBatch:
        """The named sequences, in the order named, with the columns wanted (all when None). Copies their rows."""
        columns = columns or Columns()
        sequences = np.asarray(sequences, dtype=np.int64)
        rows = rows_of(self.offsets, sequences)
        return AlignedBatch(
            input_ids=self.input_ids.take(rows),
            offsets=np.concatenate([[0], np.cumsum(self.lengths[sequences])]).astype(np.int64),
            policy=_take(self.policy, rows) if columns.policy else None,
            topk=_take(self.topk, rows) if columns.topk else None,
            routes=self._routes(rows, columns),
        )

    def _routes(self, rows: np.ndarray, columns: Columns) -> Routes | None:
        if self.routes is None or columns.moe_layers == ():
            return None
        return self.routes.take(rows, columns.moe_layers)

    @staticmethod
    def concatenate(parts: Sequence[AlignedBatch]) -> AlignedBatch:
        """All sequences of all parts, in order. The parts must have the same columns."""
        first = parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        return AlignedBatch(
            input_ids=np.concatenate([part.input_ids for part in parts]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            policy=None if first.policy is None else _join(PolicyColumns, [part.policy for part in parts]),
            topk=None if first.topk is None else _join(TopKColumns, [part.topk for part in parts]),
            routes=None if first.routes is None else Routes.concatenate([_routes_of(part) for part in parts]),
        )


def _take[T: (PolicyColumns, TopKColumns)](part: T | None, rows: np.ndarray) -> T | None:
    return (
        None if part is None else type(part)(**{f.name: getattr(part, f.name).take(rows, axis=0) for f in fields(part)})
    )


def _join[T: (PolicyColumns, TopKColumns)](kind: type[T], parts: Sequence[T | None]) -> T:
    return kind(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(kind)})


def _routes_of(part: AlignedBatch) -> Routes:
    if part.routes is None:
        raise ValueError("some parts of the batch carry routes and some do not")
    return part.routes


def align(batch: RolloutBatch) -> AlignedBatch:
    """Shift everything that describes a token onto the row that predicts it, sequence by sequence.

    Routes stay where they are: they describe the forward of the input token. The engine's K columns keep their rank
    order; the target is appended and counts as a member only where the K ids do not hold it, so that the set is
    TopK(mu, K) united with {a} and never K - 1 of them (paper, Section 4.3).
    """
    tokens = len(batch.token_ids)
    following = np.arange(1, tokens + 1)
    last_rows = batch.offsets[1:] - 1
    following[last_rows] = last_rows  # the last row of a sequence has no target; it points at itself and is masked
    trained = batch.loss_mask[following].copy()
    trained[last_rows] = False

    target_ids = batch.token_ids[following]
    mu_logp = np.where(trained, batch.mu_logp[following], 0.0).astype(np.float32)
    ids = np.where(trained[:, None], batch.topk_ids[following], -1)
    present = ids >= 0
    outside = trained & ~(ids == target_ids[:, None]).any(axis=1)
    member = np.concatenate([present, outside[:, None]], axis=1)
    logp = np.concatenate([batch.topk_logp[following], mu_logp[:, None]], axis=1)
    return AlignedBatch(
        input_ids=batch.token_ids,
        offsets=batch.offsets,
        policy=PolicyColumns(target_ids, trained, mu_logp),
        topk=TopKColumns(
            ids=np.concatenate([ids, np.where(trained, target_ids, -1)[:, None]], axis=1).astype(np.int32),
            member=member,
            mu_logp=np.where(member, logp, -np.inf).astype(np.float32),
        ),
        routes=batch.routes,
    )


class SequenceSource(Protocol):
    """The sequences of one rollout step, addressed by their number `0..B-1`, the same on every rank."""

    lengths: np.ndarray
    """int64 `[B]`, rows of each sequence, prompt included."""
    trained: np.ndarray
    """int64 `[B]`, rows of each sequence whose target the policy sampled."""
    routed: np.ndarray
    """int64 `[B]`, rows of each sequence for which the engine recorded a route; 0 where it recorded none."""
    pulled_bytes: int
    """What came to this rank so far, in bytes; what comes twice without travelling twice counts once."""

    def rows(self, sequences: np.ndarray, columns: Columns | None = None) -> AlignedBatch:
        """The named sequences in the order named, with the columns wanted (all when None). Pulls nothing else."""
        ...


@dataclass
class InMemorySource:
    """Sequences that are in this process already."""

    batch: AlignedBatch
    lengths: np.ndarray
    trained: np.ndarray
    routed: np.ndarray
    pulled_bytes: int = field(default=0, init=False)

    @staticmethod
    def of(batch: RolloutBatch) -> InMemorySource:
        aligned = align(batch)
        return InMemorySource(aligned, aligned.lengths, aligned.trained_per_sequence, aligned.routed_per_sequence)

    def rows(self, sequences: np.ndarray, columns: Columns | None = None) -> AlignedBatch:
        rows = self.batch.select(sequences, columns)
        self.pulled_bytes += rows.nbytes
        return rows
