"""The folders training states live in: `root/step_00000008/`, and `root/latest`, which names one of them.

A state carries its model's config and tokenizer in `hf/`, so that it can be exported wherever it is.

A state is written as `.step_00000008.incomplete-...` and renamed when every file is on the disk. The checksums of all
are written last, so that a folder that lost a file or a bit, or has a file of another state, is not loaded. A run that
goes on from an older one renames it to `damaged_step_00000008_TIME`, which nothing reads, counts or removes.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

import torch.distributed as dist

from megatron_dppo.checkpoint.atomic import INCOMPLETE, publish, replace_synced, set_aside, sync, write_synced
from megatron_dppo.checkpoint.checksums import CHECKSUMS, check_folder, write_checksums
from megatron_dppo.checkpoint.first_rank import on_first_rank
from megatron_dppo.errors import SystemFault, UserError, file_errors, of_file
from megatron_dppo.json_object import read_json_object

LATEST, DESCRIPTION, HF = "latest", "state.json", "hf"
FORMAT = 2
_DATA = (".distcp", ".safetensors")
"""Endings of the files with the tensors."""
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "model": dict,
    "dtype": str,
    "layout": dict,
    "optimizer_step": (int, NoneType),
    "grad_scaler": dict,
    "scheduler": (dict, NoneType),
    "progress": dict,
    "lora": (dict, NoneType),
}
"""What `state.json` says, by its JSON types."""
START_ANEW = "; start a run with a run.dir of its own, without trainer.resume"
"""What to do where nothing was saved that a run could go on from."""
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
        raise UserError(f"cannot resume: {root} does not exist{START_ANEW}")
    pointer, found_states = root / LATEST, finished_states(root)
    if pointer.is_file():
        name = pointer.read_bytes().decode(errors="replace").strip()
        fault = "is no name of a state" if not _NAME.fullmatch(name) else "is not complete there"
        if root / name not in found_states:
            offer = f"; to go on from the newest, type: {go_on_from(found_states[-1])}" if found_states else START_ANEW
            complete = ", ".join(p.name for p in found_states) or "none"
            raise UserError(
                f"cannot resume: {pointer} names {name[:40]!r}, which {fault} (complete: {complete}){offer}"
            )
        return root / name
    if not found_states:
        raise UserError(f"cannot resume: {root} holds no checkpoint (no {LATEST} file, no step_... folder){START_ANEW}")
    return found_states[-1]


def go_on_from(state: Path) -> str:
    """What to type for a run to be resumed from `state`."""
    return f"echo {state.name} > {shlex.quote(str(state.parent / LATEST))}"


def require_whole(folder: Path) -> None:
    """`UserError`, on every rank, where a file of the state is not what was saved: names it, and the newest older state
    that is whole. Collective, and other errors, see `newest_whole`."""
    state, damaged = newest_whole(folder)
    if damaged:
        raise UserError(
            f"{damaged[folder]}; copy the folder again or use the newest older state that is whole: name {state} in "
            "its place"
        )


def newest_whole(folder: Path) -> tuple[Path, dict[Path, str]]:
    """`folder`. Where a file of the state is not what was saved: the newest older state beside it that is whole, and
    what is wrong with `folder` and those between; `UserError` where there is none.

    What `of_file` makes of it, on every rank, where a file cannot be read, and `SystemFault` where two ranks do not
    find the same. That may pass, and no step is lost for it. Collective over all ranks, each of which reads a share of
    the files with the tensors and all of the small ones.
    """
    damaged: dict[Path, str] = {}
    for state in [folder, *on_first_rank(lambda: _older(folder))]:
        damage = _damage(state)
        if damage is None:
            return state, damaged
        damaged[state] = damage
    raise UserError(f"{damaged[folder]}; copy the folder again (no older state beside it is whole)")


def go_back(state: Path, damaged: Mapping[Path, str]) -> list[Path]:
    """Let `latest` name `state` and rename what is `damaged`, so that it neither counts as one of those to keep nor
    hides what is saved from here on. Returns the new names. One process only, when no other reads them any more."""
    aside = {one: one.with_name(f"damaged_{one.name}_{time.strftime('%Y%m%d-%H%M%S')}") for one in damaged}
    with file_errors(f"{'; '.join(damaged.values())}; it cannot be renamed"):
        replace_synced(state.parent / LATEST, state.name + "\n")  # first: it never names what is not there
        for one, name in aside.items():
            one.rename(name)
        sync(state.parent)
    return list(aside.values())


def _damage(folder: Path) -> str | None:
    """What the first rank with a complaint found, where a second one, far from it, finds the same in its place."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    faults = _gathered(_fault(folder, rank))
    first = next((number for number, fault in enumerate(faults) if fault), None)
    if first is None:
        return None
    second = 0 if first else ranks - 1
    fault, again = faults[first], _gathered(_fault(folder, first) if rank == second else None)[second]
    if isinstance(fault, UserError) and str(again) == str(fault):
        return str(fault)
    where = "" if str(again) == str(fault) else f" (on rank {first}, not on rank {second})"
    said = f"{fault.filename} cannot be read: {fault.strerror}" if isinstance(fault, OSError) else fault
    cause = fault if isinstance(fault, OSError) else SystemFault()
    raise of_file(cause, f"{said}{where}; if that does not pass: {folder.parent / LATEST} may name an older state")


