"""The gated delta rule of packed sequences against the formula, one token after another in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_dppo.models.packed_logits import packed_logits
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.tiny import VOCAB_SIZE, tiny_model

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [37, 1, 64, 130, 5]
HEADS, KEY, VALUE = 3, 8, 6


def inputs(
    dtype: torch.dtype, device: str = "cpu", heads: int = HEADS, key: int = KEY, value: int = VALUE
) -> list[Tensor]:
    """q, k of length 1, v, log decays and betas of one pack."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(LENGTHS)

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, rows, heads, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(noise(key), dim=-1) for _ in range(2))
    drawn = [q, k, noise(value), -0.1 * noise().exp(), noise().sigmoid()]
    return [one.to(device, dtype).requires_grad_() for one in drawn]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Of one sequence `[T, heads, ...]`."""
    state, out = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        held = torch.bmm(k[t].unsqueeze(1), state)
        state = state + torch.bmm(k[t].unsqueeze(2), beta[t][:, None, None] * (v[t].unsqueeze(1) - held))
        out.append(torch.bmm(q[t].unsqueeze(1), state).squeeze(1))
    return torch.stack(out) / q.shape[2] ** 0.5


def cumulative(device: str = "cpu") -> Tensor:
    return torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Of one sequence `[T, D]`, weight `[D, W]`."""
    padded = torch.cat([x.new_zeros(weight.shape[1] - 1, x.shape[1]), x])
    rows = [(padded[t : t + weight.shape[1]].T * weight).sum(1) for t in range(x.shape[0])]
    return torch.nn.functional.silu(torch.stack(rows))


def test_values_and_gradients_of_a_pack() -> None:
    from megatron_dppo.compat.torch_delta_rule import chunk_gated_delta_rule

    packed, exact = inputs(torch.float32), inputs(torch.float64)
    out, _ = chunk_gated_delta_rule(*packed[:3], g=packed[3], beta=packed[4], cu_seqlens=cumulative())
    parts = zip(*[one[0].split(LENGTHS) for one in exact], strict=True)
    right = torch.cat([one_by_one(*part) for part in parts])
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (out[0] * weights).sum().backward()
    (right * weights).sum().backward()
    for got, expected in ((out[0], right), *((a.grad, b.grad) for a, b in zip(packed, exact, strict=True))):
        assert expected is not None
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_convolution_sees_its_own_sequence() -> None:
    from megatron_dppo.compat.torch_delta_rule import causal_conv1d

    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(1, sum(LENGTHS), 7, generator=generator), torch.randn(7, 4, generator=generator)
    out, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=cumulative())
    right = torch.cat([convolved(part, weight) for part in x[0].split(LENGTHS)])
    torch.testing.assert_close(out[0], right, rtol=0, atol=1e-5)


def test_a_token_takes_three_products_of_each_state() -> None:
    """As `models.flops` counts them."""
    q, k, v, g, beta = (one.detach()[0, :10] for one in inputs(torch.float32))
    with FlopCounterMode(display=False) as counter:
        one_by_one(q, k, v, g, beta)
    assert counter.get_total_flops() == 10 * 6 * HEADS * KEY * VALUE


class DoubleTorch:
    """torch, but that float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


def packs(rank: int, path: Path, exact: bool = False) -> list[np.ndarray]:
    """`exact`: all is computed in float64, what asks for float32 too."""
    options: dict[str, Any] = {}
    if exact:
        from megatron_dppo.compat import torch_delta_rule

        rule = torch_delta_rule.plain_rule
        found = rule.__globals__ | {"torch": DoubleTorch()}
        torch_delta_rule.plain_rule = FunctionType(rule.__code__, found, rule.__name__, rule.__defaults__)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        options = {"params_dtype": torch.float64, "router_dtype": "fp64"}
    chunks, _, _ = build_from(path, {}, **options)
    ids = torch.randint(2, VOCAB_SIZE, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))
    other = torch.cat([torch.flip(ids[: LENGTHS[0]], (0,)), ids[LENGTHS[0] :]])
    runs = [(ids, LENGTHS), *((part, [len(part)]) for part in ids.split(LENGTHS)), (other, LENGTHS), (ids, [len(ids)])]
    together, *single, beside, joined = packed_logits(chunks, runs)
    return [one.numpy() for one in (together, torch.cat(single), beside, joined)]


def test_no_state_passes_from_one_sequence_to_the_next(tmp_path: Path) -> None:
    """A pack gives each sequence what it gives alone, whatever stands before it; one long sequence does not."""
    tiny_model("qwen3_next", tmp_path)
    ((together, single, beside, joined),) = run_ranks(packs, 1, tmp_path)
    size = np.abs(single).max()
    assert np.abs(together - single).max() < 2e-6 * size
    after = slice(LENGTHS[0], None)
    assert np.abs(beside[after] - together[after]).max() < 2e-6 * size
    assert np.abs(beside - together)[: LENGTHS[0]].max() > 0.1
    assert np.abs(joined - together)[after].max() > 0.1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_a_pack_differs_by_rounding_alone(tmp_path: Path, family: str) -> None:
    """In float64 all but nothing is left of the difference that float32 shows above, which is of other shapes of the
    same products: transformers' own between a padded batch and its sequences is 9e-7 of the largest logit there."""
    tiny_model(family, tmp_path)
    ((together, single, beside, _),) = run_ranks(packs, 1, tmp_path, True)
    size, after = np.abs(single).max(), slice(LENGTHS[0], None)
    assert together.dtype == np.float64
    assert np.abs(together - single).max() < 1e-12 * size
    assert np.abs(beside[after] - together[after]).max() < 1e-12 * size


def test_the_rule_is_plain_torch_whatever_is_installed(tmp_path: Path) -> None:
    """transformers' own name for it is a wrapper, which calls flash-linear-attention where that can be imported."""
    package = tmp_path / "fla/ops/gated_delta_rule"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def chunk_gated_delta_rule(q, k, v, g, beta):\n    raise RuntimeError('fla')\n"
    )
    for folder in (tmp_path / "fla", tmp_path / "fla/ops"):
        (folder / "__init__.py").write_text("")
    program = """
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as wrapped
from megatron_dppo.compat.torch_delta_rule import chunk_gated_delta_rule
q = torch.ones(1, 3, 1, 2)
g = torch.zeros(1, 3, 1)
try:
    wrapped(q, q, q, g=g, beta=g)
except RuntimeError as error:
    print("wrapped:", error)
out, _ = chunk_gated_delta_rule(q, q, q, g=g, beta=g + 0.5)
print("ours:", list(out.shape))
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["wrapped: fla", "ours: [1, 3, 1, 2]"], done.stderr[-2000:]
