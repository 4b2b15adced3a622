"""flash-linear-attention's kernels against the rule in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.compat.test_torch_delta_rule import LENGTHS, cumulative, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_flash_linear_attention_is_the_same_rule() -> None:
    """Values and, where its backward runs, gradients of a pack, in the types and shapes of published models."""
    from fla.modules.convolution import causal_conv1d as fused_convolution
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fused

    from megatron_dppo.compat.torch_delta_rule import causal_conv1d, chunk_gated_delta_rule, rule_runs

    backward = rule_runs()
    results = []
    for rule in (fused, chunk_gated_delta_rule):
        q, k, v, g, beta = inputs(torch.bfloat16, "cuda", heads=8, key=128, value=128)
        g = g.detach().float().requires_grad_()
        out, _ = rule(q, k, v, g=g, beta=beta, cu_seqlens=cumulative("cuda"))
        results.append([out])
        if backward:
            out.float().square().sum().backward()
            results[-1] += [one.grad for one in (q, k, v, g, beta)]
    for name, got, right in zip(("out", "q", "k", "v", "g", "beta"), *results, strict=False):
        assert got is not None
        assert right is not None
        error = float((got - right).float().norm() / right.float().norm())
        print(f"{name}: {error:.1e} of its norm")
        assert error < 1e-2, name
    x = torch.randn(1, sum(LENGTHS), 96, device="cuda")
    weight = torch.randn(96, 4, device="cuda")
    one, two = (
        conv(x, weight, None, activation="silu", cu_seqlens=cumulative("cuda"))[0]
        for conv in (fused_convolution, causal_conv1d)
    )
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
