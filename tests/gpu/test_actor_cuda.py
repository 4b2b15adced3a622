"""The training actor on one GPU with TransformerEngine: precision, memory and optimizer beside what a CPU tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and TransformerEngine"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process for all tests: starting one takes longer than what it checks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    command += ["--master-addr=127.0.0.1", "--master-port=29534", "-m", "tests.gpu.actor_steps"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    folder = str(tmp_path_factory.mktemp("actor"))
    done = subprocess.run([*command, folder], check=False, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def result(found: dict[str, Any], name: str) -> dict[str, Any]:
    assert "error" not in found[name], found[name]["error"]
    return found[name]


def test_few_launches_compute_what_many_do(found: dict[str, Any]) -> None:
    got = result(found, "few_launches")
    assert got["norms"] == pytest.approx(got["stock"], rel=1e-6)
    assert min(got["norms"]) > 1, "clipping had something to do"
    assert got["gap"] < 1e-6


@pytest.mark.parametrize(("name", "rounding"), [("experts", 1), ("biased_experts", 2.5)])
def test_experts_in_one_launch_compute_what_a_loop_does_and_wait_for_nothing(
    found: dict[str, Any], name: str, rounding: float
) -> None:
    """Where there are biases the loop adds the first before it rounds, ours after."""
    got = result(found, name)
    assert got["why_not"] is None
    assert got["ours"] == pytest.approx(got["stock"], rel=1e-3, abs=4e-4 * (rounding - 1) + 1e-4)
    assert max(got["differences"].values()) < 0.02 * rounding, got["differences"]


def test_recomputing_an_activation_with_biases_changes_nothing(found: dict[str, Any]) -> None:
    got = result(found, "biased_experts")["recompute"]
    assert got["activation"] == pytest.approx(got["none"], rel=0.01, abs=0.005)


def test_float16_finds_its_loss_scale_and_trains(found: dict[str, Any]) -> None:
    got = result(found, "loss_scaling")
    losses, norms, overflowed, scales = zip(*got["half"], strict=True)
    first = overflowed.index(0.0)
    assert 0 < first < 15
    assert sum(overflowed) < 18
    for step, (bad, scale) in enumerate(zip(overflowed[:-1], scales[:-1], strict=True)):
        assert scales[step + 1] == (scale / 2 if bad else scale)
    assert losses[first] == pytest.approx(losses[0], rel=1e-3), "a skipped step changes nothing"
    assert losses[first + 1] < losses[first]
    assert losses[first] == pytest.approx(got["brain"][0][0], rel=0.03, abs=0.01)
    assert norms[first] == pytest.approx(got["brain"][0][1], rel=0.05)


def test_offloaded_state_comes_back_to_the_bit(found: dict[str, Any]) -> None:
    got = result(found, "offload")
    held, freed, left = got["bytes"]
    assert freed >= 18 * got["parameters"]
    assert left <= held - 0.95 * freed
    assert got["kept"]
    assert got["next_step"]
    assert got["losses"][0] == pytest.approx(got["losses"][1], rel=0.02, abs=0.01)


def test_router_losses_have_their_weight(found: dict[str, Any]) -> None:
    got = result(found, "auxiliary_losses")
    norms = {name: metrics["optimizer/grad_norm"] for name, metrics in got.items()}
    assert norms["none"] == 0
    assert norms["twice"] == pytest.approx(2 * norms["once"], rel=0.02)
    assert norms["z, whole"] == pytest.approx(norms["z"], rel=0.02), "the z-loss does not depend on the packs"
    assert got["once"]["moe/load_balancing_loss"] >= 0.99
    assert got["once"] == pytest.approx(got["twice"] | {"optimizer/grad_norm": norms["once"]}, rel=0.01)
    assert all(np.isfinite(list(metrics.values())).all() for metrics in got.values())


def test_overlaps_change_nothing(found: dict[str, Any]) -> None:
    got = result(found, "overlaps")
    assert got["plain"][0] != got["plain"][1]
    for name in ("reduce", "gather"):
        assert got[name] == pytest.approx(got["plain"], rel=0.02, abs=0.01), name


def test_recomputation_changes_nothing(found: dict[str, Any]) -> None:
    got = result(found, "recompute")
    for how in ("activation", "selective", "full", "first layer"):
        assert got[how] == pytest.approx(got["none"], rel=0.01, abs=0.005), how


def test_optimizer_state_on_the_host(found: dict[str, Any]) -> None:
    got = result(found, "state_on_the_host")
    assert got["gaps"]["0.5"] < 3e-6, "another Adam, the same steps"
    assert got["gaps"]["1.0"] < 3e-6
    all_here, half, none = (got["bytes"][fraction] for fraction in ("0.0", "0.5", "1.0"))
    assert half == pytest.approx((all_here + none) / 2, rel=0.08), "copies of weights stay that nothing needs"
    assert list(got["losses"].values()) == pytest.approx([got["losses"]["0.0"]] * 3, rel=0.02, abs=0.01)
    assert got["loaded"] == 0, "a training state holds it"
    assert got["next_step"] < 1e-7
