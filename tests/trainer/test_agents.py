"""Episodes that harnesses play: ways in, limits, faults, and what is trained on. The policy is one that says what its
seed says, and records it; the session server, the workers and the `openai` client are the real ones."""

from __future__ import annotations

import datetime
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EnginesFailed, SamplingConfig
from megatron_dppo.rollout.seeds import request_seed
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.rewards.config import ExactMatchReward
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.trainer.agents import AgentPlayer
from megatron_dppo.trainer.episodes import Episodes
from megatron_dppo.trainer.requests import Draws

HERE = "tests.trainer.agent_harnesses"
ROLLOUT = RolloutConfig(max_prompt_tokens=400, max_response_tokens=16)


class Policy:
    """Says a few letters that follow from the seed; stands in for an engine, and keeps what it said."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.said, self.begun = tokenizer, {}, 0
        self.failure: Exception | None = None

    def words(self, request) -> str:
        return "".join(map(chr, np.random.default_rng(request.seed).integers(97, 123, 4)))

    def generate(self, requests, sampling, *, training) -> RolloutBatch:
        if self.failure is not None:
            raise self.failure
        self.begun += len(requests)
        (request,) = requests
        ids = [*self.tokenizer.encode(self.words(request)), self.tokenizer.eos_token_id]
        tokens = np.concatenate([request.prompt_ids, ids]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(request.prompt_ids)
        batch = RolloutBatch(
            token_ids=tokens,
            offsets=np.array([0, len(tokens)]),
            prompt_lengths=np.array([len(request.prompt_ids)], dtype=np.int32),
            loss_mask=mask,
            mu_logp=np.where(mask, -np.random.default_rng(request.seed).random(len(tokens)), 0).astype(np.float32),
            topk_ids=np.zeros((len(tokens), 0), dtype=np.int32),
            topk_logp=np.zeros((len(tokens), 0), dtype=np.float32),
            routes=None,
            request_ids=(request.request_id,),
            finish_reasons=("stop",),
            weight_versions=np.zeros(len(tokens), dtype=np.int32),
        )
        self.said[request.request_id] = (request, batch)
        return batch.beyond([request.known])


def task_config(**agent) -> TaskConfig:
    if "command" not in agent:
        agent["function"] = f"{HERE}:{agent.pop('function', 'two_turns')}"
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    shown = {"prompt": "{metadata[expression]}", "answer_pattern": r"(?P<answer>-?\d+)"}
    return TaskConfig(kind="agent", agent=agent, parameters=parameters, train_size=20, held_out_size=4, **shown)


def play(policy, prompts: int = 2, samples: int = 2, metadata=None, **agent) -> Episodes:
    config = task_config(**agent)
    task = build_task(config, policy.tokenizer)
    player = AgentPlayer(config, ROLLOUT, policy.tokenizer, task.grader)
    try:
        sampling = SamplingConfig(max_tokens=16)
        asked = [
            replace(prompt, metadata={**prompt.metadata, **(metadata or {})}) for prompt in task.prompts(0, prompts)
        ]
        return player.play(policy, sampling, asked, samples, Draws(5, 3))
    finally:
        player.close()
        task.close()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_a_function_plays_two_turns(tokenizer) -> None:
    policy = Policy(tokenizer)
    episodes = play(policy)
    np.testing.assert_allclose(episodes.rewards.reward, [0.75, 1.75, 0.75, 1.75])
    assert episodes.turns.tolist() == [2, 2, 2, 2]
    assert episodes.episode.tolist() == [0, 1, 2, 3]
    batch = episodes.batch
    assert [name.rsplit("/", 1)[1] for name in batch.request_ids] == ["0", "1", "0", "1"]
    for b, name in enumerate(batch.request_ids):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        _, last = policy.said[f"{name}/1"]
        first, _ = policy.said[f"{name}/0"]
        np.testing.assert_array_equal(batch.token_ids[rows], last.token_ids)
        assert batch.loss_mask[rows].sum() == 10
        for turn in range(2):
            request, said = policy.said[f"{name}/{turn}"]
            _, _, prompt, sample = name.split("/")
            assert request.seed == request_seed(5, 3, int(prompt), int(sample), turn=turn)
            sampled = np.flatnonzero(said.loss_mask)
            np.testing.assert_array_equal(batch.mu_logp[rows][sampled], said.mu_logp[sampled])
        text = tokenizer.decode(first.prompt_ids)
        assert text.startswith("<|user|>")
        assert text.endswith("<|assistant|>")
    assert episodes.metrics["episode/turns_mean"] == 2
    assert episodes.metrics["agent/rendered_anew"] == 0
    assert episodes.rewards.errors == {"agent": 0}


def test_what_json_cannot_say_of_a_question_is_text(tokenizer) -> None:
    metadata = {"rate": float("nan"), "count": np.float64("inf"), "at": datetime.date(2026, 1, 2)}
    assert play(Policy(tokenizer), metadata=metadata, function="told").rewards.reward.tolist() == [1.0] * 4


def test_an_edited_history_is_a_branch_with_the_rewards_of_its_episode(tokenizer) -> None:
    policy = Policy(tokenizer)
    episodes = play(policy, function="edited")
    assert episodes.episode.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(episodes.rewards) == 4
    batch = episodes.batch
    assert len(set(batch.request_ids)) == 8
    assert batch.sampled_per_sequence.tolist() == [10, 5] * 4  # every turn is trained on once
    assert episodes.metrics["agent/branches"] == 4
    for b in range(1, 8, 2):
        name = batch.request_ids[b - 1]
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        _, said = policy.said[f"{name}/2"]
        np.testing.assert_array_equal(batch.token_ids[rows], said.token_ids)
        np.testing.assert_array_equal(batch.loss_mask[rows], said.loss_mask)
        assert "something else" in tokenizer.decode(batch.token_ids[rows])


def test_an_answer_is_scored_by_the_tasks_own_reward(tokenizer) -> None:
    episodes = play(Policy(tokenizer), function="answers")
    assert episodes.rewards.reward.tolist() == [0, 1, 0, 1]
    assert episodes.rewards.correct.tolist() == [False, True, False, True]
    assert set(episodes.rewards.parts) == {"agent", "verifier"}


def test_a_reward_for_some_questions_has_nothing_of_the_others(tokenizer) -> None:
    """An episode without an answer earns 0 from those that are for its question."""
    policy, config = Policy(tokenizer), task_config(function="sometimes_answers")
    rewards = (ExactMatchReward(name="a", when={"kind": "a"}), ExactMatchReward(name="b", when={"kind": "b"}))
    task = build_task(config, tokenizer)
    grader = build_grader(TaskConfig(rewards=rewards), max_response_tokens=16)
    player = AgentPlayer(config, ROLLOUT, tokenizer, grader)
    try:
        asked = [
            replace(p, metadata={**p.metadata, "kind": kind}) for p, kind in zip(task.prompts(0, 2), "ab", strict=True)
        ]
        parts = player.play(policy, SamplingConfig(max_tokens=16), asked, 2, Draws(5, 3)).rewards.parts
    finally:
        player.close()
        task.close()
        grader.close()
    np.testing.assert_array_equal(parts["a"], np.float32([0, 1, np.nan, np.nan]))
    np.testing.assert_array_equal(parts["b"], np.float32([np.nan, np.nan, 0, 1]))


FAULTS = {
    1: "killed after 12 s",
    2: "KeyError: 'no such tool'",
    3: "it returned None",
    4: "a reply of .* bytes; at most 1,048,576 are read",
    5: "ValueError: after much text; it printed 'x+",
    6: r"the reward is 1000000000.0, outside of task.agent.bounds",
    7: "its worker process ended with status 3",
    8: "killed after 12 s",
    10: "AuthenticationError: Error code: 401",
    11: "APIStatusError: Error code: 413",
}


def test_each_fault_ends_its_own_episode_and_no_other(tokenizer, monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    started = time.monotonic()
    episodes = play(
        Policy(tokenizer), prompts=1, samples=12, function="misbehaves", timeout_s=12, environment=["PIDS"], max_turns=5
    )
    assert time.monotonic() - started < 100
    rewards = episodes.rewards
    assert rewards.reward.tolist() == [1.0, 0.5] + [0.0] * 10  # sample 1 had said so before it hung
    assert rewards.errors == {"agent": len(FAULTS)}
    assert rewards.timeouts == {"agent": 2}
    assert episodes.metrics["agent/cut_episodes"] == 1  # by its turns, sample 9
    # What was sampled before the fault is trained on, once; the flood has five answers to one question.
    assert np.bincount(episodes.episode, minlength=12).tolist() == [1] * 9 + [5, 1, 1]
    assert (episodes.batch.sampled_per_sequence == 5).all()
    reasons = np.array(episodes.batch.finish_reasons)[np.unique(episodes.episode, return_index=True)[1]]
    assert [n for n in range(12) if reasons[n] == "length"] == [1, 8, 9]
    assert not rewards.well_formed[1:].any()
    lines = [record.message.partition(" failed: ") for record in caplog.records if " failed: " in record.message]
    assert [int(name.rsplit("/", 1)[1]) for name, _, _ in lines] == sorted(FAULTS)
    for (_, _, line), said in zip(lines, FAULTS.values(), strict=True):
        assert re.match(said, line)
        assert "\n" not in line
    for pid in map(int, (tmp_path / "pids").read_text().split()):  # it had left its process group
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_the_engines_fail_with_ends_the_run(tokenizer) -> None:
    policy = Policy(tokenizer)
    policy.failure = EnginesFailed("engines failed 3 times")
    with pytest.raises(EnginesFailed, match="engines failed 3 times"):
        play(policy)


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(open(os.environ["AGENT_ROW"]))
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
answer = post("/chat/completions", {"model": "policy", "messages": row["messages"]})["choices"][0]["message"]["content"]
assert "MY_SECRET_TOKEN" not in os.environ
report = {"reward": float(len(answer)), "correct": row["sample"] == 1}
match sys.argv[1 + row["sample"]]:
    case "file": json.dump(report, open(os.environ["AGENT_REPORT"], "w"))
    case "http": post("/reward", report)
    case "nothing": pass
    case "status": print("out of cheese"); sys.exit(4)
    case "large": open(os.environ["AGENT_REPORT"], "w").write("9" * (1 << 20))
    case "pickle": open(os.environ["AGENT_REPORT"], "wb").write(b"\\x80\\x04K\\x01.")
"""


