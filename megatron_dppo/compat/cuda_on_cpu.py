"""The parts of `torch.cuda` that Megatron-Core calls without asking whether there is a GPU, mapped to the CPU."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors


class _InertStream:
    """A class, not a function: transformers evaluates `Stream | None` in annotations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _InertEvent:
        return event if event is not None else _InertEvent()


class _InertEvent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_THE_STREAM = _InertStream()


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))  # not torch.manual_seed, which queues work for a GPU to come


def patch_torch_cuda() -> None:
    """One CPU generator stands for the GPU's; streams and events do nothing; the current device is the CPU."""
    cuda = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = _get_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_rng_state
    cuda.manual_seed = cuda.random.manual_seed = _manual_seed
    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.Stream = _InertStream  # type: ignore[assignment, misc]
    cuda.Event = _InertEvent  # type: ignore[assignment, misc]
    cuda.current_stream = cuda.default_stream = lambda device=None: _THE_STREAM  # type: ignore[assignment, return-value]
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]


_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def _make(stock: Callable[..., torch.Tensor], *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    on_cpu = "cpu" if device is not None and torch.device(device).type == "cuda" else device
    return stock(*args, device=on_cpu, **kwargs | {"pin_memory": False})


def _stay(stock: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _type(stock: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = None if args or kwargs else _CUDA_TYPE_NAMES.get(tensor.dtype)
    return name or stock(tensor, *args, **kwargs)


def patch_cuda_literals() -> None:
    """Inside Megatron-Core's own code, `device="cuda"`, `.cuda()` and `pin_memory` mean the CPU, and `tensor.type()`
    names the GPU type that its optimizer compares with. Calls from anywhere else are left alone; scripts (TorchScript)
    and pickles have torch's own functions."""
    _device_constructors()  # what `with torch.device(...)` changes, looked up once: torch's own functions
    for name in ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros"):
        _inside_megatron(torch, name, _make)
    _inside_megatron(torch.Tensor, "cuda", _stay)
    _inside_megatron(torch.Tensor, "pin_memory", _stay)
    _inside_megatron(torch.Tensor, "type", _type)


def _inside_megatron(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """`call(stock, ...)` in place of `owner.name(...)` where Megatron-Core makes the call. Single functions are
    replaced, since a TorchFunctionMode would cost every operation of a rank."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("megatron."):
            return call(stock, *args, **kwargs)
        return stock(*args, **kwargs)

    if owner is torch:
        patched.__module__, patched.__qualname__ = "torch", name
        if script_name := _builtins._find_builtin(stock):
            _builtins._register_builtin(patched, script_name)
    setattr(owner, name, patched)
