"""Attention with sinks and a window as TransformerEngine computes it of packed sequences, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and TransformerEngine"),
]

HEADS, GROUPS, SIZE, WINDOW = 8, 2, 64, 128
LENGTHS = [300, 17, 129, 1000]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None) -> torch.Tensor:
    """`[T, heads, d]` in float64, sequence by sequence."""
    shared, parts = HEADS // GROUPS, []
    for one_q, one_k, one_v in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        one_k, one_v = (x.repeat_interleave(shared, dim=1) for x in (one_k, one_v))
        scores = torch.einsum("ihd,jhd->hij", one_q, one_k) / SIZE**0.5
        row = torch.arange(len(one_q), device=q.device)
        back = row[:, None] - row
        scores = scores.masked_fill((back < 0) | (back >= (window or len(one_q))), float("-inf"))
        shares = torch.cat([scores, sinks[:, None, None].expand(-1, len(one_q), 1)], dim=-1).softmax(-1)[..., :-1]
        parts.append(torch.einsum("hij,jhd->ihd", shares, one_v))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [WINDOW, None])
def test_packed_attention_with_sinks(window: int | None) -> None:
    """Output, and the gradients of queries, keys, values and sinks, within bfloat16's rounding."""
    from transformer_engine.pytorch import DotProductAttention

    torch.manual_seed(0)
    attention = DotProductAttention(
        HEADS,
        SIZE,
        num_gqa_groups=GROUPS,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(WINDOW - 1, 0) if window else None,
        softmax_type="learnable",
    ).cuda()
    tokens = sum(LENGTHS)
    inputs = [torch.randn(tokens, heads, SIZE, device="cuda").bfloat16() for heads in (HEADS, GROUPS, GROUPS)]
    given = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    sinks = torch.randn(HEADS, device="cuda", dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        attention.softmax_offset.copy_(sinks)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device="cuda")
    out = attention(
        *given,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
        attn_mask_type="padding_causal",
    ).view(tokens, HEADS, SIZE)
    right = plain(*exact, sinks, window)
    assert (out.double() - right).norm() < 1e-2 * right.norm()
    grad = torch.randn_like(out)
    out.backward(grad)
    right.backward(grad.double())
    for name, got, expected in zip("qkv", given, exact, strict=True):
        assert (got.grad.double() - expected.grad).norm() < 2e-2 * expected.grad.norm(), name
    error = (attention.softmax_offset.grad.double() - sinks.grad).norm() / sinks.grad.norm()
    print(f"window {window}: gradient of the sinks off by {error:.1e} of its norm")
    assert error < 2e-2
