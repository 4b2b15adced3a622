"""Memory, time, traffic and search of the planner, and its command."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.activations import layer_memory
from megatron_dppo.planner.engine import EngineSettings, plan_engine
from megatron_dppo.planner.gpus import GIB, GPUS
from megatron_dppo.planner.memory import stage_memory
from megatron_dppo.planner.plan import Run, microbatches_per_rank, step_traffic
from megatron_dppo.planner.report import memory_parts
from megatron_dppo.planner.search import Wanted, search
from megatron_dppo.planner.step_time import step_time
from megatron_dppo.planner.workload import Layout, Workload
from tests.models.public_configs import CONFIGS

H100 = GPUS["h100-80g"]
PAPER = Workload(
    sequences=256 * 16, mini_batches=8, prompt_tokens=1024, response_tokens=16384, mean_response_tokens=16384
)


def model(name: str = "Qwen3-30B-A3B", **changes: Any) -> HFConfig:
    return resolve_hf_config(CONFIGS[name] | changes)


def layout(
    gpus: int = 1, *, layers: int = 4, recompute: Any = "none", name: str = "Qwen3-30B-A3B", **sizes: Any
) -> Layout:
    return Layout(model(name, num_hidden_layers=layers), H100, gpus, ParallelConfig(**sizes), recompute)


def test_bytes_of_a_moe_layer_written_out() -> None:
    """Every tensor kept of one token in one layer, by hand from the shapes: h 2048, q 4096, k 512, f 768, 8 of 128."""
    attention = 2 * 2048 + 2 * 2048 + 4  # input, normalised input, 1 / rms
    attention += 2 * 4096 + 2 * 512 + 4 * (32 + 4)  # q and k before their norms, 1 / rms of heads
    attention += 2 * 4096 + 2 * 512 + 2 * 512 + 2 * 4096 + 4 * 32  # q, k, v, output, log-sum-exp
    experts = 2 * 2048 + 2 * 2048 + 4  # input, the router's input
    experts += 8 * (8 + 8 + 4)  # ids twice, probabilities
    experts += 4 * (2 * 128 + 1)  # row map
    experts += 8 * (2 * 2048 + 4 + 2 * 2 * 768 + 2 * 768)  # sorted rows and probabilities, both halves, fc2's input
    assert layer_memory(layout(), 0).kept == 16384 * (attention + experts)


def test_bytes_of_attention_with_sinks() -> None:
    """No scores: by hand from gpt-oss's 64 query heads and 8 groups of 64, q 4096 and k 512."""
    whole = dataclasses.replace(layout(), model=model("gpt-oss-20b"))
    attention = next(o for o in layer_memory(whole, 0).operators if o.name == "attention")
    assert attention.kept == 16384 * (2 * 4096 + 2 * 512 + 2 * 512 + 2 * 4096 + 4 * 64)  # q, k, v, output, log-sum-exp
    backward = 2 * 4096 + 2 * 4096 + 2 * 512 + 2 * 512  # gradients of output, q, k, v
    backward += 4 * 4096 + 2 * 4096 + 2 * 4096 + 4 * 64  # of q in float32, of k and v before heads are summed, row sums
    assert attention.backward == 16384 * backward


