"""Latent attention's rotation against complex numbers in float64: of packs, of ranks' parts of them, by the kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction

from megatron_dppo.batch.context_parallel import zigzag_rows
from megatron_dppo.models.layers import latent_attention
from megatron_dppo.models.layers.latent_attention import SharedRotary, apply_rotary, rotate, rotate_in_one_launch
from megatron_dppo.models.packed_logits import pack_params

CPU = torch.device("cpu")
LENGTHS = [4, 8, 4]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
FACTOR, PLAIN, ROTARY = 1.3, 6, 16
FREQUENCIES = 1e4 ** -(torch.arange(ROTARY // 2) / (ROTARY // 2))


def rotary(rank: int = 0, ranks: int = 1) -> SharedRotary:
    return SharedRotary(FREQUENCIES, FACTOR, SimpleNamespace(rank=lambda: rank, size=lambda: ranks))


def exact(states: torch.Tensor) -> torch.Tensor:
    """`[T, 1, heads, d]` in float64: the plain part, and pairs as complex numbers turned by position x frequency."""
    pairs = torch.view_as_complex(states[..., PLAIN:].double().unflatten(-1, (-1, 2)))
    turned = (
        pairs * torch.polar(torch.tensor(FACTOR).double(), torch.outer(POSITIONS, FREQUENCIES.double()))[:, None, None]
    )
    return torch.cat([states[..., :PLAIN].double(), turned.real, turned.imag], dim=-1)


def test_packs_are_rotated_sequence_by_sequence_on_any_rank() -> None:
    states, pack = torch.randn(len(POSITIONS), 1, 3, PLAIN + ROTARY), pack_params(LENGTHS, CPU)
    for ranks in (1, 2):
        for rank in range(ranks):
            rows = torch.from_numpy(zigzag_rows(np.array(LENGTHS), rank, ranks))
            got = rotate(states[rows], *rotary(rank, ranks)(len(rows), pack, CPU))
            assert (got - exact(states)[rows]).abs().max() < 1e-5


def test_tables_are_made_once_a_pack() -> None:
    shared, pack = rotary(), pack_params(LENGTHS, CPU)
    first = shared(len(POSITIONS), pack, CPU)
    assert shared(len(POSITIONS), pack, CPU)[0] is first[0]
    other = shared(len(POSITIONS), pack_params([8, 4, 4], CPU), CPU)
    assert not torch.equal(other[0], first[0])
    assert torch.equal(shared(len(POSITIONS), pack, CPU)[0], first[0])
    batched = shared(5, None, CPU)
    assert torch.equal(shared(5, pack_params([5], CPU), CPU)[0], batched[0])
    assert torch.equal(
        batched[0],
        first[0].new_tensor(FACTOR) * torch.outer(torch.arange(5.0), FREQUENCIES).cos().repeat(1, 2)[:, None, None],
    )


@pytest.mark.parametrize(("heads", "block"), [(1, 1), (12, 8), (12, 128)])
def test_the_kernel_rotates_alike(heads: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, where the block of heads that is tuned for a GPU divides them or not. Triton's interpreter
    runs the kernel here."""
    for tuned in (kernels.rotary_fwd_q_kernel, kernels.rotary_bwd_q_kernel):
        monkeypatch.setattr(tuned, "configs", [c for c in tuned.configs if c.kwargs["BLOCK_H"] == block])
        monkeypatch.setattr(tuned, "fn", InterpretedFunction(tuned.fn.fn))
    states, weights = torch.randn(2, len(POSITIONS), 1, heads, PLAIN + ROTARY)
    given, right = states.clone().requires_grad_(), states.double().requires_grad_()
    got = rotate_in_one_launch(given * 1, *rotary()(len(POSITIONS), pack_params(LENGTHS, CPU), CPU))
    expected = exact(right)
    assert (got - expected).abs().max() < 1e-5
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert given.grad is not None
    assert right.grad is not None
    assert (given.grad - right.grad).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("rows", "rotary", "kernel"), [(87381, 64, True), (87382, 64, False), (8, 64, True), (8, 96, False)]
)
def test_the_kernel_gets_what_it_can_count(
    rows: int, rotary: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """87,382 tokens of DeepSeek-V3's heads are more numbers than 32 bits count. A GPU's tensors, without memory."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(latent_attention, "rotate_in_one_launch", lambda states, *_: seen.append(states) or states)
    with FakeTensorMode():
        states = torch.empty(rows, 1, 128, 192, dtype=torch.bfloat16, device="cuda")
        tables = torch.empty(2, rows, 1, 1, rotary, device="cuda")
        assert apply_rotary(states, *tables).shape == states.shape
    assert bool(seen) == kernel
