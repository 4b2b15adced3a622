"""Answers are judged while others are still sampled: by a fleet, a reward and a collector as a run has them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import pytest

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.algorithm.advantage import Baseline
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.config.load import build_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.trainer.requests import Draws, requests_for
from megatron_dppo.trainer.rollouts import RolloutCollector
from megatron_dppo.trainer.task_suite import build_task_suite
from tests.rollout.uniform_engine import UniformEngine

JUDGE = """
from pathlib import Path

def judge(*, reference, **_):
    Path({gate!r}).touch()
    return float(reference)
"""


class Waits(UniformEngine):
    """Answers other prompts than one when an answer to that was judged."""

    def __init__(self, config: RolloutConfig, gate: Path) -> None:
        super().__init__(config)
        self._gate = gate

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        deadline = time.monotonic() + 60
        while requests[0].request_id.split("/")[2] != "2" and not self._gate.exists():
            if time.monotonic() > deadline:
                raise UserError("nobody judged the answers that have come")
            time.sleep(0.01)
        return super().generate(requests, sampling, training=training, call=call)


class OneByOne(UniformEngine):
    """Answers two prompts a second, and the last of 40 when it is told to end."""

    def __init__(self, config: RolloutConfig, end: Path) -> None:
        super().__init__(config)
        self._end = end

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        _, _, row, sample = requests[0].request_id.split("/")
        number = int(row) + 4 * (int(sample) // 2)
        deadline = time.monotonic() + (90 if number == 39 else number / 2)
        while not self._end.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if number == 39:
            raise UserError("all was sampled before a judge that failed was heard of")
        return super().generate(requests, sampling, training=training, call=call)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "judge.py").write_text(JUDGE.format(gate=str(tmp_path / "gate")))
    rows = [json.dumps({"problem": f"{n}?", "answer": str(n)}) for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    reward = {"kind": "python", "path": f"{tmp_path / 'judge.py'}:judge", "sandbox": "none", "bounds": [0, 9]}
    tree = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "task": {
            "kind": "data", "data": {"path": str(tmp_path / "rows.jsonl")}, "rewards": [reward],
            "reward_memory_mib": 8192, "reward_workers": 1,
        },
        "rollout": {
            "engine": "tests.rollout.uniform_engine:make", "max_prompt_tokens": 400, "max_response_tokens": 4,
            "sequences_per_object": 2, "top_k_logprobs": 0,
        },
        "trainer": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "evaluation": {"every": 0},
    }  # fmt: skip
    return build_config(Config, tree, [], where="here")


def test_an_answer_is_judged_while_others_are_sampled(ray_session: RaySession, tmp_path: Path, config: Config) -> None:
    suite = build_task_suite(config, byte_tokenizer())
    fleet = EngineFleet(partial(Waits, config.rollout, tmp_path / "gate"), config.rollout, name="judged")
    collector = RolloutCollector(config, None, (fleet, suite), [])  # type: ignore[arg-type]
    try:
        prompts = suite.task.prompts(0, 4)
        requests = requests_for(prompts, 2, Draws(0, 0))
        groups = collector._ask(fleet, suite, prompts, requests, enough=None)
        assert groups.handle.request_ids == tuple(request.request_id for request in requests)
        assert len(groups.handle.keys) == 4
        assert groups.rewards.reward.tolist() == [float(prompt.answer) for prompt in prompts for _ in range(2)]
        assert groups.rewards.errors == {"python": 0}
        assert [len(ids) for ids in groups.responses] == [4] * 8
    finally:
        collector.close()
        suite.close()
        fleet.close()


def test_a_judge_that_fails_ends_a_step_before_all_is_sampled(
    ray_session: RaySession, tmp_path: Path, config: Config
) -> None:
    suite = build_task_suite(config, byte_tokenizer())
    suite.task.close()  # the worker that has imported it
    (tmp_path / "judge.py").write_text("def judge(:")
    fleet = EngineFleet(partial(OneByOne, config.rollout, tmp_path / "end"), config.rollout, name="failing-judge")
    collector = RolloutCollector(config, None, (fleet, suite), [])  # type: ignore[arg-type]
    try:
        prompts = suite.task.prompts(0, 40)
        requests = requests_for(prompts, 2, Draws(0, 0))
        with pytest.raises(UserError, match=r"judge\.py"):
            collector._ask(fleet, suite, prompts, requests, enough=None)
    finally:
        (tmp_path / "end").touch()
        collector.close()
        suite.close()
        fleet.close()


@pytest.mark.parametrize("resume", [False, True])
def test_two_bad_rows_do_not_end_a_run_each_time_it_goes_on(tmp_path: Path, config: Config, resume: bool) -> None:
    """They would come first each time; where a run begins so, its function is taken for broken."""
    (tmp_path / "judge.py").write_text("def judge(**_):\n    raise KeyError('bad row')\n")
    task = config.task.model_copy(update={"reward_placement": "local"})
    trainer = config.trainer.model_copy(update={"resume": resume})
    suite = build_task_suite(config.model_copy(update={"task": task, "trainer": trainer}), byte_tokenizer())
    grader, ends = suite.task.grader, pytest.raises(UserError, match="failed on all 2 responses to 2 questions")
    assert grader is not None
    with closing(suite), nullcontext() if resume else ends:
        assert grader.score(suite.task.prompts(0, 2), ["1"] * 2).errors == {"python": 2}


@pytest.mark.parametrize("baseline", ["mean", "none"])
def test_a_step_that_teaches_nothing_says_so(
    ray_session: RaySession,
    tmp_path: Path,
    config: Config,
    baseline: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The judge gives all answers to a question the same: nothing is left of it above their mean."""
    algorithm = config.algorithm.model_copy(update={"baseline": Baseline(baseline)})
    config = config.model_copy(update={"algorithm": algorithm})
    suite = build_task_suite(config, byte_tokenizer())
    fleet = EngineFleet(partial(UniformEngine, config.rollout), config.rollout, name=f"alike-{baseline}")
    collector = RolloutCollector(config, None, (fleet, suite), [])  # type: ignore[arg-type]
    try:
        assert collector._collect(fleet, suite, 0).experience.metrics["reward/equal_groups_fraction"] == 1.0
    finally:
        collector.close()
        suite.close()
        fleet.close()
    said = "step 1: all answers to each prompt have the same reward, so no advantage teaches anything"
    assert (said in caplog.messages) == (baseline == "mean")


def test_more_prompts_in_a_step_than_there_are_questions_are_said(config: Config) -> None:
    said = "  trainer.prompts_per_step=5 is more than the 4 questions to train on: a step asks some of them again"
    for asked, report in ((4, []), (5, [said])):
        trainer = config.trainer.model_copy(update={"prompts_per_step": asked})
        suite = build_task_suite(config.model_copy(update={"trainer": trainer}), byte_tokenizer())
        suite.close()
        assert [line for line in suite.report if "prompts_per_step" in line] == report