def test_parts_add_up_to_the_peak_and_states_are_divided_among_their_copies() -> None:
    stage = stage_memory(layout(4, layers=12, expert=2), 0, microbatches=2)
    assert sum(memory_parts(stage).values()) == stage.peak
    dense, experts = stage.parameters.dense, stage.parameters.experts
    assert experts == 12 * 64 * 3 * 2048 * 768
    assert stage.optimizer == 12 * (-(-dense // 4) + experts // 2)
    assert stage.gradients == 2 * stage.weights


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_keeps_the_microbatches_of_its_warm_up(stages: int) -> None:
    plan = layout(stages, layers=8, pipeline=stages)
    kept = 8 // stages * layer_memory(plan, 0).kept
    boundary = 2 * 16384 * 2048
    for stage in range(stages):
        memory = stage_memory(plan, stage, microbatches=16)
        in_flight = stages - stage
        last = 2 * boundary if stage == stages - 1 else 0
        assert (memory.in_flight, memory.activations) == (in_flight, in_flight * (kept + boundary) + last)
    assert stage_memory(plan, 0, microbatches=1).in_flight == 1


def test_a_forward_beside_a_backward_has_an_attention_of_its_own_there() -> None:
    plain, beside = (layout(2, expert=2, overlap_expert_exchange=overlap) for overlap in (False, True))
    before, after = (stage_memory(one, 0, microbatches=2) for one in (plain, beside))
    attention, norm, router = 36116, 8196, 8 * (8 + 8 + 4) + 4 * (2 * 128 + 1)
    assert after.peak - before.peak == 16384 * (attention + norm + router)
    assert stage_memory(beside, 0, microbatches=1).peak == stage_memory(plain, 0, microbatches=1).peak
    sizes = {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}
    plain, beside = (layout(4, layers=8, overlap_expert_exchange=overlap, **sizes) for overlap in (False, True))
    one_more = stage_memory(beside, 0, 8).activations - stage_memory(plain, 0, 8).activations
    assert one_more == 2 * layer_memory(plain, 0).kept + 2 * 16384 * 2048  # a chunk, and what it hands on


@pytest.mark.parametrize(("microbatches", "measured"), [(1, 1.0), (2, 2.22 / 2.33), (6, 6.20 / 6.56)])
def test_an_exchange_beside_another_microbatch_is_hidden_in_part(microbatches: int, measured: float) -> None:
    """48 layers of Qwen3-30B-A3B, EP2 DP2, on two H200 (docs/benchmarks.md)."""
    plain, beside = (
        dataclasses.replace(layout(2, layers=48, expert=2, overlap_expert_exchange=overlap), gpu=GPUS["h200-141g"])
        for overlap in (False, True)
    )
    ratio = step_time(beside, microbatches).total / step_time(plain, microbatches).total
    assert ratio == pytest.approx(measured, rel=0.015)


def test_what_each_way_to_save_memory_saves() -> None:
    def peak(**changes: Any) -> float:
        return stage_memory(layout(4, layers=8, **changes), 0, 4).peak / GIB

    assert peak(recompute="full", expert=4) < peak(expert=4) - 10
    rows, width = 16384 * 8, 768
    assert peak(expert=4) - peak(recompute="activation", expert=4) == pytest.approx(8 * 2 * rows * width / GIB)
    # Of experts that are not divided the sorted rows too, and what they are sorted by is kept; the last layer then has
    # both again beside two gradients and the rows as the sort puts them out, which is more than the LM head needs.
    saved = 8 * (2 * rows * (width + 2048) - 16384 * 128 * 5)
    head, last = 2 * 151936 * 2048 + 6 * 16384 * 2048, 2 * 16384 * 2048 + 2 * rows * (3 * 2048 + width)
    assert peak() - peak(recompute="activation") == pytest.approx((saved + head - last) / GIB)
    assert peak(tensor=2, sequence_parallel=True, expert=4) < peak(expert=4)
    assert peak(context=2, expert=4) < peak(expert=4)
    assert peak(expert=4) < peak(expert=2) < peak()


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}])
def test_layers_that_are_not_computed_again_keep_what_they_need(sizes: dict[str, int]) -> None:
    """One layer more of each chunk takes what it keeps less its input, and saves its forward."""
    chunks = sizes.get("virtual_pipeline", 1)
    whole = layout(2, layers=8, recompute="full", **sizes)
    most = 8 // (chunks * sizes.get("pipeline", 1))
    one = layer_memory(dataclasses.replace(whole, recompute_layers=1), 0)
    stages = [
        [stage_memory(dataclasses.replace(whole, recompute_layers=n), stage, 8) for n in range(1, most + 2)]
        for stage in range(sizes.get("pipeline", 1))
    ]
    for stage, found in enumerate(stages):
        assert found[-1] == found[-2] == stage_memory(whole, stage, 8)
        for more, less in itertools.pairwise(found[:-1]):
            in_flight = more.in_flight if chunks == 1 else 2.5 - stage  # (warm-up and one) / chunks
            assert more.activations - less.activations == in_flight * chunks * (one.kept - one.boundary)
            # Of a chunk's last layer nothing is gained: computed again it needs the same at once.
            assert more.peak > less.peak or less is found[-2]
    seconds = [step_time(dataclasses.replace(whole, recompute_layers=n), 2).compute for n in range(1, most + 1)]
    assert seconds == sorted(seconds)
    assert seconds[-1] == step_time(whole, 2).compute


