"""Sequences that are decoded together: their prompts in one batch, then a token of each per step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.reference.routes import RouteRecorder
from megatron_dppo.rollout.serving.core import Answer
from megatron_dppo.router_replay.record import RouteSchema

_GREEDY = 1e-5
"""Temperatures below take the likeliest token."""


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, generators: Sequence[torch.Generator | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 `[B]`, and log-probabilities float32 `[B, V]` of the distribution that each was drawn from.

    That is softmax(logits / temperature), cut to the nucleus where `top_p` < 1 (the likeliest tokens that together
    reach it, at least one; what is cut has -inf); greedy rows have softmax(logits). A token is the argmax of
    log p - log q, q ~ Exp(1) from the row's generator, which is a draw from p; a difference in the last bits of the
    logits changes it no more often than it moves that maximum. vLLM draws so too, on a CPU with the same noise. Rows
    without a generator are greedy.
    """
    logits = logits.float()
    greedy = temperature < _GREEDY
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    nucleus = (top_p < 1) & ~greedy
    if bool(nucleus.any()):
        scaled[nucleus] = _cut(scaled[nucleus], top_p[nucleus])
    logp = scaled.log_softmax(dim=-1)
    keys = logp.double()
    for row, generator in enumerate(generators):
        if generator is not None:
            keys[row] -= torch.empty_like(keys[row]).exponential_(generator=generator).log_()
    return keys.argmax(dim=-1), logp


