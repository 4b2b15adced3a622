"""Several drivers on one Ray, and what is left of a run that ends badly."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.fleet.store import RolloutSource
from megatron_dppo.rollout.ray_session import RayAddress, RaySession
from tests.distributed import PATIENCE_S
from tests.processes import command_of
from tests.rollout.conftest import CONFIG, SAMPLING, Served, requests
from tests.tiny import tiny_qwen3_moe

OTHER_RANK = """
import pickle, sys
from contextlib import closing
from megatron_dppo.errors import UserError
import numpy as np
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.fleet.store import RolloutSource
where, handle = pickle.load(open(sys.argv[1], "rb"))
with closing(RaySession.connect(where)):
    part = RolloutSource(handle).rows(np.array([9, 1]))
    pickle.dump((part.input_ids, part.routes.experts, part.policy.mu_logp), open(sys.argv[2], "wb"))
"""

CONTROLLER = """
import sys, time
from contextlib import closing
from functools import partial
from pathlib import Path
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.start import open_engine
if __name__ == "__main__":
    with closing(RaySession.start(namespace="doomed", object_store_mib=80)) as session:
        make = partial(open_engine, Path(sys.argv[1]), RolloutConfig.model_validate_json(sys.argv[3]))
        engine = RemoteEngine(make, name="doomed")
        try:
            if sys.argv[2] == "ready":
                engine.started.result(300)
            print("UP", session._folder, flush=True)
            time.sleep(600)
        finally:
            engine.close()
"""


def test_another_rank_pulls_its_rows_with_what_was_broadcast(served: Served, tmp_path: Path) -> None:
    engine = served.fleet
    assert engine is not None
    handle = engine.generate_stored(requests(12, "ranks"), SAMPLING)
    context = ray.get_runtime_context()
    where = RayAddress(context.gcs_address, context.namespace, os.environ.get("RAY_AUTH_TOKEN"))
    assert where.token is None or where.token not in repr(where)
    (tmp_path / "sent").write_bytes(pickle.dumps((where, handle)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-c", OTHER_RANK, str(tmp_path / "sent"), str(tmp_path / "got")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, experts, mu_logp = pickle.loads((tmp_path / "got").read_bytes())
    expected = RolloutSource(handle).rows(np.array([9, 1]))
    np.testing.assert_array_equal(tokens, expected.input_ids)
    assert expected.routes is not None
    np.testing.assert_array_equal(experts, expected.routes.experts)
    assert expected.policy is not None
    np.testing.assert_array_equal(mu_logp, expected.policy.mu_logp)
    engine.release(handle)


def test_it_has_none_of_rays_daemons_in_python(ray_session: RaySession) -> None:
    """Monitors and the API server: a second of CPU each."""
    commands = [command_of(child).split() for child in psutil.Process().children()]
    assert [True for command in commands if command[:1] == ["raylet"]]
    assert [part for command in commands for part in command[2:5] if "/ray/" in part and part.endswith(".py")] == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "when"), [("SIGKILL", "ready"), ("SIGINT", "loading")])
def test_nothing_is_left_of_a_controller_that_ends(tmp_path: Path, how: str, when: str) -> None:
    """Killed outright with an engine at work, and interrupted while one is loading."""
    tiny_qwen3_moe(tmp_path / "model", seed=3)
    (tmp_path / "controller.py").write_text(CONTROLLER)
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(root)}
    controller = subprocess.Popen(
        [sys.executable, str(tmp_path / "controller.py"), str(tmp_path / "model"), when, CONFIG.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        # A shell that starts things in the background lets them ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert controller.stdout is not None
        line = next(line for line in controller.stdout if line.startswith("UP"))
        folder = Path(line.split()[1])
        deadline = time.monotonic() + PATIENCE_S
        while not (engine := _engine_processes(controller.pid)) or len(engine) < 2:
            assert time.monotonic() < deadline, "the engine's core never started"
            time.sleep(0.2)
        family = psutil.Process(controller.pid).children(recursive=True)
        controller.send_signal(getattr(signal, how))
        controller.wait(PATIENCE_S)
        # Ray's own agents take a minute to give a killed cluster up; the engine must not.
        _, alive = psutil.wait_procs(engine if how == "SIGKILL" else family, timeout=40)
        assert not alive, f"left behind: {[(p.pid, p.name()) for p in alive]}"
        # Of one that was killed it stays until any Ray starts on this machine, as other tests' may have already.
        assert how == "SIGKILL" or not folder.exists()
    finally:
        for process in [controller, *(family if "family" in locals() else [])]:
            if process.pid and psutil.pid_exists(process.pid):
                process.kill()
        controller.wait(PATIENCE_S)


def _engine_processes(controller: int) -> list[psutil.Process]:
    """The actor's worker and everything under it."""
    for process in psutil.Process(controller).children(recursive=True):
        if "EngineHost" in command_of(process):
            return [process, *process.children(recursive=True)]
    return []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("ray://127.0.0.1:10001", "expected host:port"),
        ("localhost", "expected host:port"),
        ("localhost:99999", "expected host:port"),
        ("a..b:6379", "no Ray cluster answers there"),
    ],
)
def test_a_wrong_address_is_named_at_once(monkeypatch: pytest.MonkeyPatch, address: str, message: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"RAY_ADDRESS={address}: {message}"):
        RaySession.start(namespace="nowhere", object_store_mib=80)


def test_a_later_session_sweeps_folders_of_killed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_dppo.rollout import ray_session

    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    ours, theirs = tmp_path / f"dppo-ray-{os.getpid()}-a", tmp_path / f"dppo-ray-{dead.pid}-b"
    unrelated = tmp_path / "dppo-ray-notes-c"
    for folder in (ours, theirs, unrelated):
        folder.mkdir()
    monkeypatch.setattr(ray_session, "_ROOT", tmp_path)
    ray_session._sweep()
    assert (ours.exists(), theirs.exists(), unrelated.exists()) == (True, False, True)


def test_the_object_store_fits_the_machines_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_dppo.rollout import ray_session

    def free(gib: float):
        return lambda path: type("Usage", (), {"free": int(gib * 2**30)})()

    monkeypatch.setattr("shutil.disk_usage", free(100))
    assert ray_session._store_bytes(512) == 512 << 20
    monkeypatch.setattr("shutil.disk_usage", free(0.5))
    assert ray_session._store_bytes(512) == 256 << 20
    monkeypatch.setattr("shutil.disk_usage", free(0.0625))  # Docker's default of 64 MiB
    assert ray_session._store_bytes(512) == 80 << 20
