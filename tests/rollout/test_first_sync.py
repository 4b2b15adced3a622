"""Engines that do not get their first weights: the same fault twice ends the run, others are replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_dppo.checkpoint.weight_layout import pack
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.rollout.engine import EngineDead, EnginesFailed, NoWeights
from megatron_dppo.rollout.fleet.failures import Failures
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.weight_transfer.manifest import ChecksumMismatch, IncompleteSync
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from tests.distributed import PATIENCE_S
from tests.rollout.conftest import CONFIG, making
from tests.rollout.reference import other_weights
from tests.tiny import tiny_qwen3_moe


def test_weights_that_no_engine_takes_end_the_run_at_the_second(ray_session: RaySession, tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, seed=1, num_hidden_layers=1)
    lacking = [one for one in other_weights(tmp_path, seed=5).items() if one[0] != "model.norm.weight"]
    config = CONFIG.model_copy(update={"engine": "reference"})
    fleet = EngineFleet(making(tmp_path, config), config, name="first-sync")
    try:
        members = fleet.members_to_sync(1)
        for number in range(2):
            deadline = time.monotonic() + PATIENCE_S
            while number and not (members := fleet.members_behind()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert [member.name for member in members] == [f"first-sync-engine-0-{number}"]
            to = Recipients(members, timeout_s=PATIENCE_S)
            to.wait(to.ask(lambda engine: engine.begin_update(1)))
            for bucket in pack(lacking, 1 << 20):
                to.wait(to.ask(lambda engine: engine.receive_bucket(1, bucket)))  # noqa: B023
            to.wait(to.ask(lambda engine: engine.end_update(1, {})))
            fleet.synced(1, members, to.errors)
        with pytest.raises(
            UserError,
            match=r"^no engine has got weights yet, and two syncs in a row failed alike; the last one: engine "
            r"first-sync-engine-0-1 did not get weight version 1: IncompleteSync: 1 tensors did not come, first "
            r"model.norm.weight; ",
        ):
            fleet.status()
    finally:
        fleet.close()


LACKS, OTHER = IncompleteSync("7 tensors did not come"), ChecksumMismatch("buckets [1, 3], 2 of 8")
DEAD = EngineDead("the process is gone")


@pytest.mark.parametrize(
    ("syncs", "ends"),
    [
        ([{"a-0": LACKS}, {"a-1": LACKS}], True),
        ([{"a-0": LACKS}, {"a-1": IncompleteSync("9 tensors did not come")}], True),
        ([{"a-0": DEAD}, {"a-1": DEAD}], True),
        ([{"a-0": LACKS}, {"a-1": OTHER}, {"a-2": DEAD}, {"a-3": LACKS}], False),
        ([{"a-0": LACKS, "b-0": LACKS}], False),  # a single sync
        ([{"a-0": LACKS, "b-0": DEAD}, {"b-1": DEAD}], True),
        ([{"a-0": LACKS, "b-0": None}, {"a-1": LACKS}, {"a-2": LACKS}], False),
        ([{"a-0": None}, {"a-0": LACKS}, {"a-1": LACKS}], False),
        ([{"a-0": LACKS}, {"a-1": None}, {"a-1": LACKS}], False),
    ],
)
def test_a_run_ends_only_before_the_first_weights_came_and_for_one_reason(
    syncs: list[dict[str, Exception | None]], ends: bool
) -> None:
    """A row of syncs, with what each engine failed."""
    failures = Failures(most=8)
    ended = [
        failures.of_sync(sync, {name: f"did not: {type(e).__name__}: {e}" for name, e in sync.items() if e}, 1)
        for sync in syncs
    ]
    assert ended[:-1] == [None] * (len(syncs) - 1)
    assert isinstance(ended[-1], NoWeights) == ends


def test_all_reasons_of_the_second_sync_are_told() -> None:
    failures = Failures(most=8)
    for number in range(2):
        failed = {f"a-{number}": "another member gave up", f"b-{number}": "no memory"}
        end = failures.of_sync(set(failed), failed, number)
    assert "engine a-1 another member gave up; engine b-1 no memory; other engines" in str(end)


def test_engines_that_a_run_takes_over_have_taken_weights() -> None:
    failures = Failures(most=1)
    assert failures.another("engine a-0 died") is None
    assert failures.of_sync({"a-1"}, {}, 1) is None
    failures.begin_run()
    assert [failures.of_sync({"a-1"}, {"a-1": "timed out"}, 1) for _ in range(2)] == [None, None]
    assert failures.another("engine a-1 timed out") is None  # counted anew


def test_a_run_of_weeks_may_lose_an_engine_now_and_then() -> None:
    """50 versions of the weights take one failure off the count; one that is brought to a new engine again does not
    count as one, nor does a sync that nobody took."""
    failures = Failures(most=2)
    for version in range(500):
        if version % 50 == 0:
            assert failures.another("engine a-0 died") is None
        assert failures.of_sync({"a"}, {}, version) is None
    for number in range(2):
        assert failures.another("engine a-0 died") is None
        assert failures.so_far == (
            f"{number + 1} engine failures count, more than rollout.max_engine_failures=2 end the run"
        )
        for _ in range(50):
            assert failures.of_sync({"a"}, {}, 499) is None
            assert failures.of_sync({"a"}, {"a": "timed out"}, 500) is None
    end = failures.another("engine a-0 died")
    assert isinstance(end, EnginesFailed)
    assert str(end).startswith("3 engine failures, rollout.max_engine_failures=2 are allowed; the last one: engine a-0")
    assert exit_status(lambda: raised(end)) == 1


def test_engines_that_die_in_every_step_end_a_run() -> None:
    failures = Failures(most=8)
    for version in range(8):
        assert failures.another("engine a-0 died") is None
        assert failures.of_sync({"a"}, {}, version) is None
    assert isinstance(failures.another("engine a-0 died"), EnginesFailed)


def raised(error: Exception) -> int:
    raise error
