"""The example is one file that bash and torchrun's Python both run; what they are given arrives."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_dppo.config.load import load_config
from megatron_dppo.errors import SystemFault, UserError
from megatron_dppo.launch.example import MadeOnce, coin
from tests.system_faults import failing

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/run_tiny_moe_dppo.sh"
BIN = Path(sys.executable).parent
SOURCES = shutil.ignore_patterns("__pycache__")
"""What Python compiles, other tests write there meanwhile."""

# Stands in for the training command only: prints what it was called with, but for --check.
ECHO_COMMAND = """
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status


def main(argv: Sequence[str]) -> int:
    if "--check" in argv:
        return exit_status(lambda: refuse("wrong.key=1", argv))
    print(f"rank {os.environ.get('RANK')}: {list(argv)}\\n", end="", flush=True)  # one write: two ranks speak
    if "wait=1" in argv:
        time.sleep(100)
    if "lost=1" in argv and "trainer.resume=true" not in argv:
        folder = [one.partition("=")[2] for one in argv if one.startswith("run.dir=")][-1]
        state = pathlib.Path(folder, "checkpoints/step_00000003")
        if os.environ["RANK"] == "0":
            state.mkdir(parents=True)
            time.sleep(100)
        while not state.exists():  # rank 0 has said what it was called with
            time.sleep(0.01)
        (state / "state.json").touch()
        os.kill(os.getpid(), 9)
    return refuse("late=1", argv)


def refuse(word: str, argv: Sequence[str]) -> int:
    if word in argv:
        raise UserError(f"{word} is refused")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
MAKE_MODEL = """
import pathlib, sys
out = pathlib.Path(sys.argv[1])
out.mkdir()
(out / "made").write_text(" ".join(sys.argv[2:]))
print("making the model", flush=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the launcher and the examples, with a training command and a model maker that only echo."""
    for folder in ("examples", "megatron_dppo/launch"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=SOURCES)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ROOT / "megatron_dppo" / name, tmp_path / "megatron_dppo" / name)
    (tmp_path / "megatron_dppo/cli.py").write_text(ECHO_COMMAND)
    (tmp_path / "examples/tiny_moe_dppo/make_model.py").write_text(MAKE_MODEL)
    return tmp_path


def run(command: list[str], project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=project, env=environment | variables, capture_output=True, text=True, timeout=300, check=False
    )


def test_is_valid_bash_and_valid_python() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLE)], check=True)
    subprocess.run([str(BIN / "shellcheck"), str(EXAMPLE)], check=True)
    documentation = ast.get_docstring(ast.parse(EXAMPLE.read_text()))
    assert documentation is not None
    for variable in ("SEED", "MODEL_DIR", "RUN_DIR", "NPROC", "PYTHON"):
        assert f"#   {variable} " in documentation


def test_its_configuration_is_valid() -> None:
    config = load_config(ROOT / "examples/tiny_moe_dppo/tiny_moe_dppo.yaml", ["trainer.steps=3"])
    assert config.trainer.steps == 3
    assert config.parallel.tensor * config.parallel.expert == 4  # TP2 x EP2 on the two ranks of the script


def test_bash_makes_the_model_once_and_passes_arguments_to_every_rank(project: Path) -> None:
    script = str(project / "examples/run_tiny_moe_dppo.sh")
    result = run(["bash", script, "trainer.steps=3", "run.name=a b"], project, SEED="7", RUN_DIR="here", NPROC="1")
    assert result.returncode == 0, result.stderr
    model = project / "runs/tiny_moe_model/seed-7"
    assert result.stdout.splitlines() == [
        "making the model",
        f"rank 0: ['train', '{project}/examples/tiny_moe_dppo/tiny_moe_dppo.yaml', 'model.path={model}', "
        f"'run.dir={project}/here', 'run.seed=7', 'trainer.steps=3', 'run.name=a b']",  # config.yaml is read anywhere
    ]
    assert (model / "made").read_text() == "--seed 7 --family qwen3_moe"
    result = run(["bash", script, "--family", "olmoe", "trainer.steps=3"], project, RUN_DIR="here", NPROC="1")
    model = project / "runs/tiny_moe_model/olmoe-0"
    assert f"'model.path={model}', 'run.dir={project}/here', 'run.seed=0', 'trainer.steps=3']" in result.stdout
    assert (model / "made").read_text() == "--seed 0 --family olmoe"


