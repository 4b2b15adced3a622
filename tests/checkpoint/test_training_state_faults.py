"""Training states on a disk that fails or is full, and after a kill: what stays, and whose fault it is."""

import errno
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron_dppo.checkpoint import checksums
from megatron_dppo.checkpoint.state_folder import (
    finish_state,
    finished_states,
    go_back,
    latest_state,
    remove_leftovers,
)
from megatron_dppo.checkpoint.training_state import TrainingStates
from megatron_dppo.errors import SystemFault, UserError
from tests.checkpoint.save_ranks import fail_config_json
from tests.checkpoint.training_ranks import (
    EP2,
    load_only,
    save_and_list_flushed,
    save_into,
    save_until_killed,
    trainee_from,
)
from tests.distributed import run_ranks
from tests.system_faults import failing


def test_a_kill_before_publishing_leaves_the_previous_state(model: Path, tmp_path: Path) -> None:
    states = tmp_path / "states"
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks(save_until_killed, 1, model, states)
    assert any(".incomplete-" in p.name for p in states.iterdir())
    assert latest_state(states).name == "step_00000001"
    assert run_ranks(load_only, 1, model, states, {}, {})[0][1] == 1


def test_a_kill_while_an_old_state_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, *_: Any, **__: Any) -> None:
        (folder / checksums.CHECKSUMS).unlink()
        raise KeyboardInterrupt

    for step in (1, 2):
        (partial := tmp_path / f"new{step}").mkdir()
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", killed)
            with pytest.raises(KeyboardInterrupt) if step == 2 else nullcontext():
                finish_state(partial, tmp_path, step, {"step": step}, keep=1, digests={})
    assert [state.name for state in finished_states(tmp_path)] == ["step_00000002"]
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002"]


def test_a_disk_that_fills_up_fails_every_rank_and_keeps_what_was_there(model: Path, tmp_path: Path) -> None:
    errors = run_ranks(save_into, 2, model, tmp_path / "states", 200_000)
    assert errors[0] == errors[1]
    assert re.match(r"UserError: cannot write a checkpoint under [^ ]+/states: File too large; earlier ", errors[0])
    assert list((tmp_path / "states").iterdir()) == []


def test_a_device_that_fails_while_a_state_is_saved_is_no_fault_of_the_user(model: Path, tmp_path: Path) -> None:
    """The launcher starts again after it."""
    errors = run_ranks(save_into, 2, model, tmp_path / "states", None, True)
    assert errors[0] == errors[1]
    states = tmp_path / "states"
    said = f"cannot write a checkpoint under {states}: Input/output error; earlier ones are untouched"
    assert errors[0] == f"SystemFault: {said}"
    assert list(states.iterdir()) == []


def test_a_device_that_fails_while_a_state_is_finished_is_none_either(model: Path, tmp_path: Path) -> None:
    """And is told in the same words when it fails again: then it did not pass, and the run is not started again."""
    states, config = tmp_path / "states", model / "config.json"
    reason = f"{config} cannot be read: Input/output error"
    said = f"SystemFault: cannot finish the checkpoint {states}/step_00000001: {reason}"
    assert run_ranks(save_with_unreadable_config, 2, model, states) == [[said] * 2] * 2


def save_with_unreadable_config(rank: int, model: Path, states: Path) -> list[str]:
    kept, said = TrainingStates(states, trainee_from(model, EP2)), []
    fail_config_json()
    for _ in range(2):
        with pytest.raises((UserError, OSError)) as error:
            kept.save(1, {})
        said.append(f"{error.type.__name__}: {error.value}")
    return said


