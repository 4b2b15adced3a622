"""What must hold of responses that weight syncs cut: of every row, which weights it comes from, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.router_replay.routes import Routes
from tests.rollout.reference import compare_law, compare_routes, reference

EOS = 1


def check_spans(batch: RolloutBatch, sampling: SamplingConfig) -> np.ndarray:
    """Each sampled token, route and prompt has the version of the forward it comes from. Returns the numbers of the
    sequences whose tokens come from more than one."""
    assert batch.routes is not None
    cut, ends = [], {EOS, *sampling.stop_token_ids}
    for b in range(len(batch)):
        rows = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        prompt, sampled = int(batch.prompt_lengths[b]), batch.loss_mask[rows]
        assert not sampled[:prompt].any()
        assert sampled[prompt:].all()
        assert 1 <= sampled.sum() <= sampling.max_tokens
        assert (batch.finish_reasons[b] == "length") == (
            sampled.sum() == sampling.max_tokens and int(batch.token_ids[rows.stop - 1]) not in ends
        )
        versions = batch.weight_versions[rows]
        assert (np.diff(versions[prompt:]) >= 0).all()
        assert (versions[:prompt] == versions[-1]).all()  # the prompt was prefilled last by the last weights
        # The forward that sampled token t + 1 routed token t; the prompt before that is of the last prefill.
        routed = batch.routes.weight_versions[rows]
        np.testing.assert_array_equal(routed[prompt - 1 : -1], versions[prompt:])
        assert (routed[: prompt - 1] == versions[-1]).all()
        assert batch.routes.valid[rows].tolist() == [True] * (len(versions) - 1) + [False]
        if versions[prompt] != versions[-1]:
            cut.append(b)
    return np.array(cut, dtype=np.int64)


def check_tokens(batch: RolloutBatch, models: Mapping[int, PreTrainedModel]) -> None:
    """Every log-probability and every route are what transformers says under the version that they name."""
    compared = 0
    for version, model in models.items():
        part, expected = _under(batch, version), reference(model, batch)
        assert compare_law(part, expected) <= 1e-4
        pairs, mismatches, _ = compare_routes(part, expected)
        assert pairs > 0
        assert mismatches == 0
        compared += int(part.loss_mask.sum())
    assert compared == batch.loss_mask.sum()


def _under(batch: RolloutBatch, version: int) -> RolloutBatch:
    """The batch with only the tokens that `version` sampled and the routes of its forwards."""
    assert batch.routes is not None
    valid = batch.routes.valid & (batch.routes.weight_versions == version)
    routes = Routes(batch.routes.experts, valid, batch.routes.num_experts)
    return replace(batch, loss_mask=batch.loss_mask & (batch.weight_versions == version), routes=routes)
