"""Each rule, broken in a configuration: `train`, `doctor` and `plan` refuse it in the same words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.run import engine_gpus
from megatron_dppo.preflight.model_rules import MODEL
from megatron_dppo.preflight.rules import SECTIONS, check_model, check_sections
from tests.models.public_configs import CONFIGS
from tests.tiny import tiny_qwen3_moe

RANKS = 2
LENGTHS = "(rollout.max_prompt_tokens and rollout.max_response_tokens)"
FAULTS: dict[str, tuple[list[str], str, str]] = {
    "mini-batches": (
        ["trainer.prompts_per_mini_batch=3"],
        "batch",
        "trainer.prompts_per_mini_batch=3 does not divide trainer.prompts_per_step=8; choose a divisor",
    ),
    "oversample": (
        ["rollout.oversample=0.01"],
        "batch",
        "rollout.oversample=0.01 of trainer.prompts_per_step=8 is less than one prompt more; raise it, or set it to 0",
    ),
    "episodes that are dropped": (
        ["task.kind=environment", "task.environment={name: x}", "rollout.dynamic_sampling=4"],
        "task",
        "rollout.dynamic_sampling=4 drops groups of answers, which is not made for episodes; set it to 0",
    ),
    "a window of episodes": (
        [
            "task.kind=environment",
            "task.environment={name: x}",
            "rollout.schedule=window",
            "rollout.max_staleness=2",
            "rollout.partial_rollouts=true",
        ],
        "task",
        "rollout.schedule=window is not made for episodes; set it to one_step_off",
    ),
    "a window that drops": (
        [
            "rollout.schedule=window",
            "rollout.max_staleness=2",
            "rollout.partial_rollouts=true",
            "rollout.oversample=0.5",
        ],
        "batch",
        "rollout.schedule=window with rollout.oversample=0.5: both choose among groups; set rollout.oversample to 0",
    ),
    "a penalty of turns": (
        [
            "task.kind=agent",
            "task.agent={function: 'x:y', credit: turn}",
            "algorithm.reference_kl={coefficient: 0.1, place: reward}",
        ],
        "algorithm",
        "algorithm.reference_kl.place=reward with task.agent.credit=turn: the penalty is of whole sequences; set the "
        "place to loss, or the credit to episode",
    ),
    "equal groups without a baseline": (
        ["rollout.dynamic_sampling=4", "algorithm.baseline=none"],
        "algorithm",
        "rollout.dynamic_sampling=4 with algorithm.baseline=none: groups of equal rewards train too; choose another "
        "baseline, or set it to 0",
    ),
    "two that drop groups": (
        ["rollout.dynamic_sampling=4", "rollout.oversample=0.5"],
        "batch",
        "rollout.dynamic_sampling=4 with rollout.oversample=0.5: both drop groups; set one of them to 0",
    ),
    "one answer": (
        ["trainer.samples_per_prompt=1"],
        "algorithm",
        "trainer.samples_per_prompt=1 with algorithm.baseline=mean: an answer has no others to compare with, so every "
        "advantage would be 0; sample several, or set algorithm.baseline=none",
    ),
    "a correction bias that adapters do not have": (
        ["actor.router_bias_update_rate=0.001", "lora={rank: 4}"],
        "lora",
        "actor.router_bias_update_rate=0.001 would move a part of the model that adapters are not saved with; set "
        "it to 0, or train all weights",
    ),
    "no top-K": (
        ["algorithm.preset=dppo-topk-kl", "rollout.top_k_logprobs=0"],
        "algorithm",
        "algorithm.preset=dppo-topk-kl needs the engine's top-K log-probabilities; set rollout.top_k_logprobs (the "
        "paper uses 20)",
    ),
    "other top-K": (
        ["algorithm.preset=dppo-topk-tv", "rollout.top_k_logprobs=7"],
        "algorithm",
        "the preset dppo-topk-tv uses the top 20 tokens, but rollout.top_k_logprobs=7; set both alike "
        "(algorithm.overrides.topk and rollout.top_k_logprobs)",
    ),
    "a loss that is none": (
        ["algorithm.loss=math:fsum"],
        "algorithm",
        "algorithm.loss=math:fsum: raised TypeError: 'LossInputs' object is not iterable; docs/algorithms.md says what "
        "is asked of it",
    ),
    "a divergence of the whole vocabulary": (
        [
            "algorithm.divergence=tests.preflight.own_rows:EVERY_TOKEN",
            "algorithm.overrides.topk=7",
            "rollout.top_k_logprobs=7",
        ],
        "algorithm",
        "algorithm.divergence=tests.preflight.own_rows:EVERY_TOKEN is computed from all 300 tokens of the vocabulary, "
        "but K is 7; set algorithm.overrides.topk=300 and rollout.top_k_logprobs=300, or choose a divergence of fewer "
        "tokens",
    ),
    "top-K in the loss": (
        ["algorithm.reference_kl={coefficient: 0.1, estimator: topk}"],
        "algorithm",
        "algorithm.reference_kl: the top-K estimate has no gradient, so it cannot be in the loss; set "
        "algorithm.reference_kl.place=reward, or estimator k2 or k3",
    ),
    "top-K that nobody records": (
        ["algorithm.reference_kl={coefficient: 0.1, estimator: topk, place: reward}", "rollout.top_k_logprobs=0"],
        "algorithm",
        "algorithm.reference_kl.estimator=topk needs the engine's top-K log-probabilities; set rollout.top_k_logprobs",
    ),
    "profile": (
        ["trainer.profile_step=101"],
        "trainer",
        "trainer.profile_step=101 is beyond trainer.steps=100: nothing would be profiled; choose an earlier step, or "
        "set it to null",
    ),
    "impatient ranks": (
        ["run.collective_timeout_minutes=5", "run.hang_minutes=4"],
        "timeouts",
        "ranks give up after 5 min, but a weight sync may wait 10 min for an engine that hangs; raise "
        "run.collective_timeout_minutes",
    ),
    "an engine that is not there": (
        ["rollout.engine=no_such_package.engine:make"],
        "engines",
        "rollout.engine: no_such_package.engine:make cannot be imported: ModuleNotFoundError: No module named "
        "'no_such_package'; see docs/rollouts.md",
    ),
    "several devices of a reference engine": (
        ["rollout.engine=reference", "rollout.tensor_parallel=2"],
        "engines",
        "rollout.tensor_parallel=2 with rollout.engine=reference, which has one device; set it to 1 and "
        "rollout.expert_parallel=false, or rollout.engine=vllm",
    ),
    "FP8 of a reference engine": (
        ["rollout.engine=reference", "rollout.quantization=fp8"],
        "engines",
        "rollout.quantization=fp8 with rollout.engine=reference, which has no such kernels; set it to none, or "
        "rollout.engine=vllm",
    ),
    "an FP8 cache of a reference engine": (
        ["rollout.engine=reference", "rollout.kv_cache_dtype=fp8"],
        "engines",
        "rollout.kv_cache_dtype=fp8 with rollout.engine=reference, which has no such kernels; set it to auto, or "
        "rollout.engine=vllm",
    ),
    "world": (
        ["parallel.pipeline=3"],
        "layout",
        "parallel: world size 2 is not a multiple of tensor x pipeline x context = 1 x 3 x 1 = 3; change the number of "
        "ranks or these sizes",
    ),
    "sequence parallel": (
        ["parallel.tensor=2"],
        "layout",
        "parallel: a mixture-of-experts model with tensor > 1 needs sequence_parallel: true; the model has to fit 2 "
        "ranks",
    ),
    "layers": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=4"],
        "layout",
        "parallel: 3 layers are fewer than pipeline x virtual_pipeline = 2 x 4; the model has to fit 2 ranks",
    ),
    "few sequences": (
        ["trainer.prompts_per_mini_batch=1", "trainer.samples_per_prompt=1", "algorithm.baseline=none"],
        "batch",
        "a gradient step has 1 sequences for 2 data-parallel ranks: some would train on nothing; raise "
        "trainer.prompts_per_mini_batch, or use more model parallelism",
    ),
    "engines": (
        ["rollout.placement=colocated", "rollout.enable_sleep=true", "rollout.tensor_parallel=4"],
        "engines",
        "rollout.placement=colocated: 2 ranks are not a multiple of rollout.tensor_parallel=4; change one of them",
    ),
    "r3 without record": (
        ["rollout.router_replay=false"],
        "router-replay",
        "actor.router_replay=r3 needs rollout.router_replay=true: the engine must record the routes; set it, or "
        "actor.router_replay=none",
    ),
    "r2 without a pass": (
        ["actor.router_replay=r2"],
        "router-replay",
        "actor.router_replay=r2 replays the trainer's own routes of the pass before the update, which the preset "
        "dppo-binary-tv does not run; set actor.router_replay=r3 or choose a preset with a recomputed anchor",
    ),
    "pack": (
        ["actor.max_tokens_per_microbatch=39"],
        "lengths",
        f"a sequence may have 40 tokens {LENGTHS}, but actor.max_tokens_per_microbatch=39: the first that long would "
        "stop the run; set it to 40, or actor.long_sequences=alone",
    ),
    "pack of context-parallel ranks": (
        ["parallel.context=2", "rollout.max_response_tokens=9", "actor.max_tokens_per_microbatch=41"],
        "lengths",
        f"a sequence may have 44 tokens {LENGTHS}, but actor.max_tokens_per_microbatch=41: the first that long would "
        "stop the run; set it to 44, or actor.long_sequences=alone",
    ),
    "positions": (
        ["rollout.max_response_tokens=481", "actor.max_tokens_per_microbatch=600"],
        "lengths",
        f"prompts and responses reach 513 tokens {LENGTHS}, the positions of the model 512; lower "
        "rollout.max_response_tokens",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(path, num_hidden_layers=3)
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "run.yaml"
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "actor": {"max_tokens_per_microbatch": 64},
        "rollout": {"max_prompt_tokens": 32, "max_response_tokens": 8, "object_store_mib": 80},
        "task": {"train_size": 64, "held_out_size": 16, "prompt": "{metadata[expression]}"},
        "evaluation": {"prompts": 16},
        "trainer": {"prompts_per_step": 8, "samples_per_prompt": 4, "prompts_per_mini_batch": 4},
    }
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(autouse=True)
def first_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


def planned(file: Path, overrides: list[str]) -> list[str]:
    gpus = RANKS + engine_gpus(load_config(file, overrides))
    return ["plan", "--config", str(file), "--gpus", str(gpus), *overrides]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_refused_by_all_in_the_same_words(
    fault: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, check, text = FAULTS[fault]
    line = f"error: {check}: {text}"
    capsys.readouterr()
    assert main(["train", str(config), *overrides]) == 2
    assert capsys.readouterr().err == f"megatron-dppo: error: {text}\n"
    assert main(["doctor", "--ranks", str(RANKS), str(config), *overrides]) == 1
    assert line in capsys.readouterr().out.splitlines()
    assert main(planned(config, overrides)) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [line])


def test_every_rule_is_broken_above_or_is_a_warning(config: Path, model: Path) -> None:
    """And every fault breaks one rule alone."""
    broken = set()
    for overrides, *_ in FAULTS.values():
        run = load_config(config, overrides)
        found = [rule for rule in SECTIONS if rule(run) is not None]
        found += [rule for rule in MODEL if rule(run, load_hf_config(model), RANKS) is not None]
        assert len(found) == 1, overrides
        broken |= {rule.__name__ for rule in found}
    assert {rule.__name__ for rule in (*SECTIONS, *MODEL)} - broken == {
        "_hang",
        "_adapters",
        "_unused",
        "_padded_experts",
        "_served",
    }


@pytest.mark.parametrize(
    ("fields", "override", "problem"),
    [
        (
            {"eos_token_id": None},
            "rollout.max_response_tokens=8",
            "{}/config.json names no eos_token_id, so no response would end before 8 tokens; set "
            "rollout.stop_token_ids",
        ),
        (
            {},
            "rollout={expert_parallel: true, tensor_parallel: 16}",
            "rollout.expert_parallel=true: {} has 8 experts, fewer than rollout.tensor_parallel=16; lower the latter",
        ),
    ],
)
def test_what_an_engine_would_refuse_of_the_model_at_its_start(
    fields: dict, override: str, problem: str, config: Path, model: Path, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    for file in (folder / "config.json", folder / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    overrides, text = [f"model.path={folder}", override], problem.format(folder)
    capsys.readouterr()
    assert main(["train", str(config), *overrides]) == 2
    assert capsys.readouterr().err == f"megatron-dppo: error: {text}\n"
    assert main(["doctor", "--ranks", str(RANKS), str(config), *overrides]) == 1
    assert f"error: engines: {text}" in capsys.readouterr().out.splitlines()
    assert main(planned(config, overrides)) == 2
    assert f"error: engines: {text}" in capsys.readouterr().err.splitlines()
    own = [*overrides, "rollout.engine=tests.rollout.uniform_engine:make", "rollout.stop_token_ids=[7]"]
    assert "engines" not in {f.check for f in check_model(load_config(config, own), load_hf_config(folder), RANKS)}


def test_all_faults_are_told_at_once(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `doctor` and `plan`; `train` tells the first."""
    chosen = ("mini-batches", "impatient ranks", "world", "r2 without a pass", "pack")
    overrides = [override for name in chosen for override in FAULTS[name][0]]
    lines = [f"error: {check}: {text}" for _, check, text in (FAULTS[name] for name in chosen)]
    capsys.readouterr()
    assert main(["train", str(config), *overrides]) == 2
    assert capsys.readouterr().err == f"megatron-dppo: error: {FAULTS['mini-batches'][2]}\n"
    assert main(planned(config, overrides)) == 2
    assert capsys.readouterr().err.splitlines() == lines
    assert main(["doctor", "--ranks", str(RANKS), str(config), *overrides]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line in lines] == lines


