"""The import contracts hold, and each of them notices when it is violated."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# One forbidden import per contract: (contract, file, import).
VIOLATIONS = (
    ("Imports go one way", "actor/violation.py", "import megatron_dppo.trainer.history"),
    ("The mathematics and the data", "algorithm/violation.py", "import transformers"),
    ("The training side", "checkpoint/violation.py", "import vllm"),
    ("The engine side", "rollout/violation.py", "import megatron.core"),
    ("Whoever uses engines", "trainer/violation.py", "import megatron_dppo.rollout.fleet.fleet"),
    ("A fleet holds any engine", "rollout/fleet/violation.py", "import megatron_dppo.rollout.reference.core"),
    ("vLLM is imported by", "rollout/weight_transfer/violation.py", "import vllm"),
    ("Ray is imported by", "rollout/vllm/violation.py", "import ray"),
)


def broken_contracts(folder: Path) -> list[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--config", "pyproject.toml"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    assert "Contracts: " in output, output
    names = [contract["name"] for contract in contracts()]
    flat = " ".join(output.split()).replace("BROKEN", " BROKEN")
    return [name for name in names if f"{name} BROKEN" in flat.replace("  ", " ")]


def contracts() -> list[dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_every_contract_notices_a_violation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megatron_dppo", tmp_path / "megatron_dppo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert broken_contracts(tmp_path) == []
    for _, file, statement in VIOLATIONS:
        (tmp_path / "megatron_dppo" / file).write_text(statement + "\n")
    broken = broken_contracts(tmp_path)
    assert len(broken) == len(contracts()) == len(VIOLATIONS)
    for (start, _, _), name in zip(VIOLATIONS, broken, strict=True):
        assert name.startswith(start)


def test_the_mathematics_loads_without_the_stack() -> None:
    code = """
import sys
import megatron_dppo.algorithm, megatron_dppo.vocab_parallel, megatron_dppo.batch, megatron_dppo.router_replay.routes
print(sorted({name.partition(".")[0] for name in sys.modules} & {"megatron", "vllm", "ray", "transformers"}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_algorithm_package_makes_no_distributed_calls() -> None:
    for file in (ROOT / "megatron_dppo/algorithm").rglob("*.py"):
        assert "torch.distributed" not in file.read_text(), file
