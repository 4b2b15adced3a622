"""Logits of a router with a bias, in float32 beside weights in bfloat16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.models.layers.biased_router import BiasedRouter

EXPERTS, HIDDEN, ROWS = 32, 64, 50


DTYPES = [("fp32", torch.float32), (None, torch.bfloat16)]


def check_logits(device: str, dtype: str | None, of_logits: torch.dtype) -> None:
    """Logits and gradients against float64."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    router: Any = BiasedRouter.__new__(BiasedRouter)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(moe_router_dtype=dtype)
    router.weight, router.bias = (torch.nn.Parameter(x) for x in (drawn(EXPERTS, HIDDEN), drawn(EXPERTS)))
    x, grad = drawn(ROWS, 1, HIDDEN).requires_grad_(), torch.randn(ROWS, 1, EXPERTS, generator=generator).to(device)
    logits = router.gating(x)
    assert logits.dtype == of_logits
    logits.backward(grad.to(of_logits))

    exact = [t.detach().double().requires_grad_() for t in (x, router.weight, router.bias)]
    right = exact[0] @ exact[1].t() + exact[2]
    right.backward(grad.double())
    off = {"atol": 1e-4, "rtol": 0} if of_logits == torch.float32 else {"atol": 0.05, "rtol": 0.01}
    torch.testing.assert_close(logits.double(), right, **off)
    for got, expected in zip((x, router.weight, router.bias), exact, strict=True):
        assert (got.grad.double() - expected.grad).norm() < 0.01 * expected.grad.norm()


@pytest.mark.parametrize(("dtype", "of_logits"), DTYPES)
def test_each_logit_has_its_own_bias(dtype: str | None, of_logits: torch.dtype) -> None:
    check_logits("cpu", dtype, of_logits)


def test_models_with_a_bias_have_this_router() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_dppo.models.layers.biased_router import add_router_biases

    routers = []
    for bias in (torch.nn.Parameter(torch.zeros(2)), None):
        router: Any = TopKRouter.__new__(TopKRouter)
        torch.nn.Module.__init__(router)
        router.register_parameter("bias", bias)
        routers.append(router)
    add_router_biases(torch.nn.ModuleList(routers))
    assert [type(router) for router in routers] == [BiasedRouter, TopKRouter]
