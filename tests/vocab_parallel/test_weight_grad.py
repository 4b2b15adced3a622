"""The weight gradient goes where Megatron's DDP looks for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_dppo.vocab_parallel import VocabShard, token_stats
from tests.vocab_parallel.dense import random_problem


def backward(problem, weight: Tensor, mask: Tensor | None = None) -> None:  # type: ignore[no-untyped-def]
    hidden = problem.hidden.detach().to(weight.dtype)
    stats = token_stats(hidden, weight, problem.token_ids, shard=VocabShard(0, 30, 27), loss_mask=mask, vocab_chunk=8)
    (stats.logp * problem.grad_logp).sum().backward()


def parameter(dtype: torch.dtype, main_dtype: torch.dtype) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(random_problem(11, 6, 30, 27, 0).weight.detach().to(dtype))
    weight.main_grad = torch.full((30, 6), 0.5, dtype=main_dtype)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize(
    ("dtype", "main_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 3e-2),
    ],
)
def test_added_to_main_grad_over_microbatches(dtype: torch.dtype, main_dtype: torch.dtype, tolerance: float) -> None:
    problem = random_problem(11, 6, 30, 27, 0)
    plain = torch.nn.Parameter(parameter(dtype, main_dtype).detach().double())
    hidden = problem.hidden.detach().to(dtype).double()
    exact = token_stats(hidden, plain, problem.token_ids, shard=VocabShard(0, 30, 27)).logp
    expected = torch.autograd.grad((exact * problem.grad_logp).sum(), plain)[0]
    weight = parameter(dtype, main_dtype)
    for microbatches in (1, 2):
        backward(problem, weight)
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        torch.testing.assert_close(
            weight.main_grad.double(),  # type: ignore[attr-defined]
            0.5 + microbatches * expected,
            rtol=tolerance,
            atol=tolerance * expected.abs().max().item(),
        )
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


def test_dummy_is_zero_where_the_weight_is_tied() -> None:
    weight = parameter(torch.float64, torch.float64)
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    backward(random_problem(11, 6, 30, 27, 0), weight)
    assert weight.grad is not None
    assert (weight.grad == 0).all()


def test_hook_runs_with_no_row_left() -> None:
    weight = parameter(torch.float64, torch.float64)
    calls = []
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.shape))
    backward(random_problem(11, 6, 30, 27, 0), weight, torch.zeros(11))
    assert calls == [weight.shape]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert (weight.main_grad == 0.5).all()  # type: ignore[attr-defined]


def test_ordinary_gradient_without_main_grad() -> None:
    weight = torch.nn.Parameter(random_problem(11, 6, 30, 27, 0).weight.detach())
    backward(random_problem(11, 6, 30, 27, 0), weight)
    assert weight.grad is not None
    assert (weight.grad[:27] != 0).any()
    assert (weight.grad[27:] == 0).all()
