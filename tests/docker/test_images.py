"""Dockerfiles, compose file and the pip lines in them. hadolint itself runs in `make lint`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "cpu.Dockerfile"]
BIN = Path(sys.executable).parent


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments dropped."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_an_image_is_pinned_unprivileged_and_watched(file: Path) -> None:
    lines = instructions(file)
    bases = [value.split("=", 1)[1] for name, value in lines if name == "ARG" and "_IMAGE=" in value]
    assert bases
    for base in bases:
        assert re.search(r":[0-9]", base), f"{base} has no version"
    stages = [index for index, (name, _) in enumerate(lines) if name == "FROM"]
    final = lines[stages[-1] :]
    users = [value for name, value in final if name == "USER"]
    assert users == ["10001:10001"]
    assert any(name == "HEALTHCHECK" and "megatron_dppo.launch.heartbeat" in value for name, value in final)
    assert not any("pip install" in value for name, value in final if name == "RUN"), (
        "the runtime stage installs nothing"
    )
    assert not any(
        re.search(r"(TOKEN|SECRET|PASSWORD|API_KEY)", value) for name, value in lines if name in ("ARG", "ENV")
    )


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_what_is_copied_is_there_and_let_in(file: Path) -> None:
    ignored = file.with_name(f"{file.name}.dockerignore").read_text().split()
    assert ignored[0] == "*"
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    for name, value in instructions(file):
        if name != "COPY" or "--from=" in value:
            continue
        *sources, _ = [word for word in value.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == entry or source.startswith(f"{entry}/") for entry in let_in), source


def pip_lines(file: Path) -> list[list[str]]:
    """Arguments of every `pip install` and `uv pip install`, apart from those of a build argument's branch."""
    found = []
    for name, value in instructions(file):
        if name != "RUN" or "APEX_REF" in value:
            continue
        found += [match.group(0).split() for match in re.finditer(r"(?:uv|python -m) pip install [^;&]*", value)]
    return found


def test_every_install_is_seen() -> None:
    assert [len(pip_lines(file)) for file in DOCKERFILES] == [4, 3]


@pytest.mark.full
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_every_pip_line_resolves(file: Path) -> None:
    """Against the package index, for the interpreter of the images (3.12), without installing anything."""
    for line in pip_lines(file):
        if line[0] == "uv":
            command = [
                str(BIN / "uv"),
                "pip",
                "install",
                "--dry-run",
                "--python-version",
                "3.12",
                "--target",
                "/nowhere",
            ]
            command += line[3:]
        else:
            command = [str(BIN / "python"), "-m", "pip", "install", "--dry-run", "--ignore-installed", *line[4:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, f"{' '.join(line)}\n{done.stderr[-2000:]}"


def test_the_compose_file_builds_these_images() -> None:
    services: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    built = {service["build"]["dockerfile"] for service in services.values() if "build" in service}
    assert built == {str(file.relative_to(ROOT)) for file in DOCKERFILES}
    assert services["train"]["ulimits"]["memlock"] == -1
    readable = [volume.split(":")[-2] for volume in services["train"]["volumes"] if volume.endswith(":ro")]
    assert not any(services["train"]["environment"]["HF_HOME"].startswith(folder) for folder in readable)
    for service in services.values():
        assert not any(re.search("TOKEN|KEY|SECRET", str(item)) for item in service.get("environment", []))
