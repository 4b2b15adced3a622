"""Process groups: started once, here, and handed down."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_dppo.compat import megatron_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.models.parallel import ParallelConfig


@dataclass(frozen=True)
class Runtime:
    """This rank's place in the job."""

    rank: int
    world_size: int
    device: torch.device
    groups: ProcessGroupCollection

    @property
    def is_controller(self) -> bool:
        """Rank 0 drives the rollout engine, scores answers and writes what people read."""
        return self.rank == 0

    def together[T](self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; where it raises UserError on any, the first rank's error is raised on all.

        Keeps a fault of one rank (a missing file on its node, say) from leaving the others waiting in a collective.
        `work` itself must not need the other ranks. One `all_gather_object`.
        """
        result: T | None = None
        problem: str | None = None
        try:
            result = work()
        except UserError as error:
            problem = str(error)
        problems: list[str | None] = [None] * self.world_size
        dist.all_gather_object(problems, problem)
        for other, message in enumerate(problems):
            if message is not None:
                same = all(message == m for m in problems)
                raise UserError(message if same else f"rank {other}: {message}")
        return result  # type: ignore[return-value]

    def broadcast[T](self, value: T | None) -> T:
        """The controller's object, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]


def start(parallel: ParallelConfig, *, seed: int, timeout_minutes: float) -> Runtime:
    """Join the job torchrun started and build Megatron-Core's groups.

    Raises UserError where this process was not started by torchrun.
    """
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: start training with torchrun, e.g. "
            "torchrun --nproc-per-node 2 --no-python megatron-dppo train CONFIG"
        )
    megatron_cpu.install()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            distributed_timeout_minutes=int(timeout_minutes),
        )
    model_parallel_cuda_manual_seed(seed)
    return Runtime(dist.get_rank(), dist.get_world_size(), device, ProcessGroupCollection.use_mpu_process_groups())


def stop() -> None:
    """Leave the job."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
