"""A vLLM logits processor that records the likeliest ids on the GPU, and the worker extension that fetches them.

Used by `bench_rollout.py` to see what top-K costs when it does not travel through vLLM's outputs.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

_recorders: list[TopKRecorder] = []
"""Of this worker process: vLLM makes the processor, the extension must find it."""


class TopKRecorder(LogitsProcessor):
    """Keeps, per step, `(log-probabilities, ids)` `[rows of the batch, K]` of what is being sampled: processors
    that leave the arg-max alone run after the temperature. Logits pass through. Off unless a request of the batch has
    `extra_args={"topk_on_gpu": K}`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.wanted: dict[int, int] = {}
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        _recorders.append(self)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.wanted.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self._set(index, (params.extra_args or {}).get("topk_on_gpu"))
        for source, target, direction in batch_update.moved:
            moved, displaced = self.wanted.get(source), self.wanted.get(target)
            self._set(target, moved)
            self._set(source, displaced if direction.name == "SWAP" else None)

    def _set(self, index: int, k: int | None) -> None:
        if k is None:
            self.wanted.pop(index, None)
        else:
            self.wanted[index] = k

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.wanted:
            values, ids = logits.topk(max(self.wanted.values()), dim=-1)
            self.steps.append((values - logits.logsumexp(-1, keepdim=True), ids.int()))
        return logits


class TopKReader:
    """Methods that vLLM adds to its worker."""

    def take_topk(self) -> str:
        """Write what was recorded to a file in shared memory, forget it, and return the file's name."""
        steps = [step for recorder in _recorders for step in recorder.steps]
        for recorder in _recorders:
            recorder.steps = []
        path = f"/dev/shm/bench-rollout-{os.getpid()}.npz"
        np.savez(
            path,
            logp=torch.cat([values for values, _ in steps]).cpu().numpy(),
            ids=torch.cat([ids for _, ids in steps]).cpu().numpy(),
        )
        return path
