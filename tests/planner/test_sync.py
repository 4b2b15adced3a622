"""A weight sync as it is planned, beside the buckets that it is made of."""

import dataclasses
from math import prod
from pathlib import Path

import pytest
import torch

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix
from megatron_dppo.config.load import load_config
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.models.names import is_expert
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.engine import EngineSettings, plan_engine
from megatron_dppo.planner.gpus import GPUS
from megatron_dppo.planner.parameters import exported, whole_model
from megatron_dppo.planner.run import planned_run
from megatron_dppo.planner.sync import expert_share, sync_memory
from megatron_dppo.planner.workload import Layout, Workload
from tests.models.public_configs import CONFIGS

PAPER = Path(__file__).resolve().parents[2] / "examples/paper/moe_base_r3.yaml"
H100 = GPUS["h100-80g"]
MIB = 1 << 20
WORKLOAD = Workload(sequences=64, mini_batches=1, prompt_tokens=512, response_tokens=512, mean_response_tokens=512)
TENSOR = ("rollout.tensor_parallel=4", "parallel.tensor=1", "parallel.sequence_parallel=false")
FLEET = (*TENSOR, "rollout.placement=fleet", "rollout.engines=1", "parallel.expert=4")
COLOCATED = (*TENSOR, "rollout.placement=colocated")
OWN = "rollout.expert_parallel=true"


@pytest.mark.parametrize(
    ("model", "gpus", "overrides", "shared"),
    [
        ("Qwen3-30B-A3B", 8, FLEET, True),
        ("Qwen3.5-35B-A3B", 8, FLEET, True),
        ("gpt-oss-20b", 8, FLEET, False),  # a layer's experts are one tensor, which has no slices
        ("gpt-oss-20b", 8, (*FLEET, OWN), True),
        ("Qwen3-30B-A3B", 8, (*FLEET, "parallel.expert=2", "parallel.expert_tensor=2"), False),
        ("Qwen3-30B-A3B", 8, (*FLEET, "parallel.expert=2", "parallel.expert_tensor=2", OWN), False),
        ("Qwen3-30B-A3B", 4, (*COLOCATED, "parallel.expert=4"), False),  # every rank has a slice for every worker
        ("Qwen3-30B-A3B", 4, (*COLOCATED, "parallel.expert=4", OWN), True),
        ("Qwen3-30B-A3B", 4, (*COLOCATED, "parallel.expert=2", OWN), False),  # ranks own experts of other workers
    ],
)
def test_experts_that_go_whole_are_planned_whole(
    model: str, gpus: int, overrides: tuple[str, ...], shared: bool
) -> None:
    plan = planned_run(load_config(PAPER, overrides), resolve_hf_config(CONFIGS[model]), H100, gpus).plan()
    whole = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, shares=False))
    assert (plan.sync_s < 0.7 * whole.sync_s) == shared
    assert shared or plan.sync_s == whole.sync_s


def buckets_of(model: HFConfig, ranks: int, workers: int, *, sliced: bool) -> WeightBuckets:
    """Expert-parallel ranks have experts in order, rank 0 all else."""
    assert model.moe is not None
    sources: dict[str, list[Source]] = {name: [] for name in model.tensors}
    for name, transform in model.parameters():
        number = int(name.split(".experts.")[1].split(".")[0]) if is_expert(name) else 0
        for piece in transform.pieces(model, 0, 1):
            sources[piece.hf_name].append(Source(number * ranks // model.moe.experts, piece.source))
    described = [(name, model.tensors[name], torch.bfloat16) for name in by_matrix(model.tensors)]
    return WeightBuckets(described, sources, {}, rank=ranks, bucket_bytes=MIB, shares=workers, sliced=sliced)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V3"])
@pytest.mark.parametrize(
    ("ranks", "workers", "sliced"), [(4, 4, True), (4, 4, False), (2, 4, False), (8, 4, False), (4, 3, False)]
)
def test_buckets_are_planned_as_they_are(name: str, ranks: int, workers: int, sliced: bool) -> None:
    """In buckets of a mebibyte the largest tensor that goes whole decides; three workers have unequal shares."""
    raw = CONFIGS[name]
    model = resolve_hf_config(raw | {"num_hidden_layers": raw.get("first_k_dense_replace", 0) + 1, "layer_types": None})
    layout = Layout(model, H100, 24, ParallelConfig(expert=ranks))
    settings = EngineSettings(bucket=MIB, expert_parallel=not sliced)
    buckets = buckets_of(model, ranks, workers, sliced=sliced)
    share = expert_share(layout, settings, workers, colocated=False)
    whole = 2 * whole_model(model).experts
    assert buckets.worker_nbytes == pytest.approx(2 * exported(model) - whole * (1 - share), rel=1e-3)
    put_together = max((2 * prod(shape) for shape in model.tensors.values() if len(shape) == 3), default=0)
    fleet = sync_memory(layout, settings, workers, colocated=False)
    assert fleet.usual == 2 * buckets.largest + put_together
    if not sliced:  # over IPC there are no slices
        foreign = any(rank % workers != number for number in buckets.shares for rank in buckets.owners_of(number))
        shared = sync_memory(layout, settings, workers, colocated=True)
        assert shared.usual - fleet.usual == foreign * buckets.largest


def test_quantised_layers_are_kept_whole_until_they_are_complete() -> None:
    """Of DeepSeek-V3's experts (three matrices of 2,048 by 7,168) a GPU of eight collects all, or its own; then it
    makes its part anew and quantises it."""
    model = resolve_hf_config(CONFIGS["DeepSeek-V3"])
    layout = Layout(model, H100, 64, ParallelConfig(expert=8))
    experts = 256 * 3 * 2048 * 7168
    for own, kept in ((False, 1), (True, 1 / 8)):
        plain, quantised = (
            sync_memory(layout, EngineSettings(quantized=on, shares=False, expert_parallel=own), 8, colocated=True)
            for on in (False, True)
        )
        assert quantised.usual - plain.usual == 2 * experts * kept + 3 * experts // 8


def test_a_model_without_experts_has_none_of_its_own() -> None:
    model = resolve_hf_config(CONFIGS["OctoThinker-3B"])
    layout = Layout(model, H100, 8, ParallelConfig())
    settings = [EngineSettings(quantized=True, expert_parallel=own) for own in (False, True)]
    whole, own = (sync_memory(layout, one, 4, colocated=False) for one in settings)
    assert own == whole
    whole, own = (plan_engine(model, H100, 4, WORKLOAD, dataclasses.replace(one, tensor=4)) for one in settings)
    assert own == whole


def test_experts_as_a_gpu_has_them() -> None:
    """Of 128 experts one of three GPUs has 43."""
    model = resolve_hf_config(CONFIGS["Qwen3-30B-A3B"])
    experts = 48 * 128 * 3 * 768 * 2048

    def weights(gpus: int, **settings: bool) -> int:
        return plan_engine(model, H100, gpus, WORKLOAD, EngineSettings(tensor=gpus, **settings)).weights

    assert weights(3, expert_parallel=True) - weights(3) == pytest.approx(2 * experts * (43 / 128 - 1 / 3), rel=1e-6)
