"""Training states: what stays, what a kill or a full disk leaves, and what is refused."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from megatron_dppo.checkpoint.safe_dcp import nothing_executed
from megatron_dppo.checkpoint.state_folder import latest_state, read_description
from megatron_dppo.errors import UserError
from tests.checkpoint.training_ranks import (
    generators_after,
    load_only,
    load_views,
    save_into,
    save_several,
    save_until_killed,
)
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

EP2 = {"expert": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe"
    tiny_qwen3_moe(path, seed=3, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("states")
    saved, _ = run_ranks(save_several, 2, model, folder, False)[0]
    return folder, saved


def copied(root: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(root[0], tmp_path / "states"))


def test_retention_keeps_the_newest_and_latest_names_the_last(root: tuple[Path, dict[str, str]]) -> None:
    assert sorted(p.name for p in root[0].iterdir()) == ["latest", "step_00000003", "step_00000004"]
    assert latest_state(root[0]).name == "step_00000004"
    assert read_description(latest_state(root[0]))["progress"] == {"position": 4}
    assert (latest_state(root[0]) / "hf" / "tokenizer.json").is_file()


def test_ranks_that_see_different_latest_states_load_the_one_that_rank_0_sees(
    model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """NFS shows a folder's new entries late on other nodes."""
    late = copied(root, tmp_path)
    (late / "latest").write_text("step_00000003\n")
    assert set(run_ranks(load_views, 2, model, [root[0], late])) == {f"{root[0]}/step_00000004 4"}


def test_asynchronous_save_holds_the_weights_of_its_moment(model: Path, tmp_path: Path) -> None:
    saved, later = run_ranks(save_several, 2, model, tmp_path / "states", True)[0]
    assert saved != later
    assert sorted(p.name for p in (tmp_path / "states").iterdir()) == ["latest", "step_00000003", "step_00000004"]
    loaded, step = run_ranks(load_only, 2, model, tmp_path / "states", EP2, {})[0]
    assert (loaded, step) == (saved, 4)


def test_generators_go_on_where_they_were(model: Path, tmp_path: Path) -> None:
    for drawn in run_ranks(generators_after, 2, model, tmp_path / "states"):
        assert drawn[:4] == drawn[4:]


def test_a_kill_before_publishing_leaves_the_previous_state(model: Path, tmp_path: Path) -> None:
    states = tmp_path / "states"
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks(save_until_killed, 1, model, states)
    assert any(".incomplete-" in p.name for p in states.iterdir())
    assert latest_state(states).name == "step_00000001"
    assert run_ranks(load_only, 1, model, states, {}, {})[0][1] == 1


def test_a_disk_that_fills_up_fails_every_rank_and_keeps_what_was_there(model: Path, tmp_path: Path) -> None:
    errors = run_ranks(save_into, 2, model, tmp_path / "states", 200_000)
    assert errors[0] == errors[1]
    assert "cannot write a checkpoint" in errors[0]
    assert "GB free there" in errors[0]
    assert list((tmp_path / "states").iterdir()) == []


def test_an_output_that_cannot_be_created_fails_every_rank(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = run_ranks(save_into, 2, model, tmp_path / "file" / "states", None)
    assert errors[0] == errors[1]
    assert "choose another output" in errors[0]


def test_nothing_to_resume_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        latest_state(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no checkpoint"):
        latest_state(tmp_path)
    (tmp_path / "latest").write_text("step_00000009\n")
    with pytest.raises(UserError, match="names step_00000009, which is not complete"):
        latest_state(tmp_path)
    (tmp_path / "latest").write_text("../../elsewhere")
    with pytest.raises(UserError, match="no checkpoint"):
        latest_state(tmp_path)


def test_without_the_pointer_the_highest_complete_state_is_taken(
    root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    states = copied(root, tmp_path)
    (states / "latest").unlink()
    (states / "step_00000007").mkdir()  # an interrupted copy
    assert latest_state(states).name == "step_00000004"


def test_a_state_that_lost_a_file_or_part_of_one_is_refused(root: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    states = copied(root, tmp_path)
    data = sorted((states / "step_00000004").glob("*.distcp"))[0]
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"incomplete: {data.name} has"):
        read_description(states / "step_00000004")
    data.unlink()
    with pytest.raises(UserError, match=rf"incomplete: {data.name} is missing"):
        read_description(states / "step_00000004")
    (states / "step_00000003" / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_description(states / "step_00000003")


def test_another_model_or_dtype_is_refused_by_name(root: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "other", num_hidden_layers=2, num_experts=4)
    assert "experts is 8 there, 4 here" in run_ranks(load_only, 1, tmp_path / "other", root[0], {}, {})[0]


def test_half_precision_run_refuses_full_precision_state(model: Path, root: tuple[Path, dict[str, str]]) -> None:
    import torch

    refusal = run_ranks(load_only, 1, model, root[0], {}, {"params_dtype": torch.bfloat16})[0]
    assert "torch.float32 weights, this run trains torch.bfloat16" in refusal


class Payload:
    """Runs a command when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_nothing_in_a_state_is_executed(model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    states = copied(root, tmp_path)
    folder, mark = states / "step_00000004", tmp_path / "executed"
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    described = json.loads((folder / "state.json").read_text())
    described["files"][".metadata"] = (folder / ".metadata").stat().st_size
    (folder / "state.json").write_text(json.dumps(described))
    with nothing_executed(), pytest.raises(pickle.UnpicklingError, match="system has no place"):
        FileSystemReader(folder).read_metadata()
    assert "has no place in a checkpoint" in run_ranks(load_only, 1, model, states, {}, {})[0]
    assert not mark.exists()
