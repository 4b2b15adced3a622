"""token_stats on one rank against the dense reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.vocab_parallel import TokenStats, VocabShard, token_stats
from tests.vocab_parallel.dense import Problem, dense_stats, random_problem
from tests.vocab_parallel.reference import token_stats_from_logits

# Float64. Which order a processor's matrix library sums in depends on the shape, so that even the products of the same
# rows beside other rows may differ in their last digits.
EXACT = {"rtol": 0.0, "atol": 1e-12}


def stats_of(problem: Problem, vocab_size: int, **options) -> TokenStats:  # type: ignore[no-untyped-def]
    shard = VocabShard(0, problem.weight.shape[0], vocab_size)
    return token_stats(problem.hidden, problem.weight, problem.token_ids, problem.topk_ids, shard=shard, **options)


def assert_equals_dense(problem: Problem, vocab_size: int, temperature: float = 1.0, **options: int) -> None:
    expected = dense_stats(problem.hidden, problem.weight, problem.token_ids, problem.topk_ids, vocab_size, temperature)
    got = stats_of(problem, vocab_size, temperature=temperature, **options)
    torch.testing.assert_close(got.logp, expected.logp, **EXACT)
    torch.testing.assert_close(got.entropy, expected.entropy, **EXACT)
    torch.testing.assert_close(got.topk_logp, expected.topk_logp, **EXACT)
    inputs = (problem.hidden, problem.weight)
    for topk in (False, True):
        for ours, theirs in zip(
            problem.gradients(got.logp, got.entropy, *inputs, topk=got.topk_logp if topk else None),
            problem.gradients(expected.logp, expected.entropy, *inputs, topk=expected.topk_logp if topk else None),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("outputs", ["logp", "entropy", "topk", "all"])
def test_gradcheck(outputs: str) -> None:
    problem = random_problem(5, 4, 14, 11, 3)
    pick: dict[str, Callable[[TokenStats], object]] = {
        "logp": lambda s: s.logp,
        "entropy": lambda s: s.entropy,
        "topk": lambda s: s.topk_logp,
        "all": lambda s: (s.logp, s.entropy, s.topk_logp),
    }
    problem.topk_ids.clamp_(min=0)  # the log-probability of an absent id is -inf, which has no difference quotient

    def run(hidden: Tensor, weight: Tensor) -> object:
        shard = VocabShard(0, 14, 11)
        stats = token_stats(
            hidden, weight, problem.token_ids, problem.topk_ids, shard=shard, temperature=0.7, vocab_chunk=4
        )
        return pick[outputs](stats)

    assert torch.autograd.gradcheck(run, (problem.hidden, problem.weight))


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 9),
    topk=st.integers(0, 6),
    token_chunk=st.integers(1, 10),
    vocab_chunk=st.integers(1, 50),
    temperature=st.floats(0.2, 5.0),
    seed=st.integers(0, 999),
)
def test_equals_dense_whatever_the_shape_and_chunks(
    tokens: int,
    vocab_size: int,
    padding: int,
    topk: int,
    token_chunk: int,
    vocab_chunk: int,
    temperature: float,
    seed: int,
) -> None:
    problem = random_problem(tokens, 6, vocab_size + padding, vocab_size, topk, seed=seed)
    assert_equals_dense(problem, vocab_size, temperature, token_chunk=token_chunk, vocab_chunk=vocab_chunk)


@pytest.mark.parametrize("topk", [0, 1, 20, 1024])
def test_number_of_ids(topk: int) -> None:
    assert_equals_dense(random_problem(7, 8, 1400, 1337, topk), 1337)


def test_default_chunks_split_neither_small_problem() -> None:
    assert_equals_dense(random_problem(4100, 4, 1500, 1500, 1), 1500)


@settings(max_examples=40)
@given(shift=st.sampled_from([-1e4, 0.0, 1e4]), spread=st.sampled_from([1e-3, 1.0, 200.0]), seed=st.integers(0, 99))
def test_far_and_spread_logits_stay_finite_and_below_zero(shift: float, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Hidden [1, x] times weight [shift + noise, 0]: logits at any height, float32.
    weight = torch.zeros(50, 2)
    weight[:, 0] = shift + spread * torch.randn(50, generator=generator)
    hidden = torch.tensor([[1.0, 0.0]]).repeat(50, 1)
    ids = torch.arange(50)
    stats = token_stats(hidden, weight, ids, ids[:, None], shard=VocabShard(0, 50, 50), vocab_chunk=7)
    exact = dense_stats(hidden.double(), weight.double(), ids, ids[:, None], 50)
    assert stats.topk_logp is not None
    assert (stats.logp <= 0).all()
    assert (stats.topk_logp <= 0).all()
    # Logits of 1e4 carry 1e-3 in float32 themselves only through the inputs, which are exact here.
    torch.testing.assert_close(stats.logp.double(), exact.logp, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(stats.entropy.double(), exact.entropy, rtol=1e-5, atol=1e-5)


def test_certain_token_keeps_its_last_digits() -> None:
    """p = 1 - 1e-6 at a logit of 40: the log-probability is -1e-6, not a multiple of the logit's rounding (4e-6)."""
    weight = torch.tensor([[40.0], [40.0 - 13.815511]])
    stats = token_stats(torch.ones(1, 1), weight, torch.tensor([0]), shard=VocabShard(0, 2, 2))
    assert stats.logp.item() == pytest.approx(-1e-6, abs=1.5e-7)  # an ulp of the sum, 1 + 1e-6


