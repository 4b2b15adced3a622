"""The distribution that tokens are drawn from, and what may not change it.

The trainer recomputes `log pi` as the log-softmax of logits / temperature over the whole vocabulary. `log mu` is
comparable only if the engine drew from the same distribution, so anything else that moves or removes probability is
refused for training (paper, Section 4; top-p or penalties would enter the ratio pi / mu as if the policy had changed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.rollout.vllm.record_frame import HOLD

if TYPE_CHECKING:
    from vllm import SamplingParams

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises positive temperatures to this."""

NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "extra_args": None,
}
"""Fields of vLLM's SamplingParams that change the distribution, with the value at which they do not."""


def sampling_params(
    sampling: SamplingConfig, seed: int, *, top_k_logprobs: int, stop_token_ids: list[int]
) -> SamplingParams:
    """vLLM's parameters for one request: token ids in and out, one output at the end, its record in one frame.

    `top_k_logprobs` is K bounded by the vocabulary; the sampled token's log-probability comes in any case.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=seed,
        logprobs=top_k_logprobs,
        flat_logprobs=True,
        stop_token_ids=stop_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args=dict(HOLD),
    )


def refuse_other_distributions(params: SamplingParams) -> None:
    """Raise `UserError` unless tokens drawn under `params` follow softmax(logits / temperature) and nothing else."""
    if params.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"temperature={params.temperature} cannot be used for training rollouts: "
            f"log mu of a greedy draw is not the policy's; use at least {LOWEST_TEMPERATURE}"
        )
    for name, neutral in NEUTRAL.items():
        value = getattr(params, name)
        if name == "extra_args" and value == HOLD:
            continue  # read by our scheduler alone
        if value != neutral and not (value in ([], {}) and neutral is None):
            raise UserError(
                f"{name}={value!r} changes the sampling distribution and cannot be used for training rollouts: the "
                f"recorded log mu would not be the policy's; leave it at {neutral!r} (evaluation may use it)"
            )


def refuse_engine_defaults(default_params: dict[str, Any], logits_processors: list[str]) -> None:
    """Raise `UserError` if the engine itself would change the distribution of every request.

    default_params    what vLLM took from the model's generation_config.json (must be nothing)
    logits_processors vLLM plug-ins that are installed in this environment and run on every step
    """
    if default_params:
        raise UserError(
            f"the engine took sampling defaults from the model's generation_config.json: {default_params}; "
            "they would change the distribution of training rollouts"
        )
    if logits_processors:
        raise UserError(
            "vLLM logits processors are installed and would change the distribution of training rollouts: "
            f"{logits_processors}; uninstall the packages that bring them"
        )
