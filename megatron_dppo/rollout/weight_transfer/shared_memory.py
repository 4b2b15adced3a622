"""The receiving end inside vLLM's workers: buckets of weights out of anonymous shared memory.

Runs in the engine-core process (or its workers), where vLLM calls it through its weight-transfer API:
`start_weight_update`, then `update_weights` per bucket, then `finish_weight_update`. vLLM's layerwise reloading does
the rest: tensors by Hugging Face name are buffered until their layer is complete, then processed into kernel format
and copied into the storage the kernels already use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_dppo.compat.vllm_cpu import repack_tied_head
from megatron_dppo.rollout.weight_transfer.bucket import TensorSlot, unpack


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):
    """One bucket.

    segment  path of the memory file that holds the payload
    size     bytes of the payload
    slots    (name, dtype, shape, offset) of each tensor
    version  version the weights belong to
    abandon  True drops what came since `start_weight_update`; the model is then a mixture and must not be used
    """

    version: int
    segment: str = ""
    size: int = 0
    slots: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    abandon: bool = False


class SharedMemoryBackend(WeightTransferEngine[SharedMemoryInit, BucketUpdate]):
    """Loads buckets by Hugging Face name. Memory: one bucket, plus the tensors of layers that are not complete yet."""

    init_info_cls = SharedMemoryInit
    update_info_cls = BucketUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        """Version of the weights in the model; None while a sync is under way or was abandoned."""
        self._incoming: int | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Segments are opened by name as they come."""

    def start_weight_update(self) -> None:
        self._abandon()  # of a sync that died in this process
        self.version = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketUpdate) -> None:
        if update_info.abandon:
            self._abandon()
            return
        self._incoming = update_info.version
        # A copy: layers that are not complete keep their tensors until a later bucket completes them.
        payload = torch.empty(update_info.size, dtype=torch.uint8)
        with open(update_info.segment, "rb", buffering=0) as segment:
            view, received = memoryview(payload.numpy()), 0
            while received < update_info.size:
                count = segment.readinto(view[received:])
                if not count:
                    raise RuntimeError(f"weight bucket ends after {received} of {update_info.size} bytes")
                received += count
        slots = [TensorSlot(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in update_info.slots]
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in unpack(slots, payload))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)
        self.version, self._incoming = self._incoming, None

    def shutdown(self) -> None:
        """Nothing stays open between buckets."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("weights are sent by megatron_dppo.rollout.vllm_engine.VllmEngine.update_weights")

    def _abandon(self) -> None:
        """Put the kernels' tensors back under the layers that a sync left open, and forget what it buffered."""
        open_layers = [layer for layer in self.model.modules() if get_layerwise_info(layer).can_load()]
        for layer in open_layers:
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        if open_layers:
            finalize_layerwise_reload(self.model, self.model_config)
        self._incoming = None


class ReportsWeights:
    """Mixed into vLLM's worker (`worker_extension_cls`), so that the engine can ask every worker what it holds."""

    weight_transfer_engine: SharedMemoryBackend

    def held_weight_version(self) -> int | None:
        """Version of this worker's weights; None before the first sync, during one, and after one that died."""
        return self.weight_transfer_engine.version
