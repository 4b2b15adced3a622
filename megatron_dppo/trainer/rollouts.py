"""One rollout step: prompts to the engine, answers to the verifier, advantages to every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch

from megatron_dppo.actor.signal import Spans, TrainingSignal
from megatron_dppo.batch import SequenceSource
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, RolloutFleet, SamplingConfig
from megatron_dppo.rollout.start import open_rollout
from megatron_dppo.rollout.stored import LayerGroups, RolloutHandle
from megatron_dppo.tasks.rewards.grader import Judged
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.coordinator import RankCoordinator, meanwhile
from megatron_dppo.trainer.dynamic_sampling import Groups, draw, reserve
from megatron_dppo.trainer.episodes import TurnReturns
from megatron_dppo.trainer.requests import Draws, requests_for
from megatron_dppo.trainer.samples import Sample, choose_samples
from megatron_dppo.trainer.task_suite import TaskSuite, judge_responses
from megatron_dppo.trainer.window import Window, WindowState

logger = logging.getLogger(__name__)

_JUDGES = 64
"""Objects of answers that are judged at the same time, at most; each has a thread that waits for verdicts."""


@dataclass(frozen=True)
class Experience:
    """What a rank learns of a rollout step: where its rows are, and what the answers were worth."""

    handle: RolloutHandle
    rewards: np.ndarray
    """float32 `[E]`, of the answers to each prompt in turn, or of the episodes."""
    metrics: dict[str, float]
    looked_at: tuple[int, ...]
    """Numbers of the sequences whose answers are kept to look at."""
    episode: np.ndarray | None = None
    """int64 `[B]`, number of the episode that each sequence belongs to; None where every sequence is one."""
    turn_returns: TurnReturns | None = None
    """Where tokens are trained with what was earned from their turn on."""
    window: WindowState | None = None
    """After this step; None with the other schedules."""

    def source(self) -> SequenceSource:
        return open_rollout(self.handle)

    def signal(self, config: Config, penalties: np.ndarray | None = None) -> TrainingSignal:
        """Advantages over the answers to each prompt, and the mini-batches in prompt order. `penalties` `[B]` are
        subtracted from the rewards, before the baseline."""
        samples, per_batch = config.trainer.samples_per_prompt, config.trainer.prompts_per_mini_batch
        episode = np.arange(len(self.handle)) if self.episode is None else self.episode
        rewards, algorithm = self.rewards, config.algorithm
        if penalties is not None:
            of_episode = np.bincount(episode, weights=penalties, minlength=len(rewards))
            rewards = (rewards - of_episode).astype(np.float32)
        kept = np.ones(len(rewards), dtype=bool)
        if algorithm.overlong_filter:
            kept[episode[self.handle.cut]] = False
            if not kept[episode].any():
                raise UserError(
                    "algorithm.overlong_filter=true leaves nothing to train on: every answer was cut at "
                    f"rollout.max_response_tokens={config.rollout.max_response_tokens}; raise that, or set the filter "
                    "off"
                )
        batch_of = episode // (per_batch * samples)
        batches = [np.flatnonzero(kept[episode] & (batch_of == n)) for n in range(len(rewards) // per_batch // samples)]
        spans = None
        if self.turn_returns is not None:
            spans = _spans(config, self.turn_returns)
        return TrainingSignal(
            _advantages(config, rewards)[episode],
            self.rewards[episode],
            [batch for batch in batches if len(batch)],
            config.trainer.ppo_epochs,
            self.episode,
            spans,
        )


@dataclass(frozen=True)
class _Collected:
    """What the controller made of a step's prompts."""

    experience: Experience
    samples: list[Sample]
    """Answers to look at."""
    seconds: float
    """From the first request to the last verdict."""


