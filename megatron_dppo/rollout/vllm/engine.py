"""The engine whose core is vLLM's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.vllm.core import VllmCore
from megatron_dppo.rollout.vllm.start import CoreLoop, check_expert_parallel, start_vllm


def open_engine(model: Path, config: RolloutConfig) -> ServedEngine[VllmCore]:
    """vLLM on this machine, its processes below this one. Blocks until it can generate."""
    facts = ModelFacts.read(Path(model), router_replay=config.router_replay)
    check_expert_parallel(facts, config)
    return ServedEngine(facts, config, CoreLoop("vllm-engine"), partial(start_vllm, facts, config))
