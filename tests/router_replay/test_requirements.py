"""Each refusal of the trainer's side, planted in the configuration that we really build."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.router_replay.requirements import check_trainer
from tests.tiny import tiny_model

FAULTS = {
    "moe_router_fusion": (True, "returns before it consults the replay hook"),
    "moe_expert_capacity_factor": (1.25, "drop tokens"),
    "moe_token_dropping": (True, "dropped tokens"),
    "moe_pad_expert_input_to_capacity": (True, "drop tokens"),
    "moe_expert_rank_capacity_factor": (2.0, "drop tokens"),
    "mtp_num_layers": (1, "number themselves from 1 again"),
    "moe_router_topk_limited_devices": (2, "device-limited"),
    "moe_router_load_balancing_type": ("sinkhorn", "consults no replay hook"),
    "moe_router_force_load_balancing": (True, "random logits"),
    "moe_router_force_biased": (0.5, "random logits"),
    "moe_input_jitter_eps": (0.01, "noise"),
    "moe_enable_routing_replay": (True, "on the same hook"),
    "cuda_graph_impl": ("local", "captured graph"),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    built = {}
    for family in ("qwen3_moe", "qwen3"):
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family, folder)
        built[family] = transformer_config(load_hf_config(folder), ParallelConfig())
    return built


def test_what_we_build_passes(configs: dict[str, Any]) -> None:
    for config in configs.values():
        check_trainer(config)


@pytest.mark.parametrize("field", FAULTS)
def test_each_fault_is_refused_with_its_reason(
    configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    value, reason = FAULTS[field]
    for family in ("qwen3", "qwen3_moe"):  # a dense model has no routes to replay and may have what it likes
        assert hasattr(configs[family], field), "Megatron-Core renamed it: the check would pass by"
        monkeypatch.setattr(configs[family], field, value)
    check_trainer(configs["qwen3"])
    with pytest.raises(UserError, match=f"router replay cannot work with {field}=.*{reason}"):
        check_trainer(configs["qwen3_moe"])


def test_several_kinds_of_balancing_are_each_looked_at(
    configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs["qwen3_moe"], "moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"])
    check_trainer(configs["qwen3_moe"])
    monkeypatch.setattr(configs["qwen3_moe"], "moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"])
    with pytest.raises(UserError, match="whole batch"):
        check_trainer(configs["qwen3_moe"])