def test_uniform_and_certain_entropy() -> None:
    hidden = torch.zeros(1, 3, dtype=torch.float64)
    weight = torch.randn(64, 3, dtype=torch.float64)
    stats = token_stats(hidden, weight, torch.tensor([5]), shard=VocabShard(0, 64, 50))
    assert stats.entropy.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=1e-6)
    one = token_stats(hidden, weight, torch.tensor([0]), shard=VocabShard(0, 64, 1))
    assert one.entropy.item() == 0.0 == one.logp.item()


def test_masked_rows_are_constants_without_gradient_and_change_nothing() -> None:
    problem = random_problem(8, 5, 23, 20, 3)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1])
    ids = problem.token_ids.clone()
    ids[3] = -1
    counts = (mask == 1) & (ids != -1)
    shard = VocabShard(0, 23, 20)
    with torch.no_grad():
        problem.hidden[mask == 0] = torch.nan  # what enters no product cannot show in any sum
    got = token_stats(problem.hidden, problem.weight, ids, problem.topk_ids, shard=shard, loss_mask=mask)
    kept = counts.nonzero().squeeze(1)
    alone = token_stats(problem.hidden[kept], problem.weight, ids[kept], problem.topk_ids[kept], shard=shard)
    assert got.topk_logp is not None
    for ours, theirs in ((got.logp, alone.logp), (got.entropy, alone.entropy), (got.topk_logp, alone.topk_logp)):
        torch.testing.assert_close(ours[kept], theirs, **EXACT)
    assert (got.logp[~counts] == 0).all()
    assert (got.entropy[~counts] == 0).all()
    absent = problem.topk_ids == -1
    assert (got.topk_logp[absent] == -torch.inf).all()
    assert (got.topk_logp[~counts[:, None] & ~absent] == 0).all()
    d_hidden, d_weight = problem.gradients(got.logp, got.entropy, problem.hidden, problem.weight, topk=got.topk_logp)
    assert (d_hidden[~counts] == 0).all()
    assert (d_hidden[counts] != 0).any(1).all()
    weights = (problem.grad_logp[kept], problem.grad_entropy[kept], problem.grad_topk[kept])
    expected = torch.autograd.grad((alone.logp, alone.entropy, alone.topk_logp), problem.weight, weights)[0]
    torch.testing.assert_close(d_weight, expected, **EXACT)


def test_rows_with_zero_gradient_are_dropped_exactly() -> None:
    problem = random_problem(9, 5, 20, 20, 2)
    problem.grad_logp[::2] = 0.0
    problem.grad_entropy[::2] = 0.0
    problem.grad_topk[::4] = 0.0  # rows that only a top-K loss trains are among the others
    assert_equals_dense(problem, 20)


@pytest.mark.parametrize("tokens", [0, 6])
def test_no_row_left_still_gives_gradients(tokens: int) -> None:
    problem = random_problem(tokens, 5, 20, 17, 2)
    stats = stats_of(problem, 17, loss_mask=torch.zeros(tokens, dtype=torch.bool))
    assert stats.topk_logp is not None
    assert stats.logp.shape == stats.entropy.shape == (tokens,)
    assert stats.topk_logp.shape == (tokens, 2)
    for gradient, like in zip(
        problem.gradients(stats.logp, stats.entropy, problem.hidden, problem.weight),
        (problem.hidden, problem.weight),
        strict=True,
    ):
        assert gradient.shape == like.shape
        assert (gradient == 0).all()


def test_optional_outputs_and_frozen_inputs() -> None:
    problem = random_problem(6, 5, 20, 20, 2)
    shard = VocabShard(0, 20, 20)
    plain = token_stats(problem.hidden, problem.weight, problem.token_ids, shard=shard)
    assert plain.topk_logp is None
    full = stats_of(problem, 20)
    torch.testing.assert_close(plain.logp, full.logp, **EXACT)
    frozen = token_stats(problem.hidden, problem.weight.detach(), problem.token_ids, shard=shard)
    d_hidden = torch.autograd.grad(frozen.logp.sum(), problem.hidden)[0]
    head_only = token_stats(problem.hidden.detach(), problem.weight, problem.token_ids, shard=shard)
    d_weight = torch.autograd.grad(head_only.logp.sum(), problem.weight)[0]
    expected = torch.autograd.grad(full.logp.sum(), (problem.hidden, problem.weight))
    torch.testing.assert_close(d_hidden, expected[0], **EXACT)
    torch.testing.assert_close(d_weight, expected[1], **EXACT)


