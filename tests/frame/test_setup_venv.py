"""tools/setup_venv.sh decides what to do; here the interpreter, pip and uv only write down that they were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/setup_venv.sh"
SYSTEM_TOOLS = (
    "bash",
    "cat",
    "cut",
    "dirname",
    "flock",
    "grep",
    "mkdir",
    "mv",
    "rm",
    "rmdir",
    "sha256sum",
    "sleep",
    "touch",
    "cp",
    "chmod",
)

# An interpreter of version VERSION: makes an environment that holds itself, "installs" uv, and logs to $LOG.
INTERPRETER = """#!/usr/bin/env bash
case "$1 $2" in
  "-c "*) [[ "$2" == *"'VERSION'"* ]] ;;
  "--version "*) echo "Python VERSION.0" ;;
  "-m venv") echo venv >>"$LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") echo pip >>"$LOG"; [ ! -e "$LOG.offline" ] || exit 1
    bin=$(dirname "$0"); cp "$UV" "$bin/uv"; chmod +x "$bin/uv" ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "uv $*" >>"$LOG"
sleep 0.3
"""


class Machine:
    """A machine whose PATH holds nothing but the usual tools and the interpreters given to it."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log, self.venv = folder / "bin", folder / "log", folder / "venv"
        self.bin.mkdir()
        for tool in SYSTEM_TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)
        (folder / "uv-to-install").write_text(UV)
        self.environment = {
            "PATH": str(self.bin),
            "VENV": str(self.venv),
            "EXTRA": "cpu",
            "LOG": str(self.log),
            "UV": str(folder / "uv-to-install"),
        }

    def add_interpreter(self, name: str, version: str) -> None:
        (self.bin / name).write_text(INTERPRETER.replace("VERSION", version))
        (self.bin / name).chmod(0o755)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT)], env=self.environment | variables, stderr=subprocess.PIPE, text=True, cwd="/"
        )

    def set_up(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        _, errors = process.communicate(timeout=300)
        return process.returncode, errors

    def calls(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_fitting_python_it_says_what_to_do(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.11")
    status, errors = machine.set_up()
    assert status == 1
    assert len(errors.splitlines()) == 1
    assert "found no Python 3.12 or 3.13" in errors
    assert "uv python install 3.12" in errors
    assert not machine.venv.exists()


@pytest.mark.parametrize("name", ["python3", "python3.12"])
def test_makes_the_environment_once(machine: Machine, name: str) -> None:
    machine.add_interpreter(name, "3.12")
    status, errors = machine.set_up()
    assert status == 0, errors
    assert machine.calls() == ["venv", "pip", "uv", "uv"]
    install, without_dependencies = machine.log.read_text().splitlines()[-2:]
    assert without_dependencies.endswith("--no-deps -r constraints/no-deps.txt")
    assert "--override constraints/cpu-overrides.txt -c constraints/cpu.txt -e .[cpu,dev]" in install
    assert machine.set_up() == (0, "")
    assert machine.calls() == ["venv", "pip", "uv", "uv"]


def test_prefers_the_tested_version(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.13")
    machine.add_interpreter("python3.12", "3.12")
    _, errors = machine.set_up()
    assert "with Python 3.12.0" in errors


def test_asks_uv_for_an_interpreter(machine: Machine, tmp_path: Path) -> None:
    machine.add_interpreter("elsewhere", "3.13")
    (machine.bin / "uv").write_text(
        f'#!/usr/bin/env bash\n[ "$1 $2" = "python find" ] && echo {machine.bin}/elsewhere\n'
    )
    (machine.bin / "uv").chmod(0o755)
    status, errors = machine.set_up()
    assert status == 0, errors
    assert machine.calls() == ["venv", "pip", "uv", "uv"]


def test_an_interrupted_set_up_is_made_anew(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.12")
    (machine.venv / "bin").mkdir(parents=True)
    (machine.venv / ".setup-unfinished").touch()
    (machine.venv / "half").touch()
    status, errors = machine.set_up()
    assert status == 0
    assert "did not finish; starting anew" in errors
    assert not (machine.venv / "half").exists()
    assert machine.calls() == ["venv", "pip", "uv", "uv"]


def test_a_folder_that_is_not_an_environment_is_left_alone(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.12")
    machine.venv.mkdir()
    (machine.venv / "notes").touch()
    status, errors = machine.set_up()
    assert status == 1
    assert "holds no Python; move it away" in errors
    assert (machine.venv / "notes").exists()


def test_an_environment_made_for_other_packages_is_brought_up_to_date(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.12")
    machine.set_up()
    (machine.venv / ".setup-stamp").write_text("of an older commit")
    status, errors = machine.set_up()
    assert (status, machine.calls()) == (0, ["venv", "pip", "uv", "uv", "pip", "uv", "uv"])
    assert "up to date" in errors
    machine.set_up(EXTRA="gpu")
    assert machine.log.read_text().splitlines()[-2].endswith("-c constraints/gpu.txt -e .[gpu,dev]")


def test_two_at_once_install_once(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.12")
    together = [machine.start(), machine.start()]
    for process in together:
        process.communicate(timeout=300)
    assert [process.returncode for process in together] == [0, 0]
    assert machine.calls() == ["venv", "pip", "uv", "uv"]


def test_a_network_that_stays_away_is_tried_three_times_then_explained(machine: Machine) -> None:
    machine.add_interpreter("python3", "3.12")
    machine.log.with_name("log.offline").touch()
    (machine.bin / "sleep").unlink()
    (machine.bin / "sleep").symlink_to(shutil.which("true") or "/bin/true")
    status, errors = machine.set_up()
    assert status == 1
    assert machine.calls() == ["venv", "pip", "pip", "pip"]
    assert "installing the packages failed" in errors.splitlines()[-1]
    machine.log.with_name("log.offline").unlink()
    assert machine.set_up()[0] == 0  # and the next try starts from scratch


def test_an_unknown_extra_is_refused(machine: Machine) -> None:
    assert machine.set_up(EXTRA="tpu") == (1, "setup: EXTRA=tpu is neither cpu nor gpu\n")


def test_ci_runs_make_test_in_the_repository(tmp_path: Path) -> None:
    (tmp_path / "make").write_text('#!/usr/bin/env bash\necho "$PWD: make $*"\n')
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", str(ROOT / ".ci/run")], env=environment, cwd="/", capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{ROOT}: make test\n"
    plan = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = [
        next(i for i, line in enumerate(plan.splitlines()) if word in line) for word in ("setup_venv", "ruff", "pytest")
    ]
    assert steps == sorted(steps)