def test_a_search_recomputes_as_few_layers_as_it_must() -> None:
    lora = LoraConfig(rank=32)
    workload = dataclasses.replace(short(), sequences=64, mini_batches=1)
    (plan,) = search(model(), GPUS["h200-141g"], 1, workload, Wanted(lora=lora)).fitting
    assert plan.layout.recompute == "full"
    assert plan.layout.recompute_layers is not None
    fewer = dataclasses.replace(plan.layout, recompute_layers=plan.layout.recompute_layers - 1)
    assert plan.comfortable
    assert not Run(fewer, workload, plan.settings).plan().comfortable
    asked = search(model(), GPUS["h200-141g"], 1, workload, Wanted(lora=lora, recompute="full")).fitting[0]
    assert asked.layout.recompute_layers is None
    assert asked.train_s > plan.train_s


def test_full_recomputation_costs_a_forward() -> None:
    none, full = (step_time(layout(recompute=kind), 2) for kind in ("none", "full"))
    assert 1.1 * none.compute < full.compute < 1.5 * none.compute


def test_half_the_bytes_of_a_gradient_take_half_the_time_on_the_way() -> None:
    alone, whole = (step_time(layout(gpus, expert=gpus), 2).gradients for gpus in (1, 16))
    half = step_time(dataclasses.replace(layout(16, expert=16), reduced_bytes=2), 2).gradients
    local = step_time(dataclasses.replace(layout(16, expert=16), reduced_bytes=0), 2).gradients
    assert local < alone
    assert half - local == pytest.approx((whole - local) / 2)


def test_uneven_expert_load_takes_memory_and_more_gpus_take_time_off() -> None:
    even = layout(8, expert=8)
    assert stage_memory(dataclasses.replace(even, expert_imbalance=1.5), 0, 2).peak > stage_memory(even, 0, 2).peak
    seconds = [Run(layout(gpus, layers=8, expert=8, recompute="full"), short()).plan().train_s for gpus in (8, 16, 32)]
    assert seconds == sorted(seconds, reverse=True)


def short() -> Workload:
    return dataclasses.replace(PAPER, response_tokens=8192, mean_response_tokens=4096)


def test_bytes_of_a_step_at_the_papers_size() -> None:
    traffic = step_traffic(model(), PAPER, engines=4)
    assert traffic.routes == 4096 * 17408 * 48 * 8
    assert traffic.log_probs == 4096 * 16384 * 21 * 8
    assert round(traffic.routes / GIB, 1) == 25.5
    assert traffic.weight_sync == 4 * 2 * 30_532_122_624


