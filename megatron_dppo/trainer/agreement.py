"""Whether all ranks of a job were started alike: with one configuration, in one folder."""

from __future__ import annotations

import secrets
import socket
import time

import torch.distributed as dist

from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError, file_errors
from megatron_dppo.trainer.resume import flatten

_PATIENCE_S = 15.0
"""For a shared file system to show on one node what another wrote."""


def check_agreement(runtime: Runtime, config: Config) -> None:
    """UserError on every rank where one has another configuration than rank 0, or does not see in `run.dir` what rank 0
    writes there: a checkpoint would lie in pieces on several disks. Collective."""
    mine = flatten(config.model_dump(mode="json"))
    mark = config.run.dir / f".shared-{secrets.token_hex(4)}"
    if runtime.is_controller:
        with file_errors(f"run.dir={config.run.dir} cannot be written", "choose another folder"):
            mark.touch()
    first, name = runtime.broadcast((mine, mark.name))
    differing = sorted(
        key
        for key in first.keys() | mine.keys()
        if first.get(key) != mine.get(key) and not key.endswith("data.path")  # which rank 0 alone reads
    )
    deadline = time.monotonic() + _PATIENCE_S
    while not (seen := (config.run.dir / name).exists()) and not differing and time.monotonic() < deadline:
        time.sleep(0.2)
    found: list[tuple[str, list[tuple[str, str]], bool]] = [("", [], True)] * runtime.world_size
    dist.all_gather_object(
        found, (socket.gethostname(), [(key, repr(mine.get(key, "absent"))) for key in differing], seen)
    )
    if runtime.is_controller:
        mark.unlink()
    for rank, (host, other, _) in enumerate(found):
        if other:
            key, value = other[0]
            raise UserError(
                f"rank {rank} on {host} was started with another configuration than rank 0: {key} is {value} there and "
                f"{first.get(key, 'absent')!r} on rank 0 ({len(other)} keys differ); start all nodes with the same"
            )
    blind = [rank for rank, (_, _, sees) in enumerate(found) if not sees]
    if blind:
        raise UserError(
            f"run.dir={config.run.dir} is another folder on {found[blind[0]][0]} than on {found[0][0]}: "
            f"{len(blind)} of {runtime.world_size} ranks, first rank {blind[0]}, do not see what rank 0 wrote there; "
            "choose a folder on a file system that all nodes share"
        )
