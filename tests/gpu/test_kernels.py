"""The experts' and the optimizer's own kernels against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_dppo.models.direct_norm import call_norms_directly
from megatron_dppo.models.experts.activation import WeightedSwiGLU
from megatron_dppo.models.experts.grouped import GroupedLinear, add_weight_gradients
from megatron_dppo.models.lora.grouped import AdaptedGroupedLinear
from tests.models import test_biased_experts as biased

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("counts", "rows", "columns"),
    [
        ([5, 0, 64, 1, 130, 0], 256, 512),
        ([0, 0, 0, 7], 128, 256),
        ([100, 63, 65, 1000, 3], 200, 328),  # tiles that reach over the matrix's edges
        ([2000, 10, 0, 500], 2048, 768),
        ([0, 0], 64, 64),
    ],
)
def test_weight_gradients_are_added_in_float32(counts: list[int], rows: int, columns: int) -> None:
    torch.manual_seed(0)
    tokens = sum(counts)
    dy = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    before = torch.randn(len(counts), rows, columns, device="cuda")
    ends = torch.tensor(np.cumsum(counts), dtype=torch.int32, device="cuda")
    got, again = before.clone(), before.clone()
    add_weight_gradients(got, dy, x, ends)
    add_weight_gradients(again, dy, x, ends)
    assert torch.equal(got, again), "one adder for every number"
    parts = zip(before.double(), dy.double().split(counts), x.double().split(counts), strict=True)
    wanted = torch.stack([start + a.t() @ b for start, a, b in parts])
    cuts = zip(before, dy.split(counts), x.split(counts), strict=True)
    library = torch.stack([start + torch.mm(a.t(), b, out_dtype=torch.float32) for start, a, b in cuts])
    error, of_library = ((t.double() - wanted).norm() / wanted.norm() for t in (got, library))
    assert error <= 1.05 * of_library + 1e-8


@pytest.mark.parametrize(
    ("counts", "parts", "rank", "rows", "columns"),
    [
        ([5, 0, 64, 1, 130, 0], 2, 32, 768, 512),
        ([0, 0, 0, 7], 1, 8, 200, 328),  # a rank below a tile's, columns that are no multiple of one
        ([2000, 10, 0, 500], 1, 96, 2048, 768),
        ([0, 0], 2, 16, 64, 64),
    ],
)
def test_experts_with_adapters(counts: list[int], parts: int, rank: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(sum(counts), columns, **options, requires_grad=True)
    stack = torch.randn(len(counts), parts * rows, columns, **options) * columns**-0.5
    a = (torch.randn(len(counts), parts * rank, columns, **options) * columns**-0.5).requires_grad_()
    b = (torch.randn(len(counts), parts, rows, rank, **options) * rank**-0.5).requires_grad_()
    dy = torch.randn(sum(counts), parts * rows, **options)
    ends = torch.tensor(np.cumsum(counts), dtype=torch.int32, device="cuda")
    y = AdaptedGroupedLinear.apply(x, ends, stack, a, b, 2.0)
    got = [y, *torch.autograd.grad(y, [x, a, b], dy)]

    exact = [t.detach().double().requires_grad_() for t in (x, a, b)]
    whole = []
    for e, part in enumerate(exact[0].split(counts)):
        low = (part @ exact[1][e].t()).chunk(parts, 1)
        share = torch.cat([one @ of.t() for one, of in zip(low, exact[2][e], strict=True)], 1)
        whole.append(part @ stack[e].double().t() + 2 * share)
    wanted = [torch.cat(whole), *torch.autograd.grad(torch.cat(whole), exact, dy.double())]
    for mine, right in zip(got, wanted, strict=True):
        assert (mine.double() - right).norm() <= 6e-3 * right.norm()
    plain = GroupedLinear.apply(x, ends, stack, False, stack[0])
    assert torch.equal(AdaptedGroupedLinear.apply(x, ends, stack, a, torch.zeros_like(b), 2.0), plain)


@pytest.mark.parametrize(("rows", "width"), [(1000, 768), (37, 200), (0, 64)])
def test_activation_times_probability(rows: int, width: int) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probability = torch.rand(rows, device="cuda", requires_grad=True)
    grad = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    value = WeightedSwiGLU.apply(gate_up, probability)
    value.backward(grad)
    exact, weight = gate_up.detach().double().requires_grad_(), probability.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    wanted = F.silu(gate) * up * weight[:, None]
    wanted.backward(grad.double())
    for got, right in ((value, wanted), (gate_up.grad, exact.grad)):
        assert torch.equal(got, right.to(torch.bfloat16)) or (got.double() - right).norm() <= 2e-3 * right.norm()
    assert (probability.grad.double() - weight.grad).norm() <= 1e-5 * weight.grad.norm()


@pytest.mark.parametrize("where", ["main_grad", "grad", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_and_biases_of_experts(where: str, dtype: torch.dtype) -> None:
    for case in [*biased.CASES, ([700, 0, 5000, 31], 2880, 2880)]:
        biased.check(*case, where, "cuda", dtype)
    biased.check_that_nan_stays("cuda")


@pytest.mark.parametrize(("shape", "centred"), [((300, 1, 256), False), ((70, 1, 4, 128), False), ((5, 64), True)])
def test_a_norm_called_directly_is_the_modules_own(shape: tuple[int, ...], centred: bool) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(3)
    norm = te.RMSNorm(shape[-1], eps=1e-6, zero_centered_gamma=centred, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    # Queries are a part of what a projection gives out: not contiguous.
    whole = torch.randn(*shape[:-1], 2 * shape[-1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def run() -> list[torch.Tensor]:
        whole.grad = norm.weight.grad = None
        out = norm(whole[..., : shape[-1]])
        out.backward(grad)
        assert whole.grad is not None
        return [out.detach(), whole.grad, norm.weight.grad]

    stock = run()
    call_norms_directly([torch.nn.ModuleList([norm])])
    assert type(norm).__name__ == "DirectRMSNorm"
    ours = run()
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


@pytest.mark.parametrize("shift", [0, 1])
def test_adamw_and_the_norm(shift: int) -> None:
    """Tensors of several sizes, at addresses that 16 bytes divide and that they do not."""
    import triton.language as tl

    from megatron_dppo.actor import adam_kernels

    torch.manual_seed(2)
    sizes = [48, 16 * 5000, 1 << 20] if not shift else [1, 47, 50_001]

    def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(n + shift, device="cuda").to(dtype)[shift:] for n in sizes]

    gradients, masters, first, second, weights = *(tensors() for _ in range(4)), tensors(torch.bfloat16)
    second = [v.abs_() for v in second]
    before = [[t.double().clone() for t in ts] for ts in (masters, first, second)]
    rows = [
        [*(t.data_ptr() for t in (g, p, m, v)), 0 if i == 1 else w.data_ptr(), g.numel(), int(i != 2)]
        for i, (g, p, m, v, w) in enumerate(zip(gradients, masters, first, second, weights, strict=True))
    ]
    untouched = weights[1].clone()
    begins = np.append(0, np.cumsum([-(-n // adam_kernels.BLOCK) for n in sizes]))
    table = torch.tensor(rows, device="cuda")
    begin = torch.tensor(begins, dtype=torch.int32, device="cuda")
    sums = torch.empty(int(begins[-1]), device="cuda")
    adam_kernels.square_sums[(len(sums),)](table, begin, sums, len(sizes), ALIGNED=not shift)
    right = sum(float(g.double().square().sum()) for g in gradients[:2])
    assert float(sums.sum()) == pytest.approx(right, rel=1e-6)
    scale, lr, betas, epsilon, decay, corrections = 0.5, 1e-2, (0.9, 0.999), 1e-8, 0.1, (0.19, 0.002)
    adam_kernels.adamw[(len(sums),)](
        table, begin, len(sizes), scale, lr, *betas, epsilon, decay, *corrections, HALF=tl.bfloat16, ALIGNED=not shift
    )
    for i, gradient in enumerate(gradients):
        g = scale * gradient.double()
        p, m, v = (values[i] for values in before)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / corrections[0] / ((v / corrections[1]).sqrt() + epsilon) + decay * p)
        for got, wanted in ((masters[i], p), (first[i], m), (second[i], v)):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights[i], untouched if i == 1 else masters[i].bfloat16())
