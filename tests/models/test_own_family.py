"""A family in a package of one's own: nothing of the product is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.round_trip import write_reference
from tests.models.toy_family import PACKAGE, install
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{packages}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script.split(), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_family_of_an_installed_package_is_trained_like_ours(tmp_path: Path) -> None:
    """Mistral's architecture is Llama's, with a window that has to be off; `toy` is an alias of the package's."""
    packages, folder = tmp_path / "site", tmp_path / "model"
    packages.mkdir()
    install(packages)
    tiny = tiny_model("mistral", folder, sliding_window=None)
    write_reference(tiny, folder)
    content = json.loads((folder / "config.json").read_text()) | {"model_type": "toy"}
    (folder / "config.json").write_text(json.dumps(content))
    done = run("-m tests.models.toy_family", packages, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    weights = sum(p.numel() for p in tiny.parameters())
    vectors = sum(p.numel() for p in tiny.parameters() if p.ndim == 1)
    products = weights - vectors - tiny.get_input_embeddings().weight.numel()
    assert found["error"] < 1e-4
    assert found["equal"] == found["tensors"] == len(list(tiny.parameters()))
    assert found["parameters"] == weights
    assert found["flops"] == 6 * products + 6 * 4 * 64
    assert (found["family"], found["routes"]) == ("mistral", None)
    assert "spec of 4 layers of 64 on 1" in done.stderr


@pytest.mark.parametrize(
    ("package", "value", "says"),
    [
        (PACKAGE, "toy_family:CALLED", "entry point toy_family:CALLED of megatron_dppo.families is a list; it must be"),
        (PACKAGE.replace('("toy",)', '("llama",)'), "toy_family:FAMILY", "two families are called 'llama'"),
    ],
)
def test_a_package_that_is_wrong_is_named(tmp_path: Path, package: str, value: str, says: str) -> None:
    install(tmp_path, package, value)
    done = run("-c", tmp_path, "from megatron_dppo.models.family import families; families()")
    assert says in done.stderr
