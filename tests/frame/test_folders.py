"""Whether a folder can be written, asked of the kernel by a file."""

from pathlib import Path

import pytest

from megatron_dppo.checkpoint.atomic import check_target
from megatron_dppo.errors import UserError
from megatron_dppo.launch.folders import require_writable


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    require_writable(tmp_path / "a/b", named="OUT")
    assert list(tmp_path.iterdir()) == []
    require_writable(tmp_path / "a/b", named="OUT", make=True)
    check_target(tmp_path / "a/b/c", overwrite=False)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a/b"]


@pytest.mark.parametrize("make", [True, False])
def test_one_that_cannot_is_named_with_the_reason(tmp_path: Path, make: bool) -> None:
    """`/proc` refuses root as well, as what is mounted read-only does."""
    (tmp_path / "file").touch()
    for folder, why in (
        (tmp_path / "file/run", "Not a directory"),
        (Path("/proc/run"), "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(UserError, match=rf"^OUT cannot be written( in \S+)?: {why}; choose another folder$"):
            require_writable(folder, named="OUT", make=make)
    with pytest.raises(UserError, match=r"^/proc/out cannot be written: No such file or directory; choose another"):
        check_target(Path("/proc/out"), overwrite=False)
