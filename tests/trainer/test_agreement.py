"""Ranks that were not started alike end before anything is written in two places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.start import require_cluster
from megatron_dppo.trainer.agreement import check_agreement
from tests.distributed import run_ranks


def agree(rank: int, folder: str, names: list[str], steps: list[int]) -> str:
    """What the check says on this rank; `names` are the folder's on each, of which the first alone has the data."""
    from megatron_dppo.trainer import agreement

    agreement._PATIENCE_S = 1.0
    os.chdir(Path(folder) / names[rank])
    Path("run").mkdir(exist_ok=True)
    config = Config.model_validate(
        {
            "run": {"dir": "run"},
            "model": {"path": "model"},
            "trainer": {"steps": steps[rank]},
            "task": {"kind": "data", "data": {"path": "questions"}},
        }
    )
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"dir": Path("run")})}
    )  # one path, two disks
    runtime = Runtime(rank, 2, torch.device("cpu"), groups=None)  # type: ignore[arg-type]
    try:
        agreement.check_agreement(runtime, config)
    except UserError as error:
        return str(error)
    finally:
        assert not list(Path("run").iterdir()) or rank > 0
    return ""


@pytest.mark.parametrize(
    ("names", "steps", "message"),
    [
        (["a", "a"], [3, 3], ""),
        (["a", "a"], [3, 4], "trainer.steps is 4 there and 3 on rank 0 (1 keys differ)"),
        (["a", "b"], [3, 3], "1 of 2 ranks, first rank 1, do not see what rank 0 wrote there"),
    ],
)
def test_all_ranks_say_what_differs(tmp_path: Path, names: list[str], steps: list[int], message: str) -> None:
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / names[0] / "questions").mkdir()
    first, second = run_ranks(agree, 2, str(tmp_path), names, steps)
    assert first == second
    assert message in first
    assert bool(message) == bool(first)


def test_ranks_of_several_nodes_need_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")
    for here in ("16", None):
        if here is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        require_cluster()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"8 of 16 ranks.*RAY_ADDRESS"):
        require_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    require_cluster()


def test_a_folder_that_takes_no_more_files_is_named(tmp_path: Path) -> None:
    """It has gone here; where a quota of files is used up it is the same call that fails."""
    config = Config.model_validate({"run": {"dir": str(tmp_path / "gone")}, "model": {"path": "model"}})
    runtime = Runtime(0, 1, torch.device("cpu"), groups=None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"run\.dir=.*gone cannot be written: No such file or directory"):
        check_agreement(runtime, config)
