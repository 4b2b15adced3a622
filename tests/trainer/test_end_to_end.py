"""Whole runs on real parts: torchrun, Megatron-Core on two ranks, vLLM in a Ray actor, math-verify, W&B off line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.trainer.progress import clock

STEPS, HALF = 4, 2
ROOT = str(Path(__file__).resolve().parents[2])
CONFIG = """
run: {{dir: {run}, name: end to end, seed: 3}}
model: {{path: {model}}}
parallel: {{tensor: 2, expert: 2, sequence_parallel: true}}
actor: {{dtype: float32, max_tokens_per_microbatch: 512}}
optimizer: {{lr: 1.0e-3, schedule: linear, warmup_steps: 2, decay_steps: 10}}
rollout: {{max_prompt_tokens: 32, max_response_tokens: 8, dtype: float32, kv_cache_mib: 64, max_num_seqs: 64}}
task:
  kind: data
  data: {{path: {data}}}
  held_out_size: 16
  rewards:
    - {{kind: math-verify, timeout_s: 60}} # the machine may be busy with other tests
    - {{kind: format, pattern: ".*[0-9].*", weight: 0.5, name: digits}}
    - {{kind: overlong, buffer_tokens: 4, weight: 0.25}}
    - {{kind: python, path: "tests.tasks.rewards.functions:length", weight: 0.1, name: length}}
  reward_workers: 1
