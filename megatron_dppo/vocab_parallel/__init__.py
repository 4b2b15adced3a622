"""Hidden states and a tensor-parallel shard of the LM head to per-token statistics, with no logit gathered or kept."""

from megatron_dppo.vocab_parallel.megatron_hook import TokenStatsRequest, token_stats_processor
from megatron_dppo.vocab_parallel.op import token_stats
from megatron_dppo.vocab_parallel.shard import VocabShard
from megatron_dppo.vocab_parallel.stats import TokenStats

__all__ = [
    "TokenStats",
    "TokenStatsRequest",
    "VocabShard",
    "token_stats",
    "token_stats_processor",
]
