"""GEM's own environments as they are, and what is said of those that are not there or do not behave."""

from __future__ import annotations

import logging
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.rollout.seeds import EVALUATION, request_seed
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.environments.episode import Episode, read_turn
from megatron_dppo.tasks.environments.make import own_random_state
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.tasks.workers.calls import Outcome
from megatron_dppo.trainer.episodes import Episodes
from megatron_dppo.trainer.lockstep import EnvironmentPlayer
from megatron_dppo.trainer.requests import Draws

HERE = "tests.tasks.environments.test_environments"


def task_of(tokenizer, max_prompt_tokens: int = 8192, **settings) -> EnvironmentTask:
    environment = {"name": "game:Sudoku-v0-easy", **settings.pop("environment", {})}
    config = TaskConfig(
        kind="environment",
        environment=environment,
        **{"train_size": 4, "held_out_size": 2, "reward_workers": 1, **settings},
    )
    made = build_task(config, tokenizer, max_prompt_tokens=max_prompt_tokens)
    assert isinstance(made, EnvironmentTask)
    return made


class Scripted:
    """A policy that says what it is told to: stands in for an engine, and keeps what it was asked."""

    def __init__(self, tokenizer, lines: dict[int, list[str]]) -> None:
        self.tokenizer, self.lines, self.requests = tokenizer, lines, []

    def generate(self, requests, sampling, *, training) -> RolloutBatch:
        assert training
        self.requests.append(requests)
        sequences = []
        for request in requests:
            _, _, prompt, _, turn = request.request_id.split("/")
            said = [*self.tokenizer.encode(self.lines[int(prompt)][int(turn)]), self.tokenizer.eos_token_id]
            sequences.append((request, np.array(said, dtype=np.int32)))
        tokens = np.concatenate([part for r, said in sequences for part in (r.prompt_ids, said)]).astype(np.int32)
        lengths = [len(r.prompt_ids) + len(said) for r, said in sequences]
        mask = np.concatenate([np.arange(n) >= len(r.prompt_ids) for (r, _), n in zip(sequences, lengths, strict=True)])
        return RolloutBatch(
            token_ids=tokens,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            prompt_lengths=np.array([len(r.prompt_ids) for r, _ in sequences], dtype=np.int32),
            loss_mask=mask,
            mu_logp=np.where(mask, -0.5, 0).astype(np.float32),
            topk_ids=np.zeros((len(tokens), 0), dtype=np.int32),
            topk_logp=np.zeros((len(tokens), 0), dtype=np.float32),
            routes=None,
            request_ids=tuple(r.request_id for r, _ in sequences),
            finish_reasons=("stop",) * len(sequences),
            weight_versions=np.zeros(len(tokens), dtype=np.int32),
        ).beyond([request.known for request in requests])


def run(task, tokenizer, policy, prompts, samples: int = 1, max_prompt_tokens: int = 8192) -> Episodes:
    player = EnvironmentPlayer(task, TaskConfig(), tokenizer, max_prompt_tokens=max_prompt_tokens)
    return player.play(policy, SamplingConfig(), prompts, samples, Draws(5, 3))


def here(task: EnvironmentTask, prompt: Prompt) -> Episode:
    """An episode in this process."""
    episode = Episode(task._make(), "here")
    episode.reset(prompt.metadata["seed"])
    return episode


def solution(task: EnvironmentTask, prompt) -> list[str]:
    """Moves that fill the board, read off the real environment's own solution."""
    sudoku = here(task, prompt)._environment
    return [
        f"\\boxed{{{r + 1} {c + 1} {sudoku.full_grid[r][c]}}}"
        for r in range(4)
        for c in range(4)
        if sudoku.board[r][c] == 0
    ]


