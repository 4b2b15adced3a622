"""Single bits that flip on a disk, in every kind of file that is written or read, and kills at random moments of saves:
refused, or without effect, and never loaded changed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.checkpoint import state_folder
from megatron_dppo.checkpoint.hf_files import INDEX, HFFiles
from megatron_dppo.checkpoint.hf_import import check_tensors
from megatron_dppo.checkpoint.hf_save import save_hf_checkpoint
from megatron_dppo.checkpoint.peft_adapter import check_peft_adapter, save_peft_adapter
from megatron_dppo.checkpoint.training_state import TrainingStates
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.models.lora.attach import attach_adapters
from megatron_dppo.models.lora.config import LoraConfig
from tests.checkpoint.training_ranks import adam_step, trainee_from
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.tiny import tiny_model

LORA = LoraConfig(rank=4)


def write_all(rank: int, source: Path, folder: Path) -> None:
    """Two states, an export of several files and an adapter, as two ranks write them."""
    trainee = trainee_from(source, {"expert": 2})
    states = TrainingStates(folder / "states", trainee)
    for step in (1, 2):
        adam_step(trainee, step)
        states.save(step, {"position": step})
    models, model, groups = build_from(source, {"expert": 2})
    save_hf_checkpoint(folder / "hf", models, model, groups, shard_bytes=150_000)
    attach_adapters(models, model, groups, LORA, seed=1)
    save_peft_adapter(folder / "adapter", models, model, groups, LORA)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`states/`, `hf/`, `adapter/`; and in `foreign/` a model as others write it, without checksums."""
    folder = tmp_path_factory.mktemp("written")
    tiny_model("qwen3_moe", folder / "foreign", num_hidden_layers=2, max_shard_size="150KB")
    run_ranks(write_all, 2, folder / "foreign", folder)
    return folder


def load_state(folder: Path) -> Any:
    state = state_folder.latest_state(folder / "states")
    state_folder.require_whole(state)
    return state


def load_model(folder: Path) -> Any:
    files = HFFiles(folder)
    files.check_weights()
    model = load_hf_config(folder)
    check_tensors(files, model, False)
    return files.tensors


def flip_bits(rank: int, written: Path, seed: int, flips: int) -> dict[str, Counter[str]]:
    """For each kind of file: how many flips were refused, and how many had no effect on what is loaded."""
    model = load_hf_config(written / "foreign")
    load: dict[str, Callable[[], Any]] = {
        "states": lambda: load_state(written),
        "hf": lambda: load_model(written / "hf"),
        "foreign": lambda: load_model(written / "foreign"),
        "adapter": lambda: check_peft_adapter(written / "adapter", model, LORA),
    }
    kinds = kinds_of(written)
    right = {name: call() for name, call in load.items()}
    found: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    generator = random.Random(seed)
    for number in range(flips):
        kind = list(kinds)[number % len(kinds)]
        file, start, stop = generator.choice(kinds[kind])
        place, bit = generator.randrange(start, stop), 1 << generator.randrange(8)
        with file.open("r+b") as stream:
            stream.seek(place)
            byte = stream.read(1)[0]
            for value in (byte ^ bit, byte):
                stream.seek(place)
                stream.write(bytes([value]))
                stream.flush()
                if value == byte:
                    break
                part = kind.partition("/")[0]
                try:
                    loaded = load[part]()
                except UserError:
                    found[kind]["refused"] += 1
                    continue
                assert loaded == right[part], f"bit {bit} of byte {place} of {file} changes what is loaded"
                found[kind]["without effect"] += 1
    assert {name: call() for name, call in load.items()} == right
    return found


def kinds_of(written: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """Files with the span of bytes to flip, by kind. Of a model that others wrote, nothing proves the numbers and the
    side files: there the index and the headers alone are flipped."""
    kinds: dict[str, list[tuple[Path, int, int]]] = {}
    newest = state_folder.latest_state(written / "states")
    for part in ("states", "hf", "foreign", "adapter"):
        for file in sorted((written / part).rglob("*")):
            size = file.stat().st_size
            if (
                not file.is_file()
                or not size
                or (part == "states" and newest not in file.parents and file.parent.name != part)
            ):
                continue
            name = (
                f"{part}/{file.suffix or file.name}"
                if file.suffix in (".distcp", ".safetensors")
                else f"{part}/{file.name}"
            )
            if file.suffix == ".safetensors":
                data = 8 + int.from_bytes(file.read_bytes()[:8], "little")
                kinds.setdefault(f"{name} header", []).append((file, 0, data))
                if part != "foreign":
                    kinds.setdefault(f"{name} data", []).append((file, data, size))
            elif part != "foreign" or file.name == INDEX:
                kinds.setdefault(name, []).append((file, 0, size))
    return kinds


def check_flips(found: dict[str, Counter[str]]) -> None:
    """Where there are checksums a flip has no effect only in the blank at the end of `latest`."""
    for kind, outcomes in found.items():
        if not kind.startswith("foreign/") and kind != "states/latest":
            assert set(outcomes) == {"refused"}, (kind, outcomes)


def test_a_flipped_bit_is_refused_or_has_no_effect(written: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(written, tmp_path / "copy"))
    found = run_ranks(flip_bits, 1, copy, 0, 150)[0]
    check_flips(found)
    assert len(found) > 20
    assert all(found.values())


@pytest.mark.full
def test_a_thousand_flipped_bits(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(written, tmp_path / "copy"))
    found = run_ranks(flip_bits, 1, copy, 1, 1000, timeout=500.0)[0]
    with capsys.disabled():
        print()
        for kind, outcomes in found.items():
            print(f"{kind:45} {dict(outcomes)}")
    check_flips(found)


def save_until_killed(rank: int, source: Path, root: Path, delay: float) -> None:
    """One state after another until this process is killed, `delay` seconds after the first save began."""
    trainee = trainee_from(source, {})
    states = TrainingStates(root, trainee)
    begun = max([int(path.name[5:]) for path in state_folder.finished_states(root)], default=0)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in count(begun + 1):
        adam_step(trainee, step)
        states.save(step, {"position": step})


def check_what_is_left(rank: int, source: Path, root: Path) -> int:
    """Every state that has its name is whole, and the latest loads."""
    for state in state_folder.finished_states(root):
        state_folder.require_whole(state)
    resumed = TrainingStates(root, trainee_from(source, {})).load()
    assert resumed.progress == {"position": resumed.step}
    return resumed.step


def kill_saves(source: Path, root: Path, seed: int, kills: int) -> list[int]:
    """The steps that were loaded after each kill."""
    generator, steps = random.Random(seed), []
    for _ in range(kills):
        with pytest.raises(AssertionError, match="exit codes"):
            run_ranks(save_until_killed, 1, source, root, generator.uniform(0.4, 1.6))
        if state_folder.finished_states(root):
            steps += run_ranks(check_what_is_left, 1, source, root)
    return steps


def test_a_save_that_is_killed_damages_no_state(written: Path, tmp_path: Path) -> None:
    steps = kill_saves(written / "foreign", tmp_path / "states", 0, 2)
    assert steps == sorted(steps)


@pytest.mark.full
def test_twenty_kills_damage_no_state(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = kill_saves(written / "foreign", tmp_path / "states", 1, 20)
    with capsys.disabled():
        print(f"\nsteps loaded after each kill: {steps}")
    assert steps == sorted(steps)
    assert len(steps) >= 18
