from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.rollout.seeds import request_seed
from megatron_dppo.rollout.serving.core import refuse_other_distributions
from megatron_dppo.rollout.vllm.record_frame import HOLD
from megatron_dppo.rollout.vllm.sampling import refuse_engine_defaults, sampling_params

NEUTRAL = {
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": [],
    "_bad_words_token_ids": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "ignore_eos": False,
    "extra_args": HOLD,  # read by our scheduler alone
}
"""Of vLLM's parameters what changes the distribution, or where a response ends, with the value at which it does not."""
HARMLESS = {
    "n", "seed", "stop", "stop_token_ids", "max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids",
    "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids",
    "routed_experts_prompt_start", "skip_reading_prefix_cache",
}  # fmt: skip


def test_vllm_draws_from_the_models_own_law() -> None:
    made = sampling_params(SamplingConfig(temperature=0.6, top_p=0.9, top_k_logprobs=20, stop_token_ids=(1,)), 7)
    assert (made.seed, made.logprobs, made.flat_logprobs, made.stop_token_ids) == (7, 20, True, [1])
    assert (made.temperature, made.top_p) == (0.6, 0.9)
    assert {name: getattr(made, name) for name in NEUTRAL} == NEUTRAL
    assert NEUTRAL.keys() | HARMLESS | {"temperature", "top_p"} == set(made.__struct_fields__)  # or place a new one


def test_the_models_own_law_passes_at_any_temperature() -> None:
    for temperature in (0.01, 0.6, 1.0, 1.3):
        refuse_other_distributions(SamplingConfig(temperature=temperature))


def test_other_laws_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"top_p=0.95 changes the sampling distribution"):
        refuse_other_distributions(SamplingConfig(top_p=0.95))
    for temperature in (0.0, 0.001):
        with pytest.raises(UserError, match="greedy draw"):
            refuse_other_distributions(SamplingConfig(temperature=temperature))


def test_laws_that_come_with_the_engine_are_refused() -> None:
    refuse_engine_defaults({}, [])
    with pytest.raises(UserError, match=r"generation_config.json: \{'top_k': 20"):
        refuse_engine_defaults({"top_k": 20, "top_p": 0.95}, [])
    with pytest.raises(UserError, match="some_package:Processor"):
        refuse_engine_defaults({}, ["some_package:Processor"])


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    base = (1, 2, 3, 4)
    assert request_seed(*base) == request_seed(*base)
    others = [(9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9), (2, 1, 3, 4), (1, 2, 4, 3)]
    assert len({request_seed(*o) for o in [base, *others]}) == 7
    grid = [request_seed(0, s, p, k) for s in range(8) for p in range(64) for k in range(16)]
    assert len(set(grid)) == len(grid)
    assert 0 <= min(grid) < max(grid) < 2**63
    low = np.array(grid, dtype=np.int64) & 0xFFFFFFFF  # what a Mersenne twister keeps
    assert len(set(low.tolist())) > len(grid) - 20
