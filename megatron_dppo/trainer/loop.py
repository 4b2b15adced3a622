"""The training loop: roll out, score, update, sync, now and then evaluate and save.

```
rank 0, a thread of its own   prompts ─► engines ─► verifier ┐ (later steps' while s trains: rollout.schedule)
rank 0, the loop              waits for it ◄─────────────────┘─ tells ─► update ─► sync ─► log, evaluate, save
other ranks, the loop         wait for rank 0 (`RankCoordinator`) ◄────► update ─► sync ─► wait for rank 0 ...
```
All ranks meet in every arrow that is drawn for both. While they wait for rank 0 they are called to bring weights to an
engine that was started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.profiling import profiled
from megatron_dppo.actor.results import UpdateReport
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.algorithm import KLPlace, most_masked_tokens
from megatron_dppo.config.schema import Config
from megatron_dppo.launch.heartbeat import Heartbeat
from megatron_dppo.launch.stop import StopRequest
from megatron_dppo.models.flops import peak_flops, training_flops
from megatron_dppo.rollout.engine import RolloutFleet
from megatron_dppo.trainer.checkpoints import Checkpoints
from megatron_dppo.trainer.clock import Clock
from megatron_dppo.trainer.coordinator import RankCoordinator, meanwhile
from megatron_dppo.trainer.evaluation import Evaluator
from megatron_dppo.trainer.last_state import LastState, Trained
from megatron_dppo.trainer.mismatch import MISMATCH_TOKENS, Mismatch
from megatron_dppo.trainer.progress import Progress
from megatron_dppo.trainer.rollouts import Experience, RolloutCollector
from megatron_dppo.trainer.samples import spelled
from megatron_dppo.trainer.task_suite import TaskSuite
from megatron_dppo.trainer.tracking import Tracker
from megatron_dppo.trainer.weight_sync import WeightSync
from megatron_dppo.trainer.window import WindowState


@dataclass(frozen=True)
class Controller:
    """What only rank 0 has."""

    fleet: RolloutFleet
    suite: TaskSuite
    evaluator: Evaluator
    tracker: Tracker
    progress: Progress


class Trainer:
    """Runs on every rank; rank 0 has a `Controller` and talks to the engine, the verifier and the person watching."""

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        *,
        actor: MegatronActor,
        checkpoints: Checkpoints,
        controller: Controller | None,
        heartbeat: Heartbeat,
        stop: StopRequest,
    ) -> None:
        self._runtime, self._config, self._actor = runtime, config, actor
        self._checkpoints, self._controller = checkpoints, controller
        self._heartbeat, self._stop = heartbeat, stop
        self._step_now = 0
        side = (controller.fleet, controller.suite) if controller else None
        self._weights = WeightSync(runtime, actor, config)
        fleet = controller.fleet if controller else None
        self._coordinator = RankCoordinator(runtime, self._weights, fleet)
        self._last_state = LastState(runtime, actor, self._weights, self._coordinator, checkpoints, fleet)
        self._collector = RolloutCollector(config, self._coordinator, side, actor.moe_layer_groups)
        self._trained = Trained(0, 0)
        self.began = 0.0
        """`time.monotonic` when the engines had the weights."""
        self.evaluated = False
        """Whether there was an evaluation before the first step."""

    def run(self, first_step: int, export: Callable[[], None] = lambda: None) -> bool:
        """Steps `first_step + 1 .. trainer.steps`; `first_step` steps are done already (0, or what a checkpoint holds).

        The engines get the weights first: those that they started from may be others, of a run before or of none.
        Returns whether the last step was reached: a run that is asked to stop (`StopRequest`) saves its state after the
        running step and returns False. After the last step `export` is called.

        Any error that all ranks can survive ends the run after what was trained is saved (`LastState`); it has a note
        that says so. It is the controller's own on the controller, and `UserError` or `ControllerFailed` elsewhere.
        """
        self._trained = Trained(first_step, first_step)
        try:
            with self._stop.listening():
                try:
                    finished = self._run(first_step)
                    if finished:
                        export()
                    return finished
                except Exception as error:
                    with self._watch("last checkpoint"):
                        if said := self._last_state.rescue(error, self._trained):
                            error.add_note(said)
                    raise
        finally:
            self._collector.close()
            self._weights.close()

    def _run(self, first_step: int) -> bool:
        self._step_now = first_step
        with self._watch("sync"):
            self._coordinator.sync(first_step)
        self.began = time.monotonic()
        # A run that was stopped during an evaluation has the checkpoint of that step, but not its result.
        if self._is_due(first_step, self._config.evaluation.every) and not self._evaluated(first_step):
            self._evaluate(first_step)
            self.evaluated = True
        if self._config.rollout.schedule == "window":
            self._collector.open_window(self._checkpoints.window.get(first_step, WindowState()))
        for step in range(first_step + 1, self._config.trainer.steps + 1):
            self._step_now = step
            saved = self._step(step)
            reason = self._asked_to_stop() if step < self._config.trainer.steps else ""
            if reason:
                if not saved:
                    self._take_gpus()
                    self._save(step)
                if self._controller:
                    with self._coordinator.alone():
                        self._stop.done(step)
                        self._controller.progress.note(
                            f"step {step}: stopped by {reason}, the state is saved; {self._checkpoints.again} goes "
                            "on from it"
                        )
                self._coordinator.settle()
                return False
        self._take_gpus()  # whoever exports the model finds it there
        self._coordinator.settle()
        return True

    def _take_gpus(self) -> None:
        """Engines that take turns with the trainer give its GPUs back. One that is being started again is waited for:
        it would take the memory that it finds free."""
        if self._weights.takes_turns:
            found = meanwhile(self._controller.fleet.ready_members) if self._controller else None
            self._weights.before_update(self._coordinator.wait_until_done(found))

    def _asked_to_stop(self) -> str:
        """What asked any rank to stop, the same on all ranks. Collective: one gather of short strings."""
        reasons: list[str] = [""] * self._runtime.world_size
        dist.all_gather_object(reasons, self._stop.reason)
        return next(filter(None, reasons), "")

    def _save(self, step: int) -> None:
        with self._watch("checkpoint"):
            self._checkpoints.save(step)
        self._trained.saved = step

    def _step(self, step: int) -> bool:
        """Returns whether the state was saved."""
        config, clock = self._config, Clock("time")
        with self._watch("rollout"), clock("rollout"):
            experience = self._collector.collect(step - 1)
            self._begin_ahead(step)
        if experience.window is not None:
            self._checkpoints.window = {
                step - 1: self._checkpoints.window.get(step - 1, WindowState()),
                step: experience.window,
            }
        metrics = dict(experience.metrics)
        with self._watch("training"), clock("hand_over"):
            self._take_gpus()
        if step == 1 and config.trainer.parity_check:
            with self._watch("parity check"):
                metrics |= self._parity(experience)
        with self._watch("training"), clock("train"):
            look = self._looks_at(step)
            report = self._update(step, experience, look=look)
            metrics |= report.metrics
        self._collector.release(experience)
        due = self._is_due(step, config.trainer.checkpoint_every)
        if due and self._weights.takes_turns:  # the engines take the GPUs with the weights
            self._save(step)
        try:
            with self._watch("weight sync"), clock("sync"):
                metrics |= self._coordinator.sync(step)
        finally:  # the step is trained, whatever comes
            metrics |= clock.metrics | {"time/step_s": sum(clock.metrics.values())}
            metrics["throughput/tokens_per_second"] = metrics["data/tokens"] / metrics["time/step_s"]
            metrics["throughput/trained_tokens_per_second"] = metrics["data/trained_tokens"] / metrics["time/train_s"]
            if self._controller:
                with self._coordinator.alone():
                    self._controller.tracker.log(step, metrics)
                    self._controller.progress.step(step, metrics)
                    if look:
                        self._show(step, report, self._controller)
        if due and not self._weights.takes_turns:
            self._save(step)
        if self._is_due(step, config.evaluation.every):
            self._evaluate(step)
        return due

    def _begin_ahead(self, step: int) -> None:
        """While `step` is trained on, engines sample what comes next from the weights they have."""
        if self._config.rollout.schedule == "one_step_off":
            for later in range(step, min(step + self._config.rollout.max_staleness, self._config.trainer.steps)):
                self._collector.begin(later)

    def _update(self, step: int, experience: Experience, *, look: bool) -> UpdateReport:
        source = experience.source()
        kl, penalties, measured = self._config.algorithm.reference_kl, None, {}
        if kl is not None and kl.place is KLPlace.REWARD:
            sums = self._actor.reference_kl(source)
            measured = {"policy/reference_kl_mean": float(sums.sum() / source.trained.sum())}
            penalties = kl.coefficient * sums if kl.coefficient else None
        signal = experience.signal(self._config, penalties)
        trace = self._config.run.dir / "profile" / f"step{step}_rank{self._runtime.rank}.json.gz"
        wanted = step == self._config.trainer.profile_step
        with profiled(self._actor.phases, trace=trace) if wanted else nullcontext() as profile:
            looked_at = experience.looked_at if look else None
            report = self._actor.update(source, signal, look=looked_at, listener=self._trained.hear)
            self._trained.end(step)
        if self._controller and profile is not None:
            with self._coordinator.alone():
                lengths = source.lengths[np.concatenate(list(signal.mini_batches) * signal.epochs)]
                trainee = self._actor.trainee
                flops = training_flops(trainee.model, lengths, trainee.lora) / self._runtime.world_size
                device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
                for table in profile.tables(flops=flops, peak_flops=peak_flops(device)):
                    self._controller.progress.console.print(table)
                self._controller.progress.note(f"step {step}: traces of all ranks in {trace.parent}")
        metrics = report.metrics | measured
        if int(experience.handle.versions.min()) < step - 1:  # then it is no mismatch of one set of weights
            metrics = {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
        return replace(report, metrics=metrics)

    def _looks_at(self, step: int) -> bool:
        every = self._config.tracking.samples_every
        return every > 0 and (step % every == 0 or step == 1)

    def _show(self, step: int, report: UpdateReport, controller: Controller) -> None:
        """Answers and blocked tokens of this step, for people."""
        controller.tracker.samples(step, [sample.marked(report.watched) for sample in self._collector.samples])
        counts, limit = report.masked_counts, self._config.tracking.masked_tokens
        if counts is not None and limit:
            masked = most_masked_tokens(counts, limit)
            controller.tracker.masked_tokens(step, spelled(masked, controller.suite.tokenizer))

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self._config.trainer.steps)

    def _evaluated(self, step: int) -> bool:
        """Whether the run's folder has an evaluation of `step` already; the controller knows."""
        tracker = self._controller.tracker if self._controller else None
        return self._coordinator.wait_for(meanwhile(lambda: tracker.has(step, "time/eval_s")) if tracker else None)

    def _parity(self, experience: Experience) -> dict[str, float]:
        """The first rollout, recomputed before any update: with the engine's routes, and with the live routers."""
        source = experience.source()
        with_replay = self._actor.parity(source, replay=True, keep=MISMATCH_TOKENS)
        without = self._actor.parity(source, replay=False, keep=MISMATCH_TOKENS)
        if self._controller:
            with self._coordinator.alone():
                Mismatch.of(with_replay.tokens, without.tokens).write(self._config.run.dir)
        return {f"parity/{name}": value for name, value in with_replay.metrics.items()} | {
            f"parity_without_replay/{name}": value for name, value in without.metrics.items()
        }

    def _evaluate(self, step: int) -> None:
        clock = Clock("time")
        evaluator = self._controller.evaluator if self._controller else None
        with self._watch("evaluation"), clock("eval"):
            metrics = self._coordinator.wait_for(meanwhile(lambda: evaluator(step)) if evaluator else None)
        if self._controller:
            with self._coordinator.alone():
                evaluated = metrics | clock.metrics
                self._controller.tracker.log(step, evaluated)
                self._tell(step, evaluated, self._controller)

    def _tell(self, step: int, metrics: dict[str, float], controller: Controller) -> None:
        """What an evaluation came to, for people."""
        if "eval/accuracy" in metrics:
            controller.progress.note(
                f"step {step}: held-out accuracy {metrics['eval/accuracy']:.3f}, "
                f"well-formed {metrics['eval/well_formed']:.3f}"
            )
        for one in controller.suite.sets:
            accuracy, low, high = (metrics[f"eval/{one.name}/accuracy{end}"] for end in ("", "_low", "_high"))
            controller.progress.note(
                f"step {step}: {one.name} avg@{one.samples} {accuracy:.3f} (95 % of resampled prompts: "
                f"{low:.3f} to {high:.3f})"
            )

    @contextmanager
    def _watch(self, phase: str) -> Iterator[None]:
        self._heartbeat.beat(phase, self._step_now)
        if self._controller:
            with self._coordinator.alone():
                self._controller.progress.phase(f"step {self._step_now}: {phase}")
        yield
