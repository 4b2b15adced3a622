"""Rewards scored by the nodes of a Ray cluster; here, because the folder has one."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.config.load import build_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.rewards.config import MathVerifyReward, PythonReward, RewardConfig
from megatron_dppo.tasks.rewards.grader import Grader, build_grader
from megatron_dppo.tasks.rewards.ray_workers import RayVerifierPool
from megatron_dppo.trainer.task_suite import build_task_suite
from tests.distributed import PATIENCE_S
from tests.tasks.rewards.test_grader import HERE, prompt


def grader(rewards: list[RewardConfig]) -> Grader:
    task = TaskConfig(rewards=rewards, answer_pattern=r"(?P<answer>.*)", reward_memory_mib=8192, reward_placement="ray")
    return build_grader(task, max_response_tokens=100)


def pool_of(made: Grader) -> RayVerifierPool:
    assert isinstance(made.pool, RayVerifierPool)
    return made.pool


def supervises(process: psutil.Process | None) -> bool:
    command = [] if process is None else process.cmdline()
    return "megatron_dppo.tasks.workers.supervisor" in command and "bwrap" not in command[0]


def workers() -> list[psutil.Process]:
    """Without the processes that they fork."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or ended and not waited for by its parent: a zombie
            if supervises(process) and not supervises(process.parent()):
                found.append(process)
    return found


def test_what_hangs_crashes_and_leaks_stalls_nobody(ray_session: RaySession) -> None:
    """And an actor that is lost between or during two calls is replaced or left out."""
    made = grader([PythonReward(path=f"{HERE}:picky", timeout_s=5.0, name="picky"), MathVerifyReward(weight=0.5)])
    try:
        responses = ["raise", "hang", "spin", "nan", "crash", "eat"] + ["14"] * 10
        start = time.monotonic()
        rewards = made.score([prompt(worth=2.5)] * len(responses), responses)
        assert time.monotonic() - start < PATIENCE_S
        assert rewards.parts["picky"].tolist() == [0.0] * 6 + [2.5] * 10
        assert rewards.parts["math-verify"].tolist() == [0.0] * 6 + [1.0] * 10
        assert rewards.errors == {"picky": 6, "math-verify": 0}
        assert rewards.timeouts == {"picky": 2, "math-verify": 0}
        (node,) = (one["NodeID"] for one in ray.nodes() if one["Alive"])
        assert len(workers()) == 2

        pool = pool_of(made)
        ray.kill(pool._actors[node])
        with pytest.raises(RuntimeError, match="no node is left to verify answers on: 1 did not answer or are gone"):
            made.score([prompt(worth=1)], ["fine"])
        again = made.score([prompt(worth=1)] * 2, ["14", "raise"])
        np.testing.assert_array_equal(again.parts["picky"], [1, 0])
        with pytest.raises(UserError, match=r"the reward picky failed on all 8 responses .*KeyError: 'no such thing'"):
            made.score([prompt(worth=1, index=n) for n in range(8)], ["raise"] * 8)
    finally:
        made.close()
    _, alive = psutil.wait_procs(workers(), timeout=20)
    assert not alive
    made.close()


def test_a_function_that_is_not_there_is_named(ray_session: RaySession) -> None:
    made = grader([PythonReward(path=f"{HERE}:nothing")])
    with pytest.raises(UserError, match="nothing"):
        made.score([prompt()], ["14"])
    assert not pool_of(made)._actors


def test_the_configuration_decides(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    tree = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "task": {"kind": "data", "data": {"path": str(tmp_path / "sums.jsonl")}, "reward_placement": "ray"},
        "evaluation": {"every": 0},
    }
    for placement, kind in (("ray", "RayVerifierPool"), ("local", "LocalVerifierPool")):
        config = build_config(Config, tree, [f"task.reward_placement={placement}"], where="here")
        suite = build_task_suite(config, byte_tokenizer())
        assert type(suite.task.grader.pool).__name__ == kind
        suite.close()
