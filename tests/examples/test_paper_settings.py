"""The configurations in examples/paper against the paper, number by number."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.algorithm import Anchor, TrustRegion
from megatron_dppo.config.load import load_config, save_config
from megatron_dppo.config.schema import Config
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.prompting import user_message
from tests.models.public_configs import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "examples/paper"

# Table 1: max_prompt_length, max_response_length, train_batch_size, ppo_mini_batch_size, optim.lr, temperature, n.
TABLE_1 = {
    "moe_base": (1024, 16384, 256, 32, 1e-6, 1.0, 16),
    "moe_base_r3": (1024, 16384, 256, 32, 1e-6, 1.0, 16),
    "moe_thinking": (1024, 16384, 256, 32, 1e-6, 1.0, 16),
    "dense_base": (1024, 8000, 128, 32, 1e-6, 1.0, 8),
    "moe_base_lora": (1024, 8000, 128, 16, 1e-5, 1.0, 8),
}
# Section 7.
MODELS = {
    "moe_base": "Qwen3-30B-A3B-Base",
    "moe_base_r3": "Qwen3-30B-A3B-Base",
    "moe_thinking": "Qwen3-30B-A3B",
    "dense_base": "Qwen3-8B-Base",
    "moe_base_lora": "Qwen3-30B-A3B-Base",
    "sanity_test": "DeepSeek-R1-Distill-Qwen-1.5B",  # Section 5
    "relaxation": "Qwen3-1.7B-Base",  # Section 6
    "clipped_tokens": "Qwen3-4B-Base",  # Appendix E
    "octothinker_math": "OctoThinker-3B-Hybrid-Base",  # Appendix G.3
    "arc_1d": "Qwen3-1.7B-Base",
    "acre": "Qwen3-1.7B-Base",
    "sudoku": "Qwen3-1.7B-Base",
}
ONE_PASS = ("moe_base", "moe_base_r3", "moe_base_lora", "moe_thinking", "dense_base", "sanity_test", "relaxation")
# Appendix F
EVALUATED_EVERY = {"moe_base": 5, "moe_base_r3": 5, "moe_thinking": 5, "dense_base": 10, "moe_base_lora": 10}
G3 = ("octothinker_math", "arc_1d", "acre", "sudoku")


def config(name: str, *overrides: str) -> Config:
    return load_config(PAPER / f"{name}.yaml", overrides)


def test_every_file_is_tested_here():
    assert {path.stem for path in PAPER.glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_loads_names_its_model_and_survives_saving(name, tmp_path):
    loaded = config(name)
    assert loaded.model.path.name == MODELS[name]
    assert loaded.run.name == name
    save_config(loaded, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == loaded


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name):
    c = config(name)
    row = (
        c.rollout.max_prompt_tokens,
        c.rollout.max_response_tokens,
        c.trainer.prompts_per_step,
        c.trainer.prompts_per_mini_batch,
        c.optimizer.lr,
        c.rollout.temperature,
        c.trainer.samples_per_prompt,
    )
    assert row == TABLE_1[name]


@pytest.mark.parametrize("name", TABLE_1)
def test_router_replay_is_used_in_one_experiment_only(name):
    """Appendix F: "We only use R3 in the MoE Base w/ R3 experiment"."""
    c = config(name)
    replays = name == "moe_base_r3"
    assert (c.actor.router_replay, c.rollout.router_replay) == ("r3" if replays else "none", replays)


@pytest.mark.parametrize("name", TABLE_1)
def test_evaluation(name):
    """Appendix F: temperature 0.7, top_p 0.95, n = 32, AIME24 and AIME25; every 5 steps for MoE, every 10 for dense."""
    c = config(name).evaluation
    assert (c.temperature, c.top_p, c.samples) == (0.7, 0.95, 32)
    assert [one.name for one in c.sets] == ["aime24", "aime25"]
    assert all(one.samples in (None, 32) for one in c.sets)
    assert c.every == EVALUATED_EVERY[name]


# Appendix F: C = 5 throughout; delta 0.2 for TV ("0.15 for MoE Base w/ LoRA and 0.2 for all other"), 0.05 for KL;
# GRPO-ClipHigher 0.2 and 0.27; CISPO without a mask. Appendix G.2: the same deltas, K = 20.
BASELINES = {
    "dppo-binary-tv": (TrustRegion.DIVERGENCE, 0.2, 0.2, None),
    "dppo-binary-kl": (TrustRegion.DIVERGENCE, 0.05, 0.05, None),
    "grpo-clip-higher": (TrustRegion.RATIO_CLIP, 0.2, 0.27, None),
    "cispo": (TrustRegion.NONE, None, None, None),
}
ABLATION = {
    "dppo-topk-tv": (TrustRegion.DIVERGENCE, 0.2, 0.2, 20),
    "dppo-topk-kl": (TrustRegion.DIVERGENCE, 0.05, 0.05, 20),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_each_method_of_section_7_is_one_override(name):
    assert config(name).algorithm.preset == "dppo-binary-tv"
    wanted = BASELINES | (ABLATION if name == "moe_base" else {})  # G.2 replicates "MoE Base w/o R3"
    if name == "moe_base_lora":
        wanted["dppo-binary-tv"] = (TrustRegion.DIVERGENCE, 0.15, 0.15, None)
    for preset, (region, negative, positive, topk) in wanted.items():
        c = config(name, f"algorithm.preset={preset}")
        row = c.algorithm.resolve()
        assert (row.trust_region, row.ratio_cap, row.topk) == (region, 5.0, topk), preset
        if negative is not None:
            assert (row.threshold_negative, row.threshold_positive) == (negative, positive), preset
        if region is not TrustRegion.NONE:
            assert row.anchor is Anchor.ROLLOUT, preset  # "for all methods, we use the behavior policy"
        assert not row.needs_recomputed_logp, preset
        if topk:
            assert c.rollout.top_k_logprobs == topk


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_trained_in_one_experiment_only(name):
    """Appendix F: "we set lora_rank=32 and lora_alpha=64"; Table 1's last column."""
    lora = config(name).lora
    assert (lora and (lora.rank, lora.alpha)) == ((32, 64) if name == "moe_base_lora" else None)


