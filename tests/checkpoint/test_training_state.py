"""Training states: saved under one layout, loaded under others, with the next Adam step exact."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.models.parallel import ParallelConfig
from tests.actor.matrix import FAMILIES, KIN, REFUSED
from tests.checkpoint.training_ranks import generators_after, load_and_step, train_and_save
from tests.distributed import run_ranks
from tests.tiny import tiny_model

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "same": (2, TP2_EP2),
    "one": (1, {}),
    "ep2": (2, {"expert": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "dp2": (2, {}),
    "tp2-etp2": (2, {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}),
}


@pytest.fixture(
    scope="module", params=["qwen3_moe", *(pytest.param(family, marks=pytest.mark.full) for family in FAMILIES + KIN)]
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, list[dict[str, str]]]:
    path, root = tmp_path_factory.mktemp("model") / "moe", tmp_path_factory.mktemp("states")
    tiny_model(request.param, path, seed=3, **({"mlp_only_layers": [1]} if request.param == "qwen3_moe" else {}))
    return path, root, run_ranks(train_and_save, 2, path, root, TP2_EP2)[0]


@pytest.mark.parametrize("layout", OTHERS)
def test_loads_under_any_layout_with_the_next_step_exact(
    layout: str, saved: tuple[Path, Path, list[dict[str, str]]]
) -> None:
    path, root, expected = saved
    world_size, sizes = OTHERS[layout]
    model = load_hf_config(path)
    if any(size in sizes for size in REFUSED.get(model.family.model_type, ())):
        with pytest.raises(UserError, match="set it to 1"):
            ParallelConfig(**sizes).check_fits(model, world_size)
        return
    found, said = run_ranks(load_and_step, world_size, path, root, sizes)[0]
    assert expected[0] != expected[1]
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert said == (3, {"position": 12, "weight_version": 3}, layout == "same")


def test_data_parallel_ranks_write_a_part_each(saved: tuple[Path, Path, list[dict[str, str]]], tmp_path: Path) -> None:
    path = saved[0]
    kept = run_ranks(train_and_save, 2, path, tmp_path, {})[0]
    sizes = [sum(f.stat().st_size for f in tmp_path.rglob(f"__{rank}_*.distcp")) for rank in range(2)]
    assert min(sizes) > 0.4 * sum(sizes)
    found, _ = run_ranks(load_and_step, 2, path, tmp_path, TP2_EP2)[0]
    assert found == kept


def test_generators_go_on_where_they_were(model: Path, tmp_path: Path) -> None:
    for drawn in run_ranks(generators_after, 2, model, tmp_path / "states"):
        assert drawn[:4] == drawn[4:]
