"""Where the tensors of a checkpoint lie in the parameters that vLLM computes with: found out once, by a trial load.

vLLM's loaders take one tensor at a time, in Python, and do the same with it at every sync: they cut this worker's share
out and copy it to its place in a fused parameter. Of random numbers a recorder sees which part goes where; afterwards
the numbers themselves show in which layers nothing else happened to them. Later syncs copy a bucket at once by these
views. Layers whose weights vLLM quantises, packs or permutes stay with its loaders.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from megatron_dppo.checkpoint.weight_layout import BucketLayout, TensorSlot, unpack

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_DRAWN = (torch.float32, torch.bfloat16, torch.float16)
_SHIFT = 64
"""Expert e of a stack starts so many random numbers after expert e - 1: no two are alike, and they share memory."""
_PACKED = ("cpu_linear", "cpu_fused_moe")
"""What a CPU computes with in the weight's place: a packed copy that only vLLM's own loading makes anew."""


@dataclass(frozen=True)
class View:
    """A part of a tensor, in elements of its contiguous memory, and the view of a parameter that it goes to. Of experts
    the tensor is the stack of this worker's, and both have them in their first dimension."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True)
class _Seen:
    """A copy that a loader made: the part of the tensor, and the place in a parameter of a module."""

    module: torch.nn.Module
    parameter: str
    source: tuple[int, tuple[int, ...], tuple[int, ...]]
    """(offset, shape, stride)"""
    target: tuple[int, tuple[int, ...], tuple[int, ...]]


class _Recorder(TorchDispatchMode):
    """Notes copies into the tensors of a model's layers."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self._places: dict[int, tuple[torch.nn.Module, str]] = {}
        for layer in layers:
            for name, tensor in get_layer_tensors(layer).items():
                self._places.setdefault(_memory(tensor), (layer, name))
        self.tensors: dict[int, str] = {}
        """Name of the tensor in each memory."""
        self.seen: dict[str, list[_Seen]] = {}
        self.others: set[torch.nn.Module] = set()
        """Layers that something else was copied into."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            memory = _memory(target)
            if memory in self._places and memory != _memory(source):
                layer, parameter = self._places[memory]
                name = self.tensors.get(_memory(source))
                if name is None or source.shape != target.shape:
                    self.others.add(layer)
                else:
                    self.seen.setdefault(name, []).append(_Seen(layer, parameter, _span(source), _span(target)))
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


