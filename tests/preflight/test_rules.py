"""Each rule, broken in a configuration: `train`, `doctor` and `plan` refuse it in the same words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megatron_dppo.algorithm import policy_loss
from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config
from megatron_dppo.models.hf_config import HFConfig, load_hf_config, resolve_hf_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.run import engine_gpus
from megatron_dppo.preflight.finding import raise_first
from megatron_dppo.preflight.model_rules import MODEL
from megatron_dppo.preflight.rules import SECTIONS, check_model, check_sections
from megatron_dppo.trainer.resume import differences, facts
from tests.models.public_configs import CONFIGS
from tests.preflight.faults import FAULTS
from tests.tiny import tiny_qwen3_moe

RANKS = 2


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
    early = any(finding.text == text for finding in check_sections(load_config(config, overrides)))
    assert main(["train", str(config), "--check", *overrides]) == (2 if early else 0)
    assert capsys.readouterr().err == (f"megatron-dppo: error: {text}\n" if early else "")


@pytest.mark.parametrize("override", ["foo=1", "optimizer.lrr=1", "optimizer.lr=fast", "optimizer.lr=-1"])
def test_a_wrong_override_is_refused_without_a_model_and_in_the_same_words(
    override: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), override]) == 2
    said = capsys.readouterr().err
    assert override.partition("=")[0] in said
    assert main(["train", str(config), "model.path=absent", override, "--check"]) == 2
    assert capsys.readouterr().err == said
    assert main(["train", str(config), "model.path=absent", "--check"]) == 0
    assert not Path(yaml.safe_load(config.read_text())["run"]["dir"]).exists()


def test_every_rule_is_broken_or_is_a_warning(config: Path, model: Path) -> None:
    """And every fault breaks one rule alone."""
    broken = set()
    for overrides, *_ in FAULTS.values():
        run = load_config(config, overrides)
        found = [rule for rule in SECTIONS if [*rule(run)]]
        found += [rule for rule in MODEL if [*rule(run, load_hf_config(model), RANKS)]]
        assert len(found) == 1, overrides
        broken |= {rule.__name__ for rule in found}
    assert {rule.__name__ for rule in (*SECTIONS, *MODEL)} - broken == {
        "_hang",
        "_one_gradient_step",
        "_adapters",
        "_recompute",
        "_unused",
        "_padded_experts",
        "_bucket_store",
        "_reduction",
        "_routers",
        "_served",
        "_spread",
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


def test_a_model_without_experts_has_none_to_compute_anew(config: Path, model: Path) -> None:
    run = load_config(config, ["actor.recompute=activation"])
    (found,) = check_model(run, resolve_hf_config(CONFIGS["Qwen3-8B"]), RANKS)
    assert str(found) == (
        "error: layout: actor.recompute=activation computes parts of experts anew, and the model has none; set it to "
        "none, selective or full"
    )
    assert [*check_model(run, load_hf_config(model), RANKS)] == []


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


def test_an_anchor_that_has_not_moved_is_warned_of(config: Path) -> None:
    """Of 8 prompts a rollout."""
    one, more = "trainer.prompts_per_mini_batch=8", "trainer.prompts_per_mini_batch=4"
    for preset in ("minirl", "dppo-binary-kl-decoupled", "mask-0.5-recompute"):
        (found,) = check_sections(load_config(config, [f"algorithm.preset={preset}", one]))
        assert str(found) == (
            f"warning: algorithm: algorithm.preset={preset} masks what has moved away from the policy before the "
            "update, and trainer.prompts_per_mini_batch=8 makes one gradient step of a rollout, before which nothing "
            "has: its trust region blocks no token; take several gradient steps, or a preset with the anchor rollout"
        )
        for right in (["trainer.ppo_epochs=2", one], [more]):
            assert list(check_sections(load_config(config, [f"algorithm.preset={preset}", *right]))) == []
    assert list(check_sections(load_config(config, ["algorithm.preset=grpo-clip-higher", one]))) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.preset=icepop-decoupled"],
        ["algorithm.preset=minirl", "algorithm.overrides={band_low: 0.5, band_high: 5.0}"],
    ],
)
def test_a_band_blocks_tokens_beside_an_anchor_that_has_not_moved(overrides: list[str], config: Path) -> None:
    """It is of a ratio to mu, which is not pi' before the first gradient step either."""
    run = load_config(config, [*overrides, "trainer.prompts_per_mini_batch=8"])
    (found,) = check_sections(run)
    assert (found.level, found.fix) == ("warning", "take several gradient steps")
    assert found.problem.endswith("has: its trust region blocks no token, its band alone does")
    # By the objective itself: pi is pi', and pi' / mu is 6, 1 and 0.4.
    pi = torch.tensor([0.6, 0.5, 0.2]).log()
    mu = torch.tensor([0.1, 0.5, 0.5]).log()
    every = torch.ones(3)
    loss = policy_loss(run.algorithm.resolve(), pi, mu, every, loss_mask=every.bool(), recomputed_logp=pi)
    assert (loss.per_token != 0).tolist() == [False, True, False]


NO_ROUTERS = "the model has no experts, so no routers"