def test_the_real_sudoku_played_to_the_end_token_by_token(tokenizer):
    task = task_of(tokenizer)
    prompt, other = task.prompts(0, 2)
    moves = solution(task, prompt)
    assert 4 < len(moves) < 15
    policy = Scripted(tokenizer, {prompt.index: moves, other.index: ["I do not know"]})
    episodes = run(task, tokenizer, policy, [prompt, other])
    assert episodes.turns.tolist() == [len(moves), 1]
    np.testing.assert_allclose(episodes.rewards.reward, [1.0, -0.1], atol=1e-6)  # GEM's own amounts
    assert episodes.rewards.correct.tolist() == [True, False]
    assert episodes.rewards.well_formed.tolist() == [True, True]
    assert episodes.batch.finish_reasons == ("stop", "stop")
    assert episodes.batch.request_ids == (f"train/3/{prompt.index}/0", f"train/3/{other.index}/0")

    # The first episode, written out by hand from a second environment.
    again = here(task, prompt)
    text, mask = prompt.text, [False] * len(prompt.prompt_ids)
    for number, move in enumerate(moves):
        text, mask = f"{text}{move}<|end|>", mask + [True] * (len(move) + 1)
        answer = again.step(move)
        if number + 1 < len(moves):
            assert "Here is the current board layout" in answer.observation
            said = f"<|user|>{answer.observation}<|assistant|>"  # the policy has closed its turn itself
            text, mask = text + said, mask + [False] * (len(answer.observation.encode()) + 2)
    first = slice(0, int(episodes.batch.offsets[1]))
    assert tokenizer.decode(episodes.batch.token_ids[first]) == text
    assert episodes.batch.loss_mask[first].tolist() == mask
    np.testing.assert_allclose(episodes.batch.mu_logp[first], np.where(mask, -0.5, 0))
    assert answer.terminated
    assert not answer.truncated


def test_seeds_and_prompts_of_the_turns(tokenizer):
    task = task_of(tokenizer, environment={"max_turns": 2})
    prompt = task.prompts(0, 1)[0]
    policy = Scripted(tokenizer, {prompt.index: solution(task, prompt)})
    episodes = run(task, tokenizer, policy, [prompt], samples=2)
    assert episodes.turns.tolist() == [2, 2]
    assert episodes.batch.finish_reasons == ("length", "length")  # cut off, not ended
    assert not episodes.rewards.correct.any()
    seeds = [r.seed for requests in policy.requests for r in requests]
    assert len(set(seeds)) == 4
    assert seeds[:2] == [request_seed(5, 3, prompt.index, sample) for sample in (0, 1)]
    assert (
        seeds[2]
        == request_seed(5, 3, prompt.index, 0, turn=1)
        != request_seed(5, 3, prompt.index, 0, turn=1, stream=EVALUATION)
    )
    first, second = policy.requests[0][0], policy.requests[1][0]
    np.testing.assert_array_equal(second.prompt_ids[: len(first.prompt_ids)], first.prompt_ids)


def test_an_episode_ends_where_its_next_turn_would_not_fit(tokenizer):
    task = task_of(tokenizer)
    prompt = task.prompts(0, 1)[0]
    policy = Scripted(tokenizer, {prompt.index: solution(task, prompt)})
    whole = run(task, tokenizer, policy, [prompt])
    limit = len(policy.requests[2][0].prompt_ids)  # the third turn just fits, the fourth does not
    policy.requests.clear()
    cut = run(task, tokenizer, policy, [prompt], max_prompt_tokens=limit)
    assert cut.turns.tolist() == [3]
    assert cut.batch.finish_reasons == ("length",)
    np.testing.assert_array_equal(cut.batch.token_ids, whole.batch.token_ids[: len(cut.batch.token_ids)])


def test_prompts_are_distinct_repeatable_and_held_apart(tokenizer):
    task, again = task_of(tokenizer, train_size=20), task_of(tokenizer, train_size=20)
    prompts = task.prompts(0, 20) + task.held_out(2)
    assert len({p.text for p in prompts}) == 22
    assert [p.text for p in again.prompts(0, 20)] == [p.text for p in task.prompts(0, 20)]
    assert task.fingerprint == again.fingerprint != task_of(tokenizer, train_size=20, seed=1).fingerprint
    assert re.search(r"C1 C2 .*\nR1 ", prompts[0].question)  # the board, which GEM puts into info["suffix"]


