"""Softmax attention over packs by its definition, as kernels of `FlashWithSinks`, in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.models.layers.sink_attention import CausalPack


class PlainKernels:
    def take(self, query: Tensor) -> bool:
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pack: CausalPack) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, pack)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).to(scores.dtype)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value).to(query.dtype), scores.logsumexp(-1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, pack: CausalPack
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared, given = query.shape[1] // key.shape[1], query.dtype
        grad, query, key, value, out = (x.to(lse.dtype) for x in (grad, query, key, value, out))
        shares = (self._scores(query, key, pack) - lse[..., None]).exp()
        of_shares = torch.einsum("ihd,jhd->hij", grad, value.repeat_interleave(shared, dim=1))
        of_scores = shares * (of_shares - (grad * out).sum(-1).T[..., None]) * pack.scale
        of_query = torch.einsum("hij,jhd->ihd", of_scores, key.repeat_interleave(shared, dim=1))
        of_key = torch.einsum("hij,ihd->jhd", of_scores, query)
        of_value = torch.einsum("hij,ihd->jhd", shares, grad)
        of_key, of_value = (x.unflatten(1, (-1, shared)).sum(2) for x in (of_key, of_value))
        return of_query.to(given), of_key.to(given), of_value.to(given)

    @staticmethod
    def _scores(query: Tensor, key: Tensor, pack: CausalPack) -> Tensor:
        """`[heads, T, T]`, minus infinity where there are none."""
        row = torch.arange(len(query), device=query.device)
        sequence = torch.bucketize(row, pack.ends.long(), right=True)
        back = row[:, None] - row
        seen = (back >= 0) & (back < (pack.window or len(row))) & (sequence[:, None] == sequence)
        exact = torch.promote_types(query.dtype, torch.float32)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = torch.einsum("ihd,jhd->hij", query.to(exact), key.to(exact))
        return (scores * pack.scale).masked_fill(~seen, float("-inf"))
