"""When nothing can be saved, nobody waits for long, and nothing is written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.actor.results import UpdateProgress
from tests.actor.matrix import Case, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe
from tests.trainer.ending_ranks import Run, config_of


def rescues(rank: int, model: str, folder: str) -> tuple[dict[str, str], list[str], float]:
    """What each kind of end leaves, and the seconds that the lonely rank waited."""
    import torch.distributed as dist

    from megatron_dppo.trainer import last_state
    from megatron_dppo.trainer.checkpoints import Checkpoints
    from megatron_dppo.trainer.coordinator import RankCoordinator
    from megatron_dppo.trainer.last_state import LastState, Trained
    from megatron_dppo.trainer.weight_sync import WeightSync

    last_state._PATIENCE_S = 0.5
    actor = build_actor(model, {}, Case(replay=False))
    config = config_of(model, Run(folder))
    weights = WeightSync(actor.runtime, actor, config)
    coordinator = RankCoordinator(actor.runtime, weights, None)
    last = LastState(actor.runtime, actor, weights, coordinator, Checkpoints(config, {"task": "none"}, actor), None)
    said: dict[str, str] = {}
    error = RuntimeError("out of memory")

    said["inside"] = last.rescue(error, Trained(4, 2, UpdateProgress(1, inside=True)))
    said["peer"] = last.rescue(RuntimeError("Connection closed by peer"), Trained(4, 2))
    said["different"] = last.rescue(error, Trained(4 + rank, 2))
    dist.barrier()
    begun = time.monotonic()
    if rank == 1:
        said["alone"] = last.rescue(error, Trained(4, 0))
    waited = time.monotonic() - begun
    return said, sorted(str(file) for file in Path(folder).rglob("*")), waited


def test_ranks_that_do_not_all_come_to_one_end_save_nothing(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=1, num_hidden_layers=1)
    (tmp_path / "run").mkdir()
    older = "so the newest state is the one after step 2; "
    older += f"run.dir={tmp_path / 'run'} trainer.resume=true goes on from it"
    expected = {
        "inside": f"The error came in the middle of a pass or an optimizer step, {older}",
        "peer": f"Not all ranks came to this end, {older}",
        "different": f"Not all ranks came to this end, {older}",
    }
    first, second = run_ranks(rescues, 2, str(tmp_path / "model"), str(tmp_path / "run"))
    assert first[0] == expected
    assert second[0] == expected | {"alone": "Not all ranks came to this end, so no state is saved"}
    assert first[1] == second[1] == []
    assert 0.4 < second[2] < 100


def broken(rank: int, model: str) -> tuple[object, object, object]:
    """The progress of an update whose second pass fails, of a whole one, and of one whose rollout fits no
    microbatch."""
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.actor.packing import SequenceTooLongError
    from megatron_dppo.batch import InMemorySource
    from megatron_dppo.trainer.last_state import Trained
    from tests.batch.rollouts import random_batch

    actor = build_actor(model, {}, Case(replay=False))
    source = InMemorySource.of(random_batch(1, [3] * 8, [4] * 8, 0, routes=False))
    signal = TrainingSignal(np.ones(8), np.ones(8), [np.arange(4), np.arange(4, 8)])
    mlp, calls = actor.model[0].decoder.layers[0].mlp, []

    def fails(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    mlp.register_forward_pre_hook(fails)
    cut, whole, long = Trained(4, 4), Trained(4, 4), Trained(4, 4)
    with pytest.raises(RuntimeError, match="out of memory"):
        actor.update(source, signal, listener=cut.hear)
    actor.update(source, signal, listener=whole.hear)
    too_long = InMemorySource.of(random_batch(1, [900] * 8, [4] * 8, 0, routes=False))
    with pytest.raises(SequenceTooLongError):
        actor.update(too_long, signal, listener=long.hear)
    return cut.update, whole.update, long.update


def test_the_actor_says_what_of_an_update_is_in_its_weights(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=1, num_hidden_layers=1)
    (found,) = run_ranks(broken, 1, str(tmp_path / "model"))
    assert found == (
        UpdateProgress(of=2, done=1, applied=1, inside=True),
        UpdateProgress(of=2, done=2, applied=2),
        UpdateProgress(of=2),
    )


def resumed(rank: int, model: str, folder: str, settings: list[tuple[float, tuple[str, ...]]]) -> list[tuple]:
    """A state of the first rate, then going on with each: the error, or the step and the rate that follows it."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.optimizer import guarded_step
    from megatron_dppo.errors import UserError
    from megatron_dppo.trainer.checkpoints import Checkpoints

    found: list[tuple] = []
    for number, (lr, named) in enumerate(settings):
        parallel_state.destroy_model_parallel()
        actor = build_actor(model, {}, Case(replay=False), lr=lr)
        config = config_of(model, Run(folder))
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume_changed": named})})
        checkpoints = Checkpoints(config, {"optimizer.lr": lr}, actor)
        if number == 0:
            guarded_step(actor.optimizer, actor.scheduler, loss_is_finite=True)
            checkpoints.save(3)
        try:
            step = checkpoints.restore()
        except UserError as error:
            found.append((str(error).partition(": ")[2],))
            continue
        found.append((step, guarded_step(actor.optimizer, actor.scheduler, loss_is_finite=True).lr))
    return found


def test_a_run_goes_on_with_another_learning_rate_where_that_is_named(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=1, num_hidden_layers=1)
    (tmp_path / "run").mkdir()
    settings = [(0.5, ()), (0.25, ()), (0.25, ("optimizer.lr",))]
    (found,) = run_ranks(resumed, 1, str(tmp_path / "model"), str(tmp_path / "run"), settings)
    refusal = (
        "optimizer.lr was 0.5 and is 0.25 now; set it back, name it in trainer.resume_changed, or start a new run "
    )
    assert found == [(3, 0.5), (f"{refusal}from the exported model",), (3, 0.25)]
