"""Attention with sinks from kernels without, in float64 with plain ones, against all scores written out, and by finite
differences. tests/gpu/test_sinks.py has those of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

from megatron_dppo.compat.packed_attention import PackedAttention
from megatron_dppo.models.layers.sink_attention import CausalPack, FlashKernels, FlashWithSinks, SinkAttention
from megatron_dppo.models.packed_logits import pack_params, packed_logits
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.models.plain_kernels import PlainKernels
from tests.models.sinks import sink_config
from tests.tiny import VOCAB_SIZE, tiny_model

HEADS, GROUPS, SIZE, WINDOW = 4, 2, 8, 3
LENGTHS = [5, 1, 9, 2]


def inputs(lengths: list[int], heads: int = HEADS, groups: int = GROUPS, size: int = SIZE) -> list[torch.Tensor]:
    """Queries, keys and values, the values a view as in a model, and sinks around what tokens score."""
    torch.manual_seed(0)
    query, key, value = torch.randn(sum(lengths), heads + 2 * groups, size, dtype=torch.float64).split(
        [heads, groups, groups], dim=1
    )
    sinks = 2 * torch.randn(heads, dtype=torch.float64)
    return [x.requires_grad_() for x in (query.contiguous(), key.contiguous(), value.detach(), sinks)]


@pytest.mark.parametrize("window", [WINDOW, None])
def test_gradients_by_finite_differences(window: int | None) -> None:
    pack = CausalPack(torch.tensor([0, 4, 5], dtype=torch.int32), 4, window, 0.7)
    given = inputs([4, 1], 2, 1, 3)
    assert torch.autograd.gradcheck(lambda *x: FlashWithSinks.apply(*x, pack, PlainKernels()), given)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layer", [1, 2], ids=["window", "full"])
def test_the_layer_is_that_of_all_scores(layer: int, again: bool) -> None:
    config = sink_config(HEADS, GROUPS, SIZE, WINDOW, params_dtype=torch.float64)
    query, key, value, sinks = inputs(LENGTHS)
    params, grad = pack_params(LENGTHS, torch.device("cpu")), torch.randn(sum(LENGTHS), HEADS * SIZE).double()
    found = []
    for kind in (PackedAttention, SinkAttention):
        attention = kind(config, layer, AttnMaskType.causal, "self")
        attention.kernels = PlainKernels()
        with torch.no_grad():
            attention.softmax_offset.copy_(sinks)
        wanted = [query, key, value, attention.softmax_offset]
        if again:
            out = checkpoint(attention, query, key, value, None, packed_seq_params=params, use_reentrant=False)
        else:
            out = attention(query, key, value, None, packed_seq_params=params)
        assert list(attention.state_dict()) == ["softmax_offset"]
        found.append([out, *torch.autograd.grad(out, wanted, grad)])
    for right, got in zip(*found, strict=True):
        assert right.norm() > 0.1
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_frozen_sinks_and_half_precision() -> None:
    """As with adapters: what is not trained gets no gradient; factors are applied in float32 or better."""
    query, key, value, sinks = inputs(LENGTHS)
    pack = CausalPack(torch.tensor([0, 5, 6, 15, 17], dtype=torch.int32), 9, WINDOW, SIZE**-0.5)
    right = FlashWithSinks.apply(query, key, value, sinks, pack, PlainKernels())
    halves = [x.detach().bfloat16().requires_grad_() for x in (query, key, value)]
    out = FlashWithSinks.apply(*halves, sinks.detach().bfloat16(), pack, PlainKernels())
    assert out.dtype == torch.bfloat16
    assert (out.double() - right).norm() < 2e-2 * right.norm()
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in halves)


@pytest.mark.parametrize("window", [WINDOW, None])
def test_calls_fit_torchs_operators(window: int | None) -> None:
    """Of FlashAttention, by shapes and types alone: there is no such kernel without a GPU."""
    query, key, value, sinks = (x.detach().bfloat16().to("meta").requires_grad_() for x in inputs(LENGTHS))
    pack = CausalPack(torch.empty(5, dtype=torch.int32, device="meta"), 9, window, SIZE**-0.5)
    out = FlashWithSinks.apply(query, key, value, sinks, pack, FlashKernels())
    out.backward(torch.empty_like(out))
    for given in (query, key, value, sinks):
        assert (given.grad.shape, given.grad.dtype) == (given.shape, torch.bfloat16)
    assert not FlashKernels().take(torch.empty(1, 1, 8).bfloat16())


class CountedKernels(PlainKernels):
    calls = 0

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: CausalPack) -> Any:
        self.calls += 1
        return super().forward(query, key, value, pack)


def calls_and_logits(rank: int, path: Path, ids: torch.Tensor) -> tuple[int, Any]:
    chunks, _, _ = build_from(path, {})
    kernels = CountedKernels()
    for module in chunks[0].modules():
        if isinstance(module, SinkAttention):
            module.kernels = kernels
    (logits,) = packed_logits(chunks, [(ids, LENGTHS)])
    return kernels.calls, logits.numpy()


def test_every_layer_of_the_family_has_it(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", tmp_path, num_hidden_layers=2, sliding_window=4)
    ids = torch.randint(0, VOCAB_SIZE, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
    ((calls, logits),) = run_ranks(calls_and_logits, 1, tmp_path, ids)
    assert calls == 2
    assert (torch.from_numpy(logits)[:, :VOCAB_SIZE] - right).abs().max() < 1e-4 * right.abs().max()