def _cut(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered, ids = scaled.sort(dim=-1)
    below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[:, None]
    below[:, -1] = False
    return torch.empty_like(scaled).scatter_(-1, ids, ordered.masked_fill(below, -torch.inf))


_DENSE = 0.75
"""A wave is rid of the rows that have ended when no more than this share is left."""


@dataclass(eq=False)
class Row:
    """A request, who waits for its answer, and what there is of it."""

    request: GenerationRequest
    sampling: SamplingConfig
    answer: Future[Answer]
    tokens: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    logp: list[np.ndarray] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    ended: bool = False

    @property
    def over(self) -> bool:
        """Whether nothing more is to be sampled: it has ended, or nobody waits."""
        return self.ended or self.answer.cancelled()

    def take(self, ids: np.ndarray, logp: np.ndarray) -> None:
        """The next token, then the likeliest ones, of which it keeps as many as were asked for."""
        width = 1 + self.sampling.top_k_logprobs
        self.tokens.append(int(ids[0]))
        self.ids.append(ids[:width])
        self.logp.append(logp[:width])
        if self.tokens[-1] in self.sampling.stop_token_ids:
            self.end("stop")
        elif len(self.tokens) == self.sampling.max_tokens:
            self.end("length")

    def end(self, reason: str) -> None:
        """Answer with what there is."""
        self.ended = True
        if not self.answer.set_running_or_notify_cancel():
            return
        width = 1 + self.sampling.top_k_logprobs
        self.answer.set_result(
            Answer(
                request_id=self.request.request_id,
                token_ids=np.array(self.tokens, dtype=np.int32),
                finish_reason=reason,
                ids=np.array(self.ids, dtype=np.int32).reshape(-1, width),
                logp=np.array(self.logp, dtype=np.float32).reshape(-1, width),
                experts=np.concatenate(self.experts) if self.experts else None,
            )
        )


class Wave:
    """The rows of one batch, from their prompts to the last one's end. Others wait for that.

    Prompts are padded on the left, equal ones go through the model once. Memory: keys and values of all rows, as long
    as the longest.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recorder: RouteRecorder | None,
        schema: RouteSchema | None,
        rows: Sequence[Row],
        *,
        most_tokens: int,
    ) -> None:
        """
        recorder     of the model, and what its record looks like; None records no experts
        most_tokens  of prompts in one forward
        """
        self._model, self._recorder, self._schema, self._most = model, recorder, schema, most_tokens
        self._device = model.device
        self.rows = list(rows)
        self._cache = DynamicCache(config=model.config)
        self._temperature = torch.tensor([row.sampling.temperature for row in rows], device=self._device)
        self._top_p = torch.tensor([row.sampling.top_p for row in rows], device=self._device)
        self._generators = [
            torch.Generator(self._device).manual_seed(row.request.seed) if row.sampling.temperature else None
            for row in rows
        ]
        self._next: torch.Tensor | None = None
        """int64 `[B, 1]`, the tokens drawn last; None before the prompts went through the model."""
        self._mask = torch.empty(0)
        self._position = torch.empty(0)

    @property
    def over(self) -> bool:
        return all(row.over for row in self.rows)

    @torch.no_grad()
    def step(self) -> None:
        """A token more of every row."""
        logits = self._prefill() if self._next is None else self._decode(self._next)
        live = [not row.over for row in self.rows]
        chosen, logp = draw(
            logits,
            self._temperature,
            self._top_p,
            [g if alive else None for g, alive in zip(self._generators, live, strict=True)],
        )
        width = max(row.sampling.top_k_logprobs for row in self.rows)
        best = logp.topk(width, dim=-1)
        ids = torch.cat([chosen[:, None], best.indices], dim=1).cpu().numpy()
        values = torch.cat([logp.gather(1, chosen[:, None]), best.values], dim=1).cpu().numpy()
        for number, row in enumerate(self.rows):
            if live[number]:
                row.take(ids[number], values[number])
        self._next = chosen[:, None]
        self._thin_out()

    def cut(self) -> None:
        """End every row with what it has."""
        for row in self.rows:
            if not row.over:
                row.end("length" if row.tokens else "abort")

    def _prefill(self) -> torch.Tensor:
        prompts = [np.asarray(row.request.prompt_ids, dtype=np.int64) for row in self.rows]
        number = {prompt.tobytes(): 0 for prompt in prompts}
        number = {key: place for place, key in enumerate(number)}
        of_row = [number[prompt.tobytes()] for prompt in prompts]
        length = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(number), length), dtype=np.int64)
        mask = np.zeros_like(ids)
        for place, prompt in zip(of_row, prompts, strict=True):
            ids[place, length - len(prompt) :] = prompt
            mask[place, length - len(prompt) :] = 1
        tokens, attended = (torch.from_numpy(array).to(self._device) for array in (ids, mask))
        position = (attended.cumsum(dim=1) - 1).clamp_min(0)
        experts = []
        width = max(1, self._most // len(ids))
        for start in range(0, length, width):
            stop = min(start + width, length)
            logits = self._forward(tokens[:, start:stop], attended[:, :stop], position[:, start:stop])
            experts.append(self._experts())
        routed = None if experts[0] is None else np.concatenate([part for part in experts if part is not None], axis=1)
        for row, place, prompt in zip(self.rows, of_row, prompts, strict=True):
            if routed is not None:
                row.experts.append(routed[place, length - len(prompt) :])
        order = torch.tensor(of_row, device=self._device)
        self._cache.reorder_cache(order)
        self._mask, self._position = attended[order], position[order, -1:]
        return logits[order]

    def _decode(self, tokens: torch.Tensor) -> torch.Tensor:
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._position = self._position + 1
        logits = self._forward(tokens, self._mask, self._position)
        if (experts := self._experts()) is not None:
            for number, row in enumerate(self.rows):
                if not row.over:
                    row.experts.append(experts[number])
        return logits

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self._shape = tokens.shape
        return self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _experts(self) -> np.ndarray | None:
        """`[sequences, tokens, layers, k]` of the last forward; None where routes are not recorded."""
        if self._recorder is None or self._schema is None:
            return None
        sequences, tokens = self._shape
        return self._recorder.in_all_layers(sequences, tokens, self._schema)

    def _thin_out(self) -> None:
        left = [number for number, row in enumerate(self.rows) if not row.over]
        if not left or len(left) > _DENSE * len(self.rows):
            return
        order = torch.tensor(left, device=self._device)
        self._cache.reorder_cache(order)
        self.rows = [self.rows[number] for number in left]
        self._generators = [self._generators[number] for number in left]
        assert self._next is not None
        self._next, self._mask, self._position = self._next[order], self._mask[order], self._position[order]
        self._temperature, self._top_p = self._temperature[order], self._top_p[order]
