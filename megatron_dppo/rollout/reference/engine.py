"""The engine whose core is transformers' own modules."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.reference.core import ReferenceCore
from megatron_dppo.rollout.serving.engine import ServedEngine


class ReferenceEngine(ServedEngine[ReferenceCore]):
    """transformers in this process, on its GPU or else its CPU. The constructor blocks until it can generate."""

    def __init__(self, model: Path, config: RolloutConfig) -> None:
        facts = ModelFacts.read(Path(model), router_replay=False)  # the loaded model says what routes
        super().__init__(facts, config, EventLoop("reference-engine"), ReferenceCore(facts, config).start)

    def score(self, batch: RolloutBatch, temperature: float) -> RolloutBatch:
        """`batch` with this model's log-probabilities of the same tokens and ids, and with its routes."""
        self._check_open()
        return self._loop.run(self._core.score(batch, temperature))
