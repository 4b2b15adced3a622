"""The doctor's memory line: what the planner says of a configuration on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config
from megatron_dppo.doctor.configuration import check_memory
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.planner.gpus import GIB, GPUS, gpu_of_device
from megatron_dppo.planner.run import planned_run
from tests.models.public_configs import CONFIGS

PAPER = Path(__file__).resolve().parents[2] / "examples/paper"
H100 = GPUS["h100-80g"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-30B-A3B"]))
    return tmp_path


def findings(model: Path, *overrides: str, ranks: int | None = 32, gpu: str | None = "h100-80g") -> list[str]:
    config = load_config(PAPER / "moe_base_r3.yaml", (f"model.path={model}", *overrides))
    planned = None if gpu is None else GPUS[gpu]
    return [str(one) for one in check_memory(config, load_hf_config(model), ranks=ranks, gpu=planned)]


def test_a_run_that_fits(model: Path) -> None:
    config = load_config(PAPER / "moe_base_r3.yaml", (f"model.path={model}",))
    plan = planned_run(config, load_hf_config(model), H100, 32).plan()
    (line,) = findings(model)
    assert line.startswith(f"ok: memory: the fullest rank needs {plan.on_gpu / GIB:.1f} of 79.6 GiB (weights ")
    assert f"optimizer {plan.fullest.optimizer / GIB:.1f}" in line
    assert line.endswith("on 32 ranks of h100-80g")


def test_a_run_that_barely_fits_is_a_warning(model: Path) -> None:
    (line,) = findings(model, ranks=8)
    assert line.startswith("warning: memory: the fullest rank needs ")
    assert ": 94% of a GPU; set " in line
    assert "GiB)" in line.rsplit(";", 1)[1]


def test_a_run_that_does_not_fit_is_an_error_with_the_fix(model: Path) -> None:
    wrong = ("actor.recompute=none", "actor.max_tokens_per_microbatch=65536")
    (line,) = findings(model, *wrong)
    assert line.startswith("error: memory: the fullest rank needs ")
    fix = line.rsplit("; set ", 1)[1].split(" (then")[0]
    (fixed,) = findings(model, *wrong, *fix.split())
    assert fixed.startswith(("ok: ", "warning: "))


def test_an_engine_that_does_not_fit_is_an_error(model: Path) -> None:
    (line,) = findings(model, "rollout.tensor_parallel=1", "rollout.gpu_memory_utilization=0.7")
    assert line.startswith("error: memory: a vLLM engine of 1 GPUs has no room beside the trainer")
    assert "; set rollout." in line


def test_the_fewest_ranks_are_assumed_and_said(model: Path) -> None:
    (line,) = findings(model, ranks=None)
    assert "on 8 ranks of h100-80g (see --ranks)" in line
    (line,) = findings(model, "parallel.expert=2", "parallel.tensor=2", "rollout.tensor_parallel=8", ranks=None)
    assert "on 8 ranks" in line, "a colocated engine's GPUs divide the ranks"


def test_more_ranks_than_the_fewest_may_be_enough(model: Path) -> None:
    """TP1 and EP1 are the fewest ranks where the optimizer state lies on one GPU, and 8 of them divide it."""
    small = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 6}
    (model / "config.json").write_text(json.dumps(small))
    alone = ("parallel.tensor=1", "parallel.sequence_parallel=false", "parallel.expert=1", "rollout.tensor_parallel=1")
    (line,) = findings(model, *alone, ranks=None)
    assert line.startswith("warning: memory: the fullest rank needs ")
    assert line.endswith("on 1 rank of h100-80g (see --ranks); 2 are enough; say how many it will run on with --ranks")
    (line,) = findings(model, *alone, ranks=1)
    assert line.startswith("error: memory: the fullest rank needs ")
    assert findings(model, *alone, ranks=2)[0].startswith(("ok: ", "warning: "))


def test_the_ranks_of_a_fleet_are_those_that_train(model: Path) -> None:
    (line,) = findings(model, "rollout.placement=fleet", "rollout.engines=8", ranks=32)
    assert line.startswith("ok: ")
    assert "on 32 ranks" in line


def test_impossible_engines_and_layouts(model: Path) -> None:
    (line,) = findings(model, "rollout.tensor_parallel=16")
    assert line.startswith("error: memory: rollout.placement=colocated: an engine of rollout.tensor_parallel=16 GPUs")
    for other in ("parallel.expert=3", "rollout.tensor_parallel=5"):
        assert findings(model, other) == [], "another check's"


def test_what_cannot_be_checked(model: Path) -> None:
    (line,) = findings(model, gpu=None)
    assert line == "ok: memory: not checked, there is no GPU here: name the one it is meant for with --gpu-kind"
    assert findings(model, "actor.dtype=float32", gpu=None) == []
    assert "not checked: the planner knows" in findings(model, "actor.dtype=float32")[0]


def test_an_unknown_gpu_has_its_own_memory(model: Path) -> None:
    config = load_config(PAPER / "moe_base_r3.yaml", (f"model.path={model}",))
    planned = gpu_of_device("NVIDIA L40S", 45 * GIB)
    (line,) = map(str, check_memory(config, load_hf_config(model), ranks=32, gpu=planned))
    assert "of 45.0 GiB" in line
    assert "of NVIDIA L40S" in line


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--ranks", "8", str(PAPER / "moe_base_r3.yaml"), f"model.path={model}"]
    command += [f"run.dir={model}/run", "actor.recompute=none"]
    assert main([*command, "--gpu-kind", "a100-80g"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if ": memory: " in line]
    assert line.startswith("error: memory: the fullest rank needs ")
    assert "of 79.1 GiB" in line
    assert main([*command, "--gpu-kind", "h1000"]) == 2
    assert "--gpu-kind h1000: not known; there are h100-80g" in capsys.readouterr().err
    assert main(["doctor", "--gpu-kind", "h100-80g"]) == 2
    assert "--gpu-kind: name a configuration as well" in capsys.readouterr().err