class RolloutCollector:
    """Collects experience; the controller works, the other ranks wait for what it found.

    A step may be begun long before it is collected (`rollout.schedule: one_step_off`): its work goes on in threads of
    the controller and in the engines while the ranks train.
    """

    def __init__(
        self,
        config: Config,
        coordinator: RankCoordinator,
        controller: tuple[RolloutFleet, TaskSuite] | None,
        layer_groups: LayerGroups,
    ) -> None:
        """
        coordinator   the ranks, waiting together
        controller    what rank 0 works with, None on the other ranks
        layer_groups  MoE layers of each model chunk of the trainer: routes are stored, and pulled, in these groups
        """
        self._config, self._coordinator, self._controller = config, coordinator, controller
        self._layer_groups = layer_groups
        self._threads = ThreadPoolExecutor(1 + config.rollout.max_staleness, thread_name_prefix="rollout")
        self._begun: dict[int, Future[_Collected]] = {}
        self._window: Window[Groups] | None = None
        self.samples: list[Sample] = []
        """Answers of the last step to look at; on the controller only."""

    def open_window(self, state: WindowState) -> None:
        """With `rollout.schedule: window`, before the first step: where it goes on from."""
        if self._controller:
            engine, suite = self._controller
            self._window = Window(
                lambda numbers: self._samplers(engine, suite, numbers),
                size=self._config.trainer.prompts_per_step,
                staleness=self._config.rollout.max_staleness,
                steps=self._config.trainer.steps,
                state=state,
            )

    def begin(self, step: int) -> None:
        """Start to roll out the prompts of `step` (0-based), unless that was begun before."""
        if self._controller and step not in self._begun:
            self._begun[step] = self._threads.submit(self._collect, *self._controller, step)

    def collect(self, step: int) -> Experience:
        """The experience of `step`, when it is whole. `step` is also the version of the trainer's weights now.

        Collective, see `RankCoordinator.wait_for`: per-sequence metadata is broadcast. Raises RuntimeError where
        tokens came from weights that are older than the schedule allows.
        """
        drained = self._coordinator.drained_s if step in self._begun else 0.0
        self.begin(step)
        start = time.perf_counter()
        found = self._begun.pop(step) if self._controller else None
        own = meanwhile(lambda: found.result().experience) if found else None
        experience = self._coordinator.wait_for(own)
        if self._controller and found is not None:
            collected = found.result()
            self.samples = collected.samples
            waited = time.perf_counter() - start
            with self._coordinator.alone():
                measured = {
                    "rollout/seconds": collected.seconds,
                    "rollout/overlap_s": max(0.0, collected.seconds - waited - drained),
                    **self._controller[0].take_counts(),
                    **_staleness(experience.handle, step),
                }
                experience = replace(experience, metrics=experience.metrics | measured)
        allowed = 0 if self._config.rollout.schedule == "synchronous" else self._config.rollout.max_staleness
        oldest, newest = int(experience.handle.versions.min()), int(experience.handle.versions.max())
        if step - oldest > allowed or newest > step:
            raise RuntimeError(
                f"step {step + 1} trains weights of version {step}, but its tokens came from versions {oldest} to "
                f"{newest}; rollout.schedule={self._config.rollout.schedule} allows {allowed} steps"
            )
        return experience

    def release(self, experience: Experience) -> None:
        """The step's rows are no longer needed anywhere."""
        if self._controller:
            with self._coordinator.alone():
                self._controller[0].release(experience.handle)

    def close(self) -> None:
        """Steps that were begun and never collected are given up; the fleet's end ends their work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._window is not None:
            self._window.close()

    def _collect(self, engine: RolloutFleet, suite: TaskSuite, step: int) -> _Collected:
        start = time.perf_counter()
        count, samples = self._config.trainer.prompts_per_step, self._config.trainer.samples_per_prompt
        asked = count + round(count * self._config.rollout.oversample)
        prompts = suite.task.prompts(step * asked, asked)
        sampling = training_sampling(self._config.rollout)
        extra: dict[str, float] = {}
        played, window = None, None
        # Answers and their rewards: of episodes, of a window, of groups drawn until enough differ, or of all prompts.
        if suite.player is not None:
            draws = Draws(self._config.run.seed, step)
            played = suite.player.play(engine, sampling, prompts, samples, draws)
            handle, rewards, extra = engine.keep(played.batch, self._layer_groups), played.rewards, played.metrics
            groups = Groups(prompts, handle, [played.batch.response_ids(i) for i in range(len(handle))], rewards)
        elif self._window is not None:
            taken = self._window.take(step)
            groups, window, start = Groups.concatenate(taken.groups), taken.state, taken.begun_at
            rewards = groups.rewards
            extra = {"window/waiting_groups": len(window.waiting), "window/late_groups": taken.late}
        elif rounds := self._config.rollout.dynamic_sampling:
            drawn = draw(
                prompts,
                reserve(suite.task, step, rounds, count),
                lambda new, before: self._ask(engine, suite, new, self._requests(step, new, before), enough=len(new)),
                rounds=rounds,
            )
            if drawn.dropped:
                engine.release(drawn.dropped)
            groups, rewards, extra = drawn.kept, drawn.rewards, drawn.metrics
        else:
            enough = count if asked > count else None
            groups = self._ask(engine, suite, prompts, self._requests(step, prompts), enough=enough)
            rewards = groups.rewards
        handle = groups.handle
        advantages = _advantages(self._config, groups.rewards.reward)
        if not advantages.any() and (played is None or played.turn_returns is None):
            logger.warning(
                "step %d: all answers to each prompt have the same reward, so no advantage teaches anything", step + 1
            )
        # Answers that are written down for people, and what is measured of all.
        looked_at = choose_samples(
            self._config.tracking.samples,
            suite.tokenizer,
            groups,
            advantages,
            played,
            None if played is None or played.turn_returns is None else _spans(self._config, played.turn_returns),
        )
        metrics = {
            "reward/mean": float(rewards.reward.mean()),
            "reward/accuracy": float(rewards.correct.mean()),
            "reward/well_formed": float(rewards.well_formed.mean()),
            "response/length_mean": float(handle.trained.sum() / len(groups.rewards)),
            "response/truncated_fraction": float(np.mean(handle.cut if played is None else played.cut)),
            "reward/verifier_errors": float(rewards.verifier_errors),
            "data/route_bytes": float(handle.route_bytes.sum()),
            "data/topk_bytes": float(handle.topk_bytes.sum()),
            "data/tokens": float(handle.lengths.sum()),
        }
        metrics |= group_metrics(rewards, samples) | _part_metrics(rewards) | extra
        # What every rank gets.
        looked = tuple(sample.sequence for sample in looked_at)
        experience = Experience(handle, groups.rewards.reward.astype(np.float32), metrics, looked, window=window)
        if played is not None:
            experience = replace(experience, episode=played.episode, turn_returns=played.turn_returns)
        return _Collected(experience, looked_at, time.perf_counter() - start)

    def _samplers(
        self, engine: RolloutFleet, suite: TaskSuite, numbers: Sequence[int]
    ) -> Iterator[Callable[[], Groups]]:
        """What samples and scores the group of each number, counted through all steps."""
        count, samples = self._config.trainer.prompts_per_step, self._config.trainer.samples_per_prompt
        for step, some in groupby(numbers, key=lambda number: number // count):
            prompts = suite.task.prompts(step * count, count)
            requests = self._requests(step, prompts)
            for place in (number - step * count for number in some):
                own = requests[place * samples : (place + 1) * samples]
                yield partial(self._ask, engine, suite, prompts[place : place + 1], own, enough=None)

    def _requests(
        self, step: int, prompts: Sequence[Prompt], before: Sequence[Prompt] = ()
    ) -> Sequence[GenerationRequest]:
        """`before` are the prompts of this step that were asked for already."""
        draws, samples = Draws(self._config.run.seed, step), self._config.trainer.samples_per_prompt
        requests = requests_for([*before, *prompts], samples, draws)
        return requests[len(before) * samples :]

    def _ask(
        self,
        engine: RolloutFleet,
        suite: TaskSuite,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerationRequest],
        *,
        enough: int | None,
    ) -> Groups:
        """Sample and score answers. `enough` see `RolloutFleet.generate_stored`."""
        assert suite.task.grader is not None  # what has none is played
        samples = self._config.trainer.samples_per_prompt
        sampling = training_sampling(self._config.rollout)
        grader, asked = suite.task.grader, [r.request_id for r in requests]

        def judge(part: RolloutHandle) -> tuple[list[np.ndarray], Judged]:
            groups = _groups_that_came(asked, part.request_ids, samples, len(part) // samples)
            # Only token ids come to the controller; log-probabilities and routes go to the ranks that train on them.
            tokens = open_rollout(part).token_ids()
            responses = [ids[n:] for ids, n in zip(tokens, part.prompt_lengths, strict=True)]
            answered = [prompts[group] for group in groups]
            return responses, judge_responses(
                grader, suite.tokenizer, answered, samples, responses, part.finish_reasons
            )

        # Answers are judged as they come, while others are still sampled.
        judged: dict[str, Future[tuple[list[np.ndarray], Judged]]] = {}
        threads = ThreadPoolExecutor(_JUDGES, thread_name_prefix="judge")

        def arrived(part: RolloutHandle) -> None:
            for earlier in judged.values():
                if earlier.done():
                    earlier.result()  # what it failed with ends the step: the rest need not be sampled
            judged[part.keys[0]] = threads.submit(judge, part)

        try:
            handle = engine.generate_stored(
                requests, sampling, self._layer_groups, samples=samples, enough=enough, arrived=arrived
            )
            count = len(prompts) if enough is None else enough
            came = _groups_that_came(asked, handle.request_ids, samples, count)
            parts = [judged[key].result() for key in handle.keys]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        responses = [ids for part, _ in parts for ids in part]
        rewards = grader.rewards(Judged.concatenate([verdicts for _, verdicts in parts]))
        return Groups([prompts[group] for group in came], handle, responses, rewards)


def _spans(config: Config, returns: TurnReturns) -> Spans:
    return returns.spans(config.trainer.samples_per_prompt, config.algorithm.advantages)


def _advantages(config: Config, rewards: np.ndarray) -> np.ndarray:
    """float32 `[B]`, over the answers to each prompt."""
    groups = torch.arange(len(rewards)) // config.trainer.samples_per_prompt
    return config.algorithm.advantages(torch.from_numpy(rewards), groups).numpy()


def _groups_that_came(asked: Sequence[str], came: Sequence[str], samples: int, count: int) -> list[int]:
    """Numbers of the prompts whose answers came. Raises RuntimeError unless they are `count` whole groups of what was
    asked for, in its order, each request once: nothing is trained on twice, and nothing is lost unseen."""
    number = {request: place for place, request in enumerate(asked)}
    if unknown := [request for request in came if request not in number]:
        raise RuntimeError(f"{len(unknown)} answers came that nobody asked for, first {unknown[0]}")
    places = [number[request] for request in came]
    groups = [place // samples for place in places[::samples]]
    whole = [group * samples + sample for group in groups for sample in range(samples)]
    if places != whole or groups != sorted(set(groups)) or len(groups) != count:
        raise RuntimeError(
            f"the answers are not {count} whole groups of {samples} in the order asked for: "
            f"{len(places)} came, {len(set(places))} of them different"
        )
    return groups


def _staleness(handle: RolloutHandle, version: int) -> dict[str, float]:
    """How many steps older than the trainer's weights those were that sampled the tokens."""
    return {
        "rollout/staleness_mean": float(version - handle.version_sums.sum() / handle.trained.sum()),
        "rollout/staleness_max": float(version - handle.versions.min()),
        "rollout/resumed_fraction": float(np.mean(handle.versions[:, 0] != handle.versions[:, 1])),
    }


