"""The fused kernels on a Hopper GPU: values, gradients, memory, determinism, NCCL. Run where there is one."""

from __future__ import annotations

import datetime
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_dppo.vocab_parallel import TokenStats, VocabShard, token_stats
from tests.processes import free_port
from tests.vocab_parallel.reference import token_stats_from_logits

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="the fused kernels need a CUDA device of compute capability 9.0"),
]
GIB = 1 << 30


class Problem:
    """bf16 (or fp16) inputs with logits of standard deviation 4, and upstream gradients."""

    def __init__(
        self, tokens: int, width: int, rows: int, vocab_size: int, topk: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        g = torch.Generator("cuda").manual_seed(tokens + rows)
        self.hidden = torch.randn(tokens, width, generator=g, device="cuda").to(dtype).requires_grad_()
        weight = torch.randn(rows, width, generator=g, device="cuda").mul_(4 / width**0.5)
        self.weight = weight.to(dtype).requires_grad_()
        self.token_ids = torch.randint(vocab_size, (tokens,), generator=g, device="cuda")
        self.topk_ids = torch.randint(-1, vocab_size, (tokens, topk), generator=g, device="cuda")
        if topk > 1:
            self.topk_ids[:, -1] = self.token_ids
        # The likeliest token of half of the rows: its log-probability has nothing but the last digits.
        if tokens:
            likeliest = (self.hidden.detach() @ self.weight.detach()[:vocab_size].t()).argmax(1)
            self.token_ids[::2] = likeliest[::2]
        self.grad_logp = torch.randn(tokens, generator=g, device="cuda")
        self.grad_entropy = torch.randn(tokens, generator=g, device="cuda")
        self.grad_topk = torch.randn(tokens, topk, generator=g, device="cuda")
        self.shard = VocabShard(0, rows, vocab_size)

    def stats(self, **options) -> TokenStats:  # type: ignore[no-untyped-def]
        return token_stats(self.hidden, self.weight, self.token_ids, self.topk_ids, **({"shard": self.shard} | options))

    def gradients(
        self, stats: TokenStats, topk: bool = False, inputs: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Of a loss of `logp` and `entropy`, with `topk` of the top K as well; the graph stays."""
        outputs, upstream = [stats.logp, stats.entropy], [self.grad_logp, self.grad_entropy]
        if topk:
            outputs, upstream = [*outputs, stats.topk_logp], [*upstream, self.grad_topk]
        upstream = [grad.to(output.dtype) for grad, output in zip(upstream, outputs, strict=True)]
        return torch.autograd.grad(outputs, inputs or (self.hidden, self.weight), upstream, retain_graph=True)  # type: ignore[return-value,arg-type]


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("tokens", "width", "rows", "vocab_size", "topk", "temperature", "dtype"),
    [
        (300, 320, 1000, 1000, 5, 1.0, torch.bfloat16),
        (128, 64, 256, 256, 1, 1.0, torch.bfloat16),
        (1, 72, 300, 299, 0, 1.3, torch.bfloat16),
        (1000, 2048, 5000, 4321, 20, 0.7, torch.float16),
        (515, 512, 40000, 39999, 1024, 1.0, torch.bfloat16),
        (2049, 1024, 8192, 8192, 33, 1.0, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("implementation", ["fused", "chunked"])
def test_equals_float64(
    tokens: int,
    width: int,
    rows: int,
    vocab_size: int,
    topk: int,
    temperature: float,
    dtype: torch.dtype,
    implementation: str,
) -> None:
    problem = Problem(tokens, width, rows, vocab_size, topk, dtype)
    h, w = (x.detach().double().requires_grad_() for x in (problem.hidden, problem.weight))
    exact = token_stats_from_logits(
        h @ w.t(), problem.token_ids, problem.topk_ids, shard=problem.shard, temperature=temperature
    )
    got = problem.stats(implementation=implementation, temperature=temperature, vocab_chunk=3000)
    close = {"rtol": 0.0, "atol": 4e-4}
    torch.testing.assert_close(got.logp.double(), exact.logp, **close)
    torch.testing.assert_close(got.entropy.double(), exact.entropy, **close)
    torch.testing.assert_close(got.topk_logp.double(), exact.topk_logp, **close)  # type: ignore[union-attr]
    assert (got.logp <= 0).all()
    for topk_used in (False, True):
        expected = problem.gradients(exact, topk_used, (h, w))
        for ours, theirs in zip(problem.gradients(got, topk_used), expected, strict=True):
            assert relative_error(ours, theirs) < 4e-3


def test_extreme_logits() -> None:
    problem = Problem(256, 64, 3000, 2999, 3)
    for scale in (50.0, 0.0):
        problem.weight.data.mul_(scale)
        stats = problem.stats(implementation="fused")
        assert stats.logp.isfinite().all()
        assert (stats.logp <= 0).all()
        assert (stats.entropy >= -1e-6).all()
        assert all(g.isfinite().all() for g in problem.gradients(stats, topk=True))
    torch.testing.assert_close(stats.logp, torch.full_like(stats.logp, -math.log(2999)))


@pytest.mark.parametrize("topk_used", [False, True])
def test_errors_no_worse_than_a_plain_product_and_a_bf16_oracle(topk_used: bool) -> None:
    """At the real vocabulary: log pi against float64 beside an fp32-output product; gradients beside exact logit
    gradients rounded once to bf16 and multiplied exactly."""
    tokens, vocab = 2048, 151936
    problem = Problem(tokens, 2048, vocab, vocab, 20)
    h, w = problem.hidden.detach(), problem.weight.detach()
    stats = problem.stats(implementation="fused")
    d_hidden, d_weight = problem.gradients(stats, topk_used)
    h64, w64, ids = h.double(), w.double(), problem.token_ids[:, None]
    z = h64 @ w64.t()
    lse = z.logsumexp(1, keepdim=True)
    exact = (z.gather(1, ids) - lse).squeeze(1)
    plain = torch.mm(h, w.t(), out_dtype=torch.float32).double()
    plain_error = ((plain.gather(1, ids) - plain.logsumexp(1, keepdim=True)).squeeze(1) - exact).abs().max()
    del plain
    assert (stats.logp.double() - exact).abs().max() <= 1.5 * plain_error
    log_p = z.sub_(lse)
    entropy = torch.stack([-(row.exp() * row).sum() for row in log_p])
    g, g_h = problem.grad_logp.double()[:, None], problem.grad_entropy.double()[:, None]
    if topk_used:
        ids = torch.cat([ids, problem.topk_ids], dim=1)
        g = torch.cat([g, problem.grad_topk.double()], dim=1).masked_fill(ids == -1, 0.0)
    dz = log_p.exp() * -(g.sum(1, keepdim=True) + g_h * (log_p + entropy[:, None]))
    dz.scatter_add_(1, ids.clamp(min=0), g)
    del z, log_p
    for got, factor in ((d_hidden, lambda x: x @ w64), (d_weight, lambda x: x.t() @ h64)):
        exact_grad = factor(dz)
        oracle = factor(dz.bfloat16().double()).bfloat16()
        assert relative_error(got, exact_grad) <= 1.2 * relative_error(oracle, exact_grad)
        del exact_grad, oracle


def test_peak_memory_and_same_bits_twice() -> None:
    """T=16,384 H=2,048 V=151,936 K=20: at most 2.5 GiB beyond inputs, both gradients included."""
    problem = Problem(16384, 2048, 151936, 151936, 20)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stats = problem.stats()
    gradients = problem.gradients(stats, topk=True)
    assert (torch.cuda.max_memory_allocated() - before) / GIB <= 2.5
    again = problem.stats()
    for a, b in zip(
        (stats.logp, stats.entropy, stats.topk_logp, *gradients),
        (again.logp, again.entropy, again.topk_logp, *problem.gradients(again, topk=True)),
        strict=True,
    ):
        assert torch.equal(a, b)  # type: ignore[arg-type]
    without = token_stats(problem.hidden, problem.weight, problem.token_ids, shard=problem.shard)
    for a, b in zip(problem.gradients(stats), problem.gradients(without), strict=True):
        assert torch.equal(a, b), "a top K that no loss uses changes no bit"


def test_masked_rows_and_main_grad() -> None:
    problem = Problem(700, 256, 5000, 4990, 4)
    mask = torch.rand(700, device="cuda") < 0.4
    whole, masked = problem.stats(), problem.stats(loss_mask=mask)
    # Tiles differ in their rows only, and a row's sums know nothing of other rows.
    assert torch.equal(masked.logp, whole.logp * mask)
    problem.grad_logp *= mask
    problem.grad_entropy *= mask
    expected = problem.gradients(masked, topk=True)
    main_grad = torch.ones(5000, 256, device="cuda")
    problem.weight.main_grad = main_grad  # type: ignore[attr-defined]
    problem.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    d_hidden, _ = problem.gradients(problem.stats(loss_mask=mask), topk=True)
    assert torch.equal(d_hidden, expected[0])
    torch.testing.assert_close(main_grad - 1, expected[1].float(), rtol=1e-2, atol=1e-3)
    nothing = problem.stats(loss_mask=torch.zeros_like(mask))
    d_hidden, _ = problem.gradients(nothing, topk=True)
    assert (nothing.logp == 0).all()
    assert (d_hidden == 0).all()


def test_bad_ids_are_refused_before_the_result_is_used() -> None:
    problem = Problem(64, 64, 300, 290, 2)
    problem.topk_ids[5, 1] = 290
    with pytest.raises(ValueError, match=r"to 290, outside \[-1, 290\)"):
        problem.stats()


def _nccl_rank(rank: int, world: int, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
        device_id=torch.device("cuda", rank),
    )
    rows = -(-20000 // (128 * world)) * 128
    whole = Problem(1024, 512, rows * world, 20000, 20)
    expected = whole.stats()
    expected_hidden, expected_weight = whole.gradients(expected, topk=True)
    shard = VocabShard.even(rows, 20000, dist.group.WORLD)
    for layout in ("replicated", "sequence_sharded"):
        part = Problem(1024, 512, rows * world, 20000, 20)
        part.weight = part.weight.detach()[shard.start : shard.stop].clone().requires_grad_()
        if layout == "sequence_sharded":
            part.hidden = part.hidden.detach().chunk(world)[rank].clone().requires_grad_()
        stats = part.stats(shard=shard, hidden_layout=layout, implementation="fused")
        d_hidden, d_weight = part.gradients(stats, topk=True)
        torch.testing.assert_close(stats.logp, expected.logp, rtol=0, atol=1e-5)
        torch.testing.assert_close(stats.topk_logp, expected.topk_logp, rtol=0, atol=1e-5)
        packed = torch.stack([stats.logp, stats.entropy])
        gathered = [torch.empty_like(packed) for _ in range(world)]
        dist.all_gather(gathered, packed)
        assert all(torch.equal(other, packed) for other in gathered)
        theirs = expected_hidden if layout == "replicated" else expected_hidden.chunk(world)[rank]
        assert relative_error(d_hidden, theirs.double()) < 4e-3
        assert relative_error(d_weight, expected_weight[shard.start : shard.stop].double()) < 1e-3
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs for NCCL")
def test_tensor_parallel_by_nccl() -> None:
    world = min(4, torch.cuda.device_count())
    mp.spawn(_nccl_rank, (world, free_port()), nprocs=world)
