"""What every rank checks of a round trip Hugging Face -> Megatron-Core -> Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megatron_dppo.checkpoint.hf_export import weight_exporter
from megatron_dppo.models.packed_logits import packed_logits
from tests.megatron import build_from
from tests.tiny import VOCAB_SIZE

LENGTHS = ([5, 11, 8], [16, 3, 5])


def microbatches() -> list[tuple[torch.Tensor, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, VOCAB_SIZE, (sum(n),), generator=generator), n) for n in LENGTHS]


@torch.no_grad()
def write_reference(model: PreTrainedModel, path: Path) -> None:
    """transformers' logits `[T, V]` of every microbatch, each sequence run alone."""
    logits = [
        torch.cat([model(part[None]).logits[0] for part in ids.split(lengths)]) for ids, lengths in microbatches()
    ]
    torch.save(logits, path / "reference.pt")


def check_round_trip(rank: int, layout: dict[str, Any], paths: list[Path]) -> dict[str, tuple[float, int]]:
    """Per checkpoint: worst logit error on this rank against transformers, and tensors found bit-equal (rank 0)."""
    found = {}
    for path in paths:
        models, model, groups = build_from(path, layout)
        references = torch.load(path / "reference.pt", weights_only=True)
        outputs = packed_logits(models, microbatches())
        error = 0.0
        for reference, output in zip(references, outputs, strict=False):
            width = output.shape[-1]
            mine = reference[:, groups.tp.rank() * width : (groups.tp.rank() + 1) * width]
            error = max(error, (output[:, : mine.shape[1]] - mine).abs().max().item())
        original: dict[str, torch.Tensor] = {}
        for file in path.glob("*.safetensors"):
            original |= {name: tensor for name, tensor in load_file(file).items() if not model.carries(name)}
        equal = 0
        for name, tensor in weight_exporter(models, model, groups).stream(bucket_bytes=50_000):
            assert (tensor is not None) == (rank == 0)
            if tensor is not None:
                assert torch.equal(tensor, original.pop(name)), name
                equal += 1
        assert rank != 0 or not original, sorted(original)
        found[path.name] = (error if outputs else -1.0, equal)
    return found
