"""How a family's measurement reads its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.models.family import text_fields
from tests.models.public_configs import CONFIGS
from tools.bench_family import ending, read_arguments, run

FIT = ["rollout.placement=fleet", "optimizer.cpu_offload_fraction=0.5"]


@pytest.mark.parametrize(
    "words",
    [["--moe-layers", "1", "2", *FIT], [*FIT, "--moe-layers", "1", "2"], [FIT[0], "--moe-layers", "1", "2", FIT[1]]],
)
def test_overrides_stand_anywhere(words: list[str]) -> None:
    """Also behind the depths, as the tool's own documentation has them."""
    assert read_arguments(["MiniMax-M2", *words]) == ("MiniMax-M2", [1, 2], FIT)


def test_two_layers_of_experts_unless_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_arguments(["GLM-4.5-Air"]) == ("GLM-4.5-Air", [2], [])
    with pytest.raises(SystemExit):
        read_arguments(["GLM-4.5-Air", "--moe-layers", "two", *FIT])
    assert "two" in capsys.readouterr().err


def test_a_run_that_was_refused_ends_the_measurement(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        run(tmp_path / "model", tmp_path / "run", ["trainer.stepz=1"])
    assert "did you mean trainer.steps?" in capfd.readouterr().err


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_answers_can_end(name: str) -> None:
    """MiniMax-M2 publishes its stop tokens beside config.json, and an engine refuses a model that names none."""
    assert text_fields(ending(name, 2))["eos_token_id"] is not None
