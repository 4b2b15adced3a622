"""What a planner needs to know of a GPU and of the wires between GPUs: the data sheet, and how much of it is reached.
Every number says what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.errors import UserError


@dataclass(frozen=True)
class Efficiency:
    """Shares of a GPU's peak, and what the host needs however fast the GPU is.

    Fitted to nine measured steps of one to four H100 80GB (docs/planner.md), starting from what is known apart: the
    head from docs/benchmarks.md (63.7 ms for four products of 10.2 TFLOP), NVLink from its all-reduce of 134 MB
    (0.51 ms on two GPUs, 0.65 ms on four), decoding from vLLM's 15,700 and 10,200 tokens/s at 16 layers and 256
    sequences, without and with routes and top-20. Network, dense products and attention are typical values, not fitted.
    """

    dense: float = 0.65
    """Dense matrix products."""
    head: float = 0.70
    """The LM head's four products, statistics included."""
    grouped: float = 0.53
    """Products of one expert's rows."""
    attention_forward: float = 0.40
    attention_backward: float = 0.35
    memory: float = 0.73
    """Norms, rotary, permutations, SwiGLU: kernels that read and write once."""
    stream: float = 0.75
    """Adam, norms of gradients, zeroing: one long kernel."""
    link: float = 0.45
    """NVLink, ranks waiting for each other included."""
    hidden_exchange: float = 0.30
    """Of the exchange between experts' ranks, what `parallel.overlap_expert_exchange` hides where it can: what runs
    beside it takes longer. From two pairs of steps of two H200s, of which it is 0.38 and 0.25 (docs/planner.md)."""
    network: float = 0.70
    decode: float = 0.36
    """Bytes an engine's step must read (weights of the experts hit, KV cache) over what it takes."""

    expert_forward_s: float = 3e-6
    """Host seconds per local expert and layer: finding its two weights. This and the next are not of the fit, which was
    of a loop over experts and of an Adam from lists: docs/planner.md."""
    expert_backward_s: float = 10e-6
    """The same for its two gradient hooks."""
    layer_forward_s: float = 7.3e-3
    """Host seconds per layer beside experts: the router's synchronisation, replay, and some hundred launches."""
    layer_backward_s: float = 15e-3
    microbatch_s: float = 0.021
    """Packing, routes to the device, objective and metrics."""
    parameter_s: float = 3e-6
    """Host seconds per parameter tensor in the optimizer step."""
    adapter_s: float = 150e-6
    """Host seconds per adapter and pass: some ten launches. An estimate, not fitted."""
    merge_s: float = 100e-6
    """Host seconds to add an adapter to one Hugging Face tensor in a weight sync: 2.18 s for the 18,624 of
    Qwen3-30B-A3B (docs/benchmarks.md)."""
    engine_token_s: float = 37e-6
    """Host seconds of an engine per token for its routes and top-K log-probabilities."""


H100 = Efficiency()
H200 = Efficiency(
    grouped=0.52,
    memory=0.69,
    link=0.35,
    layer_forward_s=0.0031,
    layer_backward_s=0.0077,
    microbatch_s=0.010,
)
"""Fitted by `tools/fit_planner.py` to twenty steps of one and two H200s; since then `microbatch_s` was set by two steps
and `link` fitted to sixteen of one, two and four (docs/planner.md). The rest is the H100's."""
MEASURED = {"h100-80g": H100, "h200-141g": H200}
"""By the name of the GPU."""


def efficiency_of(gpu: str) -> Efficiency:
    """That of the GPU, or of the H100 where the GPU was not measured."""
    return MEASURED.get(gpu, H100)


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