def test_what_is_right_is_not_complained_of(config: Path, model: Path, tmp_path: Path) -> None:
    run, tiny = load_config(config), load_hf_config(model)
    assert [*check_sections(run), *check_model(run, tiny, RANKS)] == []
    alone = load_config(config, ["actor.max_tokens_per_microbatch=9", "actor.long_sequences=alone"])
    assert [*check_model(alone, tiny, RANKS)] == []
    reference = load_config(
        config, ["rollout.engine=reference", "rollout.kv_cache_mib=64", "rollout.enforce_eager=true"]
    )
    (found,) = check_sections(reference)
    assert str(found) == (
        "warning: engines: rollout.engine=reference makes no use of rollout.enforce_eager, rollout.kv_cache_mib: keys "
        "and values take what rollout.max_num_seqs sequences need, and nothing is compiled; remove them"
    )
    stays = load_config(config, ["optimizer.keep_on_gpu_gib=8"])
    (found,) = check_sections(stays)
    assert str(found) == (
        "warning: engines: optimizer.keep_on_gpu_gib=8, but no GPU changes hands, so all optimizer state stays; remove "
        "it, or set rollout.placement=colocated and enable_sleep=true"
    )
    waits = load_config(config, ["run.hang_minutes=200"])
    (found,) = check_sections(waits)
    assert str(found) == (
        "warning: timeouts: run.hang_minutes=200 is longer than run.collective_timeout_minutes: a hung rank would not "
        "be named before the others give up; lower run.hang_minutes"
    )


