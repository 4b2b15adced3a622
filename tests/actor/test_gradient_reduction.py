"""Gradients that cross ranks in bfloat16, next to the same in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.matrix import SHAPE, TEMPERATURE, Case, advantages, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"grad_reduce_dtype": "bfloat16"},
    "beside the backward": {"grad_reduce_dtype": "bfloat16", "overlap_grad_reduce": True},
}


def gradients(rank: int, path: str, layout: dict, batch: Any) -> dict[str, tuple[np.ndarray, list[float]]]:
    """This rank's shards of the reduced gradient of the first step, and the norms of two steps, of each way."""
    from megatron.core import parallel_state

    from megatron_dppo.actor import gradient_reduction
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    gradient_reduction._PIECE = 1000  # many pieces, the last one shorter
    found = {}
    for name, options in WAYS.items():
        actor = build_actor(path, layout, Case(), **options)
        kept: list[torch.Tensor] = []
        prepare = actor.optimizer.prepare_grads

        def recording(actor: Any = actor, kept: list[torch.Tensor] = kept, prepare: Any = prepare) -> Any:
            for part in actor.optimizer.chained_optimizers if not kept else ():
                kept.extend(gradient.clone() for gradient in part.gradients())
            return prepare()

        actor.optimizer.prepare_grads = recording
        signal = TrainingSignal(advantages(), advantages(), [np.arange(len(advantages()))])
        source = InMemorySource.of(batch)
        norms = [actor.update(source, signal).metrics["optimizer/grad_norm"] for _ in range(2)]
        found[name] = (torch.cat([gradient.flatten() for gradient in kept]).numpy(), norms)
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, {}), (4, {"expert": 2}), pytest.param(4, {}, marks=pytest.mark.full)]
)
def test_every_rank_rounds_its_part_once(tmp_path: Path, ranks: int, layout: dict[str, int]) -> None:
    from tests.actor.reference import make_rollout

    batch = make_rollout(tiny_qwen3_moe(tmp_path, seed=3), seed=4, temperature=TEMPERATURE, **SHAPE)
    results = run_ranks(gradients, ranks, str(tmp_path), layout, batch)
    exact, rounded, beside = (np.concatenate([result[way][0] for result in results]).astype(np.float64) for way in WAYS)
    np.testing.assert_array_equal(rounded, beside)
    error = float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))
    print(f"{ranks} ranks {layout}: {error:.2e} of the gradient's norm")
    assert 1e-5 < error < 2**-9
    for result in results:
        exact_norms, *others = (result[way][1] for way in WAYS)
        for norms in others:
            assert norms == pytest.approx(exact_norms, rel=1e-3)


def add_up(rank: int, scale: float, overlap: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has, and its shard of the sum that a bucket group makes of everybody's."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from megatron_dppo.actor import gradient_reduction
    from megatron_dppo.actor.gradient_reduction import Bfloat16BucketGroup

    if overlap:  # as with a later pipeline stage, all of whose gradients are one bucket
        gradient_reduction._LARGEST, gradient_reduction._PIECE = 1000, 100

    size = dist.get_world_size()
    torch.manual_seed(rank)
    mine = torch.randn(size * 1001) * 10.0 ** torch.randint(-6, 6, (size * 1001,))
    group = object.__new__(Bfloat16BucketGroup)
    bucket = SimpleNamespace(grad_data=mine.clone(), gradient_scaling_factor=scale, params_with_extra_main_grads=[])
    group.buckets, group.ddp_config = [bucket], SimpleNamespace(overlap_grad_reduce=overlap)
    group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank = size, rank
    group.intra_distributed_optimizer_instance_group = dist.group.WORLD
    group.is_first_batch, group.grad_reduce_handle, group.previous_grad_reduce_bucket_group = True, None, None
    if overlap:
        group.start_grad_sync()
        assert not group.grad_reduce_handle.under_way
        group.grad_reduce_handle.wait()
    else:
        group.finish_grad_sync()
    return mine, bucket.grad_data.view(size, -1)[rank].clone()


@pytest.mark.parametrize("overlap", [False, True])
def test_parts_are_added_in_float32(overlap: bool) -> None:
    results = run_ranks(add_up, 4, 0.5, overlap)
    parts = torch.stack([mine for mine, _ in results])
    total = (parts * 0.5).bfloat16().float().sum(0)
    assert torch.equal(torch.cat([shard for _, shard in results]), total)
