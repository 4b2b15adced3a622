"""The planner's adapters: their numbers, what autograd keeps of them, memory beside what was measured, time."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config
from megatron_dppo.errors import UserError
from megatron_dppo.models.flops import training_flops
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.models.live import Owned
from megatron_dppo.models.lora.adapter import LoraAdapter, Sharding
from megatron_dppo.models.lora.config import TARGETS, LoraConfig, Target
from megatron_dppo.models.lora.sites import LocalSite, adapter_tensors, sites
from megatron_dppo.models.lora.size import active_adapter_parameters, adapter_sizes, check_targets
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.activations import LayerMemory, layer_memory
from megatron_dppo.planner.gpus import GIB, GPUS, Efficiency
from megatron_dppo.planner.memory import stage_memory
from megatron_dppo.planner.parameters import stage_adapters
from megatron_dppo.planner.plan import Run
from megatron_dppo.planner.report import memory_parts
from megatron_dppo.planner.step_time import step_time
from megatron_dppo.planner.workload import Layout
from tests.models.public_configs import CONFIGS
from tests.planner.test_plan import short

H200 = GPUS["h200-141g"]
LORA = LoraConfig(rank=32)
NAME = "Qwen3-30B-A3B"


def model(layers: int = 48, **changes: Any) -> HFConfig:
    return resolve_hf_config(CONFIGS[NAME] | {"num_hidden_layers": layers} | changes)


def layout(
    layers: int = 4, gpus: int = 1, recompute: Any = "none", lora: LoraConfig | None = LORA, **sizes: Any
) -> Layout:
    return Layout(model(layers), H200, gpus, ParallelConfig(**sizes), recompute, lora=lora)


def test_numbers_of_the_30b_model_written_out() -> None:
    sizes: Counter[str] = Counter()
    for size in adapter_sizes(model(), ParallelConfig(), 0, LORA):
        sizes[size.target] += size.parameters(LORA.rank)
    assert sizes["qkv"] + sizes["o"] == 32 * (3 * 2048 + 4096 + 2 * 512) + 32 * (4096 + 2048) == 557_056
    assert sizes["experts"] == 128 * 270_336
    assert sizes.total() == 35_160_064
    whole = stage_adapters(model(), ParallelConfig(), 0, LORA)
    assert whole.total == 48 * 35_160_064 == 1_687_683_072
    assert whole.experts == 48 * 128 * 32 * (2 * (2048 + 768) + 768 + 2048)


@given(
    layers=st.integers(1, 4),
    dense=st.sets(st.integers(0, 3), max_size=2),
    experts=st.integers(2, 6),
    topk=st.integers(1, 2),
    rank=st.integers(1, 40),
    targets=st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
)
@settings(max_examples=40)
def test_numbers_are_those_of_the_stored_adapter(
    layers: int, dense: set[int], experts: int, topk: int, rank: int, targets: list[Target]
) -> None:
    """Against the shapes that PEFT's folder has, for every mix of dense and expert layers."""
    dense = {layer for layer in dense if layer < layers and len(dense) < layers}
    if len(dense) == layers:
        dense = set()
    some = model(layers, mlp_only_layers=sorted(dense), num_experts=experts, num_experts_per_tok=topk)
    config = LoraConfig(rank=rank, targets=tuple(targets))
    if targets == ["mlp"] and not dense:
        with pytest.raises(UserError, match=r"lora.targets=\['mlp'\] name no layer"):
            check_targets(some, config)
        return
    check_targets(some, config)
    shapes = adapter_tensors(some, config)
    assert stage_adapters(some, ParallelConfig(), 0, config).total == sum(map(math.prod, shapes.values()))
    of_a_token = sum(math.prod(s) * (topk if ".experts.0." in n else ".experts." not in n) for n, s in shapes.items())
    assert active_adapter_parameters(some, config) == of_a_token


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adapter(some: HFConfig, name: str, *, experts: bool) -> LoraAdapter:
    """The adapter of a layer's product on one rank, as `attach_adapters` makes it."""
    wanted, transforms = sites(some, LoraConfig(rank=8)), dict(some.parameters())
    names = [n for n in wanted if n.startswith("decoder.layers.0.") and n.endswith(f"{name}.weight")]
    local = []
    for one in names:
        shape, pieces = transforms[one].shape(some, 1), tuple(transforms[one].pieces(some, 0, 1))
        weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        local.append(LocalSite(wanted[one], Owned(one, weight, pieces, shape)))
    assert len(local) == (some.moe.experts if experts and some.moe else 1)
    sharding = Sharding(dist.group.WORLD, wanted[names[0]].input_sharded, expert=experts, sequence_parallel=False)
    return LoraAdapter(local, LoraConfig(rank=8), sharding, local[0].owned.parameter)