class TrialLoad:
    """Random numbers for every tensor of the layouts, the same ones whenever they are asked for. Memory: one layer,
    which vLLM makes anew, and the dense tensors of a bucket; a stack of experts takes that of one expert (`_SHIFT`)."""

    def __init__(
        self,
        model: torch.nn.Module,
        layouts: Sequence[BucketLayout],
        device: torch.device,
        stack: Callable[[TensorSlot], int | None],
    ) -> None:
        """
        stack  how many experts of a slot's stack are this worker's; None where its model needs them one by one
        """
        self._model: Any = model
        self._device = device
        self._dense: list[list[TensorSlot]] = [[] for _ in layouts]
        self._stacks: list[list[TensorSlot]] = [[] for _ in layouts]
        self._tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._experts: list[list[TensorSlot]] = [[] for _ in layouts]
        """Stacks that go one by one."""
        self._stacked: set[str] = set()
        for index, layout in enumerate(layouts):
            for slot in layout.slots:
                count = stack(slot) if slot.experts else None
                if slot.experts and count is None:
                    self._experts[index].append(slot)
                    continue
                if slot.name in self._tensors or count == 0:
                    continue
                shape = slot.shape if count is None else (count, *slot.shape)
                self._tensors[slot.name] = getattr(torch, slot.dtype), shape
                if count is None:
                    self._dense[index].append(slot)
                else:
                    self._stacked.add(slot.name)
                    self._stacks[index].append(slot)

    def load(self, hand_over: Callable[[TensorSlot, torch.Tensor], None]) -> _Recorder:
        """Load everything. The model's layers must be open for reloading. `hand_over` takes a stack of experts."""
        recorder = _Recorder(self._model.modules())
        with recorder:
            for dense, stacks, experts in zip(self._dense, self._stacks, self._experts, strict=True):
                tensors = {slot.name: self._numbers(slot.name) for slot in dense}
                recorder.tensors = {_memory(tensor): name for name, tensor in tensors.items()}
                if tensors:
                    self._model.load_weights(list(tensors.items()))
                tensors.clear()  # before those of the next bucket are drawn
                for slot in stacks:
                    tensor = self._numbers(slot.name)
                    recorder.tensors = {_memory(tensor): slot.name}
                    hand_over(slot, tensor)
                recorder.tensors = {}
                for slot in experts:
                    dtype = getattr(torch, slot.dtype)
                    singles = [torch.zeros(slot.shape, dtype=dtype, device=self._device) for _ in range(slot.count)]
                    self._model.load_weights(list(zip(slot.names(), singles, strict=True)))
        return recorder

    def views(self, recorder: _Recorder) -> dict[str, list[View]]:
        """Of the tensors that end up in parameters as they are, once vLLM has finished the load."""
        slow = set(recorder.others)
        written: dict[torch.nn.Module, list[_Seen]] = {}
        for copies in recorder.seen.values():
            for copy in copies:
                written.setdefault(copy.module, []).append(copy)
        slow |= {layer for layer, copies in written.items() if not _plain(layer) or not _whole(layer, copies)}
        found: dict[str, list[View]] = {}
        for name, copies in recorder.seen.items():
            if slow.isdisjoint(copy.module for copy in copies):
                views = [View(*copy.source, _live(copy)) for copy in copies]
                if not self._arrived(name, views):
                    slow |= {copy.module for copy in copies}
                found[name] = [self._contiguous(name, view) for view in views]
        while spoiled := [name for name in found if not slow.isdisjoint(c.module for c in recorder.seen[name])]:
            for name in spoiled:  # a layer is loaded in one way, and so is a tensor
                del found[name]
                slow |= {copy.module for copy in recorder.seen[name]}
        return found

    def _numbers(self, name: str) -> torch.Tensor:
        dtype, shape = self._tensors[name]
        generator = torch.Generator(device=self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = dtype if dtype in _DRAWN else torch.float32
        if name not in self._stacked:
            return torch.empty(shape, dtype=drawn, device=self._device).normal_(generator=generator).to(dtype)
        count = prod(shape[1:]) + _SHIFT * (shape[0] - 1)
        numbers = torch.empty(count, dtype=drawn, device=self._device).normal_(generator=generator).to(dtype)
        return numbers.as_strided(shape, (_SHIFT, *torch.empty(shape[1:], device="meta").stride()))

    def _contiguous(self, name: str, view: View) -> View:
        """A view of the numbers above as one of a stack whose experts lie one after another."""
        if name not in self._stacked:
            return view
        expert = prod(self._tensors[name][1][1:])
        if view.stride[0] != _SHIFT or view.offset >= expert:
            raise RuntimeError(f"{name}: experts are loaded in another way than as a stack")
        return replace(view, stride=(expert, *view.stride[1:]))

    def _arrived(self, name: str, views: list[View]) -> bool:
        tensor = self._numbers(name)
        return all(
            torch.equal(view.target, tensor.as_strided(view.shape, view.stride, view.offset).to(view.target.dtype))
            for view in views
        )


_PIECE = 1 << 24
"""Numbers that are looked at at once."""


def _plain(layer: torch.nn.Module) -> bool:
    """Whether a layer computes with its parameters, and with nothing that was made of them."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase) and type(method) not in _PLAIN:
        return False
    if any(hasattr(owner, name) for owner in (layer, method) for name in _PACKED):
        return False
    made, _ = get_layerwise_info(layer).restore_metadata
    live = layer._parameters
    return all(
        live.get(name) is not None
        and (live[name].shape, live[name].dtype, live[name].stride()) == (meta.shape, meta.dtype, meta.stride())  # type: ignore[union-attr]
        for name, meta in made.items()
    )


def _whole(layer: torch.nn.Module, copies: list[_Seen]) -> bool:
    """Whether every number of a layer's parameters is written once, but for padding, which is zero."""
    parts: dict[str, list[_Seen]] = {name: [] for name in get_layerwise_info(layer).restore_metadata[0]}
    for copy in copies:
        parts.setdefault(copy.parameter, []).append(copy)
    return all(
        covered_once(getattr(layer, name).data, [copy.target for copy in given]) for name, given in parts.items()
    )


def covered_once(tensor: torch.Tensor, boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether `boxes` (offset, shape and stride of parts of a contiguous tensor) hold every number once, but for zeros.

    Takes a byte for a number, and no more: a sum of truth values as one would take eight.
    """
    if not tensor.is_contiguous():
        return False
    came = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    for offset, shape, stride in boxes:
        came.as_strided(shape, stride, offset).fill_(True)
    pieces = list(zip(came.view(-1).split(_PIECE), tensor.view(-1).split(_PIECE), strict=True))
    count = sum(int(held.sum()) for held, _ in pieces)
    if count != sum(prod(shape) for _, shape, _ in boxes):
        return False
    return count == came.numel() or not any(bool(numbers.masked_fill(held, 0).any()) for held, numbers in pieces)


def _live(copy: _Seen) -> torch.Tensor:
    tensor = getattr(copy.module, copy.parameter).data
    offset, shape, stride = copy.target
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)


@dataclass(frozen=True)
class _Plan:
    """Of one bucket."""

    sources: list[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]]
    """(dtype, offset, shape, stride) of what lies whole in the payload."""
    targets: list[torch.Tensor]
    blocks: list[tuple[TensorSlot, list[View]]]
    """Tensors that are put together first."""
    rest: tuple[TensorSlot, ...]
    """For vLLM's loaders."""

    def add(
        self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """A copy that changes no type takes 8 bytes at a time where it can: rows that are apart are copied number by
        number on a GPU."""
        wide = 8 // dtype.itemsize
        numbers = (offset, shape[-1] if shape else 1, *stride[:-1], target.storage_offset(), *target.stride()[:-1])
        if (
            dtype == target.dtype
            and wide > 1
            and not any(number % wide for number in numbers)
            and (stride[-1:], target.stride()[-1:]) == ((1,), (1,))
            and target.data_ptr() % 8 == 0
        ):
            dtype, offset, target = torch.int64, offset // wide, target.view(torch.int64)
            shape, stride = tuple(target.shape), (*(number // wide for number in stride[:-1]), 1)
        self.sources.append((dtype, offset, shape, stride))
        self.targets.append(target)


class ViewLoader:
    """Copies buckets of known layouts into parameters. Memory: none, but of a tensor that lies in blocks."""

    def __init__(
        self,
        model: torch.nn.Module,
        layouts: Sequence[BucketLayout],
        views: dict[str, list[View]],
        runs: Callable[[TensorSlot], list[tuple[int, int, int]]],
    ) -> None:
        """
        views  of tensors by name; others are left to vLLM's loaders
        runs   (source, target, count) of consecutive experts of a slot's stack that are this worker's
        """
        self._layouts = layouts
        self._plans = {id(layout.slots): _plan(layout.slots, views, runs) for layout in layouts}
        self.layers = _Layers(model, views)
        left = sum(slot.nbytes for plan in self._plans.values() for slot in plan.rest)
        self.share = 1 - left / sum(slot.nbytes for layout in layouts for slot in layout.slots)
        """Of the bytes, that is not left to vLLM's loaders."""

    def load(self, slots: Sequence[TensorSlot], payload: torch.Tensor) -> Sequence[TensorSlot]:
        """What is left of a bucket for vLLM's loaders. On a GPU asynchronous, in the current stream's order."""
        plan = self._plans.get(id(slots))
        if plan is None:
            return slots
        typed: dict[torch.dtype, torch.Tensor] = {}
        sources = []
        for dtype, offset, shape, stride in plan.sources:
            if dtype not in typed:
                typed[dtype] = payload[: len(payload) // dtype.itemsize * dtype.itemsize].view(dtype)
            memory = typed[dtype]
            sources.append(memory.as_strided(shape, stride, memory.storage_offset() + offset))
        if sources:
            torch._foreach_copy_(plan.targets, sources, non_blocking=True)
        for slot, views in plan.blocks:
            ((_, whole),) = unpack([slot], payload)
            for view in views:
                view.target.copy_(whole.as_strided(view.shape, view.stride, view.offset), non_blocking=True)
        return plan.rest


def _plan(
    slots: Sequence[TensorSlot],
    views: dict[str, list[View]],
    runs: Callable[[TensorSlot], list[tuple[int, int, int]]],
) -> _Plan:
    plan = _Plan([], [], [], tuple(slot for slot in slots if slot.name not in views))
    for slot in slots:
        if slot.name not in views:
            continue
        if slot.blocks and slot.experts is None:
            plan.blocks.append((slot, views[slot.name]))
            continue
        dtype = getattr(torch, slot.dtype)
        start = slot.offset // dtype.itemsize
        for view in (_within(slot, view) if slot.blocks else view for view in views[slot.name]):
            if slot.experts is None:
                plan.add(dtype, start + view.offset, view.shape, view.stride, view.target)
                continue
            for source, target, count in runs(slot):
                first = start + source * view.stride[0] + view.offset
                plan.add(dtype, first, (count, *view.shape[1:]), view.stride, view.target[target : target + count])
    return plan


def _within(slot: TensorSlot, view: View) -> View:
    """A view of a stack of whole experts as one of the part of each that lies in the slot."""
    ((rows, columns),) = slot.blocks
    row, column = divmod(view.offset, slot.shape[1])
    _, height, width = view.shape
    inside = rows[0] <= row <= rows[1] - height and columns[0] <= column <= columns[1] - width
    if not inside or view.stride[1:] != (slot.shape[1], 1):
        raise RuntimeError(
            f"{slot.name}: this worker loads other numbers than rows {rows} of columns {columns}, which it gets; set "
            "rollout.weight_transfer=object_store, by which every worker gets all"
        )
    wide = columns[1] - columns[0]
    offset = (row - rows[0]) * wide + column - columns[0]
    return replace(view, offset=offset, stride=((rows[1] - rows[0]) * wide, wide, 1))


class _Layers:
    """The layers of a model that vLLM still reloads, in the place of the model in its functions: those that are not
    loaded by views, and attention, which makes tensors of its own from the weights of others."""

    def __init__(self, model: torch.nn.Module, views: dict[str, list[View]]) -> None:
        loaded = {_memory(view.target) for given in views.values() for view in given}
        self._layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, Attention | MLAAttention)
            or not loaded.issuperset(_memory(parameter) for parameter in layer.parameters(recurse=False))
        ]

    def modules(self) -> Iterator[torch.nn.Module]:
        """See torch's `Module.modules`."""
        return iter(self._layers)
