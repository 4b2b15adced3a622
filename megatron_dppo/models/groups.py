"""Megatron-Core's process groups and random state for a layout."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dppo.models.parallel import ParallelConfig


def initialize_groups(
    parallel: ParallelConfig, seed: int, *, timeout_minutes: float = 30.0, gloo_copies: bool = True
) -> ProcessGroupCollection:
    """Build every group of `parallel` over the world once, seed the per-rank generators, and return the groups.

    Collective; torch.distributed is initialised before. Ranks are numbered along tensor, context, (expert), data and
    pipeline, the first fastest. `gloo_copies` adds the data-parallel groups over gloo that `get_megatron_optimizer`
    asks for by default.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=gloo_copies,
    )
    model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()