def kept_bytes(one: LoraAdapter, rows: int, splits: list[int] | None = None) -> int:
    """Of the tensors that autograd keeps for the backward, without the module's own."""
    weight = one.local[0].owned.parameter
    x = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    output = torch.randn(rows, weight.shape[0], dtype=torch.bfloat16, requires_grad=True)
    own = {t.untyped_storage().data_ptr() for t in (*one.parameters(), *one.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():  # the ends of the experts' rows are ids
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        if splits is None:
            y = one.add_to(output, x)
        else:
            ends = torch.tensor(splits).cumsum(0, dtype=torch.int32)
            stack = torch.randn(len(splits), *weight.shape, dtype=torch.bfloat16)
            own.add(stack.untyped_storage().data_ptr())
            assert one.joins(x, ends)
            y = one.product(x, ends, stack)
    y.backward(torch.ones_like(y))  # alive until here
    return sum(kept.values())


def operator(memory: LayerMemory, name: str) -> int:
    return next(one.kept for one in memory.operators if one.name == name)


def test_what_autograd_keeps_of_adapters(alone: None) -> None:
    rows, hidden, width, query = 64, 128, 32, 64
    small = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": 4, "num_experts_per_tok": 2}
    some = model(1, head_dim=16, num_attention_heads=4, num_key_value_heads=2, **small)
    plan = Layout(some, H200, 1, ParallelConfig(), microbatch_tokens=rows, lora=LoraConfig(rank=8))
    memory = layer_memory(plan, 0)
    # Beside the adapter's, the norm keeps its input and 1 / rms; the router's probabilities are float32.
    qkv = kept_bytes(adapter(some, "linear_qkv", experts=False), rows)
    assert operator(memory, "norm and QKV") == qkv + 2 * rows * hidden + 4 * rows
    proj = kept_bytes(adapter(some, "linear_proj", experts=False), rows)
    assert operator(memory, "output projection") == proj - 2 * rows * query  # its input is attention's output
    splits = [50, 0, 70, 8]
    fc1 = kept_bytes(adapter(some, "linear_fc1", experts=True), 2 * rows, splits)
    assert operator(memory, "experts, fc1") == fc1 + 4 * 2 * rows
    fc2 = kept_bytes(adapter(some, "linear_fc2", experts=True), 2 * rows, splits)
    assert operator(memory, "experts, fc2") == fc2

    dense = model(1, mlp_only_layers=[0], num_hidden_layers=2, intermediate_size=width, **small)
    memory = layer_memory(dataclasses.replace(plan, model=dense), 0)
    fc1 = kept_bytes(adapter(dense, "mlp.linear_fc1", experts=False), rows)
    assert operator(memory, "norm and fc1") == fc1 + 2 * rows * hidden + 4 * rows
    assert operator(memory, "fc2") == kept_bytes(adapter(dense, "mlp.linear_fc2", experts=False), rows)


def test_frozen_products_without_an_adapter_keep_no_input() -> None:
    few = dataclasses.replace(layout(), lora=LoraConfig(rank=32, targets=("o",)))
    full, frozen = layer_memory(layout(lora=None), 0), layer_memory(few, 0)
    tokens, rows = 16384, 8 * 16384
    inputs = 2 * tokens * 2048 + 2 * rows * 2048 + 2 * rows * 768
    assert full.kept - frozen.kept == inputs - 2 * tokens * 32


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    stage = stage_memory(layout(12, 4, expert=2), 0, microbatches=2)
    assert stage.adapters is not None
    dense, experts = 12 * 557_056, 12 * 64 * 270_336
    assert (stage.adapters.dense, stage.adapters.experts) == (dense, experts)
    assert stage.adapter_weights == 2 * (dense + experts)
    assert stage.gradients == 4 * (dense + experts)
    assert stage.optimizer == 12 * (dense // 4 + experts // 2)
    assert stage.weights == 2 * stage.parameters.total
    assert sum(memory_parts(stage).values()) == stage.peak


@pytest.mark.parametrize(
    ("layers", "recompute", "lora", "measured"),
    [
        (4, "none", False, 61.1),
        (4, "none", True, 17.7),
        (4, "full", False, 56.2),
        (4, "full", True, 12.7),
        (5, "full", False, 66.8),
        (10, "full", False, 119.8),
        (10, "full", True, 24.1),
        (11, "full", False, 130.4),
        (48, "full", True, 96.3),
    ],
)
def test_peaks_of_an_h200(layers: int, recompute: str, lora: bool, measured: float) -> None:
    """docs/benchmarks.md, "LoRA beside full training". All were measured while dispatchers sorted rows a second time on
    one rank, those with recomputation while they kept a layer's row map, probabilities, mask and the gradient of its
    input to the end of the backward, those with adapters before these were part of their experts' products."""
    stage = stage_memory(layout(layers, recompute=recompute, lora=LORA if lora else None), 0, microbatches=2)
    kept_then = layers * 16384 * (2 * 2048 + 4 * 257 + 5 * 128) if recompute == "full" else 0
    kept_then += 2 * 16384 * 8 * 2048
    if lora:  # an adapter's share was a tensor of its own, and B spread was kept
        kept_then += 2 * 16384 * 8 * 2048 + (1 if recompute == "full" else layers) * 2 * 128 * 64 * 1536
    assert (stage.peak + kept_then) / GIB == pytest.approx(measured, rel=0.015)


@pytest.mark.parametrize(("first", "measured"), [(None, 90.9), (20, 120.9), (8, 133.8)])
def test_peaks_of_the_whole_model(first: int | None, measured: float) -> None:
    """docs/benchmarks.md, the same heading: 48 layers, of which the first are recomputed as a whole."""
    one = dataclasses.replace(layout(48, recompute="full"), recompute_layers=first)
    assert stage_memory(one, 0, microbatches=2).peak / GIB == pytest.approx(measured, rel=0.02)


def test_peak_of_deepseek_v3() -> None:
    """docs/benchmarks.md, "Other families": a dense layer and one with experts, six packs of half a step's tokens."""
    cut = CONFIGS["DeepSeek-V3"] | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    one = dataclasses.replace(layout(recompute="full"), model=resolve_hf_config(cut), microbatch_tokens=86848 // 12)
    assert stage_memory(one, 0, microbatches=6).peak / GIB == pytest.approx(35.16, rel=0.01)


def test_products_are_those_of_the_flops() -> None:
    """Where nothing but products takes time, a step takes the FLOPs of `training_flops`, but for attention, the router,
    which the planner leaves out, and the logits, which the head computes twice."""
    free = math.inf
    only_products = Efficiency(
        **{"dense": 1.0, "head": 1.0, "grouped": 1.0, "attention_forward": free, "attention_backward": free},
        **{"memory": free, "stream": free, "expert_forward_s": 0.0, "expert_backward_s": 0.0, "layer_forward_s": 0.0},
        **{"layer_backward_s": 0.0, "microbatch_s": 0.0, "parameter_s": 0.0, "adapter_s": 0.0},
    )
    tokens, head, router = 16384, 2048 * 151936, 4 * 128 * 2048
    attention = 6 * 4 * 32 * 128 * tokens**2
    for lora, backward in ((None, 2), (LoraConfig(rank=32, targets=("o",)), 1)):
        plan = layout(4, lora=lora)
        needed = training_flops(plan.model, np.array([tokens]), lora) - attention
        seconds = step_time(plan, 1, only_products).compute - 2e-3  # the head's two constants
        expected = needed + 2 * tokens * head - 2 * (1 + backward) * tokens * router
        assert seconds * H200.bf16_flops == pytest.approx(expected, rel=1e-9)


def test_a_step_with_adapters_reduces_and_updates_them_alone() -> None:
    full, lora = (step_time(layout(8, 8, "full", some, expert=2), 2) for some in (None, LORA))
    assert lora.optimizer < 0.1 * full.optimizer
    assert lora.gradients < 0.1 * full.gradients


def test_merged_weights_are_sent() -> None:
    full, lora = (Run(layout(8, 8, lora=some, expert=8), short()).plan() for some in (None, LORA))
    assert lora.traffic == full.traffic
    tensors = 8 * (3 + 1 + 16 * 3)
    assert lora.sync_s - full.sync_s == pytest.approx(tensors * Efficiency.merge_s)
    assert any("LoRA on 8 x h200-141g" in text for text in lora.extrapolated)


def test_passes_multiply_training_and_nothing_else() -> None:
    once = Run(layout(8, 8, lora=None, expert=8), short()).plan()
    twice = Run(layout(8, 8, lora=None, expert=8), dataclasses.replace(short(), ppo_epochs=2)).plan()
    assert (once.workload.gradient_steps, twice.workload.gradient_steps) == (8, 16)
    assert twice.train_s == 2 * once.train_s
    assert twice.training_tokens_per_second == pytest.approx(once.training_tokens_per_second)
    assert (twice.rollout_s, twice.sync_s, twice.traffic) == (once.rollout_s, once.sync_s, once.traffic)
    assert twice.step_s == pytest.approx(once.step_s + once.train_s)
    assert twice.stages == once.stages


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[NAME]))
    return tmp_path


def test_the_command_with_adapters_and_passes(config_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(config_json), "--gpus", "4", "--gpu", "h200-141g", "--sequence", "9216", "--tp", "1"]
    command += ["--cp", "1", "--lora-rank", "16", "--lora-targets", "qkv", "experts", "--ppo-epochs", "3"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{48 * (32 // 2 * (3 * 2048 + 5120) + 128 * 135_168) / 1e9:.3f} B trained in adapters of rank 16" in out
    assert "24 gradient steps (3 passes of 8)" in out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    assert (best["ppo_epochs"], best["gradient_steps"]) == (3, 24)
    assert best["lora"]["targets"] == ["qkv", "experts"]
    stage = best["memory"]["stages"][0]
    assert stage["parts"]["adapters"] == 2 * stage["trained_parameters"]
    assert sum(stage["parts"].values()) == stage["peak"]
    (config_json / "run.yaml").write_text(found["config"])
    config = load_config(config_json / "run.yaml")
    assert config.lora is not None
    assert (config.lora.rank, config.lora.targets) == (16, ("qkv", "experts"))
    assert config.trainer.ppo_epochs == 3
    assert config.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-rank", "0"], "--lora-rank: 0 must be 1 or more"),
        (["--ppo-epochs", "0"], "--ppo-epochs: 0 must be 1 or more"),
        (["--lora-targets", "o"], "--lora-targets: give --lora-rank as well"),
        (["--lora-rank", "8", "--lora-targets", "o", "o"], "--lora-targets o o: name each once"),
        (["--lora-rank", "8", "--lora-targets", "mlp"], "name no layer of this qwen3_moe model"),
    ],
)
def test_bad_arguments(
    config_json: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config_json), "--gpus", "8", *arguments]) == 2
    assert message in capsys.readouterr().err