def test_other_random_streams_are_left_alone(tokenizer):
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = (random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    handlers = list(logging.getLogger().handlers)
    task = task_of(tokenizer)
    here(task, task.prompts(0, 1)[0]).step("x")
    assert random.getstate() == expected[0]
    np.testing.assert_array_equal(np.random.get_state()[1], expected[1])  # noqa: NPY002
    assert logging.getLogger().handlers == handlers


class Odd:
    """An environment that misbehaves as it is told."""

    def __init__(self, how: str = "", states: int = 1000) -> None:
        self.how, self.states = how, states

    def reset(self, seed: int | None = None) -> Any:
        if self.how == "raise":
            raise KeyError("no file")
        if self.how == "old":  # Gym's before it had infos; of two letters, it could be taken for two values
            return "no"
        return (3 if self.how == "number" else f"state {(seed or 0) % self.states}"), {}

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        return "next", float("nan"), False, False, {}


odd = 3


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"name": "game:Sudoko-v0-easy"}, "not in GEM's registry; did you mean game:Sudoku-v0-easy"),
        ({"factory": "no.such:thing"}, "cannot be imported: ModuleNotFoundError: No module named 'no'"),
        ({"factory": f"{HERE}:absent"}, "has no callable absent"),
        ({"factory": f"{HERE}:odd"}, "has no callable odd"),
        ({"factory": "builtins:dict"}, r"without reset\(\)"),
        ({"factory": f"{HERE}:Odd", "parameters": {"colour": 1}}, "parameters are refused by .*colour"),
        ({"factory": f"{HERE}:Odd", "parameters": {"how": "number"}}, "gave the observation 3; it must be text"),
        (
            {"factory": f"{HERE}:Odd", "parameters": {"how": "old"}},
            r"reset\(seed=\d+\) gave 'no'; it must give \(observation, info\)",
        ),
        (
            {"factory": f"{HERE}:Odd", "parameters": {"how": "raise"}},
            r"reset\(seed=\d+\) raised KeyError: 'no file'",
        ),
        ({"factory": f"{HERE}:Odd", "parameters": {"states": 3}}, "only 3 distinct initial states"),
    ],
)
def test_environments_that_cannot_be_used(tokenizer, environment, message):
    with pytest.raises(UserError, match=message):
        task_of(tokenizer, environment=environment)


def test_a_hidden_state_makes_a_question_of_every_seed(tokenizer):
    """From a file as well, which is found from a worker's folder too, without a name beside it."""
    hiding = {"name": None, "factory": "tests/tasks/environments/counting.py:Hiding"}
    with pytest.raises(
        UserError, match=r"Hiding gave only 1 distinct initial states .* task.environment.hidden_state=true"
    ):
        task_of(tokenizer, environment=hiding)
    task = task_of(tokenizer, environment={**hiding, "hidden_state": True})
    prompts = [*task.prompts(0, 4), *task.held_out(2)]
    assert {p.question for p in prompts} == {"guess"}
    turns, _ = task.episodes.step([task.begin(p) for p in prompts], ["7"] * 6)
    assert len({turn.observation for turn in turns}) == 6
    task.close()


def test_a_reward_that_is_no_number_and_a_prompt_that_is_too_long(tokenizer):
    task = task_of(tokenizer, environment={"factory": f"{HERE}:Odd"})
    (turn,), _ = task.episodes.step([task.begin(task.prompts(0, 1)[0])], ["go"])
    assert "gave the reward nan; it must be a finite number" in turn.error
    with pytest.raises(UserError, match=r"begins with \d+ tokens, rollout.max_prompt_tokens=100"):
        task_of(tokenizer, max_prompt_tokens=100)


def test_rewards_do_not_go_with_an_environment():
    with pytest.raises(ValidationError, match="an environment gives its own rewards"):
        TaskConfig(kind="environment", environment={"name": "x"}, rewards=[{"kind": "math-verify"}])


