"""What an engine prints is kept: vLLM says of a core that failed only that it did."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import EngineDead, RolloutEngine
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from megatron_dppo.rollout.vllm.start import check_plugin, shorten_socket_paths
from tests.rollout.conftest import making
from tests.tiny import tiny_qwen3_moe


@pytest.mark.parametrize("length", [60, 97])
def test_sockets_can_be_made_however_long_the_temporary_folder_is(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder /= "x" * (length - len(str(folder)) - 1)
    folder.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "to be restored")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    shorten_socket_paths()
    path = get_open_zmq_ipc_path().removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)  # "AF_UNIX path too long" beyond 107 bytes
    Path(path).unlink()
    shutil.rmtree(folder.parent)
    assert path.startswith(str(folder)) == (length == 60)


def test_a_package_that_vllm_cannot_load_is_named_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "lora_hf_hub_resolver")
    with pytest.raises(UserError, match=r"VLLM_PLUGINS=lora_hf_hub_resolver leaves out megatron_dppo"):
        check_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "lora_hf_hub_resolver,megatron_dppo")
    check_plugin()
    with monkeypatch.context() as bare:
        bare.setattr(sys, "path", [str(Path(__file__).parents[2] / "docs")])  # where nothing is installed
        with pytest.raises(UserError, match=r"has no installed megatron_dppo.*pip install"):
            check_plugin()


def _refuse() -> RolloutEngine:
    raise UserError("config.json names no eos_token_id; set rollout.stop_token_ids")


def _break() -> RolloutEngine:
    raise KeyError("a field that is not there")


def test_a_configuration_that_an_engine_refuses_is_the_users_error(ray_session: RaySession) -> None:
    """Not the death of a process, of which another is started with the same configuration."""
    engine = RemoteEngine(_refuse, name="refused")
    try:
        with pytest.raises(UserError, match=r"^config.json names no eos_token_id; set rollout.stop_token_ids$"):
            engine.started.result(300)
        with pytest.raises(UserError, match="names no eos_token_id"):
            engine.ask(lambda engine: engine.weight_version, "work").result(300)
    finally:
        engine.close()


def test_what_ended_an_engines_start_stands_in_the_first_line(ray_session: RaySession) -> None:
    engine = RemoteEngine(_break, name="broken-at-once")
    try:
        with pytest.raises(EngineDead, match=r"^the rollout engine's process is gone: KeyError: 'a field that is not"):
            engine.started.result(300)
    finally:
        engine.close()


def _break_as_vllm_does() -> RolloutEngine:
    said = ("Traceback (most recent call last):", "OSError: no", "torch.distributed.DistNetworkError: port 1 is taken",
            "no Error: a hint")  # fmt: skip
    print(*(f"(EngineCore pid=7) ERROR 11-30 16:30:31 [core.py:1100] {line}" for line in said), sep="\n", flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


def test_the_last_error_that_an_engine_printed_is_why_it_did_not_start(ray_session: RaySession, tmp_path: Path) -> None:
    """Of this start: the file holds what engines before it printed."""
    log = tmp_path / "engine.log"
    log.write_text("ValueError: of another engine\n")
    engine = RemoteEngine(_break_as_vllm_does, name="broken-as-vllm", log=log)
    try:
        why = rf"printed: torch.distributed.DistNetworkError: port 1 is taken\); what it printed is in {log}"
        with pytest.raises(EngineDead, match=rf"did not start on {socket.gethostname()} \(Engine core .* {why}"):
            engine.started.result(300)
    finally:
        engine.close()


@pytest.mark.full
def test_the_reason_of_a_failed_start_is_in_the_file_that_the_error_names(
    ray_session: RaySession, tmp_path: Path
) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=3)
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1000)
    log = tmp_path / "engine.log"
    engine = RemoteEngine(making(tmp_path / "model"), name="broken", log=log)
    try:
        with pytest.raises(EngineDead, match=f"SafetensorError: .*; what it printed is in {log}"):
            engine.started.result(300)
    finally:
        engine.close()
