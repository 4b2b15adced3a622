"""Half of the episodes wait 2 s in their tool: how long the engine has something to do, beside lockstep. Run with -s
for the figures of docs/agents.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.rollout.start import open_engine
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.tokenizer import load_tokenizer
from megatron_dppo.trainer.agents import AgentPlayer
from megatron_dppo.trainer.lockstep import EnvironmentPlayer
from megatron_dppo.trainer.requests import Draws
from tests.tiny import tiny_qwen3_moe

EPISODES, TURNS = 96, 3


class Watched:
    """An engine, and the seconds in which it had at least one request."""

    def __init__(self, engine) -> None:
        self.engine, self.busy, self.calls = engine, 0.0, 0
        self._lock, self._running, self._since = threading.Lock(), 0, 0.0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.calls += 1
            self._running += 1
            if self._running == 1:
                self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self.busy += time.monotonic() - self._since

    def generate(self, requests, sampling, *, training):
        with self._counted():
            batch = self.engine.generate(requests, sampling, training=training)
        return batch.beyond([request.known for request in requests])


def play(player, task, engine, sampling) -> tuple[float, float]:
    """Seconds, and the part of them in which the engine was busy; of a second time, with all processes warm."""
    for step in range(2):
        watched, started = Watched(engine), time.monotonic()
        episodes = player.play(watched, sampling, task.prompts(0, EPISODES), 1, Draws(0, step))
        seconds = time.monotonic() - started
    assert episodes.turns.tolist() == [TURNS] * EPISODES
    assert episodes.rewards.errors[next(iter(episodes.rewards.errors))] == 0
    return seconds, watched.busy / seconds


@pytest.mark.full
def test_engines_stay_busy_while_half_of_the_episodes_wait(tmp_path) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=4, max_position_embeddings=1024)
    rollout = RolloutConfig(
        max_prompt_tokens=700, max_response_tokens=96, dtype="float32", kv_cache_mib=128, max_num_seqs=8,
        enforce_eager=True, top_k_logprobs=0,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "model")
    sampling = SamplingConfig(max_tokens=rollout.max_response_tokens)
    common = {"train_size": EPISODES, "held_out_size": 1}
    waiting = {"name": "waiting", "factory": "tests.trainer.agent_harnesses:Waiting", "max_turns": TURNS}
    agent = TaskConfig(kind="agent", agent={"function": "tests.trainer.agent_harnesses:waits"}, **common)
    lockstep = TaskConfig(kind="environment", environment=waiting, **common)
    engine = open_engine(tmp_path / "model", rollout)
    try:
        task = build_task(agent, tokenizer)
        player = AgentPlayer(agent, rollout, tokenizer, task.grader)
        ours = play(player, task, engine, sampling)
        player.close()
        task.close()
        environment = build_task(lockstep, tokenizer)
        other = EnvironmentPlayer(environment, lockstep, tokenizer, max_prompt_tokens=700)
        beside = play(other, environment, engine, sampling)
        environment.close()
    finally:
        engine.close()
    print(f"\nat its own pace: {ours[0]:.1f} s, busy {ours[1]:.3f}; lockstep: {beside[0]:.1f} s, busy {beside[1]:.3f}")
    assert ours[1] > beside[1]
