"""However a run ends, the steps it finished are saved, the reason is the original one, and resuming goes on there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import GenerationTimeout
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe
from tests.trainer.ending_ranks import MINI_BATCHES, Ending, Run, run_all

REASON = "the service that scores is gone: connection reset by peer"


def saved(step: int) -> str:
    return f"The state after step {step} is saved; run.dir=FOLDER trainer.resume=true goes on from it"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(folder, seed=1, num_hidden_layers=1)
    sums = [{"problem": f"{i}+{i // 3}", "answer": str(i + i // 3)} for i in range(40)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return folder


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, list[Ending]]:
    """Every run, on both ranks."""
    folder = tmp_path_factory.mktemp("runs")

    def at(name: str, **options: object) -> Run:
        return Run(str(folder / name), **options)  # type: ignore[arg-type]

    runs = {
        "whole": at("whole"),
        "user": at("user", fault=(0, 2, "score"), error=UserError(REASON)),
        "user resumed": at("user", resume=True),
        "timeout": at("timeout", fault=(0, 2, "sample"), error=GenerationTimeout("twice too late")),
        "exit": at("exit", fault=(0, 2, "score"), error=SystemExit(0)),
        "profile": at("profile", fault=(0, 1, "show"), error=BrokenPipeError(32, "Broken pipe"), profile_step=1),
        "synced": at("synced", fault=(0, 1, "synced"), error=RuntimeError("a fault of the fleet")),
        "export": at("export", steps=1, fault=(0, 1, "export"), error=UserError("the disk is full")),
        "advantage": at("advantage", fault=(0, 2, "advantage")),
        "advantage resumed": at("advantage", resume=True),
        "every": at("every", every=1, fault=(0, 2, "advantage")),
        "every resumed": at("every", every=1, resume=True),
        "reward": at("reward", fault=(0, 2, "reward")),
        "first": at("first", fault=(0, 1, "score"), error=UserError(REASON)),
        "again": at("again", every=1, fault=(0, 2, "score"), error=UserError(REASON)),
        "blocked": at("blocked", fault=(0, 2, "score"), error=ValueError("the reason"), blocked=True),
        "colocated": at("colocated", colocated=True, fault=(0, 2, "score"), error=UserError(REASON)),
    }
    ranks = run_ranks(run_all, 2, str(model), list(runs.values()), timeout=500)
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(runs)}


def same(one: Ending, other: Ending) -> bool:
    return all(np.array_equal(one.weights[name], tensor) for name, tensor in other.weights.items())


def test_a_reward_that_gives_up_saves_the_steps_before_and_the_resumed_run_is_the_whole_one(
    endings: dict[str, list[Ending]],
) -> None:
    for ending in endings["user"]:
        assert (ending.error, ending.notes) == (f"UserError: {REASON}", (saved(1),))
        assert ending.state is not None
        assert ending.state["step"] == 1
        assert ending.state["optimizer_step"] == MINI_BATCHES
        assert ending.logged == (1,)
    whole, resumed = endings["whole"][0], endings["user resumed"][0]
    assert whole.finished
    assert resumed.finished
    assert resumed.logged == whole.logged == (1, 2, 3)
    assert same(resumed, whole)
    assert not same(endings["user"][0], whole)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("timeout", "GenerationTimeout: twice too late"),
        ("exit", "RuntimeError: ended by SystemExit(0)"),
        ("profile", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("synced", "RuntimeError: a fault of the fleet"),
    ],
)
def test_what_the_controller_fails_with_reaches_all_ranks_with_its_traceback(
    endings: dict[str, list[Ending]], name: str, error: str
) -> None:
    first, second = endings[name]
    assert first.error == error
    assert second.error == f"ControllerFailed: on rank 0: {error}"
    assert "Traceback" in second.cause
    assert "ending_ranks.py" in second.cause
    for ending in (first, second):
        assert ending.notes == (saved(1),)
        assert ending.state is not None
        assert ending.state["step"] == 1


def test_the_row_of_a_step_whose_sync_failed_is_there(endings: dict[str, list[Ending]]) -> None:
    assert endings["synced"][0].logged == (1,)


def test_a_run_that_cannot_export_its_model_has_saved_it(endings: dict[str, list[Ending]]) -> None:
    for ending in endings["export"]:
        assert (ending.error, ending.notes) == ("UserError: the disk is full", (saved(1),))
        assert ending.state is not None


def test_a_step_broken_off_between_gradient_steps_is_saved_as_that_and_goes_on_with_the_next(
    endings: dict[str, list[Ending]],
) -> None:
    for ending in endings["advantage"]:
        assert "1 gradient steps in a row were not finite (actor.max_skipped_steps=0)" in ending.error
        assert ending.notes == (
            "Step 2 was broken off after 2 of its 3 gradient steps, 1 of them skipped; the state with these is saved "
            "as its state, and run.dir=FOLDER trainer.resume=true goes on with step 3",
        )
        assert ending.state is not None
        assert ending.state["step"] == 2
        assert ending.state["progress"]["gradient_steps"] == [2, 3]
        assert ending.state["optimizer_step"] == MINI_BATCHES + 1
    resumed = endings["advantage resumed"][0]
    assert resumed.finished
    assert resumed.logged == (1, 3)
    assert resumed.state == endings["advantage"][0].state, "nothing was saved after it"


def test_a_step_broken_off_behind_a_saved_one_is_made_again(endings: dict[str, list[Ending]]) -> None:
    for ending in endings["every"]:
        assert ending.notes == (
            "Step 2 was broken off after 2 of its 3 gradient steps, 1 of them skipped, so the newest state is the one "
            "after step 1; run.dir=FOLDER trainer.resume=true goes on from it",
        )
        assert ending.state is not None
        assert ending.state["step"] == 1
    whole, resumed = endings["whole"][0], endings["every resumed"][0]
    assert resumed.logged == whole.logged
    assert same(resumed, whole)


def test_a_reward_that_is_no_number_ends_the_run_after_what_was_trained(endings: dict[str, list[Ending]]) -> None:
    for ending, who in zip(endings["reward"], ("", "ControllerFailed: on rank 0: "), strict=True):
        assert ending.error.startswith(f"{who}ValueError: rewards must be finite; rows [4] are not")
        assert ending.notes == (saved(1),)


def test_nothing_is_said_to_be_saved_that_is_not(endings: dict[str, list[Ending]]) -> None:
    for ending in endings["first"]:
        assert (ending.error, ending.notes, ending.state) == (f"UserError: {REASON}", (), None)
    for ending in endings["again"]:
        assert ending.notes == (saved(1),)
    for ending, error in zip(
        endings["blocked"], ("ValueError: the reason", "ControllerFailed: on rank 0"), strict=True
    ):
        assert ending.error.startswith(error), "the original reason, not that of the save"
        assert "The state after step 1 could not be saved (cannot create" in ending.notes[0]
        assert ending.notes[0].endswith("so no state is saved")
        assert ending.tracebacks == ()


def test_engines_that_have_the_gpus_give_them_back_first(endings: dict[str, list[Ending]]) -> None:
    for ending in endings["colocated"]:
        assert ending.notes == (saved(1),)
        assert ending.state is not None
    assert same(endings["colocated"][0], endings["user"][0])
