"""Packed attention against a float64 softmax written out sequence by sequence."""

import math

import pytest
import torch

from megatron_dppo.models.packed_logits import pack_params
from tests.distributed import run_ranks


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """`[T, heads * d]` in float64."""
    out, start = [], 0
    per_group = query.shape[1] // key.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        heads = []
        for head in range(query.shape[1]):
            q, k, v = query[rows, head], key[rows, head // per_group], value[rows, head // per_group]
            scores = (q @ k.T * scale).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        out.append(torch.cat(heads, dim=-1))
        start += length
    return torch.cat(out)


def compare(rank: int) -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dppo.compat.packed_attention import PackedAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0
    )
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self")
    lengths, generator = [5, 1, 9, 2], torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(17, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    weights = torch.randn(17, 32, generator=generator, dtype=torch.float64)

    expected = reference(*inputs, lengths, 8**-0.5)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    found = attention(*inputs, None, packed_seq_params=pack_params(lengths, torch.device("cpu")))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for grad, wanted in zip(torch.autograd.grad((found * weights).sum(), inputs), expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)

    # Rows past the last sequence give zero and do not reach the others.
    partial = attention(*inputs, None, packed_seq_params=pack_params(lengths[:2], torch.device("cpu")))
    torch.testing.assert_close(partial[:6], expected[:6], rtol=1e-12, atol=1e-12)
    assert not partial[6:].any()

    # Batched input: `[S, B, heads, d]`, one sequence per column.
    batched = [t.detach()[:16].reshape(2, 8, -1, 8).transpose(0, 1) for t in inputs]
    found = attention(*batched, None)
    for column in range(2):
        single = reference(*[t[:, column] for t in batched], [8], 8**-0.5)
        torch.testing.assert_close(found[:, column], single, rtol=1e-12, atol=1e-12)

    wrong = pack_params(lengths, torch.device("cpu"))
    wrong.max_seqlen_q = 17
    with pytest.raises(ValueError, match="the longest packed sequence has 9 rows"):
        attention(*inputs, None, packed_seq_params=wrong)


def test_packed_batched_and_padded_rows_with_gradients() -> None:
    run_ranks(compare, 1)