def _gathered(fault: UserError | OSError | None) -> list[UserError | OSError | None]:
    found: list[UserError | OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fault)
    return found


def _fault(folder: Path, rank: int) -> UserError | OSError | None:
    """What this process finds in the share of `rank`."""
    try:
        _check_share(folder, (rank, dist.get_world_size()))
    except (UserError, OSError) as error:
        return error if isinstance(error, UserError) else OSError(error.errno, error.strerror, error.filename)
    return None


def _older(folder: Path) -> list[Path]:
    """Complete states of earlier steps beside this one, the newest first."""
    states = finished_states(folder.parent) if _NAME.fullmatch(folder.name) else []
    return [state for state in reversed(states) if state.name < folder.name]


def _check_share(folder: Path, share: tuple[int, int]) -> None:
    """`UserError` names a file that is missing, damaged or of another state, `OSError` one that cannot be read. Every
    rank reads all small files, so that none goes on with another description than the others, and its share of those
    with the tensors."""
    if not (folder / DESCRIPTION).is_file():
        raise UserError(f"{folder} is no complete training state: it has no {DESCRIPTION}")
    if not check_folder(folder, mark=DESCRIPTION, which=lambda name: not name.endswith(_DATA)):
        read_description(folder)  # of an older version, which wrote none?
        raise UserError(f"{folder / CHECKSUMS} is missing")
    check_folder(folder, mark=DESCRIPTION, which=lambda name: name.endswith(_DATA), share=share)


def read_description(folder: Path) -> dict[str, Any]:
    """`state.json` of a folder whose checksums hold."""
    file = folder / DESCRIPTION
    described = read_json_object(file)
    if described.get("format") != FORMAT:
        raise UserError(f"{file} has format {described.get('format')!r}; this version reads format {FORMAT}")
    for name, kinds in _FIELDS.items():
        if not isinstance(described.get(name), kinds):
            raise UserError(f"{file}: {name} is {described.get(name)!r:.80}; copy the folder again")
    return described


def finish_state(
    partial: Path, root: Path, step: int, described: dict[str, Any], keep: int, digests: Mapping[str, str]
) -> Path:
    """Describe, write the checksums (`digests`: of the files that ranks wrote, by name), publish, point `latest` at it,
    remove what is beyond the `keep` newest. One process only."""
    write_synced(partial / DESCRIPTION, json.dumps({"format": FORMAT, **described}, indent=1))
    write_checksums(partial, mark=DESCRIPTION, known=digests)
    folder = root / folder_name(step)
    publish(partial, folder)
    replace_synced(root / LATEST, folder.name + "\n")
    # By age, not by step: a run resumed from an earlier step leaves higher numbers behind.
    older = sorted(finished_states(root), key=lambda p: (p / DESCRIPTION).stat().st_mtime_ns)
    older.remove(folder)
    for obsolete in older[: max(0, len(older) + 1 - keep)]:
        with suppress(OSError):  # of another name first: what is half removed when this process is killed is no state
            shutil.rmtree(set_aside(obsolete) or obsolete, ignore_errors=True)
    return folder


def remove_leftovers(root: Path) -> None:
    """Delete what a killed save left behind."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith(".step_") and (INCOMPLETE in path.name or ".replaced-" in path.name):
                shutil.rmtree(path, ignore_errors=True)
