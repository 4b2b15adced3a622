"""An index of a training state that was made to do harm executes nothing and reads nothing outside of its folder."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.checkpoint.safe_dcp import read_index
from tests.checkpoint.training_ranks import load_only
from tests.distributed import run_ranks


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


def test_nothing_in_a_state_is_executed(model: Path, states: Path, tmp_path: Path) -> None:
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
def folder_with_index(saved_states: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_states / "step_00000004", tmp_path / "state"))


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
