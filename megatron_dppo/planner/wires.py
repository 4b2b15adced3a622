"""Seconds of collectives over NVLink and between nodes."""

from __future__ import annotations

from megatron_dppo.planner.efficiency import Efficiency
from megatron_dppo.planner.workload import Layout


def bandwidth(layout: Layout, span: int, e: Efficiency) -> float:
    """Bytes/s of one GPU within a group whose ranks span `span` consecutive GPUs."""
    if span <= layout.gpu.gpus_per_node:
        return layout.gpu.link_bandwidth * e.link
    return layout.gpu.network_bandwidth * e.network


def all_gather(layout: Layout, size: float, ranks: int, span: int, e: Efficiency) -> float:
    """Seconds of an all-gather or reduce-scatter whose whole tensor has `size` bytes."""
    if ranks == 1:
        return 0.0
    return size * (ranks - 1) / ranks / bandwidth(layout, span, e)


def all_to_all(layout: Layout, size: float, e: Efficiency) -> float:
    """Seconds for `size` bytes of rows sent evenly to the expert-parallel ranks. Within a node NVLink, beyond the
    network carries the share of the other nodes."""
    ranks, span = layout.parallel.expert, layout.parallel.expert * layout.parallel.expert_tensor
    if ranks == 1:
        return 0.0
    node = layout.gpu.gpus_per_node
    if span <= node:
        return size * (ranks - 1) / ranks / bandwidth(layout, span, e)
    return size * (span - node) / span / bandwidth(layout, span, e)
