"""Kernels of gpt-oss's experts against float64, as Triton's interpreter runs them on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
CLAMP, OFFSET = 7.0, 1.0
CASES = [
    ([0, 33, 70, 0, 1, 0], 72, 40),
    ([0, 0, 0, 65], 33, 66),  # widths that no tile divides
    ([3, 1100], 8, 8),  # more tiles than a program sums at a time
    ([0, 0, 0], 16, 24),
]
"""Tokens of each expert, intermediate and hidden size."""


def parameters(experts: int, width: int, options: dict[str, Any], where: str) -> list[torch.nn.Parameter]:
    biases = [torch.nn.Parameter(torch.randint(-16, 17, (width,), **options) / 8) for _ in range(experts)]
    for bias in biases:
        bias.requires_grad_(where != "frozen")
        setattr(bias, "main_grad", torch.randn(width, device=options["device"]))  # noqa: B010
    return biases


def check(counts: list[int], width: int, hidden: int, where: str, device: str, dtype: torch.dtype) -> None:
    """Values and all gradients, where the biases' go to `main_grad`, to `grad`, or nowhere."""
    from megatron_dppo.models.experts.biased import AddBias, ClampedSwiGLU, clamped_swiglu

    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    rows = sum(counts)
    # Eighths, so that the sum with a bias is exact and some stand exactly at the limit.
    gate_up = (torch.randint(-80, 81, (rows, 2 * width), **options) / 8).requires_grad_()
    y, probability = torch.randn(rows, hidden, **options), torch.rand(rows, device=device, requires_grad=True)
    inner, outer = (parameters(len(counts), n, options, where) for n in (2 * width, hidden))
    grads = torch.randn(rows, width, **options), torch.randn(rows, hidden, **options)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    before = [bias.main_grad.double() for bias in (*inner, *outer)]  # type: ignore[attr-defined]

    start, add = y.clone().requires_grad_(), where == "main_grad"
    stacks = [torch.stack(biases).detach() for biases in (inner, outer)]
    value = ClampedSwiGLU.apply(gate_up, probability, ends, stacks[0], CLAMP, OFFSET, add, *inner)
    raised = AddBias.apply(start.clone(), probability, ends, stacks[1], add, *outer)
    torch.autograd.backward([value, raised], list(grads))
    again = torch.empty_like(value)
    clamped_swiglu(gate_up.detach(), probability.detach(), ends, stacks[0], CLAMP, OFFSET, again)
    assert torch.equal(again, value)

    exact = [t.detach().double().requires_grad_() for t in (gate_up, probability, *inner, *outer)]
    of_inner, of_outer = exact[2 : 2 + len(counts)], exact[2 + len(counts) :]
    spread = [torch.stack(b).repeat_interleave(torch.tensor(counts, device=device), 0) for b in (of_inner, of_outer)]
    whole = exact[0] + spread[0]
    if rows > 5:
        assert all((whole == limit).any() and (whole.abs() > CLAMP).any() for limit in (CLAMP, -CLAMP))
    gate, up = whole.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    want = gate * torch.sigmoid(1.702 * gate) * (up + OFFSET) * exact[1][:, None]
    want_y = y.double() + spread[1] * exact[1][:, None]
    torch.autograd.backward([want, want_y], [g.double() for g in grads])

    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2e-6}[dtype]
    close(value, want, rounding)
    close(raised, want_y, rounding)
    close(gate_up.grad, exact[0].grad, rounding)
    assert torch.equal(start.grad, grads[1])
    close(probability.grad, exact[1].grad, 2e-6)
    for bias, right, main in zip((*inner, *outer), exact[2:], before, strict=True):
        got = bias.main_grad  # type: ignore[attr-defined]
        if add:
            close(got, main + right.grad, 2e-6)
            assert bias.grad_added_to_main_grad  # type: ignore[attr-defined]
            assert bias.grad is not None, "without a gradient the hook that reduces would not run"
        else:
            assert torch.equal(got.double(), main)
            assert (bias.grad is None) == (where == "frozen")
            if where != "frozen":
                close(bias.grad, right.grad, rounding)


