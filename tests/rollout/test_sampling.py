from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.rollout.seeds import request_seed
from megatron_dppo.rollout.serving.core import refuse_other_distributions
from megatron_dppo.rollout.vllm.sampling import NEUTRAL, refuse_engine_defaults, sampling_params


def params(**fields):
    return sampling_params(SamplingConfig(top_k_logprobs=20, stop_token_ids=(1,), **fields), 7)


def test_the_models_own_law_passes_at_any_temperature() -> None:
    for temperature in (0.6, 1.0, 1.3):
        refuse_other_distributions(params(temperature=temperature), NEUTRAL)
    made = params()
    assert (made.seed, made.logprobs, made.flat_logprobs, made.stop_token_ids) == (7, 20, True, [1])


BENT = {
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.05,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.05,
    "min_tokens": 2,
    "logit_bias": {3: 1.0},
    "bad_words": ["a"],
    "allowed_token_ids": [1, 2, 3],
    "structured_outputs": "a grammar",
    "thinking_token_budget": 10,
    "extra_args": {"my_processor": 1},
}


def test_the_table_of_refusals_is_tested_whole() -> None:
    assert BENT.keys() == NEUTRAL.keys()


@pytest.mark.parametrize("name", BENT)
def test_whatever_bends_the_law_is_refused_by_name(name: str) -> None:
    bent = params()
    setattr(bent, name, BENT[name])
    with pytest.raises(UserError, match=f"{name}=.* changes the sampling distribution"):
        refuse_other_distributions(bent, NEUTRAL)


@pytest.mark.parametrize("temperature", [0.0, 0.001])
def test_greedy_draws_are_refused(temperature: float) -> None:
    greedy = params()
    greedy.temperature = temperature
    with pytest.raises(UserError, match="greedy draw"):
        refuse_other_distributions(greedy, NEUTRAL)


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
