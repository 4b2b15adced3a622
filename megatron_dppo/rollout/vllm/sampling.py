"""vLLM's parameters of a request, and what of an engine would change the distribution that tokens are drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.rollout.vllm.record_frame import HOLD

if TYPE_CHECKING:
    from vllm import SamplingParams


def sampling_params(sampling: SamplingConfig, seed: int) -> SamplingParams:
    """vLLM's parameters for one request: token ids in and out, one output at the end, its record in one frame.

    The sampled token's log-probability comes in any case.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=seed,
        logprobs=sampling.top_k_logprobs,
        flat_logprobs=True,
        stop_token_ids=list(sampling.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args=dict(HOLD),
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
