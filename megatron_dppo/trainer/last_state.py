"""What is saved when a run ends by an error, and what its last words say of that."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.results import UpdateProgress
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.errors import UserError, first_line
from megatron_dppo.launch.rank import lost_a_peer
from megatron_dppo.rollout.engine import RolloutFleet
from megatron_dppo.trainer.checkpoints import Checkpoints
from megatron_dppo.trainer.coordinator import RankCoordinator
from megatron_dppo.trainer.weight_sync import WeightSync

_PATIENCE_S = 15.0
"""For the slowest rank to fail as the others did. Shorter than what is left after SIGTERM."""

logger = logging.getLogger(__name__)


@dataclass
class Trained:
    """Where a run stands: the last step that was trained, and the last whose state is saved."""

    step: int
    saved: int
    update: UpdateProgress | None = None
    """Of the step after `step`, from its beginning until it is trained."""

    def hear(self, update: UpdateProgress) -> None:
        self.update = update

    def end(self, step: int) -> None:
        """`step` is trained."""
        self.step, self.update = step, None


@dataclass(frozen=True)
class LastState:
    """Saves what a run has trained before an error ends it. Every rank has one.

    That takes all ranks, so they meet first: where one of them failed alone, hangs or is gone, the others give up soon.
    Nothing is saved either where ranks may have stopped at different places of a pass or in an optimizer step
    (`UpdateProgress.inside`). Of a step that was broken off between two of its gradient steps nothing is saved where
    the state before it is: the run goes on from that as if nothing had happened. Where steps before it would be lost
    too, it is saved as what it is, that step less its other answers: the state before it does not exist any more.
    """

    runtime: Runtime
    actor: MegatronActor
    weights: WeightSync
    coordinator: RankCoordinator
    checkpoints: Checkpoints
    fleet: RolloutFleet | None
    """Only the controller has it."""

    def rescue(self, error: Exception, trained: Trained) -> str:
        """Save it if it is not saved; the sentence that says what became of it. Never raises."""
        step = trained.step
        broken_off: UpdateProgress | None = None
        if (update := trained.update) is not None and update.applied:
            step += 1
            broken_off = update if update.done < update.of else None
        if step == trained.saved:
            return self._is_saved(step)
        if broken_off is not None and trained.saved == step - 1:
            return f"Step {step} was broken off after {broken_off}, so {self._older(trained.saved)}"
        if update is not None and update.inside:
            return f"The error came in the middle of a pass or an optimizer step, so {self._older(trained.saved)}"
        peer_is_gone = lost_a_peer(error) and not self.coordinator.told
        if peer_is_gone or not self.runtime.all_say(f"save {step}, {broken_off}", patience_s=_PATIENCE_S):
            return f"Not all ranks came to this end, so {self._older(trained.saved)}"
        try:
            self._take_gpus()
            self.actor.complete_weights()
            self.checkpoints.save(step, broken_off=broken_off)
        except Exception as problem:
            if not isinstance(problem, UserError):  # of which the sentence says all there is to know
                logger.exception("the state after step %d could not be saved", step)
            why = "" if str(problem) == str(error) else f" ({first_line(problem)})"
            return f"The state after step {step} could not be saved{why}, so {self._older(trained.saved)}"
        trained.step = trained.saved = step
        if broken_off is None:
            return self._is_saved(step)
        return (
            f"Step {step} was broken off after {broken_off}; the state with these is saved as its state, and "
            f"{self.checkpoints.again} goes on with step {step + 1}"
        )

    def _is_saved(self, step: int) -> str:
        return f"The state after step {step} is saved; {self.checkpoints.again} goes on from it" if step else ""

    def _older(self, saved: int) -> str:
        if not saved:
            return "no state is saved"
        return f"the newest state is the one after step {saved}; {self.checkpoints.again} goes on from it"

    def _take_gpus(self) -> None:
        """What is left of the engines may have the trainer's GPUs."""
        if self.weights.takes_turns and self.fleet is not None:
            try:
                self.fleet.close()
            except Exception:  # the others wait; if the GPUs are not free, they will hear
                logger.exception("engines that share the trainer's GPUs could not be closed")
        self.weights.reclaim()
