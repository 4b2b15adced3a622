"""Load and overlap against counting by hand; files, table and picture."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.router_replay.routes import Routes
from tests.router_replay.test_layout import random_routes

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import inspect_routes


def test_files_become_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import matplotlib.image

    rollout = random_routes(300, layers=4, topk=2, experts=16, seed=0)
    train = random_routes(300, layers=4, topk=2, experts=16, seed=1)
    for name, routes in (("rollout", rollout), ("train", train)):
        inspect_routes.save(routes, tmp_path / f"{name}.npz")
    picture = tmp_path / "routes.png"
    assert (
        inspect_routes.main([str(tmp_path / "rollout.npz"), "--train", str(tmp_path / "train.npz"), "-o", str(picture)])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"300 tokens, {rollout.valid.sum()} routed, 4 MoE layers, top-2 of 16 experts, 9 bytes")
    assert len(lines) == 2 + 4 + 2
    image = matplotlib.image.imread(picture)
    assert image.shape[0] > 200
    assert np.ptp(image[..., :3]) > 0.5
    assert inspect_routes.main([str(tmp_path / "rollout.npz"), "-o", str(picture)]) == 0


def test_bad_input_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert inspect_routes.main(list(arguments)) == 2
        return capsys.readouterr().err

    (tmp_path / "foreign").write_bytes(b"x" * 100)
    inspect_routes.save(random_routes(5, 4, 2, 16, 0), tmp_path / "short.npz")
    inspect_routes.save(random_routes(6, 4, 2, 16, 0), tmp_path / "long.npz")
    whole = (tmp_path / "long.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(tmp_path / "other.npz", experts=np.zeros((2, 1, 1), dtype=np.uint8))
    np.save(tmp_path / "array.npy", np.zeros(3))
    assert "give a file with routes, or --model" in error()
    assert "nowhere: No such file or directory" in error(str(tmp_path / "nowhere"))
    for name in ("foreign", "cut.npz", "other.npz", "array.npy"):
        assert f"{name}: holds no routes" in error(str(tmp_path / name))
    assert "cannot write the plot: File exists" in error(
        str(tmp_path / "short.npz"), "-o", str(tmp_path / "foreign/routes.png")
    )
    assert "not of the same tokens" in error(str(tmp_path / "short.npz"), "--train", str(tmp_path / "long.npz"))


def test_load_is_counted_over_routed_rows() -> None:
    experts = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[3, 3]]], dtype=np.uint8)
    loads = inspect_routes.load(Routes(experts, np.array([True, True, True, False]), 4))
    np.testing.assert_allclose(loads.share, [[3 / 6, 2 / 6, 1 / 6, 0]])
    assert loads.busiest.tolist() == [2.0]
    assert loads.unused.tolist() == [1]
    entropy = -(0.5 * np.log(0.5) + np.log(1 / 3) / 3 + np.log(1 / 6) / 6)
    np.testing.assert_allclose(loads.effective, [np.exp(entropy)])
    with pytest.raises(ValueError, match="no token of these routes"):
        inspect_routes.load(Routes.gaps(3, 1, 2, 4))


def test_overlap_compares_sets_of_rows_that_both_have() -> None:
    one, other = (random_routes(50, layers=3, topk=3, experts=6, seed=seed) for seed in (1, 2))
    got = inspect_routes.overlap(one, other)
    rows = [t for t in range(50) if one.valid[t] and other.valid[t]]
    assert got.rows == len(rows) < 50
    for layer in range(3):
        sizes = [len({*one.experts[t, layer]} & {*other.experts[t, layer]}) for t in rows]
        assert got.common[layer] == pytest.approx(np.mean(sizes) / 3)
        assert got.identical[layer] == pytest.approx(np.mean([size == 3 for size in sizes]))
    swapped = Routes(one.experts[:, :, ::-1], one.valid, 6)
    assert inspect_routes.overlap(one, swapped).identical.tolist() == [1.0] * 3, "order within a row does not matter"
    with pytest.raises(ValueError, match="not of the same tokens and model"):
        inspect_routes.overlap(one, random_routes(49, layers=3, topk=3, experts=6, seed=0))
