"""Process groups: started once, here, and handed down."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.compat import megatron_cpu
from megatron_dppo.errors import UserError
from megatron_dppo.launch.network import init_process_group
from megatron_dppo.models.groups import initialize_groups
from megatron_dppo.models.parallel import ParallelConfig


@dataclass(frozen=True)
class Runtime:
    """This rank's place in the job."""

    rank: int
    world_size: int
    device: torch.device
    groups: ProcessGroupCollection
    control: dist.ProcessGroup | None = None
    """Where ranks wait for the controller; None is the default group. Over gloo even on GPUs: a rank that waits in NCCL
    has a kernel that spins on its GPU, and shares the GPU's time with an engine there."""

    @property
    def is_controller(self) -> bool:
        """Rank 0 drives the rollout engine, scores answers and writes what people read."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        dist.barrier(group=self.control)

    def broadcast[T](self, value: T | None) -> T:
        """The controller's object, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]  # type: ignore[return-value]

    def all_say(self, word: str, *, patience_s: float) -> bool:
        """Whether every rank says the same, none later than `patience_s` after this one. Through torch's store, not a
        collective: one that a rank does not come to keeps the others for as long as its group's timeout is, and
        nothing can be sent in the group any more."""
        store = dist.distributed_c10d._get_default_store()
        try:
            turn, place = divmod(store.add(f"said/{word}", 1) - 1, self.world_size)
            everybody = f"said by all/{word}/{turn}"
            if place == self.world_size - 1:
                store.set(everybody, "")
            try:
                store.wait([everybody], timedelta(seconds=patience_s))
            except RuntimeError:
                store.add(f"said/{word}", -1)  # or one that comes later would think that this one is still here
                return False
        except RuntimeError:  # who had the store is gone
            return False
        return True


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Ranks of the job, before any of them has joined. Raises UserError where torchrun did not start this process."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: start training with torchrun, e.g. "
            "torchrun --nproc-per-node 2 --no-python megatron-dppo train CONFIG"
        )
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    """This process's number in the job, before it has joined."""
    return int(os.environ.get("RANK", "0"))


def start(parallel: ParallelConfig, *, seed: int, timeout_minutes: float) -> Runtime:
    """Join the job torchrun started and build Megatron-Core's groups.

    Raises UserError where this process was not started by torchrun.
    """
    world_size()
    megatron_cpu.install()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)  # a run before this one in the process may have had more
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    groups = initialize_groups(parallel, seed, timeout_minutes=timeout_minutes)
    control = dist.new_group(timeout=timeout, backend="gloo") if on_gpu else None
    return Runtime(dist.get_rank(), dist.get_world_size(), device, groups, control)


def stop() -> None:
    """Leave the job."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