def test_environments_of_two_threads_do_not_share_the_generators_they_seed() -> None:
    """A step that is sampled ahead and an evaluation play at the same time."""

    def drawn(seed: int) -> list[float]:
        with own_random_state():
            random.seed(seed)
            values = []
            for _ in range(100):
                values.append(random.random())
                time.sleep(0)  # lets another thread go on
            return values

    alone = [drawn(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(drawn, range(4))) == alone


MISBEHAVIOUR = {
    "hang": "killed after 6 s",
    "spin": "killed after 6 s",
    "raise": "KeyError: 'no such move'",
    "crash": "its worker process ended with status 3",
    "number": "gave the observation 3; it must be text",
    "nan": "gave the reward nan",
    "text": "gave the reward '1.0'; it must not be text",
    "no": "gave the terminated 'no'; it must not be text",
    "exit": "its worker process ended with status 1",
    "closed": "its worker process ended with",
    "flood": "ValueError: after 64 MiB of output",
    "huge": r"the reward 1e\+39 is outside of task.environment.bounds \[-100, 100\]",
    "none": r"gave None; it must give \(observation, reward, terminated, truncated, info\)",
    "long": "a reply of .* bytes; at most 1,048,576 are read",
    "network": "PermissionError",
    "program": "PermissionError",
}


def counting(tokenizer, **settings) -> EnvironmentTask:
    environment = {
        "name": "counting",
        "factory": "tests.tasks.environments.counting:Counting",
        "step_timeout_s": 6,  # of which 20 at once take a second on a machine that does other things
        **settings,
    }
    return task_of(tokenizer, environment=environment, train_size=24)


def test_an_environment_that_misbehaves_ends_its_own_episode_only(tokenizer, caplog):
    """All steps at the same time, in processes that keep their state; what earned a reward before keeps it."""
    task = counting(tokenizer)
    prompts = task.prompts(0, 20)
    ways = dict(zip([prompt.index for prompt in prompts], MISBEHAVIOUR, strict=False))
    lines = {p.index: ["go", ways.get(p.index, "on"), "on", "on"] for p in prompts}
    policy = Scripted(tokenizer, lines)
    before = time.monotonic()
    episodes = run(task, tokenizer, policy, prompts)
    assert time.monotonic() - before < 120  # two hang for 6 s; one after another would still do
    failed = [prompt.index in ways for prompt in prompts]
    assert episodes.turns.tolist() == [2 if bad else 4 for bad in failed]
    assert episodes.rewards.reward.tolist() == [1.0 if bad else 4.0 for bad in failed]
    assert episodes.rewards.correct.tolist() == [not bad for bad in failed]
    assert episodes.batch.finish_reasons == tuple("length" if bad else "stop" for bad in failed)
    assert episodes.rewards.errors == {"environment": len(ways)}
    assert episodes.rewards.timeouts == {"environment": 2}
    assert episodes.rewards.verifier_errors == len(ways)
    assert "the environment failed in 16 of 20 episodes" in caplog.text
    last = policy.requests[3][-1]
    assert tokenizer.decode(last.prompt_ids).endswith(
        f"seed {prompts[-1].metadata['seed']} step 3 heard on<|assistant|>"
    )
    with pytest.raises(UserError, match="failed in all 1 episodes: KeyError: 'no such move'"):
        run(task, tokenizer, Scripted(tokenizer, {prompts[0].index: ["go", "raise"]}), prompts[:1])
    # Healthy episodes are the same beside others and alone, and nothing of an episode is left.
    alone = run(task, tokenizer, policy, prompts[-1:])
    start = int(episodes.batch.offsets[-2])
    np.testing.assert_array_equal(alone.batch.token_ids, episodes.batch.token_ids[start:])
    deadline = time.monotonic() + 60
    while children := [p for p in psutil.Process().children(recursive=True) if _forked(p)]:
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
    task.close()


def _forked(process: psutil.Process) -> bool:
    """From a worker, and not the worker itself."""
    with suppress(psutil.NoSuchProcess):
        commands = [p.cmdline() for p in (process, process.parent()) if p is not None]
        return all("megatron_dppo.tasks.workers.supervisor" in c and "bwrap" not in c[0] for c in commands)
    return False


def test_what_an_environment_did_wrong_is_said(tokenizer):
    task = counting(tokenizer)
    prompt = task.prompts(0, 1)[0]
    _, episodes = task.episodes.step([task.begin(prompt) for _ in MISBEHAVIOUR], ["go"] * len(MISBEHAVIOUR))
    turns, episodes = task.episodes.step(episodes, list(MISBEHAVIOUR))
    for turn, (how, message) in zip(turns, MISBEHAVIOUR.items(), strict=True):
        assert re.search(message, turn.error), how
        assert turn.timed_out == (how in ("hang", "spin"))
    task.close()


def test_outside_of_the_sandbox_steps_may_do_what_they_need(tokenizer, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "1")
    task = counting(tokenizer, sandbox="none")
    _, episodes = task.episodes.step([task.begin(task.prompts(0, 1)[0])], ["go"])
    (turn,), _ = task.episodes.step(episodes, ["program"])
    assert (turn.error, turn.reward) == ("", 1.0)
    task.close()


def test_an_episode_does_not_begin_again_unseen(tokenizer):
    """Where its process is gone, its state is."""
    task = counting(tokenizer)
    _, episodes = task.episodes.step([task.begin(task.prompts(0, 1)[0])], ["go"])
    task.episodes.end(episodes)
    (turn,), _ = task.episodes.step(episodes, ["on"])
    assert turn.error == "its process has ended"
    task.close()
    (turn,), _ = task.episodes.step(episodes, ["on"])
    assert turn.error == "its process has ended"
    task.close()


def test_steps_of_strangers():
    step = {"observation": "x", "reward": 1.0, "terminated": False, "truncated": False, "error": "", "timed_out": False}
    assert not read_turn(Outcome(reply=step), (0, 1)).error
    assert read_turn(Outcome(reply=step | {"observation": "\ud83d"}), (0, 1)).observation == "?"
    for wrong in ({"reward": 1}, {"reward": True}, {"terminated": 0}, {"observation": None}, {"more": 1}):
        assert read_turn(Outcome(reply=step | wrong), (0, 1)).error == "what its process answered is no step"
    assert "outside" in read_turn(Outcome(reply=step | {"reward": 2.0}), (0, 1)).error
