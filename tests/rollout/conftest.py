"""One engine per kind and purpose for the whole folder, and none beyond it: each start-up takes tens of seconds.

What asks for `served` or `served_mixed` is the contract that every engine passes: it runs once for each of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, RolloutEngine, SamplingConfig, update_weights
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.start import open_engine
from tests.processes import command_of
from tests.tiny import VOCAB_SIZE, tiny_qwen3_moe

CONFIG = RolloutConfig(
    dtype="float32",
    max_prompt_tokens=40,
    max_response_tokens=24,
    max_num_seqs=16,
    max_num_batched_tokens=100,  # several prompts a step, beside sequences that decode
    sequences_per_object=7,
    weight_sync_bucket_mib=1,
    object_store_mib=100,
    kv_cache_mib=64,
)
KINDS = ("vllm", "reference")
only_vllm = pytest.mark.parametrize("kind", ["vllm"], indirect=True)
"""For what is vLLM's alone, or the same for every engine and slow."""
SAMPLING = SamplingConfig(max_tokens=12, top_k_logprobs=20)


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Random prompts of 1 to 39 tokens; some are equal, so that the prefix cache has something to do."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(2, VOCAB_SIZE, rng.integers(1, 40)).astype(np.int32) for _ in range(count)]
    return [made[i - 1] if i % 4 == 3 else made[i] for i in range(count)]


def requests(count: int, name: str, seed: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"{name}/{i}/0", prompt_ids=p, seed=1000 * seed + i)
        for i, p in enumerate(prompts(count, seed))
    ]


def making(model: Path, config: RolloutConfig = CONFIG) -> Callable[[], RolloutEngine]:
    """What a fleet makes its engines with."""
    return partial(open_engine, model, config)


@dataclass(frozen=True)
class Asked:
    """An engine in a Ray actor, called as if it were here."""

    client: RemoteEngine

    @property
    def weight_version(self) -> int:
        return self.client.ask(lambda engine: engine.weight_version, "control").result()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingConfig, *, training: bool
    ) -> RolloutBatch:
        return self.client.ask(lambda engine: engine.generate(requests, sampling, training=training), "work").result()

    def begin_update(self, version: int) -> None:
        self.client.ask(lambda engine: engine.begin_update(version), "weights").result()

    def receive_bucket(self, version: int, bucket: Bucket) -> None:
        self.client.ask(lambda engine: engine.receive_bucket(version, bucket), "weights").result()

    def end_update(self, version: int, checksums: Mapping[int, int]) -> None:
        self.client.ask(lambda engine: engine.end_update(version, checksums), "weights").result()

    def abandon_update(self, version: int, reason: str) -> None:
        self.client.ask(lambda engine: engine.abandon_update(version, reason), "control").result()


@dataclass
class Served:
    """An engine, the folder of its model, and the version of its weights that a test may raise."""

    engine: Asked | ServedEngine[Any]
    model: Path
    first: RolloutBatch
    """Sampled from the checkpoint that the engine loaded, before any sync."""
    version: int = 0
    fleet: EngineFleet | None = None
    """Of the one engine, where it is in a Ray actor."""

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def update(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A full sync from named tensors; raises what the engine raised."""
        engine: Any = self.engine
        update_weights(engine, version, named_tensors, bucket_mib=CONFIG.weight_sync_bucket_mib)


@pytest.fixture(scope="package")
def ray_session() -> Iterator[RaySession]:
    """The one Ray of this process: a second one would end the first when it is closed. Leaves no process behind; the
    server of `run_ranks` and torch's keeper of shared memory live as long as this process."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with closing(RaySession.start(namespace="tests", object_store_mib=CONFIG.object_store_mib)) as session:
        yield session
    ours = ("python", "torch_shm_manager")
    left = {c.pid: command_of(c) for c in psutil.Process().children(recursive=True) if c.pid not in before}
    assert not {pid: command for pid, command in left.items() if command and command.split()[0] not in ours}


@pytest.fixture(scope="package", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """`rollout.engine`."""
    return str(request.param)


@pytest.fixture(scope="package")
def served(kind: str, ray_session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The controller's engine in a Ray actor; every layer is a mixture of experts."""
    model = tmp_path_factory.mktemp("moe")
    tiny_qwen3_moe(model, seed=1)
    config = CONFIG.model_copy(update={"engine": kind})
    fleet = EngineFleet(making(model, config), config, name=f"served-{kind}")
    try:
        (engine,) = fleet.ready_members()
        yield Served(Asked(engine), model, fleet.generate(requests(200, "first"), SAMPLING, training=True), fleet=fleet)
    finally:
        fleet.close()


@pytest.fixture(scope="package")
def served_mixed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine without Ray; layers 0 and 2 are dense, embeddings are tied, no renormalisation of expert weights."""
    model = tmp_path_factory.mktemp("mixed")
    tiny_qwen3_moe(
        model, seed=2, mlp_only_layers=[0, 2], tie_word_embeddings=True, norm_topk_prob=False, num_hidden_layers=5
    )
    engine = open_engine(model, CONFIG.model_copy(update={"engine": kind}))
    assert isinstance(engine, ServedEngine)
    try:
        yield Served(engine, model, engine.generate(requests(30, "first"), SAMPLING, training=True))
    finally:
        engine.close()
