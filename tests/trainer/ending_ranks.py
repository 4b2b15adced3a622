"""Training runs that fail as a test wishes. Ranks, actor, checkpoints, Ray's store and the loop are the real ones; what
is sampled comes from the seeds of the requests instead of engines, so that a run takes a second."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

PROMPTS, PER_MINI_BATCH, SAMPLES, RESPONSE, SEED = 6, 2, 2, 6, 3
MINI_BATCHES = PROMPTS // PER_MINI_BATCH


@dataclass(frozen=True)
class Run:
    """One call of `Trainer.run`.

    fault  on which rank, at which step, where: `score`, `sample`, `show`, `synced` are the controller's, `export` is
           everybody's; `reward` is one that is NaN, `advantage` one in the second mini-batch
    """

    folder: str
    steps: int = 3
    fault: tuple[int, int, str] | None = None
    error: Exception | BaseException = field(default_factory=lambda: RuntimeError("no fault"))
    colocated: bool = False
    resume: bool = False
    every: int = 0
    profile_step: int | None = None
    blocked: bool = False
    """Whether the folder of checkpoints cannot be written."""


@dataclass(frozen=True)
class Ending:
    """How it ended on a rank."""

    finished: bool
    error: str = ""
    notes: tuple[str, ...] = ()
    cause: str = ""
    state: dict[str, Any] | None = None
    """state.json of the newest state."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    logged: tuple[int, ...] = ()
    tracebacks: tuple[str, ...] = ()
    """What the log has a traceback of."""


def run_all(rank: int, model: str, runs: Sequence[Run]) -> list[Ending]:
    """The runs, one after another, in one Ray."""
    import torch.distributed as dist

    from megatron_dppo.actor import runtime as actor_runtime
    from megatron_dppo.rollout.ray_session import RaySession

    # Once: gloo's groups keep their threads and sockets until the process ends.
    runtime = actor_runtime.start(config_of(model, runs[0]).parallel, seed=SEED, timeout_minutes=3)
    box = [None]
    if rank == 0:
        session = RaySession.start(namespace="endings", object_store_mib=100)
        box = [session.where]
    dist.broadcast_object_list(box, src=0)
    if rank > 0:
        session = RaySession.connect(box[0])
    try:
        fleet = _fleet(config_of(model, runs[0]), "kept") if rank == 0 else None  # its store takes a second to start
        endings = [_run(runtime, model, run, fleet) for run in runs]
        if fleet is not None:
            fleet.close()
        return endings
    finally:
        session.close()


