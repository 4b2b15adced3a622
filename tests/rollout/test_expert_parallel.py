"""Models whose experts cannot be divided among the devices of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.compat.vllm_cpu import on_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.model_facts import ModelFacts, check_expert_parallel
from megatron_dppo.rollout.vllm.start import check_cpu_workers
from tests.models.test_hf_config import MOE


def facts(folder: Path, **fields: int) -> ModelFacts:
    config = {"num_experts": 0, "num_experts_per_tok": 1} | fields
    (folder / "config.json").write_text(json.dumps(MOE | config))
    return ModelFacts.read(folder, router_replay=False)


def check(model: ModelFacts, config: RolloutConfig) -> None:
    check_expert_parallel(model, config)
    check_cpu_workers(model, config)


@pytest.mark.parametrize(
    ("fields", "workers", "message"),
    [
        ({}, 2, "has no experts; set it to false"),
        ({"num_experts": 2, "num_experts_per_tok": 1}, 4, "2 experts, fewer than rollout.tensor_parallel=4"),
        pytest.param(
            {"num_experts": 8, "num_experts_per_tok": 3},
            4,
            "runs 3 experts a token, and on a CPU each of rollout.tensor_parallel=4 workers must have that many",
            marks=pytest.mark.skipif(not on_cpu(), reason="a limit of the CPU's kernels"),
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(fields: dict[str, int], workers: int, message: str, tmp_path: Path) -> None:
    config = RolloutConfig(tensor_parallel=workers, expert_parallel=True)
    with pytest.raises(UserError, match=message):
        check(facts(tmp_path, **fields), config)
    check(facts(tmp_path, **fields), RolloutConfig(tensor_parallel=workers))


def test_experts_that_go_round_are_divided(tmp_path: Path) -> None:
    config = RolloutConfig(tensor_parallel=2, expert_parallel=True)
    check(facts(tmp_path, num_experts=8, num_experts_per_tok=4), config)
