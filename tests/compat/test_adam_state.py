"""Megatron-Core's distributed optimizer with torch's Adam: the same steps as Adam itself, across a reload."""

from pathlib import Path

import pytest
import torch

from megatron_dppo.checkpoint.training_state import TrainingStates
from tests.checkpoint.training_ranks import adam_step, trainee_from
from tests.distributed import run_ranks
from tests.tiny import tiny_model


def compare(rank: int, path: Path, root: Path) -> float:
    """Worst difference from torch.optim.AdamW after five steps, with a save and a load after the second."""
    trainee = trainee_from(path, {"tensor": 1})
    mirrors = [p.detach().clone().requires_grad_() for chunk in trainee.models for p in chunk.parameters()]
    adam = torch.optim.AdamW(mirrors, lr=1e-3, weight_decay=0.01)
    for number in range(5):
        for parameter in mirrors:
            parameter.grad = torch.sin(parameter.detach() * 10 + number)
        adam.step()
        adam_step(trainee, number)
        if number == 1:
            states = TrainingStates(root, trainee)
            states.save(2, {})
            adam_step(trainee, 99)  # undone by the load
            states.load()
    live = [p for chunk in trainee.models for p in chunk.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(live, mirrors, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_five_steps_across_a_reload(world_size: int, tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path / "model", num_hidden_layers=2)
    for error in run_ranks(compare, world_size, tmp_path / "model", tmp_path / "states"):
        assert error < 1e-6