WAYS = {
    "file": "",
    "http": "",
    "nothing": "it ended without a report",
    "status": "its command ended with status 4; it printed 'out of cheese'",
    "large": "its report has more than 65,536 bytes",
    "pickle": "UnicodeDecodeError",
}


def test_a_program_reports_by_file_or_http_or_fails_alone(tokenizer, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "not for harnesses")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = f"{sys.executable} {tmp_path / 'program.py'} {' '.join(WAYS)}"
    episodes = play(Policy(tokenizer), prompts=1, samples=len(WAYS), command=command)
    assert episodes.rewards.reward.tolist() == [4.0, 4.0, 0, 0, 0, 0]
    assert episodes.rewards.correct.tolist() == [False, True, False, False, False, False]
    assert episodes.rewards.errors == {"agent": 4}
    lines = [record.message for record in caplog.records if " failed: " in record.message]
    for line, said in zip(lines, list(WAYS.values())[2:], strict=True):
        assert said in line
        assert "\n" not in line


def test_where_all_fail_the_run_ends_in_one_line(tokenizer) -> None:
    with pytest.raises(UserError, match=r"^task.agent failed in all 2 episodes: [^\n]*'out of cheese'$"):
        play(Policy(tokenizer), prompts=1, command=f"{sys.executable} -c 'print(\"out of cheese\"); exit(4)'")


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"function": "nobody"}, "has no callable nobody"),
        ({"function": "MODEL"}, "has no callable MODEL"),
        ({"command": "no-such-program --flag"}, "there is no program no-such-program"),
    ],
)
def test_a_harness_that_is_not_there_is_found_before_anything_starts(agent, said: str, tokenizer) -> None:
    with pytest.raises(UserError, match=said):
        play(Policy(tokenizer), **agent)


