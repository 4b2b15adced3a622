"""The data that travels between rollout, trainer and actor: flat arrays with row offsets, no padding."""

from megatron_dppo.batch.aligned import (
    AlignedBatch,
    Columns,
    InMemorySource,
    PolicyColumns,
    SequenceSource,
    TopKColumns,
    align,
)
from megatron_dppo.batch.rollout_batch import RolloutBatch
from megatron_dppo.batch.turns import join_turns

__all__ = [
    "AlignedBatch",
    "Columns",
    "InMemorySource",
    "PolicyColumns",
    "RolloutBatch",
    "SequenceSource",
    "TopKColumns",
    "align",
    "join_turns",
]