@pytest.mark.parametrize("name", MODELS)
def test_advantages_are_not_divided(name):
    """Section 4.1: the reward minus the mean of its group."""
    c = config(name).algorithm
    assert (c.baseline, c.divide_by_std) == ("mean", False)


def test_sanity_test():
    """Section 5 and Appendix D: 64 questions, 8 responses, a context of 8,000, 4 gradient steps, BF16, 32 samples."""
    c = config("sanity_test")
    assert (c.trainer.prompts_per_step, c.trainer.samples_per_prompt) == (64, 8)
    assert c.trainer.prompts_per_step / c.trainer.prompts_per_mini_batch == 4
    assert c.rollout.max_model_len == 8000
    assert c.actor.dtype == "bfloat16"
    assert c.evaluation.samples == 32
    assert c.task.data is not None
    assert c.task.data.path == "data/math_1460.jsonl"


def test_algorithms_of_the_sanity_test():
    """Appendix D.1: C and the thresholds of each; Section 5.3: the minimal masks."""
    expected = {
        "pg-is": (TrustRegion.NONE, None, math.inf, None),
        "cispo": (TrustRegion.NONE, None, 3.0, None),
        "grpo-clip-higher": (TrustRegion.RATIO_CLIP, (0.2, 0.28), math.inf, Anchor.ROLLOUT),
        "minirl": (TrustRegion.RATIO_CLIP, (0.2, 0.28), math.inf, Anchor.RECOMPUTED),
        "minirl-tis": (TrustRegion.RATIO_CLIP, (0.2, 0.28), 3.0, Anchor.RECOMPUTED),
        "dppo-binary-tv": (TrustRegion.DIVERGENCE, (0.15, 0.15), math.inf, Anchor.ROLLOUT),
        "dppo-binary-kl": (TrustRegion.DIVERGENCE, (0.05, 0.05), math.inf, Anchor.ROLLOUT),
        "dppo-binary-kl-decoupled": (TrustRegion.DIVERGENCE, (0.05, 0.05), math.inf, Anchor.RECOMPUTED),
    }
    for preset, (region, thresholds, cap, anchor) in expected.items():
        row = config("sanity_test", f"algorithm.preset={preset}").algorithm.resolve()
        assert (row.trust_region, row.ratio_cap) == (region, cap), preset
        if thresholds is not None:
            assert (row.threshold_negative, row.threshold_positive) == thresholds, preset
            assert row.anchor is anchor, preset
    for preset, delta, anchor in (
        ("mask-0.5", 0.5, Anchor.ROLLOUT),
        ("mask-0.8", 0.8, Anchor.ROLLOUT),
        ("mask-0.5-recompute", 0.5, Anchor.RECOMPUTED),
    ):
        changes = ("algorithm.constants=section-5.3", f"algorithm.preset={preset}")
        row = config("sanity_test", *changes).algorithm.resolve()
        assert (row.trust_region, row.threshold_negative, row.anchor) == (TrustRegion.NEGATIVE_DROP, delta, anchor)


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_rollout_is_passed_over_once(name):
    """Section 5: 64 prompts, "4 gradient steps"; Table 1 has no epochs."""
    assert config(name).trainer.ppo_epochs == 1


