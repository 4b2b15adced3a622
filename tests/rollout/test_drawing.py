"""The reference engine's draws: from the distribution that it records, which is vLLM's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from megatron_dppo.rollout.reference.wave import draw


def drawn(logits: torch.Tensor, temperature: float, top_p: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(logits)
    generators = [torch.Generator().manual_seed(seed + row) for row in range(rows)]
    return draw(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        generators if temperature else [None] * rows,
    )


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.3, 0.8)])
def test_tokens_come_as_often_as_is_recorded(temperature: float, top_p: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1)).expand(20000, -1)
    tokens, logp = drawn(logits, temperature, top_p, seed=100)
    assert (logp == logp[0]).all()
    expected = logp[0].double().exp().numpy()
    counts = np.bincount(tokens.numpy(), minlength=12)
    assert (counts[expected == 0] == 0).all()
    there = expected > 0
    result = stats.chisquare(counts[there], expected[there] / expected.sum() * len(tokens))
    assert result.pvalue > 1e-4
    if top_p == 1:
        torch.testing.assert_close(logp[0], (logits[0] / temperature).log_softmax(-1))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95])
def test_the_nucleus_is_vllms(top_p: float) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = 3 * torch.randn(50, 300, generator=torch.Generator().manual_seed(2))
    _, logp = drawn(logits, 0.7, top_p, seed=0)
    theirs = apply_top_k_top_p_pytorch(logits / 0.7, None, torch.full((50,), top_p)).log_softmax(-1)
    torch.testing.assert_close(logp, theirs)
    assert (logp == -torch.inf).any()


def test_rows_of_one_batch_have_laws_of_their_own() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    temperature, top_p = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.5, 1.0, 0.3])
    generators = [None, torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
    tokens, logp = draw(logits, temperature, top_p, generators)
    assert tokens[0] == logits[0].argmax()
    torch.testing.assert_close(logp[0], logits[0].log_softmax(-1))  # greedy: nothing is cut
    torch.testing.assert_close(logp[1], logits[1].log_softmax(-1))
    assert (logp[2] == -torch.inf).any()
    for row, value in ((1, 1.0), (2, 0.5)):
        generator = torch.Generator().manual_seed(row)
        alone, _ = draw(logits[row : row + 1], torch.tensor([value]), top_p[row : row + 1], [generator])
        assert alone[0] == tokens[row]


def test_the_same_seeds_draw_what_vllm_draws() -> None:
    """Both race exponentials from the request's generator; float32 and float64 noise differ in the last bits."""
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    logits = 2 * torch.randn(400, 300, generator=torch.Generator().manual_seed(4))
    tokens, logp = drawn(logits, 1.0, 1.0, seed=7)
    theirs = random_sample(logp.exp(), {row: torch.Generator().manual_seed(7 + row) for row in range(400)})
    assert (tokens == theirs.view(-1)).float().mean() > 0.99
