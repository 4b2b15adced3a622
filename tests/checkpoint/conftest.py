"""Training states that are saved once; files whose tests use them are one group in tests/conftest.py."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.training_ranks import save_several
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe"
    tiny_qwen3_moe(path, seed=3, num_hidden_layers=2)
    return path


@pytest.fixture(scope="package")
def saved_states(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states after steps 3 and 4, of two ranks. Not to be changed."""
    folder = tmp_path_factory.mktemp("states")
    run_ranks(save_several, 2, model, folder)
    return folder


@pytest.fixture
def states(saved_states: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(saved_states, tmp_path / "states"))