def test_an_output_that_cannot_be_created_fails_every_rank(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = run_ranks(save_into, 2, model, tmp_path / "file" / "states", None)
    assert errors[0] == errors[1]
    assert re.match("UserError: .*choose another output", errors[0])


def test_everything_is_flushed_before_a_state_is_published(model: Path, tmp_path: Path) -> None:
    root, folder = tmp_path / "states", tmp_path / "states" / "step_00000001"
    flushed = run_ranks(save_and_list_flushed, 1, model, root)[0]
    at = next(i for i, entry in enumerate(flushed) if entry.endswith(f"-> {folder}"))
    partial = Path(flushed[at].partition(" -> ")[0])
    for path in [folder, *folder.rglob("*")]:
        assert str(partial / path.relative_to(folder)) in flushed[:at]
    assert flushed[at - 2 : at] == [str(partial / "checksums.xxh128"), str(partial)]
    assert flushed[at + 1 :] == [str(root), str(root / ".latest.new"), str(root)]


@pytest.mark.parametrize(
    ("trouble", "ranks"),
    [
        *(("stale", [0, 1]), ("refused", [0, 1])),
        *((trouble, [rank]) for trouble in ("stale", "unseen", "other bytes") for rank in (0, 1)),
    ],
)
def test_what_cannot_be_read_or_one_rank_alone_finds_is_an_error_that_names_it_and_no_step_is_lost(
    trouble: str, ranks: list[int], model: Path, states: Path
) -> None:
    """A UserError only where a right is missing: after the others the launcher starts again."""
    first, second = run_ranks(load_with_trouble, 2, model, states, trouble, ranks)
    assert first == second
    reason = {
        "stale": r"__\d_\d.distcp cannot be read: Stale file handle",
        "refused": r"__\d_\d.distcp cannot be read: Permission denied",
        "unseen": "hf/config.json is missing",
        "other bytes": r"__\d_\d.distcp is damaged, .*",
    }
    where = rf" \(on rank {ranks[0]}, not on rank {1 - ranks[0]}\)" if len(ranks) == 1 else ""
    kind = "" if trouble == "refused" else "SystemFault: "  # `load_only` tells a UserError by its words
    assert re.match(f"{kind}{states}/step_00000004/{reason[trouble]}{where}; if that does not pass: ", first), first
    assert [p.name for p in finished_states(states)] == ["step_00000003", "step_00000004"]
    assert latest_state(states).name == "step_00000004"


NUMBERS = {"stale": errno.ESTALE, "refused": errno.EACCES}


def load_with_trouble(rank: int, model: Path, states: Path, trouble: str, ranks: list[int]) -> str:
    """The error, where a file system shows `ranks` something else of files of the newest state."""
    digest, is_file = checksums._digest, Path.is_file

    def is_meant(file: Path) -> bool:
        ending = "hf/config.json" if trouble == "unseen" else ".distcp"
        return rank in ranks and "step_00000004" in str(file) and str(file).endswith(ending)

    def troubled(file: Path) -> str:
        if is_meant(file) and trouble in NUMBERS:
            raise OSError(NUMBERS[trouble], os.strerror(NUMBERS[trouble]))
        return "0" * 32 if is_meant(file) and trouble == "other bytes" else digest(file)

    checksums._digest = troubled
    if trouble == "unseen":
        Path.is_file = lambda self: not is_meant(self) and is_file(self)  # type: ignore[method-assign]
    try:
        return str(load_only(rank, model, states, EP2, {}))
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def test_of_a_state_that_is_named_the_same_holds(model: Path, saved_states: Path) -> None:
    said = run_ranks(load_named_with_trouble, 1, model, saved_states / "step_00000004")[0]
    assert re.search(r"^SystemFault: .*/step_00000004/.metadata cannot be read: Stale file handle; if", said), said


def load_named_with_trouble(rank: int, model: Path, state: Path) -> str:
    checksums._digest = failing(errno.ESTALE)
    with pytest.raises((UserError, OSError)) as error:
        TrainingStates(state.parent, trainee_from(model, {}, load=False)).load(state)
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, "SystemFault"), (errno.EIO, "SystemFault"), (errno.EACCES, "UserError")]
)
def test_tensors_that_cannot_be_read_are_the_users_fault_or_the_systems(
    number: int, kind: str, model: Path, saved_states: Path
) -> None:
    first, second = run_ranks(load_with_unreadable_tensors, 2, model, saved_states, number)
    state = saved_states / "step_00000004"
    assert first == second == f"{kind}: {state} cannot be read: [Errno {number}] {os.strerror(number)}"


def load_with_unreadable_tensors(rank: int, model: Path, states: Path, number: int) -> str:
    """The error, where no rank can open what holds its tensors. The first that it opens has what all ranks have."""
    opened, seen = FileSystem.create_stream, []

    def create_stream(self: FileSystem, path: Path, mode: str) -> Any:
        seen.append(path)
        if len(seen) > 1:
            raise OSError(number, os.strerror(number))
        return opened(self, path, mode)

    trainee = trainee_from(model, EP2, load=False)
    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    try:
        TrainingStates(states, trainee).load()
    except (UserError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, SystemFault), (errno.EROFS, UserError)])
def test_what_is_damaged_and_cannot_be_renamed_is_the_users_fault_or_the_systems(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", failing(number))
    with pytest.raises(kind, match=f"^f is missing; it cannot be renamed: {os.strerror(number)}$"):
        go_back(tmp_path / "step_00000003", {tmp_path / "step_00000004": "f is missing"})
