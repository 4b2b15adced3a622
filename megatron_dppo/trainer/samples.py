"""Answers and tokens for people to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.actor.signal import Spans
from megatron_dppo.trainer.dynamic_sampling import Groups
from megatron_dppo.trainer.episodes import Episodes

MaskedTokens = Mapping[str, Sequence[tuple[int, int]]]
"""(token id, count) of the tokens blocked most, under `positive` and `negative` (the sign of the advantage)."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of a training step. `response` has its special tokens, and what an environment said in between."""

    prompt: str
    response: str
    reference: str
    pieces: list[str]
    """`response`, token by token; a token that is part of a character shows as a replacement mark. Not written to disk
    where the response holds a secret."""
    reward: float
    advantage: float
    """Without the penalty of a KL in the reward, which is not known yet."""
    parts: dict[str, float]
    correct: bool
    tokens: int
    finish_reason: str
    sequence: int
    """Its number in the step."""
    episode: int
    """The number of its episode in the step. One that branched has several sequences."""
    prompt_tokens: int
    blocked: tuple[int, ...] = ()
    """Numbers of `pieces` that the trust region took out of the update."""
    untrained: tuple[int, ...] = ()
    """Those that the policy did not sample (an environment's words), or that were not trained on."""
    turn_advantages: tuple[tuple[int, float], ...] = ()
    """Where every turn has its own advantage: the number of the piece with which a turn begins, and the turn's."""

    def marked(self, watched: np.ndarray) -> Sample:
        """With `blocked` and `untrained`, from `UpdateReport.watched`: row `t` predicts token `t + 1`."""
        rows = watched[watched[:, 0] == self.sequence]
        piece = rows[:, 1] + 1 - self.prompt_tokens
        untrained = np.setdiff1d(np.arange(self.tokens), piece)
        return replace(self, blocked=tuple(piece[rows[:, 2] > 0].tolist()), untrained=tuple(untrained.tolist()))

    def row(self) -> dict[str, Any]:
        return asdict(self)


def choose_samples(
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    groups: Groups,
    advantages: np.ndarray,
    played: Episodes | None = None,
    spans: Spans | None = None,
) -> list[Sample]:
    """The first answer to each of the first `count` prompts; more answers to them where there are fewer prompts. Of
    episodes that were `played` all sequences, each after what it began with."""
    prompts, responses, rewards = groups.prompts, groups.responses, groups.rewards
    samples, prompt_lengths = len(rewards) // len(prompts), groups.handle.prompt_lengths
    of = np.arange(len(responses)) if played is None else played.episode
    chosen = sorted(range(len(rewards)), key=lambda e: (e % samples, e // samples))[:count]

    def opening(i: int) -> str:
        if played is None:
            return prompts[of[i] // samples].text
        first = int(played.batch.offsets[i])
        return tokenizer.decode(played.batch.token_ids[first : first + int(prompt_lengths[i])])

    def turns(i: int) -> tuple[tuple[int, float], ...]:
        if spans is None:
            return ()
        mine = spans.sequence == i
        pieces = spans.row[mine] + 1 - int(prompt_lengths[i])
        return tuple(zip(pieces.tolist(), spans.advantage[mine].tolist(), strict=True))

    return [
        Sample(
            prompt=opening(i),
            response=tokenizer.decode(responses[i], skip_special_tokens=False),
            reference=prompts[episode // samples].answer,
            pieces=[tokenizer.decode([token], skip_special_tokens=False) for token in responses[i]],
            reward=float(rewards.reward[episode]),
            advantage=float(advantages[episode]),
            parts={n: float(scores[episode]) for n, scores in rewards.parts.items() if not np.isnan(scores[episode])},
            correct=bool(rewards.correct[episode]),
            tokens=len(responses[i]),
            finish_reason=groups.handle.finish_reasons[i],
            sequence=i,
            episode=episode,
            prompt_tokens=int(prompt_lengths[i]),
            turn_advantages=turns(i),
        )
        for episode in chosen
        for i in np.flatnonzero(of == episode).tolist()
    ]


def spelled(masked: MaskedTokens, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[tuple[str, int]]]:
    """The same with each token as it is written."""
    return {sign: [(tokenizer.decode([token]), count) for token, count in pairs] for sign, pairs in masked.items()}
