"""A run's configuration planned: the same figures as by hand, what does not fit, and what to change."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.engine import EngineSettings
from megatron_dppo.planner.fix import _recompute, find_fix
from megatron_dppo.planner.gpus import GIB, GPUS, gpu_of_device
from megatron_dppo.planner.plan import ENGINE_OUTSIDE, Run, largest_utilization
from megatron_dppo.planner.run import beside_figures, planned_run
from megatron_dppo.planner.search import Wanted, search
from megatron_dppo.planner.workload import Layout, Workload
from tests.models.public_configs import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "examples/paper"
H100 = GPUS["h100-80g"]
SHORT = Workload(sequences=1024, mini_batches=4, prompt_tokens=1024, response_tokens=7000, mean_response_tokens=3000)
SMALL = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
MODELS = {
    "Qwen3-30B-A3B-Base": CONFIGS["Qwen3-30B-A3B"],
    "Qwen3-30B-A3B": CONFIGS["Qwen3-30B-A3B"],
    "Qwen3-8B-Base": CONFIGS["Qwen3-8B"],
    "DeepSeek-R1-Distill-Qwen-1.5B": CONFIGS["DeepSeek-R1-Distill-Qwen-1.5B"],
    "OctoThinker-3B-Hybrid-Base": CONFIGS["OctoThinker-3B"],
    "Qwen3-4B-Base": CONFIGS["Qwen3-8B"]
    | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen3-1.7B-Base": CONFIGS["Qwen3-8B"] | SMALL | {"num_key_value_heads": 8, "tie_word_embeddings": True},
}
GPUS_OF = {"moe_base": 32, "moe_base_r3": 32, "moe_thinking": 32}
"""GPUs that the files name; the others are for 8."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def run_of(models: Path) -> Callable[..., Run]:
    def make(*overrides: str, name: str = "moe_base_r3", gpus: int = 32, **options: Any) -> Run:
        model = load_config(PAPER / f"{name}.yaml").model.path.name
        config = load_config(PAPER / f"{name}.yaml", (f"model.path={models / model}", *overrides))
        return planned_run(config, load_hf_config(config.model.path), H100, gpus, **options)

    return make


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, dict[str, Any]]:
    status = main(["plan", *command, "--json"])
    return status, json.loads(capsys.readouterr().out)


