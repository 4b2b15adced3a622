"""An engine of somebody's own, in a page: what `rollout.engine=package.module:make` needs. It knows no model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import (
    EngineClosed,
    GenerationRequest,
    Health,
    RolloutEngine,
    SamplingConfig,
    TransferTerms,
    WorkerReport,
    check_requests,
)
from megatron_dppo.rollout.weight_transfer.manifest import Manifest

TENSORS = {"a": (3, 2), "b": (4,)}
VOCAB = 50


class UniformEngine:
    """Draws every token uniformly, from the request's seed."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config, self._manifest = config, Manifest(TENSORS)
        self.weight_version, self._refused = 0, ""
        self._paused = threading.Event()
        self._paused.set()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool, call: str = ""
    ) -> RolloutBatch:
        if self._refused:
            raise EngineClosed(f"the engine refuses to generate: {self._refused}")
        check_requests(requests, sampling, self._config)
        self._paused.wait()
        return RolloutBatch.concatenate([self._answer(request, sampling.max_tokens) for request in requests])

    def _answer(self, request: GenerationRequest, count: int) -> RolloutBatch:
        prompt = len(request.prompt_ids)
        sampled = np.arange(prompt + count) >= prompt
        answer = np.random.default_rng(request.seed).integers(0, VOCAB, count)
        return RolloutBatch(
            token_ids=np.concatenate([request.prompt_ids, answer]).astype(np.int32),
            offsets=np.array([0, prompt + count]),
            prompt_lengths=np.array([prompt], dtype=np.int32),
            loss_mask=sampled,
            mu_logp=np.where(sampled, -np.log(VOCAB), 0.0).astype(np.float32),
            topk_ids=np.zeros((prompt + count, 0), dtype=np.int32),
            topk_logp=np.zeros((prompt + count, 0), dtype=np.float32),
            routes=None,
            request_ids=(request.request_id,),
            finish_reasons=("length",),
            weight_versions=np.full(prompt + count, self.weight_version, dtype=np.int32),
        )

    def abandon(self, call: str) -> None: ...

    def alive(self) -> Health:
        return Health({})

    def agree(self, terms: TransferTerms) -> None: ...

    def begin_update(self, version: int) -> None:
        self._refused = f"the sync to weight version {version} has not finished"
        self._manifest.begin()

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        for slot in bucket.slots:
            self._manifest.check(slot.name, slot.shape)

    def receive_shared(self, version: int) -> None:
        raise NotImplementedError

    def receive_group(self, version: int) -> None:
        raise NotImplementedError

    def end_update(self, version: int, checksums: Mapping[int, int]) -> list[WorkerReport]:
        self._manifest.end()
        self.weight_version, self._refused = version, ""
        return [WorkerReport(load_s=0.0, finish_s=0.0)]

    def abandon_update(self, version: int, reason: str) -> None:
        self._refused = f"the sync to weight version {version} died ({reason})"

    def sleep(self) -> None: ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...

    def pause(self) -> None:
        self._paused.clear()

    def resume(self) -> None:
        self._paused.set()

    def close(self) -> None: ...


def make(model: Path, config: RolloutConfig) -> RolloutEngine:
    return UniformEngine(config)
