"""transformers' modules as the core of an engine: a thread that decodes waves of sequences.

```
draw ── a row ──► those that wait ──► thread: a wave to its end, a token of each row per step ──► the row's answer
turn, hold, load, ... ──────────────► thread, between two steps
```
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.weight_layout import Bucket
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import EngineDead, GenerationRequest, SamplingConfig, TransferTerms, WorkerReport
from megatron_dppo.rollout.event_loop import EventLoop
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.reference.routes import RouteRecorder
from megatron_dppo.rollout.reference.wave import Row, Wave
from megatron_dppo.rollout.reference.weights import IncomingWeights, give_back, load_model
from megatron_dppo.rollout.serving.core import Answer, WorkerSync
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.weight_transfer.incoming import Incoming, let_go
from megatron_dppo.router_replay.record import RouteSchema, record_routes


@torch.no_grad()
def score(
    model: PreTrainedModel,
    recorder: RouteRecorder | None,
    schema: RouteSchema | None,
    batch: RolloutBatch,
    temperature: float,
) -> RolloutBatch:
    """`batch` with this model's `mu_logp` of its sampled tokens and `topk_logp` of its ids, of softmax(logits /
    temperature), and with this model's routes."""
    mu_logp, topk_logp, experts = batch.mu_logp.copy(), batch.topk_logp.copy(), []
    for number in range(len(batch)):
        start, stop = int(batch.offsets[number]), int(batch.offsets[number + 1])
        ids = torch.from_numpy(batch.token_ids[start:stop].astype(np.int64)).to(model.device)
        first = int(batch.prompt_lengths[number])
        logits = model(input_ids=ids[None, :-1], logits_to_keep=len(ids) - first, use_cache=False).logits[0]
        logp = (logits.float() / temperature).log_softmax(dim=-1)
        rows = slice(start + first, stop)
        mu_logp[rows] = logp.gather(1, ids[first:, None])[:, 0].cpu().numpy()
        asked = torch.from_numpy(batch.topk_ids[rows].astype(np.int64)).to(model.device)
        found = logp.gather(1, asked.clamp_min(0)).cpu().numpy()
        topk_logp[rows] = np.where(batch.topk_ids[rows] < 0, topk_logp[rows], found)
        if recorder is not None and schema is not None:
            experts.append(recorder.in_all_layers(1, len(ids) - 1, schema)[0])
    mu_logp[~batch.loss_mask] = 0.0  # what an environment wrote
    routes = None
    if schema is not None:
        routes = record_routes(experts, batch.lengths, schema, batch.request_ids).routed_under(batch.weight_versions)
    return replace(batch, mu_logp=mu_logp, topk_logp=topk_logp, routes=routes)


_GATHER_S = 0.002
"""A wave begins when no request has come for so long: those of one call come one after another."""


