"""avg@n and pass@k on held-out prompts and on evaluation sets, and how sure one can be of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.config.trainer import EvaluationConfig
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import Generates, SamplingConfig
from megatron_dppo.rollout.seeds import EVALUATION
from megatron_dppo.tasks.rewards.grader import Grader
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.requests import Draws, requests_for
from megatron_dppo.trainer.task_suite import TaskSuite, judge_responses


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the weights that `engine` holds. Runs on the controller only; the trainer's state is not touched."""

    engine: Generates
    suite: TaskSuite
    config: EvaluationConfig
    rollout: RolloutConfig
    run_seed: int

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics of all sets. `eval/accuracy` (avg@n), `eval/accuracy_low` and `_high` (95 % bootstrap interval
        over prompts), `eval/pass@k`, `eval/well_formed`, `eval/reward`, `eval/response_length` and
        `eval/truncated_fraction` of the held-out prompts, and `eval/NAME/...` of every evaluation set."""
        metrics: dict[str, float] = {}
        task = self.suite.task
        count = self.config.prompts if task.held_out_size else 0
        if count:
            prompts = task.held_out(count)
            found = self._answer(task.grader, prompts, self.config.samples, step)
            metrics |= _metrics("eval", *found, self.config.samples)
        for one in self.suite.sets:
            found = self._answer(one.grader, one.prompts, one.samples, step)
            metrics |= _metrics(f"eval/{one.name}", *found, one.samples)
        return metrics

    def _answer(
        self, grader: Grader | None, prompts: Sequence[Prompt], samples: int, step: int
    ) -> tuple[RolloutBatch, np.ndarray, Rewards]:
        """What was sampled, which answers or episodes were cut off, and the verdicts."""
        sampling = evaluation_sampling(self.config, self.rollout)
        player, draws = self.suite.player, Draws(self.run_seed, step, EVALUATION)
        if player is not None and (grader is self.suite.task.grader or player.any_prompts):
            played = player.play(self.engine, sampling, prompts, samples, draws, grader)
            return played.batch, played.cut, played.rewards
        assert grader is not None  # what has none is played
        requests = requests_for(prompts, samples, draws)
        batch = self.engine.generate(requests, sampling, training=False)
        responses = [batch.response_ids(i) for i in range(len(batch))]
        judged = judge_responses(grader, self.suite.tokenizer, prompts, samples, responses, batch.finish_reasons)
        return batch, batch.cut, grader.rewards(judged)


def evaluation_sampling(config: EvaluationConfig, rollout: RolloutConfig) -> SamplingConfig:
    """The evaluation's own sampling; responses may be as long as in training."""
    return SamplingConfig(
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=rollout.stop_token_ids,
    )


def _metrics(prefix: str, batch: RolloutBatch, cut: np.ndarray, rewards: Rewards, samples: int) -> dict[str, float]:
    values = accuracy_metrics(rewards.correct.reshape(-1, samples)) | {
        "well_formed": float(rewards.well_formed.mean()),
        "reward": float(rewards.reward.mean()),
        "response_length": float(batch.sampled_per_sequence.sum() / len(rewards)),
        "truncated_fraction": float(cut.mean()),
    }
    return {f"{prefix}/{name}": value for name, value in values.items()}


RESAMPLES = 2000
CONFIDENCE = 0.95


def pass_at_k(correct: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """Probability that at least one of k answers is right, per prompt `[P]`, from `n >= k` answers `[P, n]`:

        1 - C(n - c, k) / C(n, k)      c right answers among the n

    This is unbiased, unlike 1 - (1 - c/n)^k (Chen et al., arXiv 2107.03374, Eq. 1). Computed as a product, which does
    not overflow. Raises ValueError for k outside 1..n.
    """
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} answers per prompt")
    wrong = samples - correct.sum(axis=1)
    factors = 1.0 - k / np.arange(1, samples + 1)  # C(w, k) / C(n, k) is the product of (1 - k / i) for i = w + 1 .. n
    return np.array([1.0 if w < k else 1.0 - np.prod(factors[w:]) for w in wrong.tolist()])


def powers_of_two(samples: int) -> list[int]:
    """The k for which pass@k is reported: 1, 2, 4, ... up to `samples`, and `samples` itself."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]


def bootstrap_interval(per_prompt: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean over prompts, by 2,000 resamples of the prompts with replacement.

    It covers the choice of prompts and, with it, of their answers; few prompts (AIME has 30) give a wide one. The same
    seed gives the same interval.
    """
    rng = np.random.default_rng(seed)
    count = len(per_prompt)
    means = per_prompt[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def accuracy_metrics(correct: NDArray[np.bool_]) -> dict[str, float]:
    """`accuracy` (avg@n), `accuracy_low` and `accuracy_high` (the bootstrap interval), `pass@k`; `correct` `[P, n]`."""
    per_prompt = correct.mean(axis=1)
    low, high = bootstrap_interval(per_prompt)
    result = {"accuracy": float(per_prompt.mean()), "accuracy_low": low, "accuracy_high": high}
    return result | {f"pass@{k}": float(pass_at_k(correct, k).mean()) for k in powers_of_two(correct.shape[1])}
