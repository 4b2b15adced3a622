"""The receiving end inside vLLM's workers: buckets of weights from memory files, from the GPU's other process, or from
a communicator.

Runs in the engine-core process (or its workers), where vLLM calls it through its weight-transfer API:
`start_weight_update`, then `update_weights` per bucket (once for all buckets of known layouts), then
`finish_weight_update`. Of known layouts most tensors are copied straight into the parameters that kernels use
(`views.py`). The rest is left to vLLM's layerwise reloading: tensors by Hugging Face name are buffered until their
layer is complete, then processed into kernel format and copied into the storage the kernels already use.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_dppo.checkpoint.weight_layout import EXPERT, BucketLayout, TensorSlot, unpack
from megatron_dppo.compat.vllm_cpu import repack_tied_head
from megatron_dppo.rollout.engine import TransferTerms
from megatron_dppo.rollout.vllm.gpt_oss import mend_reload
from megatron_dppo.rollout.vllm.layers import (
    LATENT_NORM_EPS,
    KeptKernels,
    incomplete_layers,
    process_if_whole,
    set_latent_norms,
    wrongly_quantised,
)
from megatron_dppo.rollout.vllm.views import TrialLoad, ViewLoader
from megatron_dppo.rollout.weight_transfer.incoming import Incoming, let_go
from megatron_dppo.rollout.weight_transfer.segment import read_segment


class BucketLoader:
    """Loads the slots of one sync into a model, copying what it keeps, so that a bucket's memory may be used again.

    vLLM loads and post-processes a layer when all of its tensors have come (layerwise reloading); per expert that costs
    a tenth of a millisecond of Python for each of three matrices, for 128 experts ten times what NVLink needs for their
    bytes. A stack of experts is collected here and handed over in one call per matrix: vLLM's expert loader takes
    `[experts, rows, columns]` as well and cuts this worker's tensor-parallel share. An expert-parallel worker collects
    its own experts and drops the others. Memory: the tensors of layers that are not complete yet.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        found = [(path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts)]
        # By vLLM's name and by its place in the model: checkpoints of MiniMax have the latter.
        self._experts = {module.layer_name: module for _, module in found}
        self._experts |= {path.removesuffix(".routed_experts"): module for path, module in found}
        self._places = {layer.layer_name: _places(layer) for layer in self._experts.values()}
        """Where each expert of a layer is among this worker's; -1 for another worker's."""
        self._stacks: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self.views: ViewLoader | None = None
        """Takes what it can of the buckets of the update under way."""

    def load(self, slots: Sequence[TensorSlot], payload: torch.Tensor) -> None:
        """Load a bucket. `payload`: uint8, on any device; on a GPU asynchronous, in the current stream's order."""
        left = slots if self.views is None else self.views.load(slots, payload)
        dense: list[tuple[str, torch.Tensor]] = []
        for slot, tensor in unpack(left, payload):
            if slot.experts is None:
                dense.append((slot.name, self._keep(tensor)))
            elif (layer := self._layer_of(slot)) is None:
                dense.extend(zip(slot.names(), self._keep(tensor).unbind(), strict=True))
            else:
                self._collect(layer, slot, tensor)
        if dense:
            self._model.load_weights(dense)

    def drop(self) -> None:
        """Forget stacks that are not complete."""
        self._stacks.clear()
        self._missing.clear()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)

    def _layer_of(self, slot: TensorSlot) -> RoutedExperts | None:
        """vLLM's experts of the slot's layer; None where the layer needs its matrices one by one."""
        prefix, _, matrix = slot.name.partition(f".{EXPERT}.")
        layer = self._experts.get(prefix) or self._experts.get(self._own_name(prefix))
        if layer is None or matrix not in _matrices(layer):
            return None
        redundant = layer.moe_config.num_experts - layer.moe_config.num_logical_experts
        return None if redundant else layer

    def _own_name(self, name: str) -> str:
        """vLLM's, of a module that checkpoints call `name`: a model around the decoder puts itself in front."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return next(iter(mapper.apply_list([name])), name) if mapper else name

    def own_experts(self, slot: TensorSlot) -> int | None:
        """How many experts of a stack are this worker's; None where its layer needs them one by one."""
        layer = self._layer_of(slot)
        return None if layer is None else sum(place >= 0 for place in self._places[layer.layer_name])

    def runs(self, slot: TensorSlot) -> list[tuple[int, int, int]]:
        """(source, target, count) of the slot's consecutive experts that are this worker's: number in the slot, place
        among this worker's."""
        layer = self._layer_of(slot)
        assert layer is not None
        assert slot.experts is not None
        runs: list[tuple[int, int, int]] = []
        for source, number in enumerate(range(*slot.experts)):
            target = self._places[layer.layer_name][number]
            if target < 0:
                continue
            if runs and (source - runs[-1][0], target - runs[-1][1]) == (runs[-1][2], runs[-1][2]):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((source, target, 1))
        return runs

    def hand_over(self, slot: TensorSlot, stack: torch.Tensor) -> None:
        """Let vLLM load all of this worker's experts of a slot's layer and matrix, `[experts, *slot.shape]`."""
        layer = self._layer_of(slot)
        assert layer is not None
        name, shard = _matrices(layer)[slot.name.partition(f".{EXPERT}.")[2]]
        places = self._places[layer.layer_name]
        parameter = getattr(layer, name)
        parameter.weight_loader(
            param=parameter,
            loaded_weight=stack,
            weight_name=f"{layer.layer_name}.{name}",
            shard_id=shard,
            expert_id=next(number for number, place in enumerate(places) if place >= 0),  # others are ignored
            return_success=True,
        )
        process_if_whole(layer)

    def _collect(self, layer: RoutedExperts, slot: TensorSlot, tensor: torch.Tensor) -> None:
        runs, local = self.runs(slot), layer.local_num_experts
        if not runs:
            return
        stack = self._stacks.get(slot.name)
        if stack is None:
            stack = torch.empty((local, *slot.shape), dtype=tensor.dtype, device=self._device)
            self._stacks[slot.name], self._missing[slot.name] = stack, local
        for source, target, count in runs:
            stack[target : target + count].copy_(tensor[source : source + count], non_blocking=True)
            self._missing[slot.name] -= count
        if self._missing[slot.name] == 0:
            del self._missing[slot.name]
            self.hand_over(slot, self._stacks.pop(slot.name))