@pytest.mark.parametrize(
    ("overrides", "name", "problem"),
    [
        (
            ["actor.load_balancing_loss=0.01", "actor.router_z_loss=0.001"],
            "Qwen3-8B",
            f"actor.load_balancing_loss=0.01 and actor.router_z_loss=0.001: {NO_ROUTERS}",
        ),
        (
            ["actor.router_bias_update_rate=0.001"],
            "Qwen3-8B",
            f"actor.router_bias_update_rate=0.001: {NO_ROUTERS}",
        ),
        (
            ["actor.router_bias_update_rate=0.001"],
            "Qwen3-30B-A3B",
            "actor.router_bias_update_rate=0.001: the routers of qwen3_moe have no correction bias",
        ),
        (
            ["trainer.samples_per_prompt=1", "algorithm.baseline=none", "algorithm.divide_by_std=true"],
            "Qwen3-8B",
            "algorithm.divide_by_std=true with trainer.samples_per_prompt=1: an answer alone has no spread to divide "
            "by",
        ),
    ],
)
def test_what_does_nothing_is_said_and_kept(overrides: list[str], name: str, problem: str, config: Path) -> None:
    """A state that was saved with it goes on with it alone."""
    run = load_config(config, overrides)
    findings = [*check_sections(run), *check_model(run, resolve_hf_config(CONFIGS[name]), RANKS)]
    assert [str(one) for one in findings] == [
        f"warning: algorithm: {problem}; a run that does not go on from another's state can leave it out"
    ]
    raise_first(findings)
    before = json.loads(json.dumps(facts(run, task="t", weights="w")))
    assert differences(before, facts(run, task="t", weights="w")) == {}
    assert differences(before, facts(load_config(config, overrides[:-1]), task="t", weights="w"))


def test_settings_of_routers_that_a_model_has(config: Path) -> None:
    run = load_config(config, ["actor.load_balancing_loss=0.01", "actor.router_z_loss=0.001"])
    assert list(check_model(run, resolve_hf_config(CONFIGS["Qwen3-30B-A3B"]), 8)) == []
    moved = load_config(config, ["actor.router_bias_update_rate=0.001"])
    assert list(check_model(moved, resolve_hf_config(CONFIGS["GLM-4.5-Air"]), 8)) == []


def test_equal_groups_that_would_train_and_are_dropped(config: Path, tmp_path: Path) -> None:
    """By what a function of one's own makes of them."""
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def of_step(rewards, groups): return rewards - rewards.mean()\n"
        "def best(rewards, groups): return rewards - rewards.max()\n"
        "def of_group(rewards, groups):\n"
        "    mean = torch.bincount(groups, rewards) / torch.bincount(groups).clamp(min=1)\n"
        "    centred = rewards - mean[groups]\n"
        "    return (centred - centred.mean()) / centred.std()\n"
    )

    def said(name: str, *others: str) -> list[str]:
        return [
            str(one) for one in check_sections(load_config(config, [f"algorithm.advantage={file}:{name}", *others]))
        ]

    for name in ("of_step", "best"):
        assert said(name, "rollout.dynamic_sampling=3") == [
            "warning: algorithm: rollout.dynamic_sampling=3 drops groups of equal rewards, and "
            f"algorithm.advantage={file}:{name} lets such groups train; set rollout.dynamic_sampling to 0"
        ]
        assert said(name) == []
    assert said("of_group", "rollout.dynamic_sampling=3") == []


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


def test_a_reduction_that_does_nothing_is_said_and_kept(config: Path, model: Path) -> None:
    """A state goes on with the ranks that are there, and resuming asks for the setting that it was saved with."""
    alone = ["optimizer.grad_reduce_dtype=bfloat16", "parallel={tensor: 2, expert: 2, sequence_parallel: true}"]
    (said,) = check_model(load_config(config, alone), load_hf_config(model), RANKS)
    assert said.level == "warning"
    assert "does nothing: no two of 2 ranks have the same parameters" in str(said)


def test_weights_that_find_no_room_in_the_object_store(config: Path, model: Path) -> None:
    """Qwen3-30B-A3B's embedding, 151936 rows of 2048 in two bytes, is 593.5 MiB, more than a bucket."""
    large, way = resolve_hf_config(CONFIGS["Qwen3-30B-A3B"]), "rollout.weight_transfer=object_store"

    def needed(hf_config: HFConfig, *overrides: str) -> list[str]:
        found = [str(one) for one in check_model(load_config(config, overrides), hf_config, RANKS)]
        return [text.partition("has up to ")[2].split()[0] for text in found if "of weights in the store" in text]

    assert needed(large) == []
    assert needed(large, way) == ["1187"]
    assert needed(large, way, "rollout.object_store_mib=1187") == []
    assert needed(load_hf_config(model), way) == [], "the whole model is smaller"
    dense, default = resolve_hf_config(CONFIGS["Mixtral-8x7B"]), "rollout.object_store_mib=512"
    assert needed(dense, way, "actor.dtype=bfloat16", default) == [], "two buckets of the default fit"
    assert needed(dense, way, "actor.dtype=bfloat16", "rollout.object_store_mib=511") == ["512"]
