"""What a colocated sync has left of the trainer's memory when its buffers are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dppo.actor.offload import PARTS
from megatron_dppo.trainer.clock import Clock
from tests.actor.matrix import Case, build_actor
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe
from tests.trainer.ending_ranks import Run, config_of


def held(rank: int, model: str, folder: str) -> list[dict[str, bool]]:
    """Which parts have memory when the sender prepares, and at the end of the change of owners."""
    from megatron_dppo.trainer.weight_sync import WeightSync

    actor = build_actor(model, {}, Case(replay=False), dtype="bfloat16")
    config = config_of(model, Run(folder))
    rollout = config.rollout.model_copy(update={"placement": "colocated", "enable_sleep": True})
    weights = WeightSync(actor.runtime, actor, config.model_copy(update={"rollout": rollout}))
    storages = {part: [t.untyped_storage() for t in actor.offloader._tensors(part)] for part in PARTS}
    found: list[dict[str, bool]] = []

    def look() -> None:
        found.append({part: any(one.nbytes() for one in own) for part, own in storages.items()})

    sender: Any = weights._planned()[0]
    sender.prepare = look
    weights._lend(None, Clock("sync"))
    actor.offload()
    look()
    return found


def test_buffers_are_made_where_gradients_were_and_before_anything_is_copied(tmp_path: Path) -> None:
    """Made beside all that a step had, they might find no room; behind the copies, they would wait for these."""
    tiny_qwen3_moe(tmp_path / "model", seed=1, num_hidden_layers=1)
    (found,) = run_ranks(held, 1, str(tmp_path / "model"), str(tmp_path / "run"))
    assert found == [{"weights": True, "optimizer": True, "gradients": False}, dict.fromkeys(PARTS, False)]
