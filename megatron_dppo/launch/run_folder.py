"""The folder of a run, before anything is written there."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.errors import of_file


def make_writable(folder: Path, *, setting: str, who: object) -> None:
    """Make it where it is absent, and a file in it, named by `who` tries. Errors: UserError, or SystemFault, that names
    it as `setting`=folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-probe-{who}"
        probe.touch()
        probe.unlink(missing_ok=True)  # another job may be trying the same folder
    except OSError as error:
        raise of_file(
            error, f"{setting}={folder} cannot be written: {error.strerror or error}; choose another folder"
        ) from error
