"""Megatron-Core models under any layout, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dppo.checkpoint.hf_import import load_hf_weights
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.models.build import build_model
from megatron_dppo.models.groups import initialize_groups
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig

_made: list[tuple[ParallelConfig, ProcessGroupCollection]] = []
"""The groups that `build_from` made last in this process."""


def _groups(parallel: ParallelConfig, seed: int) -> ProcessGroupCollection:
    """Those of the model before where the layout is the same: gloo's groups, which nothing ends before the process
    does, have threads and sockets."""
    if parallel_state.is_initialized():
        for layout, groups in _made:
            if layout == parallel and groups.tp is parallel_state.get_tensor_model_parallel_group():
                model_parallel_cuda_manual_seed(seed)
                return groups
        parallel_state.destroy_model_parallel()
    _made[:] = [(parallel, initialize_groups(parallel, seed))]
    return _made[0][1]


def build_from(
    path: Path | str, layout: dict[str, Any], *, load: bool = True, seed: int = 1, **options: Any
) -> tuple[list[GPTModel], HFConfig, ProcessGroupCollection]:
    """The chunks of this rank for the checkpoint in `path` under `layout` (fields of ParallelConfig)."""
    megatron_cpu.install()
    model, parallel = load_hf_config(path), ParallelConfig(**layout)
    parallel.check_fits(model, dist.get_world_size())
    groups = _groups(parallel, seed)
    models = build_model(model, transformer_config(model, parallel, **options), groups)
    if load:
        load_hf_weights(models, model, groups)
    return models, model, groups