BY_HAND = {
    "moe_base_r3": ["--gpus", "32", "--tp", "4", "--ep", "8", "--engine-tp", "4"],
    "moe_base_lora": ["--gpus", "8", "--tp", "2", "--ep", "8", "--engine-tp", "4", "--lora-rank", "32"],
    "dense_base": ["--gpus", "8", "--tp", "2", "--ep", "1", "--engine-tp", "1"],
}
OF_TABLE_1 = {
    "moe_base_r3": ["--sequence", "17408", "--prompts", "256", "--samples", "16", "--mini-batch", "32"],
    "moe_base_lora": ["--sequence", "9024", "--prompts", "128", "--samples", "8", "--mini-batch", "16"],
    "dense_base": ["--sequence", "9024", "--prompts", "128", "--samples", "8", "--mini-batch", "32"],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_configuration_and_the_same_options_by_hand_are_one_plan(
    name: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models / load_config(PAPER / f"{name}.yaml").model.path.name
    hand = [*BY_HAND[name], *OF_TABLE_1[name], "--pp", "1", "--cp", "1", "--recompute", "full", "--topk", "0"]
    hand += ["--microbatch-tokens", "18432", "--rollout-gpus", "0", "--mean-response", "3000"]
    _, by_hand = printed(capsys, str(folder), *hand)
    command = ["--config", str(PAPER / f"{name}.yaml"), "--gpus", BY_HAND[name][1], "--mean-response", "3000"]
    # By hand engines use 0.9 of a GPU and routes are recorded.
    engines = ["rollout.gpu_memory_utilization=0.9", "rollout.router_replay=true"]
    status, found = printed(capsys, *command, f"model.path={folder}", *engines)
    expected = by_hand["best"]
    if expected["lora"]:  # by hand it has the default alpha
        expected["lora"]["alpha"] = found["plan"]["lora"]["alpha"]
    assert (status, found["fits"], found["fix"]) == (0, True, None)
    assert found["plan"] == expected


def test_a_recommended_configuration_is_planned_alike(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rollout in ([], ["--rollout-gpus", "16"]):
        options = ["--gpus", "32", "--sequence", "9216", *rollout]
        _, searched = printed(capsys, str(models / "Qwen3-30B-A3B"), *options)
        (tmp_path / "run.yaml").write_text(searched["config"])
        status, found = printed(capsys, "--config", str(tmp_path / "run.yaml"), "--gpus", "32")
        best = searched["best"]
        assert status == 0
        assert found["plan"]["rollout_gpus"] == best["rollout_gpus"]
        assert found["plan"]["memory"]["stages"] == best["memory"]["stages"]
        assert found["plan"]["seconds"]["training"] == best["seconds"]["training"]
        assert found["plan"]["engine"]["engines"] == best["engine"]["engines"]


@pytest.mark.parametrize("name", sorted(path.stem for path in PAPER.glob("*.yaml")))
def test_the_paper_configurations_fit_the_gpus_they_name(name: str, run_of: Callable[..., Run]) -> None:
    plan = run_of(name=name, gpus=GPUS_OF.get(name, 8)).plan()
    assert plan.problem == ""
    assert plan.comfortable
    assert max(plan.moments.values()) < 0.9 * H100.memory
    row = re.search(rf"^\|[^|]*`{name}`.*", (ROOT / "docs/planner.md").read_text(), re.M)
    assert row is not None, "it is not in the document's table"
    moments = (plan.moments[one] / GIB for one in ("training", "weight sync", "generation"))
    assert row[0].split("|")[3:6] == [f" {gib:.1f} " for gib in moments]


def test_a_run_that_does_not_fit(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(PAPER / "moe_base_r3.yaml"), "--gpus", "8", f"model.path={models}/Qwen3-30B-A3B"]
    command += ["actor.recompute=none"]
    assert main(["plan", *command]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "It does not fit: needs" in out
    assert "mostly" in out
    status, found = printed(capsys, *command)
    assert (status, found["fits"]) == (1, False)
    assert len(found["fix"]["overrides"]) == 1
    status, fixed = printed(capsys, *command, *found["fix"]["overrides"])
    assert (status, fixed["fits"]) == (0, True)
    assert fixed["plan"]["memory"]["moments"] == found["fix"]["moments"]
    assert fixed["plan"]["seconds"]["step"] == found["fix"]["step"]


@pytest.mark.parametrize(
    ("overrides", "gpus", "part"),
    [
        (("parallel.expert=1", "parallel.tensor=1", "parallel.sequence_parallel=false"), 32, "mostly gradients"),
        (("actor.recompute=none", "actor.max_tokens_per_microbatch=131072"), 32, "mostly activations"),
        (
            ("rollout.tensor_parallel=1", "rollout.gpu_memory_utilization=0.7"),
            32,
            "engine of 1 GPUs has no room",
        ),
        (("rollout.gpu_memory_utilization=0.99",), 32, "in generation: a vLLM engine of 4 GPUs"),
        (("rollout.kv_cache_mib=80000",), 32, "in generation: a vLLM engine of 4 GPUs"),
    ],
)
def test_the_part_is_named_and_the_fix_fits(
    overrides: tuple[str, ...], gpus: int, part: str, run_of: Callable[..., Run]
) -> None:
    assert part in run_of(*overrides, gpus=gpus).plan().problem
    fix = find_fix(run_of(*overrides, gpus=gpus))
    assert fix is not None
    assert not fix.more_gpus
    fixed = run_of(*overrides, *fix.keys, gpus=gpus).plan()
    assert fixed.problem == ""
    assert (fixed.stages, fixed.engine, fixed.moments) == (fix.plan.stages, fix.plan.engine, fix.plan.moments)


def test_layers_that_run_in_parts_are_not_recomputed_whole(run_of: Callable[..., Run]) -> None:
    run = run_of("parallel.overlap_expert_exchange=true", "actor.recompute=none")
    changes = [(keys, changed.layout.parallel.overlap_expert_exchange) for keys, changed in _recompute(run)]
    whole = ("actor.recompute=full", "parallel.overlap_expert_exchange=false")
    assert changes == [(("actor.recompute=activation",), True), (whole, False)]


def test_the_optimizer_goes_to_the_host_only_where_nothing_else_helps(run_of: Callable[..., Run]) -> None:
    """8 B parameters on one GPU, where neither ranks nor recomputation take off states."""
    run = run_of("parallel.tensor=1", "parallel.sequence_parallel=false", name="dense_base", gpus=1)
    fix = find_fix(run)
    assert fix is not None
    assert not fix.more_gpus
    assert any(key.startswith("optimizer.cpu_offload_fraction=") for key in fix.keys)
    stage = fix.plan.stages[0]
    assert stage.optimizer + 12 / 16 * stage.host_optimizer == run.plan().stages[0].optimizer
    one = find_fix(dataclasses.replace(run, layout=dataclasses.replace(run.layout, gpu=GPUS["a100-40g"])))
    assert one is not None
    assert one.more_gpus
    assert str(one).startswith(f"use {one.plan.gpus} GPUs")


def test_gpus_change_hands(run_of: Callable[..., Run]) -> None:
    shared = run_of().plan()
    weights = shared.engine.weights + shared.engine.kv_cache + 4 * GIB
    assert shared.moments["generation"] == weights + int(0.7 * GIB) + 2 * int(2.5 * GIB)
    assert weights == pytest.approx(0.8 * H100.memory, abs=8)
    stage = shared.stages[0]
    assert shared.host_per_node == 8 * (stage.weights + stage.optimizer)
    kept = run_of("optimizer.keep_on_gpu_gib=2").plan()
    assert kept.host_per_node == shared.host_per_node - 8 * 2 * GIB
    for moment in ("first weight sync", "weight sync", "generation"):
        assert kept.moments[moment] == shared.moments[moment] + 2 * GIB
    assert kept.on_gpu == shared.on_gpu
    fleet = run_of("rollout.placement=fleet", "rollout.engines=4", "rollout.kv_cache_mib=1024", gpus=48).plan()
    assert (fleet.layout.gpus, fleet.rollout_gpus, fleet.engine.engines) == (32, 16, 4)
    assert fleet.engine.kv_cache == GIB
    assert fleet.host_per_node == 0
    assert shared.on_gpu - fleet.on_gpu == 2 * GIB
    awake = run_of("rollout.placement=colocated", "rollout.enable_sleep=false", gpus=32).plan()
    assert awake.host_per_node == 0
    assert awake.on_gpu - fleet.on_gpu == awake.engine.on_gpu + ENGINE_OUTSIDE
    assert max(awake.moments.values()) == awake.on_gpu


def test_a_first_sync_needs_memory_of_its_own_and_a_sync_of_shares_less_time(run_of: Callable[..., Run]) -> None:
    """By hand: a layer of Qwen3-30B-A3B has 128 experts of 3 x 2,048 x 768, a router, attention and norms; beside a
    quarter of it on each of four GPUs the embedding, 151,936 x 2,048, whole."""
    layer = 128 * (3 * 2048 * 768 + 2048) + 2048 * (2 * 32 + 2 * 4) * 128 + 2 * 2048 + 2 * 128
    shared = run_of().plan()
    more = shared.moments["first weight sync"] - shared.moments["weight sync"]
    assert more == pytest.approx(2 * layer / 4 + 2 * 151936 * 2048, rel=0.01)
    engines = ("rollout.placement=fleet", "parallel.tensor=1", "parallel.sequence_parallel=false", "parallel.expert=4")
    times = {
        options: run_of(*engines, *options, gpus=8).plan()
        for options in [("rollout.tensor_parallel=4",), ("rollout.tensor_parallel=4", "rollout.quantization=fp8")]
    }
    slices, whole = times.values()
    experts, dense = 2 * 48 * 128 * 3 * 2048 * 768, slices.traffic.weight_sync - 2 * 48 * 128 * 3 * 2048 * 768
    assert slices.sync_s / whole.sync_s == pytest.approx((dense + experts / 4) / (dense + experts), rel=0.01)


def test_measured_gpus_that_change_hands() -> None:
    """docs/benchmarks.md, "colocated, 2 GPUs, 6 layers", with `rollout.gpu_memory_utilization=0.5`."""
    model = resolve_hf_config(CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 6})
    parallel = ParallelConfig(tensor=2, expert=2, sequence_parallel=True)
    workload = Workload(sequences=256, mini_batches=2, prompt_tokens=256, response_tokens=192, mean_response_tokens=192)
    layout = Layout(model, GPUS["h200-141g"], 2, parallel, microbatch_tokens=18432)
    plan = Run(layout, workload, EngineSettings(tensor=1, utilization=0.5)).plan()
    assert (plan.moments["weight sync"] - plan.sync.usual) / GIB == pytest.approx(19.15, rel=0.01)  # measured behind it
    assert plan.moments["generation"] / GIB == pytest.approx(75.6, rel=0.01)


def test_a_small_gpu_leaves_engines_less() -> None:
    assert largest_utilization(H100, shared=True) == 0.9
    small = GPUS["a100-40g"]
    assert largest_utilization(small, shared=False) == 0.9
    assert largest_utilization(small, shared=True) == 0.85
    result = search(resolve_hf_config(MODELS["Qwen3-1.7B-Base"]), small, 8, SHORT, Wanted(rollout_gpus=0))
    assert result.best is not None
    assert result.best.settings.utilization == 0.85
    assert max(result.best.moments.values()) <= small.memory


def test_what_a_configuration_says_is_planned(run_of: Callable[..., Run]) -> None:
    assert run_of("rollout.router_replay=false", "actor.router_replay=none").plan().traffic.routes == 0
    assert run_of("trainer.ppo_epochs=3").plan().workload.gradient_steps == 24
    long = run_of("actor.max_tokens_per_microbatch=9000", "actor.long_sequences=alone").plan()
    assert long.layout.microbatch_tokens == 17408
    assert long.problem == ""
    half = run_of("optimizer.cpu_offload_fraction=0.5").plan().stages[0]
    whole = run_of().plan().stages[0]
    assert half.optimizer == pytest.approx(whole.optimizer / 2, abs=12)
    assert half.host_optimizer == pytest.approx(whole.optimizer / 2 * 16 / 12, abs=16)
    assert run_of("rollout.dtype=float32").plan().engine.weights == 2 * run_of().plan().engine.weights


def test_fp8_engines(models: Path, run_of: Callable[..., Run]) -> None:
    """Qwen3-30B-A3B counted by hand: attention 2 x (32 + 4) heads of 128 by 2048, 128 experts of 3 x 768 by 2048; what
    stays in bfloat16 are routers, norms, embedding and head."""
    plain = run_of(f"model.path={models}/Qwen3-30B-A3B").plan().engine
    fp8 = ("rollout.quantization=fp8", "rollout.kv_cache_dtype=fp8", "rollout.expert_parallel=true")  # rows not cut
    eight = run_of(f"model.path={models}/Qwen3-30B-A3B", *fp8).plan().engine
    matrices = 48 * (2 * (32 + 4) * 128 * 2048 + 128 * 3 * 768 * 2048)
    assert plain.weights * plain.tensor - eight.weights * eight.tensor == pytest.approx(
        matrices * (1 - 4 / 128**2), rel=1e-6
    )
    assert eight.kv_per_token * eight.tensor == plain.kv_per_token * plain.tensor / 2
    assert eight.decode_tokens_per_second / eight.tensor > plain.decode_tokens_per_second / plain.tensor


def test_what_is_not_planned_is_named(models: Path, run_of: Callable[..., Run]) -> None:
    named = {
        "actor.dtype=float32": "actor.dtype=float32",
        "actor.token_dispatcher=allgather": "actor.token_dispatcher=allgather",
        "actor.load_balancing_loss=0.01": "actor.load_balancing_loss",
        "rollout.max_num_batched_tokens=16384": "rollout.max_num_batched_tokens=16384",
        "rollout.object_store_mib=100": "rollout.object_store_mib=100",
        "optimizer.cpu_offload_fraction=1": "optimizer.cpu_offload_fraction",
        "optimizer.overlap_grad_reduce=true": "optimizer.overlap_grad_reduce",
        "algorithm.preset=dppo-binary-kl-decoupled": "algorithm.preset=dppo-binary-kl-decoupled",
        "rollout.quantization=fp8": "rollout.quantization=fp8",
        "rollout.oversample=0.5": "rollout.oversample=0.5",
        "rollout.dynamic_sampling=8": "rollout.dynamic_sampling=8",
        "rollout.enforce_eager=true": "rollout.enforce_eager=true",
        "rollout.engine=reference": "rollout.engine=reference",
        "rollout.vllm.numa_bind=true": "rollout.vllm={'numa_bind': True}: planned without",
        "actor.megatron.bucket_size=1000": "actor.megatron={'bucket_size': 1000}: planned without",
        "evaluation.every=5": "evaluation and checkpoints",
    }
    quiet = ["algorithm.constants=null", "rollout.object_store_mib=65536", "evaluation.every=0"]
    quiet += ["trainer.checkpoint_every=0", f"model.path={models}/Qwen3-30B-A3B"]
    assert _beside(*quiet) == _beside(*quiet, "rollout.expert_parallel=true") == ()
    for override, start in named.items():
        (line,) = _beside(*quiet, override)
        assert line.startswith(start)
    memory, time = _beside(*quiet, "algorithm.reference_kl.coefficient=0.1")
    assert memory.startswith("algorithm.reference_kl: ")
    assert "GiB of the host for each training GPU" in memory
    assert time.startswith("algorithm.reference_kl: the reference's forward pass")
    (time,) = _beside(*quiet, "algorithm.reference_kl.coefficient=0.1", "lora.rank=32")
    assert time.startswith("algorithm.reference_kl: the reference's forward pass")


def _beside(*overrides: str) -> tuple[str, ...]:
    config = load_config(PAPER / "moe_base_r3.yaml", overrides)
    return beside_figures(config, planned_run(config, load_hf_config(config.model.path), H100, 32).plan())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "--gpus", "8"], "MODEL_CONFIG MODEL and --config exclude each other"),
        (
            ["--gpus", "32", "--tp", "2"],
            "--tp goes with MODEL_CONFIG; with --config the configuration decides: set ",
        ),
        (["--gpus", "32", "--topk", "0"], "set rollout.top_k_logprobs=VALUE"),
        (["--gpus", "0"], "argument --gpus: 0 must be 1 or more"),
        (["--gpus", "12"], "world size 12 is not a multiple"),
        (["--gpus", "32", "rollout.tensor_parallel=64"], "32 ranks are not a multiple of rollout.tensor_parallel=64"),
        (["--gpus", "64", "rollout.tensor_parallel=64"], "has to fit on a node of 8"),
        (["--gpus", "1", "rollout.placement=fleet"], "leaves none to train"),
        (["--gpus", "32", "--mean-response", "20000"], "--mean-response 20000: must be from 1 to 16384"),
        (["--gpus", "32", "trainer.stepz=3"], "unknown config key trainer.stepz"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [] if "MODEL" in arguments else [f"model.path={models}/Qwen3-30B-A3B"]
    assert main(["plan", "--config", str(PAPER / "moe_base_r3.yaml"), *arguments, *where]) == 2
    assert message in capsys.readouterr().err


def test_without_a_configuration_one_model_is_named(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "8"]) == 2
    assert "name a model (MODEL_CONFIG)" in capsys.readouterr().err
    assert main(["plan", str(models / "Qwen3-30B-A3B"), "parallel.tensor=2", "--gpus", "8"]) == 2
    assert "config keys to change go with --config" in capsys.readouterr().err


def test_the_demo_is_planned_and_its_precision_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 1}))
    demo = yaml.safe_load((ROOT / "examples/tiny_moe_dppo/tiny_moe_dppo.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(demo | {"model": {"path": str(tmp_path)}}))
    status, found = printed(capsys, "--config", str(tmp_path / "run.yaml"), "--gpus", "3")
    assert status == 0
    assert found["plan"]["rollout_gpus"] == 1
    assert any(line.startswith("actor.dtype=float32") for line in found["beside"])


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80g"),
        ("NVIDIA H100 PCIe", 79.2, "h100-80g"),
        ("NVIDIA H200", 139.8, "h200-141g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA L40S", 44.4, None),
    ],
)
def test_gpus_by_the_names_torch_gives_them(name: str, gib: float, kind: str | None) -> None:
    memory = int(gib * GIB)
    found = gpu_of_device(name, memory)
    assert (found.name, found.memory) == (kind or name, memory)
