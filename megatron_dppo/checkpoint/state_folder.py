"""The folders training states live in: `root/step_00000008/`, and `root/latest`, which names one of them.

A state carries its model's config and tokenizer in `hf/`, so that it can be exported wherever it is.

A state is written as `.step_00000008.incomplete-...` and renamed when every file is on the disk; its `state.json`
lists every file with its size, so that a folder that lost some (an interrupted copy) is noticed before it is read.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_dppo.checkpoint.atomic import INCOMPLETE, publish, sync, write_synced
from megatron_dppo.errors import UserError

LATEST, DESCRIPTION, HF = "latest", "state.json", "hf"
FORMAT = 1
_NAME = re.compile(r"step_(\d{8})")


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def finished_states(root: Path) -> list[Path]:
    """Complete folders by rising step."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _NAME.fullmatch(p.name) and (p / DESCRIPTION).is_file())


def latest_state(root: Path) -> Path:
    """The folder `latest` names; where that file is missing, the complete folder of the highest step.

    `UserError` says which of these is wrong: no such folder, nothing saved in it, `latest` naming what is not there.
    """
    if not root.is_dir():
        raise UserError(f"cannot resume: {root} does not exist")
    pointer = root / LATEST
    if pointer.is_file():
        name = pointer.read_text().strip()
        if not _NAME.fullmatch(name):
            raise UserError(
                f"cannot resume: {pointer} says {name!r}, which is no checkpoint; write a step folder there"
            )
        if not (root / name / DESCRIPTION).is_file():
            found = ", ".join(p.name for p in finished_states(root)) or "none"
            raise UserError(f"cannot resume: {pointer} names {name}, which is not complete there (complete: {found})")
        return root / name
    found_states = finished_states(root)
    if not found_states:
        raise UserError(f"cannot resume: {root} holds no checkpoint (no {LATEST} file, no step_... folder)")
    return found_states[-1]


def read_description(folder: Path) -> dict[str, Any]:
    """`state.json`, after checking that every file it lists is there in full."""
    file = folder / DESCRIPTION
    if not file.is_file():
        raise UserError(f"{folder} is no complete training state: it has no {DESCRIPTION}")
    try:
        described: dict[str, Any] = json.loads(file.read_text())
        files: dict[str, int] = described["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error!r}") from None
    if described.get("format") != FORMAT:
        raise UserError(f"{file} has format {described.get('format')!r}; this version reads format {FORMAT}")
    for name, size in files.items():
        part = folder / name
        if not part.is_file():
            raise UserError(f"{folder} is incomplete: {name} is missing; copy it again or resume from an older step")
        if part.stat().st_size != size:
            raise UserError(
                f"{folder} is incomplete: {name} has {part.stat().st_size} of {size} bytes; copy it again or resume "
                "from an older step"
            )
    return described


def finish_state(partial: Path, root: Path, step: int, described: dict[str, Any], keep: int) -> Path:
    """Describe, publish, point `latest` at it, remove what is beyond the `keep` newest. One process only."""
    files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
    write_synced(partial / DESCRIPTION, json.dumps({"format": FORMAT, "files": files, **described}, indent=1))
    sync(partial)
    folder = root / folder_name(step)
    publish(partial, folder)
    replacement = root / f".{LATEST}.new"
    write_synced(replacement, folder.name + "\n")
    replacement.replace(root / LATEST)
    sync(root)
    # By age, not by step: a run resumed from an earlier step leaves higher numbers behind.
    older = sorted(finished_states(root), key=lambda p: (p / DESCRIPTION).stat().st_mtime_ns)
    older.remove(folder)
    for obsolete in older[: max(0, len(older) + 1 - keep)]:
        shutil.rmtree(obsolete, ignore_errors=True)
    return folder


def remove_leftovers(root: Path) -> None:
    """Delete what a killed save left behind."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith(".step_") and (INCOMPLETE in path.name or ".replaced-" in path.name):
                shutil.rmtree(path, ignore_errors=True)
