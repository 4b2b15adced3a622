"""Megatron-Core models under any layout, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.checkpoint.hf_import import load_hf_weights
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.models.build import build_model
from megatron_dppo.models.groups import initialize_groups
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig


def build_from(
    path: Path | str, layout: dict[str, Any], *, load: bool = True, seed: int = 1, **options: Any
) -> tuple[list[GPTModel], HFConfig, ProcessGroupCollection]:
    """The chunks of this rank for the checkpoint in `path` under `layout` (fields of ParallelConfig)."""
    megatron_cpu.install()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    model, parallel = load_hf_config(path), ParallelConfig(**layout)
    parallel.check_fits(model, dist.get_world_size())
    groups = initialize_groups(parallel, seed)
    models = build_model(model, transformer_config(model, parallel, **options), groups)
    if load:
        load_hf_weights(models, model, groups)
    return models, model, groups


def packed(lengths: list[int]) -> PackedSeqParams:
    """Sequences of `lengths` rows, one after another."""
    cu = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )


@torch.no_grad()
def forward(models: list[GPTModel], microbatches: list[tuple[torch.Tensor, list[int]]]) -> list[torch.Tensor]:
    """This rank's vocabulary shard of the logits `[T, V_local]` of every microbatch of packed ids `[T]`; on the last
    pipeline stage only (elsewhere an empty list)."""

    def step(data: Iterator[tuple[torch.Tensor, list[int]]], gpt: GPTModel) -> tuple[torch.Tensor, Any]:
        ids, lengths = next(data)
        out = gpt(ids[None], torch.arange(len(ids))[None], None, packed_seq_params=packed(lengths))

        def keep(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
            return output

        return out, keep

    chunks = len(models)
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in range(chunks)],
        model=models,
        num_microbatches=len(microbatches),
        seq_length=max(len(ids) for ids, _ in microbatches),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return []
    return [out[0] for out in results if torch.is_tensor(out)]
