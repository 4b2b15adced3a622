"""What stands for the engines in tests of sessions: draws answers at random, with everything an engine records, and
keeps each as it gave it out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.router_replay.routes import Routes

LAYERS, EXPERTS, CHOSEN = 2, 8, 2

type Write = Callable[[np.random.Generator, GenerationRequest], Sequence[int]]


class Recorder:
    """A `Sample` that keeps whole what it gives out. A token has other experts in every call, as if weights had
    changed."""

    def __init__(self, write: Write, stops: Sequence[int]) -> None:
        """
        write  the ids of an answer, which is cut at the first of `stops` and at `max_tokens`
        """
        self._write, self._stops, self._lock = write, frozenset(stops), threading.Lock()
        self.given: dict[str, RolloutBatch] = {}
        """By the request's id."""
        self.trained: dict[str, bool] = {}
        self.seeds: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.came: list[int] = []
        """Rows of each answer."""
        self.whole = False
        """Whether it answers what is known too, which it must not."""

    def __call__(self, request: GenerationRequest, sampling: SamplingConfig, training: bool) -> RolloutBatch:
        rng = np.random.default_rng(request.seed)
        written = [int(one) for one in self._write(rng, request)][: sampling.max_tokens]
        stops = self._stops | set(sampling.stop_token_ids)
        end = next((n for n, one in enumerate(written) if one in stops), None)
        answer = written if end is None else written[: end + 1]
        batch = self._batch(request, np.array(answer, dtype=np.int32), sampling, training, rng, end is None)
        with self._lock:
            assert request.request_id not in self.given, f"{request.request_id} was sampled twice"
            self.given[request.request_id] = batch
            self.trained[request.request_id] = training
            self.seeds[request.request_id] = request.seed
            self.known[request.request_id] = request.known
            new = batch if self.whole else batch.beyond([request.known])
            self.came.append(len(new.token_ids))
        return new

    def _batch(
        self,
        request: GenerationRequest,
        answer: np.ndarray,
        sampling: SamplingConfig,
        training: bool,
        rng: np.random.Generator,
        cut: bool,
    ) -> RolloutBatch:
        ids = np.concatenate([request.prompt_ids, answer]).astype(np.int32)
        count, prompt, k = len(ids), len(request.prompt_ids), sampling.top_k_logprobs
        sampled = np.arange(count) >= prompt
        topk_ids = np.full((count, k), -1, dtype=np.int32)
        topk_logp = np.full((count, k), -np.inf, dtype=np.float32)
        topk_ids[sampled] = rng.integers(0, 400, (len(answer), k))
        topk_logp[sampled] = -rng.random((len(answer), k))
        routes = None
        if training:
            experts = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (count, LAYERS, 1)), axis=-1)
            valid = np.arange(count) < count - 1
            routes = Routes(experts[..., :CHOSEN] * valid[:, None, None], valid, EXPERTS)
        return RolloutBatch(
            token_ids=ids,
            offsets=np.array([0, count], dtype=np.int64),
            prompt_lengths=np.array([prompt], dtype=np.int32),
            loss_mask=sampled,
            mu_logp=np.where(sampled, -rng.random(count), 0).astype(np.float32),
            topk_ids=topk_ids,
            topk_logp=topk_logp,
            routes=routes,
            request_ids=(request.request_id,),
            finish_reasons=("length" if cut else "stop",),
            weight_versions=np.full(count, rng.integers(0, 5), dtype=np.int32),
        )
