"""Training states: what stays, what a kill or a full disk leaves, and what is refused."""

import errno
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from megatron_dppo.checkpoint import checksums
from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.checkpoint.safe_dcp import read_index
from megatron_dppo.checkpoint.state_folder import finished_states, go_back, latest_state, read_description
from megatron_dppo.checkpoint.training_state import TrainingStates
from megatron_dppo.errors import SystemFault, UserError
from tests.checkpoint.save_ranks import fail_config_json
from tests.checkpoint.training_ranks import (
    generators_after,
    load_only,
    load_views,
    save_and_list_flushed,
    save_into,
    save_several,
    save_until_killed,
    trainee_from,
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
    saved = run_ranks(save_several, 2, model, folder)[0]
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


def test_nothing_to_resume_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        latest_state(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no checkpoint"):
        latest_state(tmp_path)
    (tmp_path / "latest").write_text("step_00000009\n")
    with pytest.raises(UserError, match="names 'step_00000009', which is not complete"):
        latest_state(tmp_path)
    (tmp_path / "latest").write_text("../../elsewhere")
    with pytest.raises(UserError, match="no name of a state"):
        latest_state(tmp_path)


def test_without_the_pointer_the_highest_complete_state_is_taken(
    root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    states = copied(root, tmp_path)
    (states / "latest").unlink()
    (states / "step_00000007").mkdir()  # an interrupted copy
    assert latest_state(states).name == "step_00000004"


def cut(folder: Path) -> str:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    return "__1_0.distcp is damaged, or of another folder"


def lost(folder: Path) -> str:
    (folder / "__1_0.distcp").unlink()
    return "__1_0.distcp is missing"


def flipped(folder: Path) -> str:
    file = folder / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return "__1_0.distcp is damaged, or of another folder"


def of_another_step(folder: Path) -> str:
    shutil.copyfile(folder.with_name("step_00000003") / "__1_0.distcp", folder / "__1_0.distcp")
    return "__1_0.distcp is damaged, or of another folder"


def emptied(folder: Path) -> str:
    (folder / "state.json").write_text("{")
    return "state.json is damaged, or of another folder"


def other_tokenizer(folder: Path) -> str:
    (folder / "hf" / "tokenizer.json").write_text("{}")
    return "hf/tokenizer.json is damaged, or of another folder"


def without_checksums(folder: Path) -> str:
    (folder / "checksums.xxh128").unlink()
    return "checksums.xxh128 is missing"


def fewer_checksums(folder: Path) -> str:
    """As a copy that was cut off leaves it."""
    file = folder / "checksums.xxh128"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    return "checksums.xxh128 is damaged: it does not end with the line of state.json"


def escaping_checksums(folder: Path) -> str:
    file = folder / "checksums.xxh128"
    file.write_text(f"{'0' * 32}  ../latest\n" + file.read_text())
    return "checksums.xxh128 is damaged: line 1 is no digest and path of a file"


def without_description(folder: Path) -> str:
    (folder / "state.json").unlink()
    return "has no state.json"


@pytest.mark.parametrize("fault", [cut, lost, flipped, of_another_step, emptied, other_tokenizer, without_checksums,
                                   fewer_checksums, escaping_checksums], ids=lambda f: f.__name__)  # fmt: skip
def test_a_damaged_state_is_named_and_the_one_before_it_taken(
    fault: Callable[[Path], str], model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """On every rank the same, also where only one has read the file."""
    states = copied(root, tmp_path)
    reason = fault(states / "step_00000004")
    first, second = run_ranks(load_and_listen, 2, model, states, EP2)
    assert first[0] == second[0] == 3
    (said,) = first[1]
    assert reason in said
    assert said.endswith("; going on from step_00000003, the newest older state that is whole")
    assert second[1] == []
    (kept,) = states.glob("damaged_step_00000004_*")
    assert f"; kept as {kept.name}; " in said
    assert [p.name for p in finished_states(states)] == ["step_00000003"]
    assert latest_state(states).name == "step_00000003"


@pytest.mark.parametrize(
    ("trouble", "ranks"),
    [
        *(("stale", [0, 1]), ("refused", [0, 1])),
        *((trouble, [rank]) for trouble in ("stale", "unseen", "other bytes") for rank in (0, 1)),
    ],
)
def test_what_cannot_be_read_or_one_rank_alone_finds_is_an_error_that_names_it_and_no_step_is_lost(
    trouble: str, ranks: list[int], model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """A UserError only where a right is missing: after the others the launcher starts again."""
    states = copied(root, tmp_path)
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


def test_of_a_state_that_is_named_the_same_holds(model: Path, root: tuple[Path, dict[str, str]]) -> None:
    said = run_ranks(load_named_with_trouble, 1, model, root[0] / "step_00000004")[0]
    assert re.search(r"^SystemFault: .*/step_00000004/.metadata cannot be read: Stale file handle; if", said), said


def load_named_with_trouble(rank: int, model: Path, state: Path) -> str:
    def stale(file: Path) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    checksums._digest = stale
    with pytest.raises((UserError, OSError)) as error:
        TrainingStates(state.parent, trainee_from(model, {}, load=False)).load(state)
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, SystemFault), (errno.EROFS, UserError)])
def test_what_is_damaged_and_cannot_be_renamed_is_the_users_fault_or_the_systems(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(kind, match=f"^f is missing; it cannot be renamed: {os.strerror(number)}$"):
        go_back(tmp_path / "step_00000003", {tmp_path / "step_00000004": "f is missing"})


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


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, "SystemFault"), (errno.EIO, "SystemFault"), (errno.EACCES, "UserError")]
)
def test_tensors_that_cannot_be_read_are_the_users_fault_or_the_systems(
    number: int, kind: str, model: Path, root: tuple[Path, dict[str, str]]
) -> None:
    first, second = run_ranks(load_with_unreadable_tensors, 2, model, root[0], number)
    assert first == second == f"{kind}: {root[0]}/step_00000004 cannot be read: [Errno {number}] {os.strerror(number)}"


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


