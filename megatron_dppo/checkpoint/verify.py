"""Compare a Megatron-Core model with transformers reading a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.checkpoint.first_rank import on_first_rank
from megatron_dppo.errors import UserError
from megatron_dppo.models.family import transformers_config
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.packed_logits import Pack, packed_logits
from megatron_dppo.models.parallel import ParallelConfig

PROMPTS = (
    "What is 17 + 25 - 9?",
    "Write a function that returns the n-th Fibonacci number.",
    "The three largest cities of Japan by population are",
)
_MEAN_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Mean |difference| over the largest |logit|. A mean, since in half precision a router may choose another expert."""


@dataclass(frozen=True)
class Comparison:
    """Over all sample tokens and the whole vocabulary."""

    tokens: int
    largest_logit: float
    mean_difference: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, logits up to {self.largest_logit:.3g}: difference {self.mean_difference:.2e} on "
            f"average, {self.largest_difference:.2e} at most"
        )


def compare_with_transformers(
    models: Sequence[GPTModel], model: HFConfig, groups: ProcessGroupCollection, parallel: ParallelConfig, folder: Path
) -> Comparison:
    """Logits of a few prompts from both, in the weights' dtype; `UserError` where they do not agree.

    Collective. Rank 0 loads the whole model once more, with transformers, on the CPU.
    """
    dtype = next(models[0].parameters()).dtype
    packs = sample_packs(folder, model, parallel)
    references = on_first_rank(lambda: _reference(folder, packs, dtype))

    total, largest, highest = 0.0, 0.0, 0.0
    for reference, logits in zip(references, packed_logits(models, packs), strict=False):
        width = logits.shape[1]
        mine = reference[:, groups.tp.rank() * width : (groups.tp.rank() + 1) * width].float()
        difference = (logits[:, : mine.shape[1]].float().cpu() - mine).abs()
        total += difference.double().sum().item()
        largest = max(largest, difference.max().item() if difference.numel() else 0.0)
        highest = max(highest, mine.abs().max().item() if mine.numel() else 0.0)
    device = torch.cuda.current_device()
    sums = torch.tensor([total], dtype=torch.float64, device=device)
    maxima = torch.tensor([largest, highest], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    tokens = sum(len(ids) for ids, _ in packs)
    copies = groups.dp_cp.size()
    found = Comparison(
        tokens=tokens,
        largest_logit=maxima[1].item(),
        mean_difference=sums.item() / (tokens * model.vocab_size * copies),
        largest_difference=maxima[0].item(),
    )
    if not found.mean_difference <= _MEAN_TOLERANCE[dtype] * max(1.0, found.largest_logit):
        raise UserError(f"verification failed: Megatron-Core and transformers reading {folder} disagree ({found})")
    return found


def sample_packs(folder: Path, model: HFConfig, parallel: ParallelConfig) -> list[Pack]:
    """The prompts as one pack per pipeline stage; ids drawn at random where the folder has no tokenizer, or
    one that is code."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        sequences = [torch.tensor(tokenizer.encode(prompt)) for prompt in PROMPTS]
    else:
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(0, model.vocab_size, (n,), generator=generator) for n in (9, 17, 14)]
    rows = sum(len(s) for s in sequences)
    missing = -rows % parallel.tensor  # sequence parallelism divides the rows evenly
    sequences[-1] = torch.cat([sequences[-1], sequences[-1][:1].repeat(missing)])
    pack = torch.cat(sequences), [len(s) for s in sequences]
    return [pack] * parallel.pipeline


@torch.no_grad()
def _reference(folder: Path, packs: Sequence[Pack], dtype: torch.dtype) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    try:
        config = transformers_config(folder)
        reference = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()
        ids, lengths = packs[0]
        logits = torch.cat([reference(part[None]).logits[0] for part in ids.split(lengths)])
    except Exception as error:  # whatever transformers raises must reach every rank
        raise UserError(f"transformers cannot load {folder}: {error}") from error
    return [logits] * len(packs)
