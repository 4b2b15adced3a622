"""The one place where token-indexed rollout data is shifted onto the rows that predict it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megatron_dppo.batch.rollout_batch import RolloutBatch, rows_of
from megatron_dppo.router_replay.routes import Routes


@dataclass(frozen=True)
class AlignedBatch:
    """`B` sequences as the trainer sees them: row `t` is the *input* token `t` and what it predicts.

    The last row of each sequence predicts nothing: its `loss_mask` is False and its targets are the row's own token.

    input_ids      int32 `[N]`         token fed to the model
    target_ids     int32 `[N]`         token that follows it
    offsets        int64 `[B + 1]`
    loss_mask      bool  `[N]`         True where the target was sampled by the policy
    mu_logp        float32 `[N]`       log mu(target); 0 where not sampled
    topk_ids       int32 `[N, K + 1]`  the engine's K ids in rank order, then the target; -1 = absent
    topk_member    bool  `[N, K + 1]`  which columns count: present ids, and the target unless the K hold it already
    topk_mu_logp   float32 `[N, K + 1]` log mu of the columns; -inf where they do not count
    routes         Routes `[N]`: experts of the *input* token of the row (not shifted)
    """

    input_ids: np.ndarray
    target_ids: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray
    mu_logp: np.ndarray
    topk_ids: np.ndarray
    topk_member: np.ndarray
    topk_mu_logp: np.ndarray
    routes: Routes | None

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
        return np.add.reduceat(self.loss_mask.astype(np.int64), self.offsets[:-1])

    @property
    def routed_per_sequence(self) -> np.ndarray:
        """Rows per sequence for which the engine recorded a route, int64 `[B]`."""
        if self.routes is None:
            return np.zeros(len(self), dtype=np.int64)
        return np.add.reduceat(self.routes.valid.astype(np.int64), self.offsets[:-1])

    def select(self, sequences: np.ndarray) -> AlignedBatch:
        """The named sequences, in the order named (copies their rows)."""
        sequences = np.asarray(sequences, dtype=np.int64)
        rows = rows_of(self.offsets, sequences)
        arrays = {
            f.name: getattr(self, f.name)[rows] for f in fields(AlignedBatch) if f.name not in ("offsets", "routes")
        }
        return AlignedBatch(
            **arrays,
            offsets=np.concatenate([[0], np.cumsum(self.lengths[sequences])]).astype(np.int64),
            routes=None if self.routes is None else self.routes.take(rows),
        )


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
        target_ids=target_ids,
        offsets=batch.offsets,
        loss_mask=trained,
        mu_logp=mu_logp,
        topk_ids=np.concatenate([ids, np.where(trained, target_ids, -1)[:, None]], axis=1).astype(np.int32),
        topk_member=member,
        topk_mu_logp=np.where(member, logp, -np.inf).astype(np.float32),
        routes=batch.routes,
    )
