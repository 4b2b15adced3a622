"""One rollout step: prompts to the engine, answers to the verifier, advantages to every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_dppo.actor.actor import TrainingSignal
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.algorithm import group_advantages
from megatron_dppo.config.schema import Config
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.fleet import EngineFleet
from megatron_dppo.rollout.protocol import SamplingLaw
from megatron_dppo.rollout.seeds import TRAINING
from megatron_dppo.rollout.stored import LayerGroups, RolloutHandle, RolloutSource
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.task import Rewards
from megatron_dppo.trainer.episodes import play
from megatron_dppo.trainer.examiner import Examiner, judge
from megatron_dppo.trainer.requests import requests_for
from megatron_dppo.trainer.samples import Sample, choose_samples


@dataclass(frozen=True)
class Experience:
    """What a rank learns of a rollout step: where its rows are, and what the answers were worth."""

    handle: RolloutHandle
    rewards: np.ndarray
    """float32 `[B]`"""
    metrics: dict[str, float]

    def source(self) -> RolloutSource:
        return RolloutSource(self.handle)

    def signal(self, config: Config) -> TrainingSignal:
        """Advantages over the answers to each prompt, and the mini-batches in prompt order."""
        samples, per_batch = config.trainer.samples_per_prompt, config.trainer.prompts_per_mini_batch
        groups = np.arange(len(self.rewards)) // samples
        advantages = group_advantages(
            torch.from_numpy(self.rewards),
            torch.from_numpy(groups),
            baseline=config.algorithm.baseline,
            normalize_std=config.algorithm.divide_by_std,
        )
        sequences = np.arange(len(self.rewards)).reshape(-1, per_batch * samples)
        return TrainingSignal(advantages.numpy(), self.rewards, list(sequences))


class RolloutCollector:
    """Collects experience; the controller works, the other ranks wait for what it found."""

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        controller: tuple[EngineFleet, Examiner] | None,
        layer_groups: LayerGroups,
    ) -> None:
        """
        controller    what rank 0 works with, None on the other ranks
        layer_groups  MoE layers of each model chunk of the trainer: routes are stored, and pulled, in these groups
        """
        self._runtime, self._config, self._controller = runtime, config, controller
        self._layer_groups = layer_groups
        self.samples: list[Sample] = []
        """Answers of the last step to look at; on the controller only."""

    def collect(self, step: int) -> Experience:
        """Roll out the prompts of `step` (0-based). Collective: one broadcast of per-sequence metadata."""
        return self._runtime.broadcast(self._collect(*self._controller, step) if self._controller else None)

    def release(self, experience: Experience) -> None:
        """The step's rows are no longer needed anywhere."""
        if self._controller:
            engine, _ = self._controller
            engine.release(experience.handle)

    def _collect(self, engine: EngineFleet, examiner: Examiner, step: int) -> Experience:
        count, samples = self._config.trainer.prompts_per_step, self._config.trainer.samples_per_prompt
        prompts = examiner.task.prompts(step * count, count)
        law = training_law(self._config.rollout)
        extra: dict[str, float] = {}
        if isinstance(examiner.task, EnvironmentTask):
            episodes = play(
                examiner.task,
                examiner.tokenizer,
                prompts,
                samples,
                lambda requests: engine.generate(requests, law, training=True),
                run_seed=self._config.run.seed,
                step=step,
                stream=TRAINING,
                max_prompt_tokens=self._config.rollout.max_prompt_tokens,
            )
            rewards = episodes.rewards
            handle = engine.keep(episodes.batch, self._layer_groups)
            responses = [episodes.batch.response_ids(i) for i in range(len(episodes.batch))]
            extra["episode/turns_mean"] = float(episodes.turns.mean())
            extra["episode/environment_tokens_mean"] = float((handle.response_lengths - handle.trained).mean())
        else:
            requests = requests_for(prompts, samples, run_seed=self._config.run.seed, step=step, stream=TRAINING)
            handle = engine.generate_refs(requests, law, self._layer_groups)
            if handle.request_ids != tuple(r.request_id for r in requests):
                raise RuntimeError("the engine returned other requests than it was given, or in another order")
            # Only token ids come to the controller; laws and routes go to the ranks that train on them.
            tokens = RolloutSource(handle).token_ids()
            responses = [ids[n:] for ids, n in zip(tokens, handle.prompt_lengths, strict=True)]
            rewards = judge(examiner.task, examiner.tokenizer, prompts, samples, responses)
        self.samples = choose_samples(
            self._config.tracking.samples,
            examiner.tokenizer,
            prompts,
            samples,
            responses,
            rewards,
            handle.finish_reasons,
        )
        metrics = {
            "reward/mean": float(rewards.reward.mean()),
            "reward/accuracy": float(rewards.correct.mean()),
            "reward/well_formed": float(rewards.well_formed.mean()),
            "response/length_mean": float(handle.trained.mean()),
            "response/truncated_fraction": float(np.mean([reason == "length" for reason in handle.finish_reasons])),
            "reward/verifier_errors": float(rewards.verifier_errors),
            "data/route_bytes": float(handle.route_bytes),
            "data/topk_bytes": float(handle.topk_bytes),
            "data/tokens": float(handle.lengths.sum()),
        }
        return Experience(handle, rewards.reward.astype(np.float32), metrics | _part_metrics(rewards) | extra)


def training_law(rollout: RolloutConfig) -> SamplingLaw:
    """How training rollouts are sampled."""
    return SamplingLaw(
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_k_logprobs=rollout.top_k_logprobs,
        stop_token_ids=rollout.stop_token_ids,
    )


def _part_metrics(rewards: Rewards) -> dict[str, float]:
    """Each reward apart, and how often it could not judge."""
    metrics = {f"reward/part/{name}": float(scores.mean()) for name, scores in rewards.parts.items()}
    metrics |= {f"reward/errors/{name}": float(count) for name, count in rewards.errors.items()}
    return metrics | {f"reward/timeouts/{name}": float(count) for name, count in rewards.timeouts.items()}