def training_sampling(rollout: RolloutConfig) -> SamplingConfig:
    """How training rollouts are sampled."""
    return SamplingConfig(
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_k_logprobs=rollout.top_k_logprobs,
        stop_token_ids=rollout.stop_token_ids,
    )


def group_metrics(rewards: Rewards, samples: int) -> dict[str, float]:
    """Fractions of the groups, `samples` answers each: all earned the same, which a group's baseline leaves without an
    advantage; all are right; none is."""
    correct = rewards.correct.reshape(-1, samples)
    found = {
        "equal": ~rewards.differ(samples),
        "solved": correct.all(axis=1),
        "unsolved": ~correct.any(axis=1),
    }
    return {f"reward/{name}_groups_fraction": float(groups.mean()) for name, groups in found.items()}


def _part_metrics(rewards: Rewards) -> dict[str, float]:
    """Each reward apart, and how often it could not score."""
    asked = {name: scores[~np.isnan(scores)] for name, scores in rewards.parts.items()}
    metrics = {f"reward/part/{name}": float(scores.mean()) for name, scores in asked.items() if len(scores)}
    metrics |= {f"reward/errors/{name}": float(count) for name, count in rewards.errors.items()}
    return metrics | {f"reward/timeouts/{name}": float(count) for name, count in rewards.timeouts.items()}
