"""Attention with sinks and a window on a GPU, of packed sequences, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, GROUPS, SIZE, WINDOW = 16, 2, 64, 128
LENGTHS = [300, 17, 129, 1000, 1]


def layer(window: bool) -> torch.nn.Module:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_dppo.models.layers.sink_attention import SinkAttention
    from tests.models.sinks import sink_config

    config = sink_config(HEADS, GROUPS, SIZE, WINDOW)
    return SinkAttention(config, 1 if window else 2, AttnMaskType.causal, "self").cuda()


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
    from megatron_dppo.models.packed_logits import pack_params

    torch.manual_seed(0)
    attention, tokens = layer(window is not None), sum(LENGTHS)
    inputs = [torch.randn(tokens, heads, SIZE, device="cuda").bfloat16() for heads in (HEADS, GROUPS, GROUPS)]
    given = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    sinks = torch.randn(HEADS, device="cuda", dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        attention.softmax_offset.copy_(sinks)
    out = attention(*given, None, packed_seq_params=pack_params(LENGTHS, torch.device("cuda")))
    right = plain(*exact, sinks, window).flatten(1)
    assert (out.double() - right).norm() < 1e-2 * right.norm()
    grad = torch.randn_like(out)
    out.backward(grad)
    right.backward(grad.double())
    for name, got, expected in zip("qkv", given, exact, strict=True):
        assert (got.grad.double() - expected.grad).norm() < 2e-2 * expected.grad.norm(), name
    error = (attention.softmax_offset.grad.double() - sinks.grad).norm() / sinks.grad.norm()
    print(f"window {window}: gradient of the sinks off by {error:.1e} of its norm")
    assert error < 2e-2


def test_no_scores_in_memory() -> None:
    """Two sequences of 8,192 tokens, whose scores are 2 GiB in half precision."""
    from megatron_dppo.models.packed_logits import pack_params

    attention = layer(window=False)
    given = [
        torch.randn(16384, heads, SIZE, device="cuda").bfloat16().requires_grad_() for heads in (HEADS, GROUPS, GROUPS)
    ]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(*given, None, packed_seq_params=pack_params([8192, 8192], torch.device("cuda"))).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29