def test_an_environment_is_played_at_its_own_pace(tokenizer) -> None:
    policy = Policy(tokenizer)
    environment = {"name": "counting", "factory": f"{HERE}:Counting", "sandbox": "none"}
    config = TaskConfig(kind="agent", agent={}, environment=environment, train_size=6, held_out_size=1)
    task = build_task(config, tokenizer)
    player = AgentPlayer(config, ROLLOUT, tokenizer, None)
    try:
        episodes = player.play(policy, SamplingConfig(max_tokens=16), task.prompts(0, 2), 2, Draws(5, 3))
    finally:
        player.close()
        task.close()
    assert episodes.rewards.reward.tolist() == [3.0] * 4
    assert episodes.rewards.correct.all()
    assert episodes.turns.tolist() == [3] * 4
    batch = episodes.batch
    for b, prompt in enumerate([task.prompts(0, 2)[n] for n in (0, 0, 1, 1)]):
        ids = batch.token_ids[batch.offsets[b] : batch.offsets[b + 1]]
        np.testing.assert_array_equal(ids[: len(prompt.prompt_ids)], prompt.prompt_ids)
        assert "<|user|>now 1<|assistant|>" in tokenizer.decode(ids)
        assert batch.sampled_per_sequence[b] == 15


def test_turns_of_branches_know_their_rows(tokenizer) -> None:
    """Three turns, the last in a branch; 0.5 for the second turn and the sample's number at the end, discounted."""
    episodes = play(Policy(tokenizer), prompts=1, function="edited_with_turns", credit="turn", discount=0.5)
    turns, batch = episodes.turn_returns, episodes.batch
    assert turns is not None
    assert turns.sequence.tolist() == [0, 0, 1, 2, 2, 3]
    assert turns.episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert turns.number.tolist() == [0, 1, 2, 0, 1, 2]
    np.testing.assert_allclose(turns.returns, [0.25, 0.5, 0, 0.5, 1, 1])
    for sequence, row in zip(turns.sequence, turns.row, strict=True):
        first = batch.offsets[sequence] + row + 1  # the row before a token predicts it
        assert batch.loss_mask[first]
        assert not batch.loss_mask[first - 1]