def test_relaxation_study():
    """Section 6: e_low 0.2, e_high 0.28, alpha 0.1; the baseline is GRPO with Clip-Higher."""
    for preset, low, high in (("relax-both", True, True), ("relax-low", True, False), ("relax-high", False, True)):
        row = config("relaxation", f"algorithm.preset={preset}").algorithm.resolve()
        assert (row.threshold_negative, row.threshold_positive, row.relax_below) == (0.2, 0.28, 0.1)
        assert (row.relax_low, row.relax_high) == (low, high)
    baseline = config("relaxation", "algorithm.preset=grpo-clip-higher", "algorithm.constants=appendix-d")
    row = baseline.algorithm.resolve()
    assert (row.threshold_negative, row.threshold_positive, row.ratio_cap) == (0.2, 0.28, math.inf)
    assert config("relaxation", "algorithm.overrides.relax_below=0.2").algorithm.resolve().relax_below == 0.2


def test_appendix_e():
    """Qwen3-4B-Base, the DAPO dataset, GRPO; at step 50 what r > 1.28 and r < 0.8 block, the 50 tokens of each."""
    c = config("clipped_tokens")
    row = c.algorithm.resolve()
    assert (row.trust_region, row.anchor) == (TrustRegion.RATIO_CLIP, Anchor.ROLLOUT)
    assert (1 - row.threshold_negative, 1 + row.threshold_positive) == (0.8, 1.28)
    assert c.task.data.path == config("relaxation").task.data.path
    assert (c.trainer.steps, c.tracking.samples_every, c.tracking.masked_tokens) == (50, 50, 50)


@pytest.mark.parametrize("name", G3)
def test_appendix_g3(name):
    """ "For the TV divergence clipping, we use a threshold of 0.2 ... the only difference being the trust region"."""
    row = config(name).algorithm.resolve()
    assert (row.trust_region, row.threshold_negative, row.threshold_positive) == (TrustRegion.DIVERGENCE, 0.2, 0.2)
    ratio = config(name, "algorithm.preset=ppo-clip").algorithm.resolve()
    assert ratio.trust_region is TrustRegion.RATIO_CLIP
    assert (ratio.ratio_cap, ratio.aggregation) == (row.ratio_cap, row.aggregation)
    # "their example scripts": num_ppo_epochs is 2 in Gem's.
    assert config(name).trainer.ppo_epochs == (1 if name == "octothinker_math" else 2)


def test_tasks_of_appendix_g3():
    assert config("octothinker_math").task.data.layout == "math"  # "the standard math reasoning dataset (Hendrycks)"
    assert [config(name).task.dataset for name in ("arc_1d", "acre")] == ["arc_1d", "acre"]
    assert config("sudoku").task.environment.name == "game:Sudoku-v0-easy"


