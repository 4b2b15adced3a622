"""What an engine prints is kept: vLLM says of a core that failed only that it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.rollout.engine import EngineDead
from megatron_dppo.rollout.fleet.host import RemoteEngine
from megatron_dppo.rollout.ray_session import RaySession
from tests.rollout.conftest import vllm
from tests.tiny import tiny_qwen3_moe


@pytest.mark.full
def test_the_reason_of_a_failed_start_is_in_the_file_that_the_error_names(
    ray_session: RaySession, tmp_path: Path
) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=3)
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1000)
    log = tmp_path / "engine.log"
    engine = RemoteEngine(vllm(tmp_path / "model"), name="broken", log=log)
    try:
        with pytest.raises(EngineDead, match=f"what it printed is in {log}"):
            engine.started.result(300)
    finally:
        engine.close()
    assert "SafetensorError" in log.read_text()
