"""Each fault is planted in the configuration of a real engine."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.vllm import start
from megatron_dppo.rollout.vllm.start import (
    check_engine,
    common_options,
    engine_options,
    quantization_options,
    start_vllm,
)
from megatron_dppo.rollout.vllm_options import _SETTINGS, _known, check_options
from megatron_dppo.router_replay.record import RouteSchema
from tests.tiny import tiny_qwen3_moe


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, RouteSchema]:
    """vLLM's configuration of an engine that records routes, and the layer pattern of its model."""
    from vllm import AsyncEngineArgs

    folder: Path = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(folder, seed=1)
    config = RolloutConfig(max_prompt_tokens=40, max_response_tokens=24, max_num_seqs=16)
    arguments = AsyncEngineArgs(
        model=str(folder),
        max_model_len=64,
        skip_tokenizer_init=True,
        enable_return_routed_experts=True,
        **engine_options(config),
    )
    routes = ModelFacts.read(folder, router_replay=True).routes
    assert routes is not None
    return arguments.create_engine_config(), routes


def test_what_this_package_decides_of_vllm_is_refused_by_name() -> None:
    """Whichever the machine and the model: as the source names them."""
    written = {
        node.value
        for function in (common_options, engine_options, quantization_options)
        for node in ast.walk(ast.parse(inspect.getsource(function)))
        if isinstance(node, ast.Constant) and node.value in _known()
    }
    assert {"model", "block_size", "gdn_prefill_backend", "distributed_executor_backend", "kv_cache_dtype"} <= written
    assert _SETTINGS.keys() <= _known()
    for name in written:
        with pytest.raises(UserError, match=rf"^rollout\.vllm\.{name}( is not taken)?: .*; (set that|remove it)$"):
            check_options([name])


def test_what_vllm_refuses_of_an_option_names_the_section(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, seed=1)
    facts = ModelFacts.read(tmp_path, router_replay=True)
    config = RolloutConfig(max_prompt_tokens=40, max_response_tokens=24, vllm={"attention_backend": "NONE_SUCH"})
    with pytest.raises(
        UserError, match=r"rollout.vllm={'attention_backend': 'NONE_SUCH'}: vLLM refuses it: .*NONE_SUCH"
    ):
        asyncio.run(start_vllm(facts, config))


def test_what_vllm_refuses_of_a_model_that_no_family_describes_is_one_line(tmp_path: Path) -> None:
    """Of a quantised checkpoint, or of a model of no family, nothing but vLLM knows how long sequences may be."""
    tiny_qwen3_moe(tmp_path, seed=1)
    file = tmp_path / "config.json"
    scales = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": scales}))
    facts = ModelFacts.read(tmp_path, router_replay=False)
    assert facts.model is None
    config = RolloutConfig(router_replay=False, max_prompt_tokens=40, max_response_tokens=512)
    with pytest.raises(
        UserError, match=rf"^{tmp_path}: vLLM refuses .*max_model_len \(552\) is greater .*max_position_embeddings=512"
    ):
        asyncio.run(start_vllm(facts, config))


def test_an_engine_as_we_start_it_passes(built: tuple[Any, RouteSchema]) -> None:
    check_engine(*built)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("parallel_config", "enable_dbo", True, "dual-batch overlap: the halves of a split batch"),
        ("model_config", "enable_return_routed_experts", False, "started without enable_return_routed_experts"),
    ],
)
def test_each_fault_is_refused_with_its_reason(
    built: tuple[Any, RouteSchema], monkeypatch: pytest.MonkeyPatch, section: str, field: str, value: Any, message: str
) -> None:
    vllm_config, schema = built
    monkeypatch.setattr(getattr(vllm_config, section), field, value)
    with pytest.raises(UserError, match=message):
        check_engine(vllm_config, schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "the engine's model has 8 experts, the trainer's 16"),
        ({"topk": 4}, "the engine's model has 2 experts per token, the trainer's 4"),
        ({"hidden_layers": 6}, "the engine's model has 4 layers, the trainer's 6"),
    ],
)
def test_another_model_is_refused(built: tuple[Any, RouteSchema], change: dict[str, int], message: str) -> None:
    vllm_config, schema = built
    with pytest.raises(UserError, match=message):
        check_engine(vllm_config, dataclasses.replace(schema, **change))


@pytest.mark.parametrize(("installed", "chosen"), [(True, None), (False, "triton")])
def test_gated_delta_layers_take_a_kernel_that_is_installed(
    installed: bool, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper vLLM takes FlashInfer's without asking, and the engine dies at the first prompt."""
    from vllm import AsyncEngineArgs

    monkeypatch.setattr(start, "on_cpu", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    options = engine_options(RolloutConfig())
    assert AsyncEngineArgs(model="none", **options).gdn_prefill_backend == chosen