trainer: {{steps: {steps}, prompts_per_step: 8, samples_per_prompt: 4, prompts_per_mini_batch: 4}}
evaluation: {{every: 2, prompts: 8, samples: 2, sets: [{{name: small, data: {{path: {data}}}, samples: 1}}]}}
algorithm: {{preset: grpo-clip-higher, overrides: {{threshold_negative: 1.0e-4, threshold_positive: 1.0e-4}}}}
tracking: {{wandb: true, samples_every: 2, samples: 3, masked_tokens: 300}}
"""


def run(folder: Path, model: Path, *overrides: str) -> str:
    """Train by torchrun, as a user does; returns what was printed."""
    config = folder.with_suffix(".yaml")
    data = model / "sums.jsonl"
    sums = [{"problem": f"{i}+{i // 3}", "answer": i + i // 3} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in [*sums, sums[0]]))
    config.write_text(CONFIG.format(run=folder, model=model, steps=STEPS, data=data))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--no-python", str(Path(sys.executable).with_name("megatron-dppo")), "train", str(config), *overrides),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": ROOT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    write_checkpoint(folder, random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run(folder, model, f"trainer.checkpoint_every={HALF}")


@pytest.mark.slow
def test_every_part_did_its_work(whole):
    folder, printed = whole
    logged = rows(folder)
    trained = [row for row in logged if "optimizer/loss" in row]
    evaluated = [row["step"] for row in logged if "eval/accuracy" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert evaluated == [0, 2, 4]
    first = trained[0]
    assert first["parity/max_abs_logp_gap"] < 1e-3
    assert first["parity_without_replay/differing_tokens"] >= 0
    for row in trained:
        # Every token of a sequence but the last was routed by the engine, in each of the four layers.
        assert row["r3/replayed_routings"] == 4 * (row["data/tokens"] - 32)
        assert row["r3/gap_routings"] == 4 * 32
        assert row["optimizer/skipped_steps"] == 0
        assert row["data/trained_tokens"] == row["data/tokens"]
        of_training = row["data/trained_tokens"] / row["time/train_s"]
        assert row["throughput/trained_tokens_per_second"] == pytest.approx(of_training)
        assert row["reward/verifier_errors"] == 0
        parts = {name: row[f"reward/part/{name}"] for name in ("math-verify", "digits", "overlong", "length")}
        weighted = parts["math-verify"] + 0.5 * parts["digits"] + 0.25 * parts["overlong"] + 0.1 * parts["length"]
        assert row["reward/mean"] == pytest.approx(weighted, abs=1e-6)
        assert parts["length"] > 0
        assert 0 < row["policy/mean_abs_pi_mu"] < 0.01
        assert 0 < row["mismatch/mean_abs_pi_mu"] < 1e-5  # float32 on both sides, and no step since the rollout
    # Linear warm-up from 0 over two gradient steps, then decay to 0 at the tenth; two gradient steps a row.
    assert [row["optimizer/lr"] for row in trained] == pytest.approx([5e-4, 8.75e-4, 6.25e-4, 3.75e-4])
    assert "held-out accuracy" in printed
    assert "24 questions of 25 rows (layout math); left out: 1 duplicates" in printed
    assert "8 to train on, 16 held out" in printed
    assert "step 4: small avg@1" in printed
    assert (folder / "curves.png").stat().st_size > 10_000
    assert any((folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_every_metric_is_explained(whole):
    text = Path(ROOT, "docs/metrics.md").read_text()
    names = [name for line in text.splitlines() if line.startswith("|") for name in re.findall("`([^`]*)`", line)]
    known = re.compile("|".join(_pattern(name) for name in names if "/" in name))
    logged = {name for row in rows(whole[0]) for name in row} - {"step"}
    assert len(logged) > 70
    assert sorted(name for name in logged if not known.fullmatch(name)) == []


def _pattern(name: str) -> str:
    pattern = re.escape(name)
    holes = {
        r"NAME/\.\.\.": ".+",
        "NAME": ".+",
        "NN": r"\d+",
        "BAND": "(low|middle|high)",
        "@k": r"@\d+",
        "pQ": r"p[\d.]+",
        r"/\*": "/.+",
    }
    for hole, filled in holes.items():
        pattern = pattern.replace(hole, filled)
    return pattern


@pytest.mark.slow
def test_samples_blocked_tokens_and_wandb(whole):
    folder, _ = whole
    samples = rows(folder, "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert all(row["prompt"].endswith("<|assistant|>") and row["tokens"] > 0 for row in samples)
    assert all(set(row["parts"]) == {"math-verify", "digits", "overlong", "length"} for row in samples)
    assert all(row["untrained"] == [] and set(row["blocked"]) <= set(range(row["tokens"])) for row in samples)
    masked = rows(folder, "masked_tokens.jsonl")
    assert [row["step"] for row in masked] == [1, 2, 4]
    for row in masked:
        (trained,) = [other for other in rows(folder) if other["step"] == row["step"] and "policy/tokens" in other]
        blocked = sum(count for sign in ("positive", "negative") for _, count in row[sign])
        assert blocked == pytest.approx(trained["policy/masked_fraction"] * trained["policy/tokens"])
    (offline,) = (folder / "wandb").glob("offline-run-*")
    identity = (folder / "wandb_id.txt").read_text()
    assert identity in offline.name
    logged = next(offline.glob("*.wandb")).read_bytes()
    assert b"policy/mean_abs_pi_mu" in logged


@pytest.mark.slow
def test_the_trained_model_is_another_one_that_transformers_loads(whole, model):
    folder, _ = whole
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (model, folder / "hf")
        )
    assert torch.isfinite(after).all()
    assert 1e-4 < (after - before).abs().max() < 10


@pytest.mark.slow
def test_a_run_in_two_halves_is_the_same_run(whole, model, tmp_path):
    """Weights, moments, schedule, data order and request seeds all go on where they were when the run is taken back to
    the checkpoint in its middle, and made one step longer. An evaluation that the stop cut off is made up for."""
    halves = tmp_path / "halves"
    shutil.copytree(whole[0], halves)
    (halves / "checkpoints/latest").write_text(f"step_{HALF:08d}\n")
    kept = [row for row in rows(halves) if row["step"] != HALF or "time/eval_s" not in row]
    (halves / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    longer = (f"trainer.steps={STEPS + 1}", "trainer.export_hugging_face=false")
    printed = run(halves, model, "trainer.resume=true", *longer)
    assert f"going on after step {HALF}, saved in " in printed
    evaluated = {row["step"]: row["time/eval_s"] for row in rows(halves) if "time/eval_s" in row}
    assert sorted(evaluated) == [0, HALF, STEPS, STEPS + 1]
    took = clock(sum(seconds for step, seconds in evaluated.items() if step >= HALF))
    assert re.search(rf"of it eval *│ *│ *{took}", printed)
    expected = {row["step"]: row for row in rows(whole[0]) if "optimizer/loss" in row}
    resumed = {row["step"]: row for row in rows(halves) if "optimizer/loss" in row}
    assert list(resumed) == [*expected, STEPS + 1]
    for step, before in expected.items():
        assert (resumed[step]["time/step_s"] == before["time/step_s"]) == (step <= HALF), "made anew after the half"
        for name in ("optimizer/loss", "optimizer/grad_norm", "optimizer/lr", "reward/mean", "policy/entropy"):
            np.testing.assert_allclose(
                resumed[step][name], before[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} of step {step}"
            )