class ReferenceCore:
    """See `Core`. The thread alone touches the model; whatever else is asked of it goes through its queue.

    An error in a step ends it: what is asked of it is then answered by `EngineDead`.
    """

    def __init__(self, facts: ModelFacts, config: RolloutConfig) -> None:
        self._facts, self._config = facts, config
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.routes: RouteSchema | None = None
        self._asked: queue.SimpleQueue[tuple[Row | Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        """Rows to sample and calls to make, with who waits for them."""
        self._waiting: list[Row] = []
        self._wave: Wave | None = None
        self._held = False
        self._end = threading.Event()
        self._dead = ""
        """Why it ended by itself."""
        self._load_s = 0.0
        self._thread = threading.Thread(target=self._run, name="reference-engine", daemon=True)

    async def start(self) -> ReferenceCore:
        """Load the model."""
        self._thread.start()
        try:
            await self._between_steps(self._load_model)
        except BaseException:
            self._end.set()
            raise
        return self

    async def draw(self, request: GenerationRequest, sampling: SamplingConfig) -> Answer:
        row = Row(request, sampling, Future())
        return await self._put(row, row.answer)

    async def score(self, batch: RolloutBatch, temperature: float) -> RolloutBatch:
        """See `score`."""
        return await self._between_steps(lambda: score(self._model, self._recorder, self.routes, batch, temperature))

    async def turn(self) -> None:
        await self._between_steps(lambda: None)

    async def hold(self, *, cut: bool) -> None:
        def hold() -> None:
            if cut:
                if self._wave is not None:
                    self._wave.cut()
                for row in self._waiting:
                    row.end("abort")
                self._wave, self._waiting = None, []
            self._held = True

        await self._between_steps(hold)

    async def pause(self) -> None:
        await self.hold(cut=False)

    async def resume(self) -> None:
        def resume() -> None:
            self._held = False

        await self._between_steps(resume)

    async def sleep(self) -> None:
        def sleep() -> None:
            if self.device.type == "cuda":
                give_back(self._model, "meta")
                let_go(self.device)

        await self._between_steps(sleep)

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        def wake() -> None:
            if what == "weights" and self.device.type == "cuda":
                give_back(self._model, "cuda")

        await self._between_steps(wake)

    async def agree(self, terms: TransferTerms) -> None:
        await self._between_steps(lambda: self._incoming.agree(terms))

    async def start_update(self) -> None:
        def start() -> None:
            self._incoming.begin()
            self._weights.begin()
            self._load_s = 0.0

        await self._between_steps(start)

    async def load(self, version: int, what: Bucket | Literal["shared", "group"]) -> None:
        def load() -> None:
            start = time.perf_counter()
            if isinstance(what, Bucket):
                self._weights.load(what.slots, torch.from_numpy(what.payload.copy()))
            else:
                self._incoming.take(what, self._weights.load)
            self._load_s += time.perf_counter() - start

        await self._between_steps(load)

    async def finish_update(self, version: int) -> list[WorkerSync]:
        def finish() -> list[WorkerSync]:
            start = time.perf_counter()
            self._weights.finish()
            sums = self._incoming.checksums()
            used = None
            if self.device.type == "cuda":
                let_go(self.device)
                free, total = torch.cuda.mem_get_info(self.device)
                used = (total - free) / 2**30
            finish_s = time.perf_counter() - start
            return [WorkerSync(sums, WorkerReport(load_s=self._load_s, finish_s=finish_s, gpu_used_gib=used))]

        return await self._between_steps(finish)

    async def abandon_update(self, version: int) -> None:
        await self._between_steps(lambda: self._weights.begin())

    async def close(self) -> None:
        self._end.set()
        self._asked.put((lambda: None, Future()))
        await asyncio.to_thread(self._thread.join, 30.0)

    async def _between_steps[T](self, call: Callable[[], T]) -> T:
        """What the thread makes of a call, which waits its turn."""
        return await self._put(call, Future())

    async def _put[T](self, asked: Row | Callable[[], Any], answer: Future[T]) -> T:
        self._asked.put((asked, answer))
        if self._dead:  # looked at afterwards: nobody takes it out any more
            self._give_up()
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        torch.set_num_threads(self._config.cpu_threads if self.device.type == "cpu" else torch.get_num_threads())
        while not self._end.is_set():
            idle = self._held or (self._wave is None and not self._waiting)
            self._serve(block=idle)
            if self._held or self._end.is_set():
                continue
            try:
                self._step()
            except BaseException as error:
                self._dead = f"{type(error).__name__}: {error}"
                self._give_up()
                return

    def _serve(self, *, block: bool) -> None:
        """Take in what is asked; with `block` wait for the first."""
        while block or not self._asked.empty():
            asked, answer = self._asked.get()
            block = False
            if isinstance(asked, Row):
                self._waiting.append(asked)
            elif answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(asked())
                except BaseException as error:
                    answer.set_exception(error)

    def _step(self) -> None:
        if self._wave is None:
            self._waiting = [row for row in self._waiting if not row.over]
            if not self._waiting:
                return
            most = self._config.max_num_seqs
            came = 0
            while came != len(self._waiting) < most:
                came = len(self._waiting)
                time.sleep(_GATHER_S)
                self._serve(block=False)
                if self._held:
                    return
            rows, self._waiting = self._waiting[:most], self._waiting[most:]
            self._wave = Wave(
                self._model, self._recorder, self.routes, rows, most_tokens=self._config.max_num_batched_tokens
            )
        if not self._wave.over:
            self._wave.step()
        if self._wave.over:
            self._wave = None

    def _give_up(self) -> None:
        """Tell whoever waits that the thread has ended."""
        waiting: list[Future[Any]] = [row.answer for row in [*self._waiting, *(self._wave.rows if self._wave else [])]]
        with suppress(queue.Empty):
            while True:
                waiting.append(self._asked.get_nowait()[1])
        for answer in waiting:
            with suppress(InvalidStateError):  # it has its answer, or nobody waits
                answer.set_exception(EngineDead(f"the reference engine's thread ended: {self._dead}"))

    def _load_model(self) -> None:
        """Read it, and send one token through: that says what the record of its experts looks like."""
        self._model = load_model(self._facts.folder, self._config, self.device)
        self._weights, self._incoming = IncomingWeights(self._model), Incoming(self.device)
        self._recorder = RouteRecorder(self._model) if self._config.router_replay else None
        with torch.no_grad():
            self._model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device))
        if self._recorder is not None:
            self.routes = self._recorder.schema(self._model.config.get_text_config().num_hidden_layers)


class ReferenceEngine(ServedEngine[ReferenceCore]):
    """transformers in this process, on its GPU or else its CPU. The constructor blocks until it can generate."""

    def __init__(self, model: Path, config: RolloutConfig) -> None:
        facts = ModelFacts.read(Path(model), router_replay=False)  # the loaded model says what routes
        super().__init__(facts, config, EventLoop("reference-engine"), ReferenceCore(facts, config).start)

    def score(self, batch: RolloutBatch, temperature: float) -> RolloutBatch:
        """`batch` with this model's log-probabilities of the same tokens and ids, and with its routes."""
        self._check_open()
        return self._loop.run(self._core.score(batch, temperature))
