"""Which MoE layers are trained together, over the whole job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_dppo.router_replay.replay import find_routers


def gather_layer_groups(
    chunks: Sequence[torch.nn.Module], moe_layer_numbers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Numbers (among the MoE layers of the model) held by each model chunk of any rank, in model order.

    moe_layer_numbers: 1-based layer numbers of all MoE layers. Collective: one all-gather of a few numbers. Together
    the groups hold every MoE layer once; chunks without one give no group.
    """
    own = [tuple(index for index, _ in find_routers([chunk], moe_layer_numbers)) for chunk in chunks]
    everybody: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, own)
    return tuple(sorted({group for rank in everybody for group in rank if group}))
