"""Words of a command line may stand before and behind its options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.cli import _parse, main
from tests.tiny import make_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("evaluate M q=q.jsonl -o OUT rollout.x=1", {"data": ["q=q.jsonl", "rollout.x=1"], "out": Path("OUT")}),
        ("evaluate -o OUT M q.jsonl", {"data": ["q.jsonl"], "model": Path("M")}),
        ("evaluate M -o OUT q.jsonl seed=1 --config C", {"data": ["q.jsonl", "seed=1"], "config": Path("C")}),
        ("doctor C --ranks 1 a.b=c", {"config": Path("C"), "overrides": ["a.b=c"], "ranks": 1}),
        ("doctor --ranks 1 C a.b=c", {"config": Path("C"), "overrides": ["a.b=c"], "ranks": 1}),
        ("doctor C a.b=c --gpu d=e --strict f=g", {"config": Path("C"), "overrides": ["a.b=c", "d=e", "f=g"]}),
        ("plan --gpus 8 M", {"model": ["M"], "gpus": 8}),
        ("plan --config R a.b=c --gpus 8 d.e=f", {"model": ["a.b=c", "d.e=f"], "config": Path("R")}),
        ("train C a.b=c", {"config": Path("C"), "overrides": ["a.b=c"]}),
    ],
)
def test_words_on_both_sides_of_an_option(line, found):
    arguments = vars(_parse(line.split()))
    assert {name: arguments[name] for name in found} == found


@pytest.mark.parametrize("line", ["doctor C --rank1 1", "plot a --no-such", "evaluate M q.jsonl -o OUT --x=1 a.b=c"])
def test_an_option_that_does_not_exist_is_refused(line, capsys):
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: megatron-dppo ")
    assert "\nmegatron-dppo: error: unrecognized arguments: --" in said


def test_a_rank_hands_what_is_wrong_with_its_words_to_its_launcher(tmp_path):
    rank = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, "-m", "megatron_dppo.cli", "train"]
    assert subprocess.run(command, env=rank, capture_output=True, timeout=300, check=False).returncode == 2
    assert "error: the following arguments are required: config" in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize(("program", "late"), [("megatron_dppo.cli", "numpy"), ("megatron_dppo.launch", "torch")])
def test_ctrl_c_while_it_is_loaded_is_one_line(program, late, tmp_path):
    """What takes time to import begins after the program can say how it ended."""
    (tmp_path / f"{late}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", program, "--version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "megatron-dppo: stopped by SIGINT\n")


def test_a_start_says_nothing_that_no_user_can_act_on() -> None:
    code = """
import importlib, inspect, logging, sys, warnings
from megatron_dppo.launch.imports import _NOBODYS, ignore_warnings_of_libraries
ignore_warnings_of_libraries()
for name, start in _NOBODYS.items():
    assert start in inspect.getsource(importlib.import_module(name)), name
    logger = logging.getLogger(name)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.warning(start + " and so on")
    logger.warning("of use")
for said in "Detected a Jax installation but", "another":
    warnings.warn_explicit(said, RuntimeWarning, "__init__.py", 59, module="transformer_engine")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["of use"] * 3
    assert "No CUDA runtime" not in result.stderr
    assert "RuntimeWarning: another" in result.stderr
    assert "Jax" not in result.stderr


@pytest.mark.parametrize("line", ["doctor", "plan MODEL --gpus 8", "plan MODEL --gpus 8 --json"])
def test_output_that_nobody_reads_any_more_is_no_traceback(line, tmp_path):
    """As by `| head`."""
    make_config("qwen3_moe").save_pretrained(tmp_path)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megatron_dppo.cli", *line.replace("MODEL", str(tmp_path)).split()]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write)
    said = ended.stderr.splitlines()[-1]
    assert (ended.returncode, said[:56]) == (1, "megatron-dppo: failed: nobody reads its output any more:")
    assert "Traceback" not in ended.stderr
