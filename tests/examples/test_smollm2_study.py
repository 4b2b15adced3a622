"""The study of SmolLM2: which runs, what is left of them, what they show; and the supervised phase before it."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from examples.smollm2 import lane, make_model, plan, report, study, supervised
from examples.smollm2.share import GpuShare
from megatron_dppo.trainer.history import History, Series
from tests.examples.test_smollm2 import tiny_llama


def chosen(out: Path, **changed: object) -> argparse.Namespace:
    known = {
        "out": out,
        "seeds": [0, 1],
        "algorithms": ["dppo-binary-tv", "pg-is"],
        "rates": [1e-5, 2e-5],
        "staleness": [0, 4],
        "noise": [0.0, 0.01],
        "rate": 2e-5,
        "parted": None,
        "overrides": ("trainer.steps=7",),
    }
    return argparse.Namespace(**(known | changed))


def test_runs_are_named_by_what_varies(tmp_path: Path) -> None:
    rates = list(plan.of_experiment("rates", 1, chosen(tmp_path)))
    assert [one.folder for one in rates] == [
        f"rates/{algorithm}/{rate}/seed-1" for algorithm in ("dppo-binary-tv", "pg-is") for rate in ("1e-05", "2e-05")
    ]
    assert "optimizer.lr=2e-05" in rates[1].overrides
    assert rates[1].seed == 1
    assert rates[0].overrides[-1] == "trainer.steps=7", "the last word counts"
    fresh, old = list(plan.of_experiment("staleness", 0, chosen(tmp_path)))[:2]
    assert fresh.folder == "rates/dppo-binary-tv/2e-05/seed-0", "the same run as of the rates"
    assert not any("schedule" in override for override in fresh.overrides)
    assert "rollout.max_staleness=4" in old.overrides
    with pytest.raises(plan.UserError, match="--parted"):
        list(plan.of_experiment("replay", 0, chosen(tmp_path)))
    tiny_llama().config.save_pretrained(tmp_path)
    with pytest.raises(plan.UserError, match=f"--parted: {tmp_path} is no mixture of experts; make the mixture"):
        list(plan.of_experiment("replay", 0, chosen(tmp_path, parted=tmp_path)))
    make_model.upcycle(tiny_llama(), 4, 2).config.save_pretrained(tmp_path)
    r3, live = plan.of_experiment("replay", 0, chosen(tmp_path, parted=tmp_path))
    assert (r3.model, r3.experts) == (tmp_path, 8)
    assert set(live.overrides) - set(r3.overrides) == {"run.name=live", "actor.router_replay=none"}


def logged(out: Path, folder: str, rewards: list[float], stale: int = 0) -> None:
    """As the trainer writes it: the first policy answers until the window is full, and the mismatch is measured where
    no answer is old."""
    run = out / folder
    run.mkdir(parents=True)
    rows = [
        {"step": i + 1, "reward/mean": r, "rollout/staleness_mean": min(i, stale), "policy/masked_fraction": 0.02}
        | {"policy/mean_abs_pi_mu": (i + 1) / 100, "policy/abs_prob_diff_max": (i + 1) / 10}
        | ({} if min(i, stale) else {"mismatch/mean_abs_pi_mu": 0.0073})
        for i, r in enumerate(rewards)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_complete_by_the_steps_of_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 without a GPU, where `smollm2.yaml` says 50. One that is not complete begins anew when it is started."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    share = GpuShare(tmp_path / "gib", 9)
    job = plan.Job("learn/dense/seed-0", 0, (), 9, model=tmp_path / "none")
    logged(tmp_path, job.folder, [0.1] * 20)
    metrics = tmp_path / job.folder / "metrics.jsonl"
    assert lane.run_lane([job], tmp_path, time.monotonic() + 600, share) == 0
    assert metrics.exists()
    longer = replace(job, overrides=("trainer.steps=21",))
    assert lane.run_lane([longer], tmp_path, time.monotonic(), share) == 0, "time is over"
    assert metrics.exists()
    until, log = time.monotonic() + 600, tmp_path / f"{job.folder}.log"
    assert lane.run_lane([longer], tmp_path, until, share) == 1, "there is no model"
    assert not metrics.exists()
    tried = log.stat().st_size
    assert lane.run_lane([longer], tmp_path, until, share) == 1
    assert log.stat().st_size == tried, "tried again by another lane"
    assert lane.run_lane([longer], tmp_path, until + 1, share) == 1
    assert log.stat().st_size > tried, "the study was started again"


@pytest.mark.parametrize(
    ("name", "message"),
    [("PACKAGE", "PACKAGE=absent: no such file; name the wheel"), ("TASK", "TASK=absent is none of the tasks")],
)
def test_what_variables_name_is_looked_for_before_lanes_start(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "absent")
    assert study.main([str(tmp_path / "o"), "learn", "--seeds", "4294967295"]) == 2  # nobody has its mixture
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def held(file: Path, gib: int) -> subprocess.Popen[str]:
    """Another process that has `gib` of 10 GiB, until it is killed."""
    script = (
        "from pathlib import Path; from examples.smollm2.share import GpuShare; "
        f"share = GpuShare(Path({str(file)!r}), 10); print(share.take({gib}, 1e12), flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        **pipes,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    return other


def test_lanes_take_no_more_of_a_gpu_than_there_is(tmp_path: Path) -> None:
    share = GpuShare(tmp_path / "lanes/0.gib", 10)
    with held(tmp_path / "lanes/0.gib", 6) as other:
        try:
            assert share.take(4, 0.0)
            assert not share.take(5, 0.0)
            assert share.held == 0
            assert not share.take(99, 0.0), "more than there is: alone"
        finally:
            other.kill()
    assert share.take(99, time.monotonic() + 60), "the system gave back what the other one had"
    assert share.fits(99)
    assert share.take(3, 0.0)


def test_a_run_that_has_no_room_in_one_lane_is_left_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lane has the room already: the system would not give it to this one for as long as it has runs."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    job = plan.Job("replay/r3/seed-0", 0, (), 5, model=tmp_path / "none")
    log, taken, until = tmp_path / f"{job.folder}.log", threading.Event(), time.monotonic() + 30

    def other_lane() -> None:
        while not log.exists():
            time.sleep(0.05)
        with open(tmp_path / f"{job.folder}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken.set()
            done.wait()

    done, other = threading.Event(), threading.Thread(target=other_lane)
    with held(tmp_path / "gib", 6) as holder:
        other.start()
        try:
            assert lane.run_lane([job], tmp_path, until, GpuShare(tmp_path / "gib", 10)) == 0
            assert taken.is_set()
            assert time.monotonic() < until, "waited for room until the time was over"
        finally:
            done.set()
            other.join()
            holder.kill()


def test_a_lane_that_is_killed_starts_again_and_nothing_failed(tmp_path: Path) -> None:
    for arm in ("r3", "live"):
        logged(tmp_path, f"replay/{arm}/seed-0", [0.1] * 30)
    make_model.upcycle(tiny_llama(), 4, 2).config.save_pretrained(tmp_path)
    options = ["--parted", str(tmp_path), "--seeds", "0", "--lanes", "1"]
    command = [sys.executable, str(Path(plan.__file__).with_name("study.py")), str(tmp_path), "replay", *options]
    study = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (lanes := psutil.Process(study.pid).children()):
        time.sleep(0.05)
    lanes[0].kill()
    said, _ = study.communicate(timeout=300)
    assert "lane 0 ended with status -9" in said
    assert study.returncode == 0


def test_the_largest_value_that_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = {
        "dppo-binary-tv": {"1e-05": (0.4, 0.5), "2e-05": (0.5, 0.3), "4e-05": (0.2, 0.2)},
        "pg-is": {"1e-05": (0.2, 0.4), "2e-05": (0.0, 0.0), "4e-05": (0.0, 0.0)},
    }
    for algorithm, rates in ends.items():
        for rate, by_seed in rates.items():
            for seed, end in enumerate(by_seed):
                logged(tmp_path, f"rates/{algorithm}/{rate}/seed-{seed}", [0.1, end])
    begun = tmp_path / "rates/cispo/1e-05/seed-0/metrics.jsonl"
    begun.parent.mkdir(parents=True)
    begun.touch()
    assert report.report(tmp_path) == 0
    # The best gains 0.4: a run learns from 0.1 + 0.2 on.
    printed = capsys.readouterr().out
    assert "| DPPO-Binary-TV | 2e-05, 2e-05 |" in printed
    assert "| PG-IS | none, 1e-05 |" in printed
    assert "| DPPO-Binary-TV 2e-05 | 2 | 2 | 0.100 (0.100 to 0.100) | 0.400 (0.300 to 0.500) |" in printed
    assert (tmp_path / "study.png").stat().st_size > 10_000
    with pytest.raises(report.UserError, match="holds no run"):
        report.report(tmp_path / "none")


def test_stale_answers_are_compared_by_the_policy_that_gave_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps old, ten steps show the policy after 0, 0, 0, 1 ... 7 steps; all arms have those after 6 and 7.
    Answers that are not old are the runs of the rate."""
    for folder, gain, stale in (
        ("staleness/pg-is/2", 0.01, 2),
        ("rates/pg-is/2e-05", 0.1, 0),
        ("rates/pg-is/4e-05", 9, 0),
    ):
        logged(tmp_path, f"{folder}/seed-2", [gain * i for i in range(10)], stale)
    with pytest.raises(report.UserError, match=r"config\.yaml"):
        report.report(tmp_path)
    (tmp_path / "staleness/pg-is/2/seed-2/config.yaml").write_text("optimizer: {lr: 2.0e-5}\n")
    report.report(tmp_path)
    stale = capsys.readouterr().out.partition("## staleness")[2]
    assert "of the policy after 7 steps" in stale
    assert "| PG-IS 0 | 1 | 10 | 0.000 | 0.650 | 7.3e-03 | 9.5e-02 | 1.00 | 2.00% |" in stale
    assert "| PG-IS 2 | 1 | 10 | 0.000 | 0.085 | - | 9.5e-02 | 1.00 | 2.00% |" in stale, (
        "the mismatch of the first step"
    )
    assert stale.count("| PG-IS ") == 3, "a run of another rate"
    assert (tmp_path / "staleness.png").stat().st_size > 10_000
    logged(tmp_path, "staleness/pg-is/2/seed-3", [0.3], 2)
    (tmp_path / "staleness/pg-is/2/seed-3/metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.3}\n')
    with pytest.raises(report.UserError, match=r"seed-3/metrics\.jsonl: rollout/staleness_mean is not a number"):
        report.report(tmp_path)


def test_runs_that_ended_early_are_compared_over_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shortest that counts made 8 of 10 steps: ends are means over steps 7 and 8 of all runs. Seven are too few."""
    for folder, steps in (("pg-is/0/seed-0", 10), ("pg-is/0/seed-1", 8), ("cispo/0/seed-0", 10)):
        logged(tmp_path, f"noise/{folder}", [0.1 * i for i in range(steps)])
    for folder, steps in (("pg-is/0/seed-2", 7), ("cispo/0.01/seed-0", 1)):
        logged(tmp_path, f"noise/{folder}", [0.9] * steps)
    report.report(tmp_path)
    printed = capsys.readouterr().out
    assert "of the policy after 7 steps" in printed
    end = "0.650 | 7.3e-03 | 7.5e-02 | 0.80 | 2.00% |"
    assert f"| PG-TIS (CISPO) 0 | 1 | 10 | 0.000 | {end}" in printed
    row = next(line for line in printed.splitlines() if line.startswith("| PG-IS 0 "))
    assert row.split(" | ")[1:5] == ["2", "8 to 10", "0.000 (0.000 to 0.000)", "0.650 (0.650 to 0.650)"]
    assert "| PG-IS | 0, 0 |" in printed
    assert "Left out, since they ended early: pg-is/0/seed-2 after 7, cispo/0.01/seed-0 after 1.\n" in printed


def test_held_out_accuracy_stands_beside_the_mismatch_of_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, after in enumerate((0.5, 0.7)):
        logged(tmp_path, f"replay/r3/seed-{seed}", [0.1, 0.2])
        with open(tmp_path / f"replay/r3/seed-{seed}/metrics.jsonl", "a") as metrics:
            for step, accuracy in ((0, 0.1), (2, after)):
                row = {"step": step, "eval/accuracy": accuracy, "eval/well_formed": 1.0, "time/step_s": 30.0}
                metrics.write(json.dumps(row | {"time/eval_s": 30.0}) + "\n")
    logged(tmp_path, "replay/live/seed-0", [0.1, 0.2])  # with evaluation.every=0
    report.report(tmp_path)
    printed = capsys.readouterr().out
    assert "| live | 1 | 2 | - | - | - | - | 0.0 |" in printed
    assert "| r3  | 2 | 2 | 0.100 (0.100 to 0.100) | 0.200 (0.200 to 0.200) | 7.3e-03 " in printed
    assert "| r3 | 2 | 2 | 0.100 (0.100 to 0.100) | 0.600 (0.500 to 0.700) | 1.000 " in printed
    assert (tmp_path / "replay.png").stat().st_size > 10_000


def test_the_mean_age_of_a_steps_answers_is_rounded() -> None:
    steps, ages = np.arange(1, 7), np.array([0, 1, 2, 2.38, 3.51, 4])
    history = History({report.REWARD: Series(steps, steps / 10), report.STALENESS: Series(steps, ages)})
    assert report.by_policy(history).steps.tolist() == [0, 0, 0, 1, 0, 1]


def test_working_is_right_or_slips() -> None:
    draw = random.Random(0)
    assert supervised.worked("27 - 4 + 13", 0.0, draw) == "27 - 4 = 23, 23 + 13 = 36. The answer is 36."
    assert supervised.worked("15 - 43 - 75", 0.0, draw).endswith("The answer is -103.")
    slipped = supervised.worked("27 - 4 + 13", 1.0, draw)
    assert slipped != "27 - 4 = 23, 23 + 13 = 36. The answer is 36."
    first = slipped.split(", ")[0].split(" = ")[1]
    assert f", {first} + 13 = " in slipped, "what follows goes on from it"


def test_experts_part_and_then_routes_matter() -> None:
    mixture = make_model.upcycle(tiny_llama(), 4, 2, router_std=0.5, seed=1)
    ids = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(0))
    assert max(supervised.distances(mixture)) == 0
    assert supervised.route_gaps(mixture, ids).max() < 1e-4, "equal experts: any route is the same"
    solved = [([5, i % 7, 9], [i % 7 + 20, i % 5 + 30, 2]) for i in range(64)]
    supervised.teach(mixture, solved, steps=12, lr=1e-2, seed=0)
    assert min(supervised.distances(mixture)) > 0.01
    before = mixture.model.layers[0].mlp.gate.weight.detach().clone()
    assert supervised.route_gaps(mixture, ids).mean() > 1e-3
    assert torch.equal(before, mixture.model.layers[0].mlp.gate.weight), "routers are put back"
