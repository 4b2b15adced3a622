"""How long a weight sync is planned to take, by what goes to each GPU of an engine."""

import dataclasses
from pathlib import Path

import pytest

from megatron_dppo.config.load import load_config
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.planner.gpus import GPUS
from megatron_dppo.planner.run import planned_run
from tests.models.public_configs import CONFIGS

PAPER = Path(__file__).resolve().parents[2] / "examples/paper/moe_base_r3.yaml"
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
    config = load_config(PAPER, overrides)
    plan = planned_run(config, resolve_hf_config(CONFIGS[model]), GPUS["h100-80g"], gpus).plan()
    whole = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, shares=False))
    assert (plan.sync_s < 0.7 * whole.sync_s) == shared
    assert shared or plan.sync_s == whole.sync_s
