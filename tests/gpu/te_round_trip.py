"""TransformerEngine's grouped experts at the shapes of Qwen3-30B-A3B (4 layers): weights in, logits, weights out.

Runs alone, in one process on one GPU: `python -m tests.gpu.te_round_trip [folder]`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_dppo.checkpoint.hf_export import weight_exporter
from megatron_dppo.checkpoint.hf_files import HFFiles
from megatron_dppo.checkpoint.hf_import import load_hf_weights
from megatron_dppo.models.build import build_model
from megatron_dppo.models.groups import initialize_groups
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.packed_logits import packed_logits
from megatron_dppo.models.parallel import ParallelConfig
from tests.models.public_configs import CONFIGS

LENGTHS = [700, 1, 211, 136]


@dataclass(frozen=True)
class Result:
    tensors: int
    gigabytes: float
    import_seconds: float
    export_seconds: float
    export_extra_gigabytes: float
    transformers_error: float
    """Mean |difference| of transformers' bf16 logits from its fp32 ones."""
    megatron_error: float
    """The same of Megatron-Core's bf16 logits."""


def write_model(folder: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A random bf16 checkpoint; ids, transformers' fp32 logits, and the mean error of its bf16 logits."""
    config = resolve_hf_config(CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 4}).config
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + 1 if parameter.ndim == 1 else parameter)
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder, max_shard_size="2GB")
        ids = torch.randint(0, config.vocab_size, (sum(LENGTHS),), device="cuda")
        half = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)]).float()
        model.float()
        exact = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
    return ids, exact, (half - exact).abs().mean().item()


@torch.no_grad()
def round_trip(folder: Path) -> Result:
    """Import, compare logits, export, compare bits. The default process group exists."""
    groups = initialize_groups(ParallelConfig(), seed=0, gloo_copies=False)
    ids, exact, transformers_error = write_model(folder)
    torch.cuda.empty_cache()
    model = load_hf_config(folder)
    config = transformer_config(model, ParallelConfig(), params_dtype=torch.bfloat16)
    start = time.perf_counter()
    models = build_model(model, config, groups)
    names = [name for name, _ in models[0].named_parameters()]
    assert any("mlp.experts.linear_fc1.weight127" in name for name in names), "experts are not one grouped GEMM"
    load_hf_weights(models, model, groups)
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    (logits,) = packed_logits(models, [(ids, LENGTHS)])
    megatron_error = (logits[:, : model.vocab_size].float() - exact).abs().mean().item()
    del logits, exact
    torch.cuda.empty_cache()

    files, exporter = HFFiles(folder), weight_exporter(models, model, groups)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    exporting = time.perf_counter()
    for name, tensor in exporter.stream():
        assert tensor is not None, name
    torch.cuda.synchronize()
    exported = time.perf_counter()
    extra = torch.cuda.max_memory_allocated() - before
    count = 0
    for name, tensor in exporter.stream():
        stored = files.read(name, tuple((0, n) for n in files.tensors[name].shape))
        assert tensor is not None, name
        assert torch.equal(tensor.cpu().view(torch.int16), stored.view(torch.int16)), name
        count += 1
    assert count == len(files.tensors)
    return Result(
        tensors=count,
        gigabytes=sum(t.nbytes for t in exporter.tensors) / 1e9,
        import_seconds=loaded - start,
        export_seconds=exported - exporting,
        export_extra_gigabytes=extra / 1e9,
        transformers_error=transformers_error,
        megatron_error=megatron_error,
    )


def run(folder: Path) -> Result:
    """`round_trip` in a process group of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return round_trip(folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    try:
        print(json.dumps(asdict(run(target))))
    finally:
        shutil.rmtree(target, ignore_errors=True)