@pytest.mark.parametrize(
    ("workers", "divided", "width"), [(2, False, 0), (4, False, 192), (4, True, 0), (8, False, 96)]
)
def test_experts_that_fp8_pads(config: Path, workers: int, divided: bool, width: int) -> None:
    """Qwen3-30B-A3B's 768 rows in blocks of 128."""
    overrides = [f"rollout.tensor_parallel={workers}", f"rollout.expert_parallel={divided}".lower()]
    run = load_config(config, [*overrides, "rollout.quantization=fp8"])
    found = list(check_model(run, resolve_hf_config(CONFIGS["Qwen3-30B-A3B"]), 8))
    padded = [finding.problem for finding in found if "vLLM pads them" in finding.problem]
    assert len(padded) == (width > 0)
    assert all(f"each GPU has {width} rows of every expert" in problem for problem in padded)


def test_k1_in_the_loss_is_warned_of(config: Path) -> None:
    (found,) = check_sections(load_config(config, ["algorithm.reference_kl={coefficient: 0.1, estimator: k1}"]))
    assert str(found).startswith("warning: algorithm: algorithm.reference_kl: the gradient of k1 in the loss is 0 on")
    for right in ("{coefficient: 0.1, estimator: k1, place: reward}", "{coefficient: 0, estimator: k1}", "null"):
        assert list(check_sections(load_config(config, [f"algorithm.reference_kl={right}"]))) == []