def config_of(model: str, run: Run) -> Any:
    from megatron_dppo.config.schema import Config

    placed = {"placement": "colocated", "enable_sleep": True} if run.colocated else {}
    pattern = {"kind": "format", "pattern": ".*[a-zA-Z0-9].*"}
    return Config.model_validate(
        {
            "run": {"dir": run.folder, "seed": SEED},
            "model": {"path": model},
            "actor": {
                **{"dtype": "float32", "max_tokens_per_microbatch": 256},
                **{"router_replay": "none", "max_skipped_steps": 0},
            },
            "optimizer": {"lr": 1e-2},
            "algorithm": {"preset": "pg-is"},
            "rollout": {
                **{"max_prompt_tokens": 64, "max_response_tokens": RESPONSE, "top_k_logprobs": 0, "dtype": "float32"},
                **{"router_replay": False, "object_store_mib": 100, **placed},
            },
            "task": {"kind": "data", "data": {"path": f"{model}/sums.jsonl"}, "held_out_size": 0, "rewards": [pattern]},
            "trainer": {
                **{"steps": run.steps, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
                **{"prompts_per_mini_batch": PER_MINI_BATCH, "checkpoint_every": run.every, "parity_check": False},
                **{"resume": run.resume, "profile_step": run.profile_step},
            },
            "evaluation": {"every": 0, "prompts": 0},
        }
    )


def _run(runtime: Any, model: str, run: Run, kept: Any) -> Ending:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from transformers import AutoTokenizer

    from megatron_dppo.launch.heartbeat import Heartbeat
    from megatron_dppo.launch.stop import StopRequest
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.trainer.checkpoints import Checkpoints
    from megatron_dppo.trainer.evaluation import Evaluator
    from megatron_dppo.trainer.loop import Controller, Trainer
    from megatron_dppo.trainer.progress import Progress
    from megatron_dppo.trainer.task_suite import build_task_suite
    from megatron_dppo.trainer.tracking import Tracker
    from megatron_dppo.trainer.train import build_actor

    config, rank = config_of(model, run), runtime.rank
    model_parallel_cuda_manual_seed(SEED)
    config.run.dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        heartbeat = stack.enter_context(Heartbeat(config.run.dir, rank, limit=600).running())
        actor = build_actor(runtime, config, load_hf_config(config.model.path))
        checkpoints = Checkpoints(config, {"task": "sums"}, actor)
        first_step = checkpoints.restore() if run.resume else 0
        if run.blocked and rank == 0:
            (config.run.dir / "checkpoints").write_text("a file")
        controller = None
        if rank == 0:
            suite = build_task_suite(config, AutoTokenizer.from_pretrained(model))
            # One that shares the GPUs is closed before the last state is saved.
            fleet = _fleet(config, f"colocated-{run.resume}") if run.colocated else kept
            fleet.version = first_step
            stack.callback(_mend, kept)
            tracker = stack.enter_context(
                closing(Tracker(config.run.dir, resume_step=first_step if run.resume else None))
            )
            progress = Progress(total_steps=run.steps)
            progress.phase("starting ranks")  # as `train` has; the console of a test breaks at a step
            evaluator = Evaluator(fleet, suite, config.evaluation, config.rollout, SEED)
            controller = Controller(fleet, suite, evaluator, tracker, progress)
        trainer = Trainer(
            runtime, config, actor=actor, checkpoints=checkpoints, controller=controller, heartbeat=heartbeat,
            stop=StopRequest(config.run.dir),
        )  # fmt: skip
        if run.fault is not None and run.fault[0] == rank:
            _break(trainer, controller, actor, *run.fault[1:], run.error)
        finished, told = False, {}
        tracebacks: list[str] = []
        log = logging.getLogger("megatron_dppo.trainer.last_state")
        seen = logging.Handler()
        seen.emit = lambda record: tracebacks.append(record.getMessage()) if record.exc_info else None  # type: ignore[method-assign]
        log.addHandler(seen)
        stack.callback(log.removeHandler, seen)
        try:
            finished = trainer.run(first_step, _exporting(run))
        except Exception as error:
            told = {
                "error": f"{type(error).__name__}: {error}",
                "notes": tuple(note.replace(run.folder, "FOLDER") for note in getattr(error, "__notes__", ())),
                "cause": str(error.__cause__ or ""),
            }
        actor.onload()
        weights = {name: tensor.numpy().copy() for name, tensor in actor.export_weights() if tensor is not None}
    states = sorted(config.run.dir.glob("checkpoints/step_*/state.json"))
    metrics = config.run.dir / "metrics.jsonl"
    return Ending(
        finished=finished,
        state=json.loads(states[-1].read_text()) if states else None,
        weights=weights,
        logged=tuple(json.loads(line)["step"] for line in metrics.read_text().splitlines()) if metrics.exists() else (),
        tracebacks=tuple(tracebacks),
        **told,
    )


def _exporting(run: Run) -> Callable[[], None]:
    def export() -> None:
        if run.fault is not None and run.fault[2] == "export":
            raise run.error

    return export


def _fleet(config: Any, name: str) -> Any:
    """A fleet without an engine: it keeps what it samples in the store as engines do."""
    from megatron_dppo.batch import RolloutBatch
    from megatron_dppo.rollout.fleet.fleet import EngineFleet

    class Fleet(EngineFleet):
        version = 0
        handles: ClassVar[list[Any]] = []

        def generate_stored(
            self, requests: Any, sampling: Any, layer_groups: Any = None, *, arrived: Any, **_: Any
        ) -> Any:
            batches = [_answer(request, self.version) for request in requests]
            self.handles.append(self.keep(RolloutBatch.concatenate(batches), layer_groups))
            for number in range(len(self.handles[-1].keys)):
                arrived(self.handles[-1].select([number]))
            return self.handles[-1]

        def members_to_sync(self, version: int) -> list[Any]:
            return []

        def synced(self, version: int, members: Any, failed: Any) -> None:
            self.version = version

    return Fleet(_no_engine, config.rollout, name=name, options=[])


def _no_engine() -> Any:
    raise AssertionError("a fleet of no places makes no engine")


def _mend(fleet: Any) -> None:
    """Take faults and what they left back: the next run has the same fleet."""
    while fleet.handles:
        fleet.release(fleet.handles.pop())
    for name in ("generate_stored", "synced"):
        vars(fleet).pop(name, None)


def _answer(request: Any, version: int) -> Any:
    from megatron_dppo.batch import RolloutBatch

    rng = np.random.default_rng(request.seed)
    prompt = len(request.prompt_ids)
    tokens = prompt + RESPONSE
    sampled = np.arange(tokens) >= prompt
    answer = rng.integers(2, 258, RESPONSE).astype(np.int32)
    return RolloutBatch(
        token_ids=np.concatenate([request.prompt_ids, answer]).astype(np.int32),
        offsets=np.array([0, tokens]),
        prompt_lengths=np.array([prompt], dtype=np.int32),
        loss_mask=sampled,
        mu_logp=np.where(sampled, -5.0, 0.0).astype(np.float32),
        topk_ids=np.zeros((tokens, 0), dtype=np.int32),
        topk_logp=np.zeros((tokens, 0), dtype=np.float32),
        routes=None,
        request_ids=(request.request_id,),
        finish_reasons=("length",),
        weight_versions=np.full(tokens, version, dtype=np.int32),
    )


def _break(trainer: Any, controller: Any, actor: Any, step: int, where: str, error: BaseException) -> None:
    """Make a part of the run fail at a step."""

    def at(inner: Callable[..., Any], change: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if trainer._step_now != step:
                return inner(*arguments, **options)
            if change is None:
                raise error
            return change(inner(*arguments, **options))

        return call

    def poison(rewards: Any) -> Any:
        reward = rewards.reward.copy()
        reward[4] = np.nan
        return dataclasses.replace(rewards, reward=reward)

    def poisoned_update(source: Any, signal: Any, **options: Any) -> Any:
        if trainer._step_now == step:
            signal.advantages[PER_MINI_BATCH * SAMPLES] = np.nan
        return update(source, signal, **options)

    if where == "score":
        object.__setattr__(controller.suite.task.grader, "judge", at(controller.suite.task.grader.judge))
    elif where == "reward":
        object.__setattr__(controller.suite.task.grader, "rewards", at(controller.suite.task.grader.rewards, poison))
    elif where == "sample":
        controller.fleet.generate_stored = at(controller.fleet.generate_stored)
    elif where == "show":
        controller.progress.console.print = at(controller.progress.console.print)
    elif where == "synced":
        controller.fleet.synced = at(controller.fleet.synced)
    elif where == "advantage":
        update, actor.update = actor.update, poisoned_update