def test_torchrun_runs_the_file_to_the_letter_and_its_summary_ends_with_the_reason(project: Path) -> None:
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "examples/run_tiny_moe_dppo.sh", "late=1"]
    result = run(command, project, MODEL_DIR=str(project / "model"))
    making, *ranks = sorted(result.stdout.splitlines())
    assert making == "making the model"
    assert {line[:7] for line in ranks} <= {
        "rank 0:",
        "rank 1:",
    }  # the first to fail may end the other before it speaks
    assert len({line[7:] for line in ranks}) == 1  # the same run folder, too
    assert "'late=1'" in ranks[0]
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "megatron-dppo: error: late=1 is refused"


def test_under_a_torchrun_without_options_the_reason_is_the_last_line_too(project: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "examples/run_tiny_moe_dppo.sh", "wrong.key=1"]
    result = run(torchrun, project, MODEL_DIR=str(project / "model"))
    reason = "megatron-dppo: error: wrong.key=1 is refused"
    assert (result.returncode, result.stdout) == (1, "")
    assert not (project / "model").exists()
    lines = result.stderr.splitlines()
    assert lines[-1] == reason
    assert any(line.strip() == f"traceback : {reason}" for line in lines)


@pytest.mark.parametrize("start", ["torchrun", "bash"])
def test_the_line_to_go_on_names_the_folder_that_was_trained_in(start: str, project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("RUN_DIR", None)
    process = subprocess.Popen(
        [str(BIN / "torchrun") if start == "torchrun" else "bash", "examples/run_tiny_moe_dppo.sh", "wait=1"],
        cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    trained = ""
    while not trained:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        trained = line.partition("'run.dir=")[2].partition("'")[0]
    time.sleep(1.0 if start == "torchrun" else 0.0)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=300)
    (line,) = [line for line in errors.splitlines() if "To go on from the last checkpoint" in line]
    assert f" RUN_DIR={trained} bash " in line


@pytest.mark.parametrize("how", ["RUN_DIR", "run.dir"])
def test_lost_ranks_are_started_again_from_the_newest_state(how: str, project: Path) -> None:
    """The folder is that in which the ranks train, whoever named it."""
    folder = project / "mine"
    override = [] if how == "RUN_DIR" else [f"run.dir={folder}"]
    named = folder if how == "RUN_DIR" else project / "other"
    result = run(["bash", "examples/run_tiny_moe_dppo.sh", "lost=1", *override], project, RUN_DIR=str(named))
    assert result.returncode == 0, result.stderr
    assert "rank 1 ended with SIGKILL (out of memory, or killed by hand)\n" in result.stderr
    assert "megatron-dppo: restart 1 of 3 from the state after step 3\n" in result.stderr
    first, second = (line for line in result.stdout.splitlines() if line.startswith("rank 0"))
    assert "trainer.resume=true" not in first
    assert second == first.replace("]", ", 'trainer.resume=true']")
    assert len((folder / "restarts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("wrong", ["NPROC=two", "NPROC=0", "NPROC=-1", "MAX_RESTARTS=often"])
def test_a_wrong_number_of_ranks_or_restarts_is_one_clear_line(project: Path, wrong: str) -> None:
    name, _, number = wrong.partition("=")
    result = run(["bash", "examples/run_tiny_moe_dppo.sh"], project, **{name: number})
    assert (result.returncode, result.stdout) == (2, "")
    end = "the number of ranks, 1 or more" if name == "NPROC" else "a whole number; 0 never starts lost ranks again"
    assert result.stderr == f"megatron-dppo: error: {wrong}: must be {end}\n"


@pytest.mark.parametrize("word", ["--family", "--foo", "trainer.steps"])
def test_a_word_that_says_nothing_is_refused_before_a_model_is_made(project: Path, word: str) -> None:
    result = run(["bash", "examples/run_tiny_moe_dppo.sh", "a.b=c", word], project, MODEL_DIR=str(project / "model"))
    assert result.returncode == 2
    assert f"megatron-dppo: error: {word}: not an option of " in result.stderr.splitlines()[-1]
    assert not (project / "model").exists()


@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}])
@pytest.mark.parametrize("name", ["tiny_moe", "agent"])
def test_a_wrong_configuration_is_refused_before_a_model_is_made(
    project: Path, name: str, rank: dict[str, str]
) -> None:
    script = [sys.executable, f"examples/run_{name}_dppo.sh", "wrong.key=1"]
    result = run(script, project, MODEL_DIR=str(project / "model"), **rank)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "megatron-dppo: error: wrong.key=1 is refused\n"
    assert not (project / "model").exists()


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, SystemFault), (errno.EROFS, UserError)])
def test_a_model_that_cannot_be_written_is_the_users_fault_or_the_systems(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", failing(number))
    with pytest.raises(kind, match=f"^cannot write {tmp_path}/m: {os.strerror(number)}; choose another folder$"):
        MadeOnce(tmp_path / "m", ["-c", ""]).ensure()


def test_a_model_maker_that_fails_leaves_nothing_behind(project: Path) -> None:
    (project / "examples/tiny_moe_dppo/make_model.py").write_text(MAKE_MODEL + "sys.exit('no memory')\n")
    result = run(["bash", "examples/run_tiny_moe_dppo.sh"], project, MODEL_DIR=str(project / "model"))
    assert result.returncode == 2
    assert "megatron-dppo: error: making" in result.stderr.splitlines()[-1]
    assert not (project / "model").exists()


def test_a_trial_without_a_download_takes_the_ranks_it_finds(project: Path) -> None:
    """A torchrun without options starts one rank, which starts one per GPU (here NPROC); sizes fit their number."""
    (project / "examples/paper/make_shapes.py").write_text(MAKE_MODEL)
    script = ["examples/run_qwen3_moe_dppo.sh", "--random-weights", "--layers", "2", "trainer.steps=9"]
    result = run([str(BIN / "torchrun"), *script], project, NPROC="2", MODEL_DIR=str(project / "model"))
    assert result.returncode == 0, result.stderr
    assert (project / "model/made").read_text() == "--layers 2"
    (rank,) = [line for line in result.stdout.splitlines() if line.startswith("rank 0")]
    assert rank.endswith("'trainer.steps=9']")  # what was asked for has the last word
    for setting in ("model.random_weights=true", "task.kind=reasoning-gym", "parallel.tensor=2", "parallel.expert=2"):
        assert f"'{setting}'" in rank
    # A process that had a vLLM engine has this variable, and says nothing of nodes by it.
    refused = run(["bash", "examples/run_qwen3_moe_dppo.sh", "--layers", "2"], project, LOCAL_WORLD_SIZE="2")
    assert refused.returncode == 2
    assert "--layers goes with --random-weights" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("launcher", ["bash", str(BIN / "torchrun")])
def test_an_experiment_for_gpus_says_at_once_that_there_is_none(launcher: str, project: Path) -> None:
    model = project / "model"
    script = [launcher, "examples/run_qwen3_moe_dppo.sh", "--random-weights", "--layers", "2"]
    refused = run(script, project, MODEL_DIR=str(model))
    assert refused.returncode
    assert "megatron-dppo: error: no GPU is seen here" in refused.stderr.splitlines()[-1]
    assert not model.exists()


def test_ranks_of_several_nodes_are_told_to_name_one_folder(project: Path) -> None:
    script = [sys.executable, "examples/run_qwen3_moe_dppo.sh"]
    rank = {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    refused = run(script, project, **rank)
    assert refused.returncode == 2
    assert refused.stderr.startswith("megatron-dppo: error: RUN_DIR is not set")
    (project / "model").mkdir()
    (project / "model/config.json").touch()
    assert run(script, project, **rank, RUN_DIR="here", MODEL_DIR="model").returncode == 0


def test_what_an_image_holds_makes_the_models(tmp_path: Path) -> None:
    """An image has the installed package and `examples`: neither the tests nor the tools."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=SOURCES)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/megatron_dppo").symlink_to(ROOT / "megatron_dppo")
    for script, options, layers in (("tiny_moe_dppo/make_model.py", ["--random"], 4), ("paper/make_shapes.py", [], 48)):
        out = tmp_path / Path(script).stem
        command = [sys.executable, str(tmp_path / "examples" / script), str(out), *options]
        done = subprocess.run(
            command,
            cwd="/",
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        config = json.loads((out / "config.json").read_text())
        assert (config["model_type"], config["num_hidden_layers"]) == ("qwen3_moe", layers)


def test_rewards_of_random_weights_differ_within_a_group() -> None:
    """So that all of a step is computed: of the LM head's rows those without a gradient are left out."""
    rewards = [coin(response="", question="", metadata={}) for _ in range(64)]
    assert {0.0, 1.0} == set(rewards)