def test_adapters_that_fit_no_layer(config: Path, model: Path, tmp_path: Path) -> None:
    """A model whose layers are all mixtures of experts has no dense feed-forward layer."""
    run = load_config(config, ["lora={targets: [mlp]}"])
    found = [str(finding) for finding in check_model(run, load_hf_config(model), RANKS)]
    assert found == ["error: lora: lora.targets=['mlp'] name no layer of this qwen3_moe model; add another"]
    biased, every = resolve_hf_config(CONFIGS["gpt-oss-20b"]), load_config(config, ["lora={rank: 4}"])
    found = [str(one) for one in check_model(every, biased, RANKS) if one.check == "lora"]
    assert len(found) == 1
    assert "the experts of gpt_oss carry biases, and such get no adapters; leave out experts" in found[0]


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
    ],
)
def test_positions_are_those_of_the_scaled_rotation(
    rope: dict | None, positions: int, config: Path, model: Path, tmp_path: Path
) -> None:
    """As vLLM counts them; Qwen3's cards ask for yarn to go beyond `max_position_embeddings`."""
    shutil.copytree(model, tmp_path / "scaled")
    raw = json.loads((model / "config.json").read_text())
    if rope is not None:
        raw.pop("rope_parameters", None)
        raw |= {"rope_theta": 10000.0, "rope_scaling": rope}
    (tmp_path / "scaled/config.json").write_text(json.dumps(raw))
    scaled = load_hf_config(tmp_path / "scaled")
    for longest, wrong in ((positions, False), (positions + 1, True)):
        overrides = [f"rollout.max_response_tokens={longest - 32}", f"actor.max_tokens_per_microbatch={longest}"]
        found = [finding.check for finding in check_model(load_config(config, overrides), scaled, RANKS)]
        assert found == (["lengths"] if wrong else [])


def test_the_planner_counts_the_rows_of_context_parallel_ranks() -> None:
    """A pack holds the longest sequence with its padding, in a recommendation as in a check."""
    layout = ParallelConfig(context=4)
    assert (layout.packed_length(17), ParallelConfig().packed_length(17)) == (24, 17)
    assert resolve_hf_config(CONFIGS["Qwen3-8B"]).positions == 40960