def _matrices(layer: RoutedExperts) -> dict[str, tuple[str, str]]:
    """vLLM's parameter and shard of each matrix of an expert, by the name that its model says a checkpoint has."""
    return {
        f"{layer.ckpt_gate_proj_name}.weight": ("w13_weight", "w1"),
        f"{layer.ckpt_up_proj_name}.weight": ("w13_weight", "w3"),
        f"{layer.ckpt_down_proj_name}.weight": ("w2_weight", "w2"),
    }


def _places(layer: RoutedExperts) -> list[int]:
    manager = layer.expert_map_manager
    return [int(manager.map_global_to_local(number)) for number in range(layer.moe_config.num_experts)]


@dataclass
class TransferInit(WeightTransferInitInfo):
    """How the weights of the syncs to come will arrive."""

    terms: bytes
    """Pickled `TransferTerms`: vLLM hands on plain values alone."""


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):
    """One bucket, or all of them."""

    version: int
    """Version the weights belong to."""
    segment: str = ""
    """Path of a memory file that holds the payload of a bucket."""
    size: int = 0
    """Bytes of that payload."""
    slots: bytes = b""
    """Pickled `TensorSlot`s of that bucket."""
    way: Literal["", "shared", "group"] = ""
    """How every bucket of the layouts comes."""
    abandon: bool = False
    """True drops what came since `start_weight_update`; the model is then a mixture and must not be used."""


_KEPT = 256 << 20
"""Bytes beside its buckets that a fleet's worker may have more of in torch's cache after a sync than before."""