def test_an_engine_holds_what_its_cache_holds() -> None:
    engine = plan_engine(model(), H100, 8, PAPER, EngineSettings())
    assert engine.kv_per_token == 2 * 2 * 48 * (4 // engine.tensor) * 128
    assert engine.concurrent == engine.kv_cache // (engine.kv_per_token * PAPER.sequence)
    assert engine.engines * engine.tensor == 8


def test_engines_take_all_of_their_gpus() -> None:
    """Colocated engines have to divide the ranks among them: of 12 GPUs one engine of 8 would leave four over."""
    engine = plan_engine(model("Qwen3-235B-A22B"), GPUS["h200-141g"], 12, PAPER, EngineSettings())
    assert (engine.engines, engine.tensor) == (3, 4)


def test_half_of_the_gpus_is_no_way_out_where_engines_do_not_divide_it() -> None:
    """Six small GPUs hold no engine of two beside the trainer, and of three each engine would leave one over."""
    small = dataclasses.replace(H100, memory=20 * GIB)
    wanted = Wanted(lora=LoraConfig(rank=32), engine_tensor=2)
    assert search(model("Qwen3-8B"), small, 6, short(), wanted).fitting == ()
    apart = search(model("Qwen3-8B"), small, 8, short(), wanted).fitting
    assert {(plan.rollout_gpus, plan.engine.engines) for plan in apart} == {(4, 2)}


def test_more_engines_do_not_decode_few_sequences_faster() -> None:
    def rate(gpus: int, sequences: int) -> float:
        workload = dataclasses.replace(short(), sequences=sequences)
        return plan_engine(
            model(), GPUS["h200-141g"], gpus, workload, EngineSettings(tensor=1)
        ).decode_tokens_per_second

    assert rate(8, 1) == rate(1, 1)
    assert rate(8, 8) == pytest.approx(8 * rate(1, 1))
    assert rate(8, 2048) == pytest.approx(8 * rate(1, 2048))
    assert rate(1, 2) < 2 * rate(1, 1)


def test_packs_of_a_gradient_step() -> None:
    plan = layout(8, expert=8)
    assert microbatches_per_rank(plan, PAPER) == -(-4096 * 17408 // (8 * 8 * 16384))
    interleaved = layout(8, layers=8, pipeline=4, virtual_pipeline=2)
    assert microbatches_per_rank(interleaved, PAPER) % 4 == 0


def test_the_search_recommends_what_fits_and_says_why_others_do_not() -> None:
    result = search(model(), H100, 64, PAPER, Wanted())
    assert result.best is not None
    for plan in result.fitting:
        assert plan.on_gpu <= H100.memory
        assert plan.engine.fits
        assert plan.layout.microbatch_tokens >= PAPER.sequence
    assert result.best.comfortable
    assert result.best.step_s <= 1.05 * min(plan.step_s for plan in result.fitting if plan.comfortable)
    assert all(plan.problem for plan in result.others)
    assert any("mostly gradients" in plan.problem for plan in result.others)
    assert "64 GPUs (measured: 1 to 4)" in result.best.extrapolated
    other = dataclasses.replace(result.best, layout=dataclasses.replace(result.best.layout, gpu=GPUS["b200-180g"]))
    assert "b200-180g, estimated by the H100's efficiencies (measured: h100-80g, h200-141g)" in other.extrapolated


def test_a_large_cluster_is_searched_in_seconds() -> None:
    result = search(model("Qwen3-235B-A22B"), H100, 1024, PAPER, Wanted())
    assert result.best is not None
    assert result.best.gpus == 1024


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["Qwen3-30B-A3B"]))
    return folder


@pytest.mark.parametrize(
    ("name", "gpus"), [("Qwen3-30B-A3B", "64"), pytest.param("Qwen3-235B-A22B", "1024", marks=pytest.mark.full)]
)
def test_the_guide_shows_what_the_planner_says(
    name: str, gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", str(tmp_path), "--gpus", gpus, "--mean-response", "6000"]) == 0
    printed = [[cell.strip() for cell in re.split("[│┃]", line)] for line in capsys.readouterr().out.splitlines()]
    guide = (Path(__file__).parents[2] / "docs/cluster.md").read_text()
    table = guide[guide.index(f"/{name} --gpus {gpus} ") :].partition("| layout")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 8
    for row in table[2:]:
        assert [cell.strip() for cell in row.split("|")] in printed


def test_the_command_prints_a_configuration_that_loads(
    config_json: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config_json), "--gpus", "64", "--tp", "2", "--sequence", "9216"]) == 0
    out = capsys.readouterr().out
    assert "Extrapolated" in out
    text = out[out.index("run:\n") :]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load_config(file)
    assert config.parallel.tensor == 2
    assert config.parallel.sequence_parallel
    assert config.rollout.max_model_len == 9216
    config.parallel.check_fits(model(), 64)
    # The plan shares the GPUs, and so must the run: the default is a fleet on GPUs of its own, of which none is left.
    assert (config.rollout.placement, config.rollout.enable_sleep) == ("colocated", True)


def test_a_run_planned_inside_of_its_models_folder_has_a_name(
    config_json: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_json)
    assert main(["plan", ".", "--gpus", "64", "--json"]) == 0
    found = yaml.safe_load(json.loads(capsys.readouterr().out)["config"])
    assert found["run"] == {"dir": "runs/Qwen3-30B-A3B", "name": "Qwen3-30B-A3B"}
    (tmp_path / "named").symlink_to(config_json)
    assert main(["plan", str(tmp_path / "named"), "--gpus", "64", "--json"]) == 0
    assert yaml.safe_load(json.loads(capsys.readouterr().out)["config"])["run"]["name"] == "named"