def close(got: Tensor | None, right: Tensor | None, of_each: float) -> None:
    """Within a rounding of each number, and of their scale as float32 sums are."""
    assert got is not None
    assert right is not None
    scale = float(right.detach().abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(got.double(), right, rtol=of_each, atol=4e-6 * scale)


def check_that_nan_stays(device: str) -> None:
    """A clamp would make a number of it."""
    from megatron_dppo.models.experts.biased import ClampedSwiGLU

    gate_up = torch.zeros(3, 8, device=device)
    gate_up[0, 1] = gate_up[1, 4 + 2] = float("nan")
    gate_up.requires_grad_()
    bias = torch.nn.Parameter(torch.zeros(8, device=device))
    ends, ones = torch.tensor([3], dtype=torch.int32, device=device), torch.ones(3, device=device)
    value = ClampedSwiGLU.apply(gate_up, ones, ends, bias.detach()[None], CLAMP, OFFSET, False, bias)
    value.sum().backward()
    assert value.isnan().nonzero().tolist() == [[0, 1], [1, 2]]
    assert gate_up.grad is not None
    assert gate_up.grad.isnan().any(1).tolist() == [True, True, False]


class Grouped(torch.nn.Module):
    """What TransformerEngine's GroupedLinear has of weights and biases, which a CPU cannot build."""

    num_gemms, fuse_wgrad_accumulation = 3, True

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        for expert in range(self.num_gemms):
            for name, shape in (("weight", (rows, columns)), ("bias", (rows,))):
                parameter = torch.nn.Parameter(torch.empty(shape))
                setattr(parameter, "main_grad", torch.zeros(shape))  # noqa: B010
                self.register_parameter(f"{name}{expert}", parameter)


def check_module(*, recompute: bool) -> None:
    """gpt-oss's experts whole: both products, activation, biases; the activation kept or made again."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    from megatron_dppo.models.experts.module import OneLaunchExperts, _line_up, _one_launch

    torch.manual_seed(2)
    counts, hidden, width = [4, 0, 9], 12, 8
    experts: Any = OneLaunchExperts.__new__(OneLaunchExperts)
    torch.nn.Module.__init__(experts)
    experts.config = SimpleNamespace(
        moe_apply_probs_on_input=False,
        add_bias_linear=True,
        gated_linear_unit=True,
        activation_func=quick_gelu,
        activation_func_clamp_value=CLAMP,
        glu_linear_offset=OFFSET,
    )
    experts.offload_expert_fc1 = experts.offload_moe_act = False
    experts.activation_recompute = recompute
    experts.linear_fc1, experts.linear_fc2 = Grouped(2 * width, hidden), Grouped(hidden, width)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear.__class__ = _one_launch(Grouped)
        _line_up(linear)
        for parameter in linear.parameters():
            torch.nn.init.normal_(parameter, std=2.0)
    x = torch.randn(sum(counts), hidden, requires_grad=True)
    probability = torch.rand(sum(counts), requires_grad=True)
    grad = torch.randn(sum(counts), hidden)
    assert experts.why_not(x) is None
    output, bias = experts(x, torch.tensor(counts), probability)
    assert bias is None
    output.backward(grad)

    exact = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    rows, weights = (t.detach().double().requires_grad_() for t in (x, probability))
    parts = []
    for e, (part, weight) in enumerate(zip(rows.split(counts), weights.split(counts), strict=True)):
        gate_up = part @ exact[f"linear_fc1.weight{e}"].t() + exact[f"linear_fc1.bias{e}"]
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        value = gate * torch.sigmoid(1.702 * gate) * (up + OFFSET)
        parts.append(weight[:, None] * (value @ exact[f"linear_fc2.weight{e}"].t() + exact[f"linear_fc2.bias{e}"]))
    want = torch.cat(parts)
    want.backward(grad.double())
    close(output, want, 1e-5)
    close(x.grad, rows.grad, 1e-5)
    close(probability.grad, weights.grad, 1e-5)
    for name, parameter in experts.named_parameters():
        close(parameter.main_grad, exact[name].grad, 1e-5)


def test_activation_and_biases_of_experts() -> None:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


if __name__ == "__main__":
    for case in CASES:
        check(*case, where="main_grad", device="cpu", dtype=torch.float32)
    check(*CASES[0], where="grad", device="cpu", dtype=torch.float16)  # the interpreter cuts bfloat16 off
    check(*CASES[0], where="frozen", device="cpu", dtype=torch.float32)
    check_that_nan_stays("cpu")
    for recompute in (False, True):
        check_module(recompute=recompute)