class BucketReceiver(WeightTransferEngine[TransferInit, BucketUpdate]):
    """Loads buckets by Hugging Face name. Memory: one bucket (two from a communicator), plus the tensors of layers that
    are not complete yet. Between syncs the two buckets of a communicator alone."""

    init_info_cls = TransferInit
    update_info_cls = BucketUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        """Version of the weights in the model; None while a sync is under way or was abandoned."""
        self.checksums: dict[int, int] = {}
        """Of the last sync: by number of the bucket, see `checksum`."""
        self.measured: dict[str, float] = {}
        """Of the last sync: where this worker's time went, and the memory used on its GPU at the end."""
        self.incomplete: list[str] = []
        """Of the last sync: see `incomplete_layers`."""
        self._way = ""
        """In which the buckets of the last sync came."""
        self._unused = 0
        """Bytes in torch's cache before the sync."""
        self._kernels: KeptKernels | None = None
        self._views: ViewLoader | None = None
        """For buckets of the layouts that were agreed on."""
        self._incoming: int | None = None
        self._buckets = Incoming(self.device)
        self._loader = BucketLoader(self.model, self.device)
        mend_reload(self.model)
        # Here, since vLLM makes this object when it has loaded the model and before it compiles it.
        if (eps := self.vllm_config.additional_config.get(LATENT_NORM_EPS)) is not None:
            set_latent_norms(self.model, eps)

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        terms: TransferTerms = pickle.loads(init_info.terms)
        if terms.layouts is not None:
            self._learn([layout for layout in terms.layouts if layout.goes_to(worker)])
        self._buckets.agree(terms, worker=worker)

    def start_weight_update(self) -> None:
        self._abandon()  # of a sync that died in this process
        self.version = None
        self._unused = _unused(self.device)
        self._buckets.begin()
        self.checksums, self.measured = {}, {}
        self._loader.views = self._views
        self._open()

    def receive_weights(self, update_info: BucketUpdate) -> None:
        if update_info.abandon:
            self._abandon()
            self._buckets.close_buffers()
            let_go(self.device)
            return
        self._incoming, self._way = update_info.version, update_info.way
        start = time.perf_counter()
        if update_info.way:
            self._buckets.take(update_info.way, self._load)
            self.measured["by_views"] = 0.0 if self._loader.views is None else self._loader.views.share
        else:
            if self._loader.views is not None:  # these buckets are others
                self._loader.views = None
                self._open()
            slots: list[TensorSlot] = pickle.loads(update_info.slots)
            self._loader.load(slots, read_segment(update_info.segment, update_info.size))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the sender may use the bucket's memory again
        self._spend("load_s", start)

    def finish_weight_update(self) -> None:
        start = time.perf_counter()
        self.incomplete = [] if self._incoming is None else incomplete_layers(self.model)
        self._close()
        self.checksums = self._buckets.checksums()
        self.version, self._incoming = None if self.incomplete else self._incoming, None
        # A fleet's GPU is the engine's alone, but not all that needs memory there asks torch's allocator for it.
        if self._way != "group" or _unused(self.device) > self._unused + _KEPT:
            let_go(self.device)
        self.measured["finish_s"] = time.perf_counter() - start
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self.measured["gpu_used_gib"] = (total - free) / 2**30

    def shutdown(self) -> None:
        self._buckets.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("weights are sent by megatron_dppo.trainer.weight_sync")

    def _learn(self, layouts: list[BucketLayout]) -> None:
        """Find out by a trial load which tensors of `layouts` can be copied to their places. To be called during an
        update, before anything has come: the weights are random afterwards."""
        self._abandon()
        self._views = self._loader.views = self.version = None
        self._open()
        trial = TrialLoad(self.model, layouts, self.device, self._loader.own_experts)
        recorder = trial.load(self._loader.hand_over)
        whole = not incomplete_layers(self.model)
        self._close()
        if whole:
            self._views = ViewLoader(self.model, layouts, trial.views(recorder), self._loader.runs)
        self._loader.views = self._views
        self._open()

    def _open(self) -> None:
        """Let vLLM expect weights, in those layers that are not loaded by views."""
        for parameter in self.model.parameters():  # it asks loaders for their names, and MiniMax has partial functions
            loader = getattr(parameter, "weight_loader", None)
            if loader is not None and not hasattr(loader, "__name__"):
                loader.__name__ = type(loader).__name__
        self._kernels = self._kernels or KeptKernels(self.model)
        initialize_layerwise_reload(self._reloaded)

    def _close(self) -> None:
        """Let vLLM finish what came."""
        finalize_layerwise_reload(self._reloaded, self.model_config)
        if self._kernels is not None:
            self._kernels.put_back()
        repack_tied_head(self.model)

    @property
    def _reloaded(self) -> Any:
        return self.model if self._loader.views is None else self._loader.views.layers

    def _load(self, slots: Sequence[TensorSlot], payload: torch.Tensor) -> None:
        start = time.perf_counter()
        self._loader.load(slots, payload)
        self._spend("load_host_s", start)

    def _spend(self, name: str, since: float) -> None:
        self.measured[name] = self.measured.get(name, 0.0) + time.perf_counter() - since

    def _abandon(self) -> None:
        """Put the kernels' tensors back under the layers that a sync left open, and forget what it buffered."""
        self._loader.drop()
        open_layers = [layer for layer in self.model.modules() if get_layerwise_info(layer).can_load()]
        for layer in open_layers:
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        if open_layers:
            finalize_layerwise_reload(self.model, self.model_config)
        self._incoming = None


def _unused(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class ReportsWeights:
    """Mixed into vLLM's worker (`worker_extension_cls`), so that the engine can ask every worker what it holds."""

    weight_transfer_engine: BucketReceiver
    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]
    """vLLM's."""

    def begin_weight_sync(self) -> None:
        """Begin a sync, whatever became of the last one. vLLM refuses where it has one open in this worker: where the
        engine could not join a communicator, or failed in another worker alone."""
        self._weight_update_active = False
        self.start_weight_update()

    def end_weight_sync(self) -> tuple[int | None, list[str], list[tuple[int, int]], list[tuple[str, float]]]:
        """Finish a sync. What this worker holds then, in one answer: the version of its weights (None where some did
        not come), by name the layers that did not get all of theirs, (bucket, checksum), and (measure, value)."""
        self.finish_weight_update()
        done = self.weight_transfer_engine
        return done.version, done.incomplete, list(done.checksums.items()), list(done.measured.items())

    def wrongly_quantised(self) -> list[str]:
        """See the function of this name."""
        return wrongly_quantised(self.weight_transfer_engine.model)