def test_a_dense_model_gets_a_configuration_without_router_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-8B"]))
    assert main(["plan", str(tmp_path), "--gpus", "16", "--json"]) == 0
    (tmp_path / "run.yaml").write_text(json.loads(capsys.readouterr().out)["config"])
    config = load_config(tmp_path / "run.yaml")
    assert config.actor.router_replay == "none"
    assert not config.rollout.router_replay


def test_the_command_as_json(config_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(config_json / "config.json"), "--gpus", "64", "--json", "--rollout-gpus", "32", "--cp", "2"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    assert best["gpus"] == 64
    assert best["rollout_gpus"] == 32
    assert best["parallel"]["context"] == 2
    stage = best["memory"]["stages"][0]
    assert sum(stage["parts"].values()) == stage["peak"]
    config = yaml.safe_load(found["config"])
    assert config["parallel"]["context"] == 2
    assert config["rollout"]["placement"] == "fleet"
    assert config["rollout"]["engines"] * config["rollout"]["tensor_parallel"] == 32


def test_nothing_fits(config_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_json), "--gpus", "4"]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits" in out
    assert "GiB of 80" in out
    assert "Use more GPUs" in out


def test_a_model_too_large_for_an_engine_of_one_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-235B-A22B"]))
    layout = ["--tp", "8", "--pp", "4", "--ep", "16", "--cp", "2"]
    assert main(["plan", str(tmp_path), "--gpus", "64", "--gpu", "a100-40g", *layout]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "An engine lives in one node, and each of its 8 GPUs would hold 55 GiB of weights, of 39" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8", "--topk", "-1"], "--topk: -1 must be 0 or more"),
        (["--gpus", "0"], "--gpus: 0 must be 1 or more"),
        (["--gpus", "8", "--gpu", "h1000"], "--gpu h1000: not known; there are h100-80g"),
        (["--gpus", "8", "--tp", "3"], "not a multiple of tensor x pipeline x context"),
        (["--gpus", "8", "--ep", "8", "--tp", "0"], "argument --tp: 0 must be 1 or more"),
        (["--gpus", "8", "--rollout-gpus", "8"], "must be from 0 to 7"),
        (["--gpus", "8", "--prompt", "20000"], "leaves no room for a response"),
        (["--gpus", "8", "--mini-batch", "7"], "--mini-batch 7 does not divide --prompts 256"),
        (["--gpus", "8", "--mean-response", "99999"], "must be from 1 to 16384"),
        (["--gpus", "8", "--imbalance", "0.5"], "--imbalance: 0.5 must be 1 or more and less than 1e+06"),
        (["--gpus", "8", "--imbalance", "inf"], "--imbalance: inf must be 1 or more and less than 1e+06"),
        (["--gpus", "6", "--engine-tp", "4"], "--engine-tp 4: must divide the 6 GPUs of the engines"),
        (
            ["--gpus", "12", "--engine-tp", "3"],
            "--engine-tp 3: must divide the 12 GPUs of the engines and the model's 32",
        ),
        (["--gpus", "8", "--rollout-gpus", "4", "--engine-tp", "8"], "--engine-tp 8: must divide the 4 GPUs"),
        (["--gpus", "16", "--engine-tp", "16"], "at most 8 (a node) where they share the trainer's GPUs"),
    ],
)
def test_bad_arguments(
    config_json: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config_json), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_or_broken_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "absent"), "--gpus", "8"]) == 2
    broken = tmp_path / "config.json"
    broken.write_text("{")
    assert main(["plan", str(broken), "--gpus", "8"]) == 2
    broken.write_text("[]")
    assert main(["plan", str(broken), "--gpus", "8"]) == 2
    assert "config.json must hold a JSON object, found a list" in capsys.readouterr().err
    (other := tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    assert main(["plan", str(other), "--gpus", "8"]) == 2
    assert "tokenizer.json: is no config.json of a model: it has no model_type" in capsys.readouterr().err
    assert main(["plan", "run.yaml", "--gpus", "8"]) == 2
    assert "a run's configuration is planned with --config run.yaml" in capsys.readouterr().err
