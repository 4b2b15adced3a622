"""`actor.megatron`: what is taken reaches Megatron-Core and trains as before, what is not is refused by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend
from pydantic import ValidationError

from megatron_dppo.actor import megatron_options
from megatron_dppo.actor.config import ActorConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.trainer.resume import placed
from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, Case, Lesson, Trained, build_actor, train_actor
from tests.actor.test_matrix import compare
from tests.distributed import run_ranks

STAGES = [["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]]
MODULES = ["core_attn", "moe"]


def test_each_option_is_where_it_belongs() -> None:
    given = {"attention_backend": "flash", "bucket_size": 1000, "pin_cpu_params": False}
    options = ActorConfig(megatron=given).megatron_options()
    assert options.transformer == {"attention_backend": AttnBackend.flash}
    assert (options.data_parallel, options.optimizer) == ({"bucket_size": 1000}, {"pin_cpu_params": False})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"atention_backend": "flash"}, "Megatron-Core has no such option; did you mean attention_backend?"),
        ({"attention_backend": "fast"}, "attention_backend=fast: is one of flash, fused, unfused, local, auto"),
        ({"flash_attention_version": 7}, "flash_attention_version=7: Input should be 2, 3 or 4"),
        ({"bucket_size": "many"}, "bucket_size=many: Input should be a valid integer"),
        ({"deterministic_mode": 1}, "deterministic_mode=1: Input should be a valid boolean"),
        ({"tensor_model_parallel_size": 2}, "parallel.tensor decides it; set that"),
        ({"moe_token_dispatcher_type": "flex"}, "actor.token_dispatcher decides it; set that"),
        ({"moe_flex_dispatcher_backend": "deepep"}, "nothing here makes use of it; remove it"),
        ({"adam_beta1": 0.5}, "optimizer.beta1 decides it; set that"),
        (
            {"moe_expert_capacity_factor": 1.0},
            "with it: experts with a capacity drop tokens, which the engine did not; re",
        ),
        (
            {"moe_router_fusion": True},
            "moe_router_fusion is not taken: routes cannot be replayed with it: the fused router returns before it "
            "consults the replay hook, so nothing would be replayed; remove it",
        ),
        ({"mtp_num_layers": 1}, "and the engine records no routes for them; remove it"),
        ({"num_layers": 4}, "it changes what is computed, or nothing here makes use of it; remove it"),
        ({"fp8": "e4m3"}, "is not taken: it changes what is computed"),
        ({"check_for_nan_in_grad": True}, "actor.max_skipped_steps decides it; set that"),
        ({"average_in_collective": True}, "is not taken"),
        ({"tp_comm_overlap": True}, "is not taken"),
        ({"apply_rope_fusion": True}, "it is on wherever the model and the device allow"),
        ({"recompute_modules": ["moe"]}, "computed again with actor.recompute=selective, not none; set that"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=rf"actor\.megatron.*{re.escape(message)}"):
        ActorConfig(megatron=given)


def test_names_that_stand_for_settings_are_megatron_cores_and_ours() -> None:
    known = {field.name for kind in megatron_options._TAKEN for field in dataclasses.fields(kind)}
    assert megatron_options._SETTINGS.keys() <= known
    assert {placed(name) for name in megatron_options._SETTINGS.values()} == {"result", "free"}  # or KeyError


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "glm4_moe"])
def test_what_describes_the_model_is_never_overwritten(family: str, worlds: Callable[[str], World]) -> None:
    """All that is not Megatron-Core's default, but what Megatron-Core and we divide and recompute where nobody says."""
    config = transformer_config(load_hf_config(worlds(family).path), ParallelConfig())
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    made = {name for name, default in defaults.items() if getattr(config, name, default) != default}
    assert len(made) > 20
    for name in made - {"pipeline_model_parallel_layout", "recompute_modules", "microbatch_group_size_per_vp_stage"}:
        with pytest.raises(UserError, match=f"actor.megatron.{name}"):
            megatron_options.megatron_options({name: getattr(config, name)}, recompute="none")


def test_one_that_megatron_core_refuses_names_the_section(world: World) -> None:
    model = load_hf_config(world.path)
    options = ActorConfig(megatron={"pipeline_model_parallel_layout": [["embedding"], ["loss"]]}).megatron_options()
    with pytest.raises(UserError, match=r"actor.megatron=.*Megatron-Core refuses it: .*; change or remove it"):
        transformer_config(model, ParallelConfig(pipeline=2), **options.transformer)


def train_with(
    rank: int, path: str, layout: dict, lesson: Lesson, case: Case, megatron: dict[str, Any], optimizer: dict[str, Any]
) -> tuple[Trained, list[int], list[int]]:
    actor = build_actor(path, layout, case, megatron=megatron, **optimizer)
    layers = [len(chunk.decoder.layers) for chunk in actor.model]
    buckets = [len(buffer.buckets) for chunk in actor.chunks for buffer in chunk.buffers]
    return train_actor(rank, actor, lesson), layers, buckets


def test_a_step_with_them_is_the_same_step(world: World) -> None:
    """Stages that are given, what is computed again, and buckets of gradients."""
    case = Case(recompute="selective")
    megatron = {"pipeline_model_parallel_layout": STAGES, "recompute_modules": MODULES, "bucket_size": 1000}
    ranks, sizes = LAYOUTS["PP2"]
    results = run_ranks(
        train_with, ranks, str(world.path), sizes, world.lesson, case, megatron, {"overlap_grad_reduce": True}
    )
    assert [layers for _, layers, _ in results] == [[1], [3]]
    assert results[0][2][0] > 1  # later stages have one, in Megatron-Core
    compare(world, case, results[0][0])
