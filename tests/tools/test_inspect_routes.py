from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.router_replay.wire import routes_to_bytes
from tests.router_replay.test_layout import random_routes

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import inspect_routes


def test_files_become_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import matplotlib.image

    rollout = random_routes(300, layers=4, topk=2, experts=16, seed=0)
    train = random_routes(300, layers=4, topk=2, experts=16, seed=1)
    for name, routes in (("rollout", rollout), ("train", train)):
        (tmp_path / name).write_bytes(routes_to_bytes(routes))
    picture = tmp_path / "routes.png"
    assert inspect_routes.main([str(tmp_path / "rollout"), "--train", str(tmp_path / "train"), "-o", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"300 tokens, {rollout.valid.sum()} routed, 4 MoE layers, top-2 of 16 experts, 9 bytes")
    assert len(lines) == 2 + 4 + 2
    image = matplotlib.image.imread(picture)
    assert image.shape[0] > 200
    assert np.ptp(image[..., :3]) > 0.5
    assert inspect_routes.main([str(tmp_path / "rollout"), "-o", str(picture)]) == 0


def test_bad_input_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert inspect_routes.main(list(arguments)) == 2
        return capsys.readouterr().err

    (tmp_path / "foreign").write_bytes(b"x" * 100)
    (tmp_path / "short").write_bytes(routes_to_bytes(random_routes(5, 4, 2, 16, 0)))
    (tmp_path / "long").write_bytes(routes_to_bytes(random_routes(6, 4, 2, 16, 0)))
    assert "give a file with routes, or --model" in error()
    assert "nowhere: No such file or directory" in error(str(tmp_path / "nowhere"))
    assert "foreign: these are not routes" in error(str(tmp_path / "foreign"))
    assert "not of the same tokens" in error(str(tmp_path / "short"), "--train", str(tmp_path / "long"))
