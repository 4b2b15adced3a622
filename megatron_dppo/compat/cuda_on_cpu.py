"""The parts of `torch.cuda` that Megatron-Core calls without asking whether there is a GPU, mapped to the CPU."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
_MEANT_FOR_A_GPU = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to})
_PLACES = frozenset({"device", "pin_memory"})


def _calling_module() -> str:
    """Who called the torch function that a mode sees; other modes (`with torch.device(...)`) may stand in between."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") in ("torch.utils._device", "torch.overrides"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class CudaLiteralsToCpu(TorchFunctionMode):
    """Inside Megatron-Core's own code, `device="cuda"`, `.cuda()` and `pin_memory` mean the CPU, and `tensor.type()`
    names the GPU type that its optimizer compares with. Calls from anywhere else are left alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Every call of torch on a rank comes here: who made it is looked for only where that could matter.
        if func not in _MEANT_FOR_A_GPU and kwargs.keys().isdisjoint(_PLACES):
            return func(*args, **kwargs)
        if not _calling_module().startswith("megatron."):
            return func(*args, **kwargs)
        kwargs = dict(kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype, func(*args))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


_active = threading.local()


def enter_cuda_literals_mode() -> None:
    """Modes belong to a thread: every thread that runs Megatron-Core enters its own, once."""
    if getattr(_active, "mode", None) is None:
        _active.mode = CudaLiteralsToCpu()
        _active.mode.__enter__()
