"""The stability study: what runs, what goes on, what the picture and the table say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from examples.noisy_engine import perturbed
from examples.stability_study.study import BAD, LABELS, MISMATCH, PEERS, REWARD, Outcome, _main, options, report, table
from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix
from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.config.load import load_config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.start import open_engine
from megatron_dppo.trainer.history import History, Series
from tests.rollout.conftest import CONFIG as ENGINE
from tests.rollout.conftest import SAMPLING, requests
from tests.rollout.reference import compare_law, model_with, reference
from tests.tiny import tiny_qwen3_moe

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples/stability_study/stability_study.yaml"


def write_run(run: Path, rewards: np.ndarray, *, bad: float = 0.001, checkpoint: bool = False) -> None:
    run.mkdir(parents=True)
    rows = [
        {"step": i + 1, REWARD: float(r), MISMATCH: (1e-3 + bad) * (i + 1), BAD: bad} for i, r in enumerate(rewards)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if checkpoint:
        (run / "checkpoints/step_00000004").mkdir(parents=True)
        (run / "checkpoints/step_00000004/state.json").write_text("{}")


def test_shape_of_the_sanity_test() -> None:
    """Section 5 and Appendix D: 1,460 questions, 64 x 8, four gradient steps; a real mismatch of precision."""
    config = load_config(CONFIG)
    assert (config.task.train_size, config.trainer.prompts_per_step, config.trainer.samples_per_prompt) == (1460, 64, 8)
    assert config.trainer.prompts_per_step / config.trainer.prompts_per_mini_batch == 4
    assert (config.actor.dtype, config.rollout.dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize("algorithm", [*LABELS, *PEERS])
def test_every_algorithm_is_a_valid_configuration(algorithm: str, tmp_path: Path) -> None:
    chosen = options(tmp_path / "run", algorithm, 3).split()
    config = load_config(CONFIG, chosen)
    assert config.algorithm.preset == algorithm
    if algorithm in LABELS:
        assert config.algorithm.resolve().constants == ("section-5.3" if "mask" in algorithm else "appendix-d")


def test_where_a_run_stands(tmp_path: Path) -> None:
    def ask(run: str, steps: int) -> str:
        return options(tmp_path / run, "pg-is", steps)

    write_run(tmp_path / "a", np.ones(5), checkpoint=True)
    assert ask("a", 5) == "complete"
    assert ask("a", 9).endswith("trainer.resume=true")
    write_run(tmp_path / "b", np.ones(5))
    assert "resume" not in ask("b", 9)
    assert not (tmp_path / "b").exists()  # begun anew
    write_run(tmp_path / "c", np.ones(0))  # stopped before its first step
    assert "resume" not in ask("c", 9)
    with pytest.raises(UserError, match="ALGORITHMS: ppo is not in the study: pg-is"):
        options(tmp_path, "ppo", 5)


def test_the_plan_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "pg-is/seed-1", np.ones(5))
    assert _main(["plan", str(CONFIG), str(tmp_path), "0 1", "pg-is mask-0.5", "trainer.steps=5"]) == 0
    first = "algorithm.preset=pg-is algorithm.constants=appendix-d"
    second = "algorithm.preset=mask-0.5 algorithm.constants=section-5.3"
    assert capsys.readouterr().out.splitlines() == [
        f"0 pg-is {first}",
        f"0 mask-0.5 {second}",
        "1 pg-is complete",
        f"1 mask-0.5 {second}",
    ]
    assert _main(["plan", str(CONFIG), str(tmp_path), "0", ""]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == list(LABELS)
    with pytest.raises(UserError, match="SEEDS=a b: must be whole numbers"):
        _main(["plan", str(CONFIG), str(tmp_path), "a b", ""])


def test_collapse_is_told_from_learning(tmp_path: Path) -> None:
    steps = np.arange(1, 61)
    rising = np.linspace(0.4, 0.9, 60)
    fallen = np.where(steps < 40, rising, 0.05)

    def outcome(rewards: np.ndarray) -> Outcome:
        flat = Series(steps, np.full(60, 0.01))
        return Outcome.of(History({REWARD: Series(steps, rewards), MISMATCH: flat, BAD: flat}))

    assert not outcome(rising).collapsed
    assert outcome(rising).final_reward == pytest.approx(rising[-6:].mean())
    assert outcome(fallen).collapsed


def test_picture_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, algorithm in enumerate(LABELS):
        for seed in range(2):
            write_run(
                tmp_path / algorithm / f"seed-{seed}",
                np.linspace(0.3, 0.5 + 0.03 * number, 12 + seed),
                bad=0.001 * number,
            )
    assert report(tmp_path) == 0
    assert (tmp_path / "study.md").read_text() in capsys.readouterr().out
    image = np.asarray(Image.open(tmp_path / "study.png").convert("RGB")).astype(int)
    coloured = image.max(axis=2) - image.min(axis=2) > 40
    panels = [part for row in np.array_split(coloured, 3) for part in np.array_split(row, 2, axis=1)]
    assert min(panel.mean() for panel in panels) > 0.002
    rows = (tmp_path / "study.md").read_text().splitlines()
    assert len(rows) == 2 + len(LABELS)
    assert re.search(r"PG-IS \| 2 \| 12 to 13 \| 0\.500 \(0\.500 to 0\.500\)", rows[2])
    with pytest.raises(UserError, match="holds no run of the study"):
        report(tmp_path / "nothing")


def test_the_others_have_a_row_of_their_own(tmp_path: Path) -> None:
    """Figures that no run belongs to are left out: PG-IS is in two of the three."""
    for number, algorithm in enumerate([*PEERS, "pg-is"]):
        write_run(tmp_path / algorithm / "seed-0", np.linspace(0.3, 0.5 + 0.03 * number, 9), bad=0.001 * number)
        if number + 1 < len(PEERS):
            continue
        report(tmp_path)
        image = Image.open(tmp_path / "study.png").convert("RGB")
        assert image.size == (1500, 480 if algorithm != "pg-is" else 3 * 480)
        rows = np.asarray(image).astype(int)[-480:]
        assert (rows.max(axis=2) - rows.min(axis=2) > 40).mean() > 0.002
        assert len((tmp_path / "study.md").read_text().splitlines()) == 2 + number + 1


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    steps = np.arange(1, 4)
    one = History({name: Series(steps, np.ones(3)) for name in (REWARD, MISMATCH, BAD)})
    assert "| 1.000 |" in table({"pg-is": [one]})


def test_the_script_is_valid() -> None:
    script = ROOT / "examples/stability_study.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    subprocess.run([str(Path(sys.executable).with_name("shellcheck")), str(script)], check=True)
    named = set(script.read_text().replace("\n#", " ").split())
    assert {*LABELS, *PEERS} <= {word.rstrip(",()") for word in named}


TRAINING = """#!/usr/bin/env bash
# Stands for the trainer: a run of cispo takes three steps, the others fail before their first.
case "$*" in *torch.distributed.run*) ;; *) exec {python} "$@" ;; esac
for word in "$@"; do case $word in run.dir=*) folder=${{word#run.dir=}} ;; esac; done
echo "${{folder#{out}/}}" >> {out}/started
mkdir -p "$folder"
case $folder in *cispo*) ;; *) exit 1 ;; esac
for step in 1 2 3; do
  echo '{{"step": '$step', "reward/mean": 0.5, "policy/mean_abs_pi_mu": 0.1, "policy/bad_update_fraction": 0.0}}'
