"""avg@n and pass@k on held-out prompts and on evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.config.trainer import EvaluationConfig
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import Generates, SamplingConfig
from megatron_dppo.rollout.seeds import EVALUATION
from megatron_dppo.tasks.environments.environment_task import EnvironmentTask
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.accuracy import accuracy_metrics
from megatron_dppo.trainer.episodes import play
from megatron_dppo.trainer.examiner import Examiner, Scorer, judge
from megatron_dppo.trainer.requests import requests_for


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the weights that `engine` holds. Runs on the controller only; the trainer's state is not touched."""

    engine: Generates
    examiner: Examiner
    config: EvaluationConfig
    rollout: RolloutConfig
    run_seed: int

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics of all sets. `eval/accuracy` (avg@n), `eval/accuracy_low` and `_high` (95 % bootstrap interval
        over prompts), `eval/pass@k`, `eval/well_formed`, `eval/reward`, `eval/response_length` and
        `eval/truncated_fraction` of the held-out prompts, and `eval/NAME/...` of every evaluation set."""
        metrics: dict[str, float] = {}
        task = self.examiner.task
        count = self.config.prompts if task.held_out_size else 0
        if count:
            prompts = task.held_out(count)
            if isinstance(task, EnvironmentTask):
                batch, rewards = self._play(task, prompts, step)
            else:
                batch, rewards = self._answer(task, prompts, self.config.samples, step)
            metrics |= _metrics("eval", batch, rewards, self.config.samples)
        for one in self.examiner.sets:
            batch, rewards = self._answer(one.scorer, one.prompts, one.samples, step)
            metrics |= _metrics(f"eval/{one.name}", batch, rewards, one.samples)
        return metrics

    def _answer(
        self, scorer: Scorer, prompts: Sequence[Prompt], samples: int, step: int
    ) -> tuple[RolloutBatch, Rewards]:
        sampling = evaluation_sampling(self.config, self.rollout)
        tokenizer = self.examiner.tokenizer
        return answer(self.engine, sampling, scorer, tokenizer, prompts, samples, run_seed=self.run_seed, step=step)

    def _play(self, task: EnvironmentTask, prompts: Sequence[Prompt], step: int) -> tuple[RolloutBatch, Rewards]:
        sampling = evaluation_sampling(self.config, self.rollout)
        episodes = play(
            task,
            self.examiner.tokenizer,
            prompts,
            self.config.samples,
            lambda requests: self.engine.generate(requests, sampling, training=False),
            run_seed=self.run_seed,
            step=step,
            stream=EVALUATION,
            max_prompt_tokens=self.rollout.max_prompt_tokens,
        )
        return episodes.batch, episodes.rewards


def evaluation_sampling(config: EvaluationConfig, rollout: RolloutConfig) -> SamplingConfig:
    """The evaluation's own sampling; responses may be as long as in training."""
    return SamplingConfig(
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=rollout.stop_token_ids,
    )


def answer(
    engine: Generates,
    sampling: SamplingConfig,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    samples: int,
    *,
    run_seed: int,
    step: int,
) -> tuple[RolloutBatch, Rewards]:
    """`samples` answers to each prompt in turn, and the verdicts."""
    requests = requests_for(prompts, samples, run_seed=run_seed, step=step, stream=EVALUATION)
    batch = engine.generate(requests, sampling, training=False)
    responses = [batch.response_ids(i) for i in range(len(batch))]
    return batch, judge(scorer, tokenizer, prompts, samples, responses, batch.finish_reasons)


def _metrics(prefix: str, batch: RolloutBatch, rewards: Rewards, samples: int) -> dict[str, float]:
    values = accuracy_metrics(rewards.correct.reshape(-1, samples)) | {
        "well_formed": float(rewards.well_formed.mean()),
        "reward": float(rewards.reward.mean()),
        "response_length": float(batch.sampled_per_sequence.mean()),
        "truncated_fraction": float(np.mean([reason == "length" for reason in batch.finish_reasons])),
    }
    return {f"{prefix}/{name}": value for name, value in values.items()}
