"""The correction bias of sigmoid routers: held by default, moved by load on demand, never rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.router_replay.routes import Routes
from tests.actor.conftest import World
from tests.actor.matrix import LAYOUTS, SHAPE, TEMPERATURE, UPDATES, Case, Lesson, advantages, build_actor, train_actor
from tests.actor.reference import BIAS, make_rollout
from tests.distributed import run_ranks
from tests.tiny import tiny_model

RATE = 0.004


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Every row has a route, so that the load of every expert is known."""
    path = tmp_path_factory.mktemp("glm")
    model = tiny_model("glm4_moe", path, seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    assert batch.routes is not None
    rng = np.random.default_rng(9)
    chosen = np.argsort(rng.random((*batch.routes.experts.shape[:2], SHAPE["experts"])) * rng.random(8), axis=-1)
    routes = Routes(chosen[..., :2].astype(np.uint8), np.ones(len(batch.token_ids), dtype=bool), SHAPE["experts"])
    return World(path, model, Lesson(replace(batch, routes=routes), advantages(), UPDATES), lambda *_: ([], {}))


def biases(rank: int, path: Path, layout: dict, lesson: Lesson, dtype: str, rate: float) -> dict[str, np.ndarray]:
    actor = build_actor(str(path), layout, Case(), dtype=dtype, router_bias_update_rate=rate)
    weights = train_actor(rank, actor, lesson).weights
    return {name: tensor for name, tensor in weights.items() if name.endswith(BIAS)}


def loaded(world: World) -> dict[str, np.ndarray]:
    return {name: b.numpy() for name, b in world.model.named_buffers() if name.endswith(BIAS)}


@pytest.mark.parametrize("layout", ["1 rank", "EP2"])
def test_it_moves_by_load_where_that_is_asked_for(world: World, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    found = run_ranks(biases, ranks, world.path, sizes, world.lesson, "float32", RATE)[0]
    expected, batch = {name: b.astype(np.float64) for name, b in loaded(world).items()}, world.lesson.batch
    for sequences in (mini_batch for update in UPDATES for mini_batch in update):
        rows = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in sequences])
        for layer, name in enumerate(expected):
            load = np.bincount(batch.routes.experts[rows, layer].ravel(), minlength=8)  # type: ignore[union-attr]
            expected[name] = expected[name] + RATE * np.sign(load.mean() - load)
    assert found.keys() == expected.keys()
    for name, bias in expected.items():
        np.testing.assert_allclose(found[name], bias, atol=1e-6, rtol=0, err_msg=name)
        assert np.abs(bias - loaded(world)[name]).max() > 2 * RATE


def test_a_skipped_step_does_not_move_it(world: World) -> None:
    """Infinite advantages: the loss of the one step is not finite."""
    endless = replace(world.lesson, advantages=np.full(12, np.inf), updates=[[np.arange(12)]])
    found = run_ranks(biases, 1, world.path, {}, endless, "float32", RATE)[0]
    for name, bias in loaded(world).items():
        np.testing.assert_array_equal(found[name], bias, err_msg=name)


def test_it_is_held_and_not_rounded(world: World) -> None:
    found = run_ranks(biases, 1, world.path, {}, world.lesson, "bfloat16", 0.0)[0]
    for name, bias in loaded(world).items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], bias, err_msg=name)
