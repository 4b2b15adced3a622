"""The dense float64 reference of token_stats, and random problems for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    logp: Tensor
    entropy: Tensor
    topk_logp: Tensor


def dense_stats(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, topk_ids: Tensor, vocab_size: int, temperature: float = 1.0
) -> Dense:
    """log-softmax over the true vocabulary of the whole head, all of it in memory, differentiable."""
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, dim=-1)
    topk = log_p.gather(1, topk_ids.clamp(min=0)).masked_fill(topk_ids == -1, -torch.inf)
    return Dense(log_p.gather(1, token_ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1), topk)


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    topk_ids: Tensor
    grad_logp: Tensor
    grad_entropy: Tensor
    grad_topk: Tensor

    def gradients(
        self, logp: Tensor, entropy: Tensor, *inputs: Tensor, topk: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Of a loss of the first two, and of `topk` where it is given; the graph stays."""
        outputs, upstream = [logp, entropy], [self.grad_logp, self.grad_entropy]
        if topk is not None:
            outputs, upstream = [*outputs, topk], [*upstream, self.grad_topk]
        return torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


def random_problem(
    tokens: int, width: int, rows: int, vocab_size: int, topk: int, *, seed: int = 0, scale: float = 2.0
) -> Problem:
    """float64; logits of standard deviation `scale`; ids with repeats and absences; `rows` of head, some padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, vocab_size, (tokens, topk), generator=generator)
    if topk > 1:
        ids[:, 1] = ids[:, 0]
    return Problem(
        torch.randn(tokens, width, dtype=torch.float64, generator=generator).requires_grad_(),
        torch.randn(rows, width, dtype=torch.float64, generator=generator).mul_(scale / width**0.5).requires_grad_(),
        torch.randint(vocab_size, (tokens,), generator=generator),
        ids,
        torch.randn(tokens, dtype=torch.float64, generator=generator),
        torch.randn(tokens, dtype=torch.float64, generator=generator),
        torch.randn(tokens, topk, dtype=torch.float64, generator=generator),
    )