@pytest.mark.parametrize("name", ["arc_1d", "acre", "sudoku"])
def test_tasks_of_gem_are_built_and_scored(name):
    """The real libraries behind the configurations, a few questions each."""
    c = config(name, "task.train_size=3", "task.held_out_size=2")
    task = build_task(c.task, byte_tokenizer(), max_prompt_tokens=c.rollout.max_prompt_tokens)
    prompts = task.prompts(0, 3)
    if isinstance(task, EnvironmentTask):
        assert "\\boxed{row column number}" in prompts[0].question
        (turn,), _ = task.episodes.step([task.begin(prompts[0])], ["no move"])
        assert turn.terminated
        assert turn.error == ""
        task.close()
        return
    right = [f"I think, so \\boxed{{1}}? No: \\boxed{{{prompt.answer}}}." for prompt in prompts]
    assert task.grader.score(prompts, right).correct.all()
    verdict = task.grader.score(prompts, ["\\boxed{nothing}", "no box", prompts[2].answer])
    assert not verdict.correct.any()
    assert verdict.well_formed.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 3? No.\nSo\n\nAnswer: $34$", "$34$"),
        ("answer : \\boxed{34}\nI hope it is correct.", "\\boxed{34}"),
        ("<think>Answer: 3</think>\nThe answer is 34", "3</think>"),
        ("34", None),
    ],
)
def test_answers_on_dapo_are_read_from_the_last_answer_line(response, answer):
    match = re.compile(config("moe_base").task.answer_pattern, re.DOTALL).fullmatch(response)
    assert (match and match["answer"]) == answer


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sudoku"])
def test_prompts_can_be_filled(name):
    c = config(name)
    text = user_message(c.task, "1 + 1?", {})
    assert "1 + 1?" in text
    assert "{{" not in text
    for one in c.evaluation.sets:
        if one.prompt is not None:
            filled = one.prompt.format(question="1 + 1?", metadata={})
            assert filled.startswith("Solve the following math problem step by step.")
            assert "of the form Answer: $Answer (without quotes)" in filled
            assert filled.endswith('\n\nRemember to put your answer on its own line after "Answer:".')


@pytest.mark.parametrize(
    ("name", "model", "world"), [*((n, "Qwen3-30B-A3B", 32) for n in list(TABLE_1)[:3]), ("dense_base", "Qwen3-8B", 8)]
)
def test_layouts_fit_the_models(name, model, world):
    """Of the ranks the paper says nothing; a base model has its own model's shapes."""
    config(name).parallel.check_fits(resolve_hf_config(CONFIGS[model]), world)


def test_scripts_are_bash_and_python_and_name_every_experiment():
    named = set()
    for script in sorted((ROOT / "examples").glob("run_*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)
        subprocess.run([str(Path(sys.executable).with_name("shellcheck")), str(script)], check=True)
        compile(script.read_text(), str(script), "exec")
        named |= {name for name in MODELS if f'"{name}": "' in script.read_text()}
    assert named == set(MODELS)


@pytest.mark.parametrize("launcher", ["bash", "torchrun"])
def test_a_script_says_how_to_get_its_model(launcher, tmp_path):
    script = str(ROOT / "examples/run_qwen3_moe_dppo.sh")
    start = {
        "bash": ["bash", script],
        "torchrun": [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "1", script],
    }
    done = subprocess.run(
        start[launcher],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "MODEL_DIR": str(tmp_path),
             "HOME": str(tmp_path), "PET_MASTER_PORT": os.environ["PET_MASTER_PORT"], "NPROC": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == {"bash": 2, "torchrun": 1}[launcher]
    assert f"hf download Qwen/Qwen3-30B-A3B-Base --local-dir {tmp_path}" in done.stderr


def test_an_experiment_that_is_not_there(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "examples/run_gem_dppo.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "EXPERIMENT": "chess",
             "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "megatron-dppo: error: EXPERIMENT=chess is none of sudoku, arc_1d, acre"


def test_files_say_where_the_paper_is_silent():
    for path in PAPER.glob("*.yaml"):
        assert "silent" in path.read_text(), path
        assert yaml.safe_load(path.read_text())