def test_masked_turns_are_context(tokenizer) -> None:
    """The second turn of the first sequence, and the only one of the second, which then is none."""
    whole = play(Policy(tokenizer), prompts=1, function="edited", credit="turn")
    masked = play(Policy(tokenizer), prompts=1, function="edited_and_masked", credit="turn")
    assert masked.episode.tolist() == [0, 1]
    assert masked.metrics["agent/untrained_turns"] == 4
    before, after = whole.batch.select([0, 2]), masked.batch
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    for b in range(2):
        first, second = np.split(np.flatnonzero(before.loss_mask[before.offsets[b] : before.offsets[b + 1]]), 2)
        rows = slice(after.offsets[b], after.offsets[b + 1])
        assert np.flatnonzero(after.loss_mask[rows]).tolist() == first.tolist()
        np.testing.assert_array_equal(after.mu_logp[rows][first], before.mu_logp[rows][first])
        assert (after.mu_logp[rows][second] == 0).all()
    assert masked.turn_returns is not None
    assert masked.turn_returns.sequence.tolist() == [0, 1]
    assert masked.turn_returns.number.tolist() == [0, 0]


class SlowToGoOn(Policy):
    def words(self, request) -> str:
        time.sleep(14 if request.request_id.endswith("/1/1") else 0)
        return "well"


def test_no_answer_is_under_way_when_a_step_has_ended(tokenizer) -> None:
    """Its second turn would take longer than the episode has; engines may be put to sleep after a step."""
    policy = SlowToGoOn(tokenizer)
    episodes = play(policy, prompts=1, function="lingers", timeout_s=10)
    assert episodes.rewards.timeouts["agent"] == 1
    assert episodes.turns.tolist() == [1, 1]
    assert policy.begun == len(policy.said) == 3


def test_the_end_of_a_run_does_not_wait_for_harnesses(tokenizer) -> None:
    policy = Policy(tokenizer)
    config = task_config(function="sleeps", timeout_s=1000)
    task = build_task(config, tokenizer)
    player = AgentPlayer(config, ROLLOUT, tokenizer, task.grader)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            player.play(policy, SamplingConfig(max_tokens=16), task.prompts(0, 2), 2, Draws(5, 3))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while len(policy.said) < 4:
        time.sleep(0.05)
    player.close()
    thread.join(timeout=300)
    task.close()
    assert not thread.is_alive()
    assert failed


def test_one_of_gems_environments_is_played_by_chat(tokenizer) -> None:
    environment = {"name": "game:Sudoku-v0-easy", "sandbox": "none", "max_turns": 2}
    config = TaskConfig(kind="agent", agent={}, environment=environment, train_size=2, held_out_size=1)
    task = build_task(config, tokenizer, max_prompt_tokens=8000)
    player = AgentPlayer(config, RolloutConfig(max_prompt_tokens=8000, max_response_tokens=16), tokenizer, None)
    try:
        episodes = player.play(Policy(tokenizer), SamplingConfig(max_tokens=16), task.prompts(0, 1), 2, Draws(5, 3))
    finally:
        player.close()
        task.close()
    assert episodes.rewards.errors == {"agent": 0}
    assert episodes.turns.min() >= 1
    assert not episodes.rewards.correct.any()  # letters are no move