def test_the_state_that_a_run_went_back_to_is_not_removed_for_a_damaged_one(
    model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    states = copied(root, tmp_path)
    flipped(states / "step_00000004")
    run_ranks(load_and_save_again, 2, model, states)
    assert [p.name for p in finished_states(states)] == ["step_00000003", "step_00000004"]
    assert len(list(states.glob("damaged_step_00000004_*"))) == 1
    assert run_ranks(load_and_listen, 2, model, states, EP2) == [(4, []), (4, [])]


def load_and_save_again(rank: int, model: Path, states: Path) -> None:
    kept = TrainingStates(states, trainee_from(model, EP2, load=False), keep=2)
    kept.save(kept.load().step + 1, {"position": 4})


def load_and_listen(rank: int, model: Path, states: Path, layout: dict[str, int]) -> tuple[int, list[str]]:
    """The step, and the warnings."""
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_dppo.checkpoint").addHandler(listener)
    return load_only(rank, model, states, layout, {})[1], said


def test_what_is_taken_is_whole_itself(model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    states = copied(root, tmp_path)
    shutil.copytree(states / "step_00000003", states / "step_00000002")
    flipped(states / "step_00000004")
    flipped(states / "step_00000003")
    ((step, said),) = run_ranks(load_and_listen, 1, model, states, {})
    assert step == 3  # what the copy's description says
    assert ["; going on from step_00000002, " in line for line in said] == [True, True]
    assert [p.name for p in finished_states(states)] == ["step_00000002"]
    flipped(states / "step_00000002")
    assert "no older state beside it is whole" in run_ranks(load_only, 1, model, states, {}, {})[0]


def test_a_pointer_to_what_is_not_complete_offers_what_is(root: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    states = copied(root, tmp_path)
    without_description(states / "step_00000004")
    with pytest.raises(UserError, match=r"'step_00000004', which is not complete there .*echo step_00000003 > "):
        latest_state(states)
    (states / "latest").write_bytes(b"step_0000\xff004")
    with pytest.raises(UserError, match=r"which is no name of a state .*echo step_00000003 > "):
        latest_state(states)


def test_states_of_the_format_without_checksums_are_named(
    model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    states = copied(root, tmp_path)
    for folder in states.glob("step_*"):
        (folder / "checksums.xxh128").unlink()
        described = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(described | {"format": 1}))
    assert "state.json has format 1; this version reads format 2" in run_ranks(load_only, 1, model, states, {}, {})[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "4"),
        ("model", []),
        ("dtype", None),
        ("layout", 1),
        ("scheduler", 0.5),
        ("progress", None),
        ("lora", []),
    ],
)
def test_a_description_of_other_types_is_refused_by_field(
    root: tuple[Path, dict[str, str]], tmp_path: Path, name: str, value: object
) -> None:
    described = json.loads((root[0] / "step_00000004" / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(described))
    assert read_description(tmp_path)["step"] == 4
    (tmp_path / "state.json").write_text(json.dumps(described | {name: value}))
    with pytest.raises(UserError, match=rf"state\.json: {name} is .*copy the folder again"):
        read_description(tmp_path)


def test_every_file_of_a_state_has_a_checksum_that_other_programs_read(root: tuple[Path, dict[str, str]]) -> None:
    folder = root[0] / "step_00000004"
    lines = (folder / "checksums.xxh128").read_text().splitlines()
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "checksums.xxh128"]
    assert lines == [
        f"{xxhash.xxh3_128(file.read_bytes()).hexdigest()}  {file.relative_to(folder).as_posix()}"
        for file in sorted(files, key=lambda file: (file.name == "state.json", file.relative_to(folder).as_posix()))
    ]


def test_everything_is_flushed_before_a_state_is_published(model: Path, tmp_path: Path) -> None:
    root, folder = tmp_path / "states", tmp_path / "states" / "step_00000001"
    flushed = run_ranks(save_and_list_flushed, 1, model, root)[0]
    at = next(i for i, entry in enumerate(flushed) if entry.endswith(f"-> {folder}"))
    partial = Path(flushed[at].partition(" -> ")[0])
    for path in [folder, *folder.rglob("*")]:
        assert str(partial / path.relative_to(folder)) in flushed[:at]
    assert flushed[at - 2 : at] == [str(partial / "checksums.xxh128"), str(partial)]
    assert flushed[at + 1 :] == [str(root), str(root / ".latest.new"), str(root)]


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


def sealed(folder: Path, index: bytes) -> None:
    """The folder with that index, and checksums as its maker would write them."""
    (folder / ".metadata").write_bytes(index)
    write_checksums(folder, mark="state.json")


def test_nothing_in_a_state_is_executed(model: Path, root: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    states = copied(root, tmp_path)
    folder, mark = states / "step_00000004", tmp_path / "executed"
    sealed(folder, pickle.dumps(Payload(mark)))
    with pytest.raises(pickle.UnpicklingError, match="system has no place"):
        read_index(folder)
    assert "has no place in a checkpoint" in run_ranks(load_only, 1, model, states, {}, {})[0]
    assert not mark.exists()


CLASSES = [
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
    b"ctorch.serialization\n_get_layout\n",
    b"ccollections\nOrderedDict\n)R",
]


@pytest.mark.parametrize("target", CLASSES)
@pytest.mark.parametrize("state", [b"N}S'planted'\nI1\ns\x86", b"}S'planted'\nI1\ns"])
def test_an_index_sets_no_attributes_of_classes(folder_with_index: Path, target: bytes, state: bytes) -> None:
    (folder_with_index / ".metadata").write_bytes(target + state + b"b.")
    with pytest.raises(pickle.UnpicklingError, match="sets what is no field"):
        read_index(folder_with_index)
    assert not hasattr(Metadata, "planted")
    assert not hasattr(TensorProperties, "planted")


@pytest.fixture
def folder_with_index(root: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(root[0] / "step_00000004", tmp_path / "state"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"\x80\x04]\x94.", "is damaged"),
        (b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"a.", "is damaged"),
        (b"r" + (2**31).to_bytes(4, "little") + b".", "is damaged"),
        (b"ctorch.distributed.checkpoint.filesystem\nFileSystemWriter\n.", "FileSystemWriter has no place"),
        (b"ctorch.distributed.checkpoint.filesystem\nPath\n.", "Path has no place"),
    ],
)
def test_an_index_that_is_none_is_refused(folder_with_index: Path, content: bytes, message: str) -> None:
    (folder_with_index / ".metadata").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match=message):
        read_index(folder_with_index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../../secret"}, "a file outside the folder"),
        ({"relative_path": "/etc/hostname"}, "a file outside the folder"),
        ({"relative_path": "__9_9.distcp"}, "is damaged .*No such file"),
        ({"offset": -1}, "places .* outside of __"),
        ({"length": 2**60}, "places .* outside of __"),
        ({"length": "1"}, "is damaged"),
        ({"transform_descriptors": ["zstd"]}, "has no description"),
    ],
)
def test_an_index_reads_nothing_outside_its_files(
    folder_with_index: Path, change: dict[str, Any], message: str
) -> None:
    index = read_index(folder_with_index)
    first = next(iter(index.storage_data.values()))
    for field, value in change.items():
        setattr(first, field, value)
    (folder_with_index / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(pickle.UnpicklingError, match=message):
        read_index(folder_with_index)
