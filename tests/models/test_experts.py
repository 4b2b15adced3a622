"""All experts in one launch, as a CPU computes them: against float64, whatever the loads and wherever gradients go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.errors import UserError
from megatron_dppo.models.experts.activation import WeightedSwiGLU, recompute_for_backward, weighted_swiglu
from megatron_dppo.models.experts.grouped import GroupedLinear, slow_paths, stacked, unusable
from megatron_dppo.models.experts.module import _line_up, _one_launch
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig
from tests.models.public_configs import CONFIGS

COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def experts(number: int, rows: int, columns: int, *, apart: bool = False) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Weights next to each other, with gradient buffers that are so too, or not; and the weights' memory."""
    stack = torch.randn(number, rows, columns)
    weights = [torch.nn.Parameter(w) for w in stack]
    buffer = torch.randn(number, rows + apart, columns)
    for weight, main in zip(weights, buffer, strict=True):
        setattr(weight, "main_grad", main[:rows])  # noqa: B010
    return weights, stack


def test_which_gpus_take_slower_paths_is_said() -> None:
    assert slow_paths((9, 0)) == ""
    assert slow_paths((10, 0)).startswith("a GPU of compute capability 10.0 takes slower paths for log-probabilities")
    assert "one by one" not in slow_paths((10, 0))
    assert "products of experts (one by one)" in slow_paths((8, 0))


def expected(x: Tensor, dy: Tensor, weights: list[Any], counts: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, input gradient and weight gradients in float64."""
    parts = list(zip(x.double().split(counts), dy.double().split(counts), weights, strict=True))
    return (
        torch.cat([rows @ w.double().t() for rows, _, w in parts]),
        torch.cat([grads @ w.double() for _, grads, w in parts]),
        [grads.t() @ rows for rows, grads, _ in parts],
    )


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("where", ["main_grad", "main_grad apart", "grad", "frozen"])
def test_products_of_all_experts(counts: list[int], where: str) -> None:
    torch.manual_seed(0)
    weights, _ = experts(len(counts), 8, 12, apart=where == "main_grad apart")
    x, dy = torch.randn(sum(counts), 12, requires_grad=True), torch.randn(sum(counts), 8)
    for weight in weights:
        weight.requires_grad_(where != "frozen")
    before = [w.main_grad.double().clone() for w in weights]  # type: ignore[attr-defined]
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    y = GroupedLinear.apply(x, ends, stacked(weights), where.startswith("main_grad"), *weights)
    y.backward(dy)
    output, input_gradient, gradients = expected(x.detach(), dy, weights, counts)
    torch.testing.assert_close(y.double(), output, rtol=1e-5, atol=1e-5)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), input_gradient, rtol=1e-5, atol=1e-5)
    for weight, start, gradient in zip(weights, before, gradients, strict=True):
        main = weight.main_grad.double()  # type: ignore[attr-defined]
        if where.startswith("main_grad"):
            torch.testing.assert_close(main, start + gradient, rtol=1e-5, atol=1e-5)
            assert weight.grad_added_to_main_grad, "DistributedDataParallel's hook would add the placeholder"
            assert weight.grad is not None, "without a gradient the hook that reduces would not run"
            continue
        torch.testing.assert_close(main, start, rtol=0, atol=0)
        if where == "frozen":
            assert weight.grad is None
        else:
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-5, atol=1e-5)


def test_a_stack_is_the_weights_own_memory() -> None:
    weights, stack = experts(3, 4, 8)
    found = stacked(weights)
    assert found is not None
    assert found.data_ptr() == stack.data_ptr()
    assert stacked([*reversed(weights)]) is None
    assert stacked([torch.zeros(4, 8) for _ in range(3)]) is None
    assert stacked([w.t() for w in weights]) is None, "expert by expert in order, but columns first"


def test_what_needs_another_way() -> None:
    x = torch.zeros(2, 8)
    assert unusable(x, torch.zeros(8, 8)) is None
    assert "bytes" in str(unusable(x, torch.zeros(7, 8)))
    assert "float64" in str(unusable(x.double(), torch.zeros(8, 8, dtype=torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 7])
def test_activation_times_probability(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(rows, 12, dtype=dtype, requires_grad=True)
    probability = torch.rand(rows, requires_grad=True)
    grad = torch.randn(rows, 6, dtype=dtype)
    WeightedSwiGLU.apply(gate_up, probability).backward(grad)
    exact, weight = gate_up.detach().double().requires_grad_(), probability.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (F.silu(gate) * up * weight[:, None]).backward(grad.double())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for got, wanted in ((gate_up.grad, exact.grad), (probability.grad, weight.grad)):
        assert got is not None
        assert wanted is not None
        torch.testing.assert_close(got.double(), wanted, **tolerance)


def test_an_activation_is_computed_again_for_the_backward() -> None:
    """Nothing of it is held in between, whoever kept it, and gradients are the same to the bit."""
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        gate_up, probability = torch.randn(7, 12, requires_grad=True), torch.rand(7, requires_grad=True)
        down, adapter = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5, requires_grad=True)
        weighted = WeightedSwiGLU.apply(gate_up, probability)
        output = weighted @ down + weighted @ adapter
        if again:
            inner, outer = gate_up.detach(), probability.detach()
            recompute_for_backward(output, weighted, lambda out, of=(inner, outer): weighted_swiglu(*of, out))
            assert weighted.untyped_storage().nbytes() == 0
        output.square().sum().backward()
        found.append([one.grad for one in (gate_up, probability, down, adapter)])
    for plain, other in zip(*found, strict=True):
        assert plain is not None
        assert other is not None
        assert (plain == other).all()


class Grouped(torch.nn.Module):
    """What TransformerEngine's GroupedLinear has of weights, which a CPU cannot build."""

    num_gemms, fuse_wgrad_accumulation = 3, False

    def __init__(self) -> None:
        super().__init__()
        for expert in range(self.num_gemms):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.randn(4, 8)))