done > "$folder/metrics.jsonl"
"""


def test_a_run_that_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    out, python = tmp_path / "study", tmp_path / "python"
    out.mkdir()
    python.write_text(TRAINING.format(python=sys.executable, out=out))
    python.chmod(0o755)
    environment = os.environ | {"OUT": str(out), "SEEDS": "0 1", "ALGORITHMS": "pg-is cispo", "PYTHON": str(python)}
    environment |= {"MODEL_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "examples/stability_study.sh"), "trainer.steps=3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("see the reasons above: pg-is/seed-0 pg-is/seed-1")
    started = (out / "started").read_text().splitlines()
    assert started == ["pg-is/seed-0", "cispo/seed-0", "pg-is/seed-1", "cispo/seed-1"]
    (row,) = (line for line in (out / "study.md").read_text().splitlines() if "PG-TIS" in line)
    assert row.startswith("| PG-TIS (CISPO) | 2 | 3 |")


def test_a_wrong_override_is_refused_before_the_model_is_made(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path / "out"), "MODEL_DIR": str(tmp_path / "model")}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "examples/stability_study.sh"), "optimizer.lrr=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    reason = "megatron-dppo: error: unknown config key optimizer.lrr; did you mean optimizer.lr?"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, reason)
    assert not list(tmp_path.iterdir())


def test_noise_is_relative_repeatable_and_leans_one_way() -> None:
    weights = {"a": 3.0 * torch.randn(200, 50), "b": torch.ones(40, dtype=torch.bfloat16)}
    first, again, other = (
        {name: perturbed(name, tensor, noise=0.1, seed=seed) for name, tensor in weights.items()} for seed in (1, 1, 2)
    )
    assert torch.equal(first["a"], again["a"])
    assert not torch.equal(first["a"], other["a"])
    assert first["b"].dtype == torch.bfloat16
    assert (first["a"] - weights["a"]).std().item() == pytest.approx(0.3, rel=0.05)
    assert (first["b"].float() - 1).std().item() == pytest.approx(0.1, rel=0.4)


NOISY = f"{ROOT}/examples/noisy_engine.py:noise_100000_seed_3"


def test_the_noisy_engine_needs_bytes_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs rollout\.weight_transfer=object_store; set it"):
        open_engine(tmp_path, RolloutConfig(engine=NOISY))


def test_the_noisy_engine_has_every_weight_of_a_sync_with_its_noise(tmp_path: Path) -> None:
    """vLLM, given a trainer's buckets: it samples from transformers' law of weights with the noise on them."""
    start, trained = tmp_path / "start", tmp_path / "trained"
    for seed, folder in enumerate((start, trained)):
        tiny_qwen3_moe(folder, seed=seed)
    weights = {name: tensor for file in trained.glob("*.safetensors") for name, tensor in load_file(file).items()}
    with closing(
        open_engine(start, ENGINE.model_copy(update={"engine": NOISY, "weight_transfer": "object_store"}))
    ) as engine:
        engine.begin_update(7)
        for bucket in trainers_buckets(weights):
            engine.receive_bucket(7, bucket)
        engine.end_update(7, {})
        batch = engine.generate(requests(16, "noisy"), SAMPLING, training=True)
    noisy = {name: perturbed(name, tensor, noise=0.1, seed=3) for name, tensor in weights.items()}
    assert compare_law(batch, reference(model_with(trained, noisy, tmp_path / "noisy"), batch)) <= 1e-4


def trainers_buckets(weights: dict[str, torch.Tensor]) -> Iterator[Bucket]:
    """As one rank packs them, experts of a layer stacked; from Ray's object store their bytes cannot be written."""
    whole = {name: tuple((0, size) for size in tensor.shape) for name, tensor in weights.items()}
    buckets = WeightBuckets(
        [(name, tuple(weights[name].shape), weights[name].dtype) for name in by_matrix(weights)],
        {name: [Source(0, block)] for name, block in whole.items()},
        {(name, block): partial(torch.Tensor.view, weights[name], -1) for name, block in whole.items()},
        rank=0,
        bucket_bytes=100_000,
    )
    assert any(slot.experts for layout in buckets.layouts for slot in layout.slots)
    for index, layout in enumerate(buckets.layouts):
        payload = np.empty(layout.size, dtype=np.uint8)
        buckets.write(index, torch.from_numpy(payload))
        payload.flags.writeable = False
        yield Bucket(layout.slots, payload)
