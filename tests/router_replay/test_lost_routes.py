"""Routes deleted between the engine's record and the routers: at each hop the run stops and says where."""

from __future__ import annotations

import re

import numpy as np

from megatron_dppo.errors import UserError
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe


def plant_on_rank(rank: int, path: str, batch) -> dict[str, str]:
    """Fault to message; "no error" where an update went through."""
    from contextlib import nullcontext

    from megatron_dppo.batch import InMemorySource
    from tests.router_replay import actor_ranks as plant

    actor = plant.build_actor(path, {}, preset="dppo-binary-tv", mode="r3", recompute="full")
    teaching = plant.signal([np.arange(6)])
    honest = InMemorySource.of(batch)
    faults = {
        "none": (honest, nullcontext()),
        "the object store lost the routes": (plant.Handed(batch, plant.without_routes), nullcontext()),
        "the rows came without validity": (plant.Handed(batch, plant.invalidated), nullcontext()),
        "one row lost its route": (plant.Handed(batch, plant.one_row_lost), nullcontext()),
        "routes of another model": (plant.Handed(batch, plant.other_model), nullcontext()),
        "a router never asks": (honest, plant.router_without_hook(actor)),
        "a recomputation never asks": (honest, plant.recomputation_without_hook(actor)),
        "none, afterwards": (honest, nullcontext()),
    }
    seen = {}
    for name, (source, around) in faults.items():
        try:
            with around:
                actor.update(source, teaching)
            seen[name] = "no error"
        except (UserError, RuntimeError, ValueError) as error:
            seen[name] = str(error)
        left = [router.router_replay for _, router in actor._passes.routers]
        assert left == [None] * 4, f"{name}: a hook stayed on a router"
    return seen


def test_deleting_routes_at_any_hop_stops_the_run(tmp_path):
    from tests.actor.reference import make_rollout
    from tests.router_replay.actor_ranks import SHAPE, TEMPERATURE

    batch = make_rollout(tiny_qwen3_moe(tmp_path, seed=3), seed=4, temperature=TEMPERATURE, **SHAPE)
    (seen,) = run_ranks(plant_on_rank, 1, str(tmp_path), batch)
    expected = {
        "none": "no error",
        "the object store lost the routes": "actor.router_replay=r3, but the rollout carries no routes",
        "the rows came without validity": r"MoE layer 0, microbatch 0 of data-parallel rank 0: 0 rows with a route "
        r"reached the trainer's ranks, the engine recorded \d+ \(\d+ of \d+",
        "one row lost its route": r"MoE layer 0, microbatch 0 .*: (\d+) rows with a route reached .* recorded \d+",
        "routes of another model": "routes are of a model with 16 experts, the trainer's has 8",
        "a router never asks": r"MoE layer 2, microbatch 0 .*: 0 recorded routes were replayed in the forward pass",
        "a recomputation never asks": r"\d+ routings of MoE layer 1 of this rank were kept .* never used, first of "
        "microbatch 0",
        "none, afterwards": "no error",
    }
    assert seen.keys() == expected.keys()
    for fault, message in expected.items():
        assert re.search(message, seen[fault]), f"{fault}: {seen[fault]}"