def test_old_weights_go_before_their_new_place_is_made() -> None:
    """Both at once were DeepSeek-V3's peak with adapters: its weights and 14 GiB of one layer's first matrices."""
    linear, there = Grouped(), []
    old = [StorageWeakRef(weight.untyped_storage()) for weight in linear.parameters()]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.new_empty.default and made.numel():
                there.append(sum(not storage.expired() for storage in old))
            return made

    with Watch():
        _line_up(linear)
    assert set(there) == {0}
    assert linear.weight1.untyped_storage().nbytes() == 3 * 4 * 8 * 4


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_move_are_found_again(frozen: bool) -> None:
    """Into other memory (a wrapper's buffer), out of it (an offload), and apart."""
    torch.manual_seed(0)
    linear: Any = Grouped().requires_grad_(not frozen)
    linear.__class__ = _one_launch(Grouped)
    _line_up(linear)
    with torch.no_grad():
        for weight in linear.parameters():  # `_line_up` leaves them to whoever loads
            weight.normal_()
    x, ends = torch.randn(5, 8), torch.tensor([2, 2, 5], dtype=torch.int32)

    def product() -> Tensor:
        return torch.cat([rows @ getattr(linear, f"weight{e}").t() for e, rows in enumerate(x.split([2, 0, 3]))])

    def check() -> None:
        y, _ = linear(x, ends)
        torch.testing.assert_close(y, product())
        if not frozen:
            (gradient,) = torch.autograd.grad(y.sum(), [linear.weight2])
            torch.testing.assert_close(gradient, x[2:].sum(0).expand(4, 8))

    check()
    held = linear.stack()
    assert linear.stack() is held
    buffer = torch.randn(3, 4, 8)
    for expert, place in enumerate(buffer):
        getattr(linear, f"weight{expert}").data = place
    assert linear.stack().data_ptr() == buffer.data_ptr()
    check()
    storage = buffer.untyped_storage()
    storage.resize_(0)
    storage.resize_(buffer.numel() * 4)
    buffer.normal_()
    check()
    linear.weight0.data = torch.randn(4, 8)
    assert linear.stack() is None


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_the_activation_of_no_experts_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense model, and experts on a CPU, where each computes by itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, parallel = resolve_hf_config(dict(CONFIGS[name])), ParallelConfig()
    with pytest.raises(UserError, match=r"actor\.recompute=activation is for experts on GPUs"):
        transformer_config(model, parallel, params_dtype=torch.bfloat16, recompute="activation")
