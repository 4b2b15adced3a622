"""A training state through TransformerEngine and NCCL: saved on one rank or under TP2 x EP2, loaded, and the next step
is equal.

`torchrun --nproc-per-node RANKS -m tests.gpu.training_state FOLDER`, one or two (on a CPU too, over gloo).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_dppo.actor import runtime as actor_runtime
from megatron_dppo.actor.config import OptimizerConfig
from megatron_dppo.actor.optimizer import build_optimizer
from megatron_dppo.checkpoint.state_parts import distributed_parts
from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates
from megatron_dppo.models.parallel import ParallelConfig
from tests.checkpoint.training_ranks import adam_step
from tests.megatron import build_from
from tests.tiny import tiny_qwen3_moe

LAYOUTS: dict[int, dict[str, Any]] = {1: {}, 2: {"tensor": 2, "expert": 2, "sequence_parallel": True}}
"""By number of ranks."""


def trainee_in(path: Path) -> Trainee:
    """bfloat16 weights, float32 master weights and moments, as the actor has them."""
    layout = LAYOUTS[dist.get_world_size()]
    models, model, groups = build_from(path, layout, params_dtype=torch.bfloat16)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunks = [DistributedDataParallel(gpt.config, ddp, gpt) for gpt in models]
    optimizer, scheduler = build_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.01), chunks, torch.bfloat16)
    return Trainee(
        model=model,
        models=chunks,
        groups=groups,
        parallel=ParallelConfig(**layout),
        optimizer=optimizer,
        scheduler=scheduler,
    )


def digest(trainee: Trainee) -> str:
    """Of this rank's weights, master weights and moments."""
    assert trainee.optimizer is not None
    tensors = [p.detach() for chunk in trainee.models for p in chunk.parameters()]
    for part in distributed_parts(trainee.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                tensors += [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main(folder: Path) -> dict[str, Any]:
    parallel = ParallelConfig(**LAYOUTS[int(os.environ["WORLD_SIZE"])])
    runtime = actor_runtime.start(parallel, seed=0, timeout_minutes=3)
    path = folder / "model"
    if runtime.rank == 0:
        tiny_qwen3_moe(path)
    dist.barrier()
    trainee = trainee_in(path)
    for number in range(3):
        adam_step(trainee, number)
    saved = digest(trainee)
    TrainingStates(folder / "states", trainee).save(3, {"position": 12})
    adam_step(trainee, 3)
    expected = digest(trainee)

    fresh = trainee_in(path)
    for chunk in fresh.models:
        for parameter in chunk.parameters():
            parameter.data.fill_(7.0)
    resumed = TrainingStates(folder / "states", fresh).load()
    loaded = digest(fresh)
    adam_step(fresh, 3)
    mine = {"step": resumed.step, "loaded": loaded == saved, "next_step": digest(fresh) == expected}
    every: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(every, mine)
    return {"ranks": every, "moved": saved != expected, "device": str(runtime.device.type)}


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    actor_runtime.stop()
