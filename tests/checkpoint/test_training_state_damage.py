"""Which training state a run goes on from: the newest that is whole. What is not is named, or refused."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from megatron_dppo.checkpoint.state_folder import finished_states, latest_state, read_description
from megatron_dppo.checkpoint.training_state import TrainingStates
from megatron_dppo.errors import UserError
from tests.checkpoint.training_ranks import EP2, load_only, load_views, trainee_from
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe


def test_retention_keeps_the_newest_and_latest_names_the_last(saved_states: Path) -> None:
    assert sorted(p.name for p in saved_states.iterdir()) == ["latest", "step_00000003", "step_00000004"]
    assert latest_state(saved_states).name == "step_00000004"
    assert read_description(latest_state(saved_states))["progress"] == {"position": 4}
    assert (latest_state(saved_states) / "hf" / "tokenizer.json").is_file()


def test_ranks_that_see_different_latest_states_load_the_one_that_rank_0_sees(
    model: Path, saved_states: Path, states: Path
) -> None:
    """NFS shows a folder's new entries late on other nodes."""
    (states / "latest").write_text("step_00000003\n")
    assert set(run_ranks(load_views, 2, model, [saved_states, states])) == {f"{saved_states}/step_00000004 4"}


def test_nothing_to_resume_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; start a run with a run\.dir of its own"):
        latest_state(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no checkpoint"):
        latest_state(tmp_path)
    (tmp_path / "latest").write_text("step_00000009\n")
    with pytest.raises(UserError, match="names 'step_00000009', which is not complete"):
        latest_state(tmp_path)
    (tmp_path / "latest").write_text("../../elsewhere")
    with pytest.raises(UserError, match="no name of a state"):
        latest_state(tmp_path)


def test_without_the_pointer_the_highest_complete_state_is_taken(states: Path) -> None:
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
    fault: Callable[[Path], str], model: Path, states: Path
) -> None:
    """On every rank the same, also where only one has read the file."""
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


def test_the_state_that_a_run_went_back_to_is_not_removed_for_a_damaged_one(model: Path, states: Path) -> None:
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


def test_what_is_taken_is_whole_itself(model: Path, states: Path) -> None:
    shutil.copytree(states / "step_00000003", states / "step_00000002")
    flipped(states / "step_00000004")
    flipped(states / "step_00000003")
    ((step, said),) = run_ranks(load_and_listen, 1, model, states, {})
    assert step == 3  # what the copy's description says
    assert ["; going on from step_00000002, " in line for line in said] == [True, True]
    assert [p.name for p in finished_states(states)] == ["step_00000002"]
    flipped(states / "step_00000002")
    assert "no older state beside it is whole" in run_ranks(load_only, 1, model, states, {}, {})[0]


def test_a_pointer_to_what_is_not_complete_offers_what_is(states: Path) -> None:
    without_description(states / "step_00000004")
    with pytest.raises(UserError, match=r"'step_00000004', which is not complete there .*echo step_00000003 > "):
        latest_state(states)
    (states / "latest").write_bytes(b"step_0000\xff004")
    with pytest.raises(UserError, match=r"which is no name of a state .*echo step_00000003 > "):
        latest_state(states)


def test_states_of_the_format_without_checksums_are_named(model: Path, states: Path) -> None:
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
    saved_states: Path, tmp_path: Path, name: str, value: object
) -> None:
    described = json.loads((saved_states / "step_00000004" / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(described))
    assert read_description(tmp_path)["step"] == 4
    (tmp_path / "state.json").write_text(json.dumps(described | {name: value}))
    with pytest.raises(UserError, match=rf"state\.json: {name} is .*copy the folder again"):
        read_description(tmp_path)


def test_every_file_of_a_state_has_a_checksum_that_other_programs_read(saved_states: Path) -> None:
    folder = saved_states / "step_00000004"
    lines = (folder / "checksums.xxh128").read_text().splitlines()
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "checksums.xxh128"]
    assert lines == [
        f"{xxhash.xxh3_128(file.read_bytes()).hexdigest()}  {file.relative_to(folder).as_posix()}"
        for file in sorted(files, key=lambda file: (file.name == "state.json", file.relative_to(folder).as_posix()))
    ]


def test_another_model_or_dtype_is_refused_by_name(saved_states: Path, tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "other", num_hidden_layers=2, num_experts=4)
    assert "experts is 8 there, 4 here" in run_ranks(load_only, 1, tmp_path / "other", saved_states, {}, {})[0]


def test_half_precision_run_refuses_full_precision_state(model: Path, saved_states: Path) -> None:
    import torch

    refusal = run_ranks(load_only, 1, model, saved_states, {}, {"params_dtype": torch.bfloat16})[0]
    assert "torch.float32 weights, this run trains torch.bfloat16" in refusal
