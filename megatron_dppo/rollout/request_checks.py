"""What an engine may be asked for."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.protocol import GenerationRequest, SamplingLaw


def check_requests(requests: Sequence[GenerationRequest], law: SamplingLaw, config: RolloutConfig) -> None:
    """Raise `UserError` for requests that an engine of `config` cannot answer."""
    if not requests:
        raise UserError("generate was called without requests")
    if len({r.request_id for r in requests}) != len(requests):
        raise UserError("generate was called with the same request_id twice")
    if law.max_tokens < 1:
        raise UserError(f"max_tokens={law.max_tokens}: a response has at least one token")
    for request in requests:
        length = len(request.prompt_ids)
        if length == 0 or length > config.max_prompt_tokens:
            raise UserError(
                f"request {request.request_id}: the prompt has {length} tokens, "
                f"rollout.max_prompt_tokens allows 1 to {config.max_prompt_tokens}"
            )
        if length + law.max_tokens > config.max_model_len:
            raise UserError(
                f"request {request.request_id}: {length} prompt tokens and max_tokens={law.max_tokens} exceed "
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {config.max_model_len}"
            )