def test_bfloat16_keeps_float32_logits() -> None:
    problem = random_problem(64, 128, 1000, 1000, 5, scale=4.0)
    hidden, weight = problem.hidden.detach().bfloat16(), problem.weight.detach().bfloat16()
    exact = dense_stats(hidden.double(), weight.double(), problem.token_ids, problem.topk_ids, 1000)
    shard = VocabShard(0, 1000, 1000)
    stats = token_stats(hidden, weight, problem.token_ids, problem.topk_ids, shard=shard)
    assert stats.logp.dtype == torch.float32
    # bf16 logits would be off by 2e-2 here.
    torch.testing.assert_close(stats.logp.double(), exact.logp, rtol=0, atol=2e-5)
    torch.testing.assert_close(stats.topk_logp.double(), exact.topk_logp, rtol=0, atol=2e-5)  # type: ignore[union-attr]


def test_reference_is_differentiable_and_equal() -> None:
    problem = random_problem(6, 5, 22, 19, 4)
    shard = VocabShard(0, 22, 19)
    args = (problem.token_ids, problem.topk_ids)
    got = token_stats_from_logits(problem.hidden @ problem.weight.t(), *args, shard=shard, temperature=1.3)
    expected = dense_stats(problem.hidden, problem.weight, *args, 19, 1.3)
    torch.testing.assert_close(got.topk_logp, expected.topk_logp, **EXACT)
    inputs = (problem.hidden, problem.weight)
    for ours, theirs in zip(
        problem.gradients(got.logp, got.entropy, *inputs, topk=got.topk_logp),
        problem.gradients(expected.logp, expected.entropy, *inputs, topk=expected.topk_logp),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_a_top_k_that_no_loss_uses_changes_no_bit() -> None:
    """Nor does one whose ids are all absent, whatever comes back through them."""
    problem = random_problem(33, 16, 300, 290, 4)
    shard, inputs = VocabShard(0, 300, 290), (problem.hidden, problem.weight)
    without = token_stats(*inputs, problem.token_ids, shard=shard)
    beside = stats_of(problem, 290)
    absent = token_stats(*inputs, problem.token_ids, torch.full_like(problem.topk_ids, -1), shard=shard)
    problem.grad_topk.fill_(torch.nan)
    found = [
        [stats.logp, stats.entropy, *problem.gradients(stats.logp, stats.entropy, *inputs, topk=topk)]
        for stats, topk in ((without, None), (beside, None), (absent, absent.topk_logp))
    ]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_two_runs_give_the_same_bits() -> None:
    problem = random_problem(33, 16, 300, 290, 4)
    runs = []
    for _ in range(2):
        stats = stats_of(problem, 290)
        gradients = problem.gradients(stats.logp, stats.entropy, problem.hidden, problem.weight, topk=stats.topk_logp)
        runs.append((stats.logp, stats.entropy, stats.topk_logp, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.tensor([0, 1, 20])}, r"ids from 0 to 20, outside \[-1, 20\)"),
        ({"token_ids": torch.tensor([0, -2, 3])}, "ids from -2"),
        ({"topk_ids": torch.tensor([[0], [1], [99]])}, "to 99"),
        ({"token_ids": torch.tensor([0, 1])}, r"token_ids must be \[3\]"),
        ({"topk_ids": torch.tensor([0, 1, 2])}, r"topk_ids must be \[3, K\]"),
        ({"loss_mask": torch.tensor([1, 1])}, r"loss_mask must be \[3\]"),
        ({"hidden": torch.zeros(3, 6)}, r"hidden must be \[T, H\]"),
        ({"hidden": torch.zeros(3, 5, dtype=torch.float64)}, "share a floating type"),
        ({"weight": torch.zeros(21, 5)}, r"weight has 21 rows, the shard \[0, 20\) has 20"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"hidden_layout": "sharded"}, "hidden_layout must be"),
        ({"implementation": "triton"}, "implementation must be"),
        ({"implementation": "fused"}, "cannot run here: it needs CUDA tensors"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "hidden": torch.zeros(3, 5),
        "weight": torch.zeros(20, 5),
        "token_ids": torch.tensor([0, 1, 2]),
        "shard": VocabShard(0, 20, 20),
    }
    with pytest.raises(ValueError, match=message):
        token_stats(**(arguments | change))  # type: ignore[arg-type]


def test_shards_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="single rank must hold the whole vocabulary"):
        VocabShard(0, 10, 20)
    with pytest.raises(ValueError, match="start=3, stop=2"):
        VocabShard(3, 2, 20)
    with pytest.raises(ValueError, match="cannot hold a vocabulary of 20"):
        VocabShard.even(10, 20)
