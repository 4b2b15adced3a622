"""What a planner needs to know of a GPU and of the wires between GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.errors import UserError
from megatron_dppo.planner.efficiency import MEASURED

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures of one GPU in a node of eight; bandwidths are in one direction."""

    name: str
    memory: int
    """Bytes the driver reports."""
    bf16_flops: float
    """Dense bf16 tensor-core peak, FLOP/s."""
    memory_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """NVLink bytes/s of one GPU."""
    network_bandwidth: float
    """Bytes/s of one GPU's share of the node's network cards."""
    gpus_per_node: int = 8

    @property
    def measured(self) -> bool:
        """Whether the efficiencies were calibrated on this GPU."""
        return self.name in MEASURED


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80g", int(79.6 * GIB), 989e12, 3.35e12, 450e9, 50e9),
        Gpu("h200-141g", int(139.8 * GIB), 989e12, 4.8e12, 450e9, 50e9),
        Gpu("a100-80g", int(79.1 * GIB), 312e12, 2.04e12, 300e9, 25e9),
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 1.56e12, 300e9, 25e9),
        Gpu("b200-180g", int(178.4 * GIB), 2250e12, 7.7e12, 900e9, 50e9),
    )
}
"""By the name `--gpu` takes."""


def find_gpu(name: str, *, option: str = "--gpu") -> Gpu:
    """Raises UserError with the known names."""
    if name not in GPUS:
        raise UserError(f"{option} {name}: not known; there are {', '.join(GPUS)}")
    return GPUS[name]


def gpu_of_device(name: str, memory: int) -> Gpu:
    """The GPU that torch calls `name`, with the bytes it has. Of an unknown one the speed is taken for the H100's.

    The model has to be named ("H100 PCIe" and "H100 80GB HBM3" alike) and the memory to agree within a tenth: there are
    A100s of 40 and of 80 GB, and partitions of a GPU bear its name.
    """
    for gpu in GPUS.values():
        model = gpu.name.split("-")[0].upper()
        if model in name.upper().replace("-", " ").split() and abs(memory - gpu.memory) < 0.1 * gpu.memory:
            return replace(gpu, memory=memory)
    return replace(GPUS["h100-80g"], name=name, memory=memory)
