"""Answers that a text ends: sampled by the piece, and cut where the text is whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megatron_dppo.agents.drawing import PIECE, draw
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from tests.agents.recorder import Recorder
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
A = TOKENIZER.encode("a", add_special_tokens=False)[0]
EOS = 1
REQUEST = GenerationRequest(request_id="r", prompt_ids=np.full(10, A, dtype=np.int32), seed=5, affinity="s")


def spell(ids: Sequence[int] | np.ndarray) -> str:
    return str(TOKENIZER.decode([int(n) for n in ids], skip_special_tokens=True))


def drawn(
    text: str, stop: Sequence[str], *, most: int = 2000, most_prompt: int = 5000
) -> tuple[RolloutBatch, Recorder]:
    """The answer of a model that would say `text`, then end."""
    whole = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    recorder = Recorder(lambda rng, request: whole[len(request.prompt_ids) - 10 :], [EOS])
    sampling = SamplingConfig(max_tokens=most, top_k_logprobs=2)
    return draw(recorder, REQUEST, sampling, training=True, most_prompt=most_prompt, stop=stop, spell=spell), recorder


@pytest.mark.parametrize(
    ("text", "stop", "ends"),
    [
        ("a" * 600 + "STOP" + "b" * 600, ["STOP"], "STOP"),
        ("a" * (PIECE - 2) + "STOP and more", ["STOP"], "STOP"),  # over the end of a piece
        ("a" * 300 + "é🦊" + "b" * 50, ["🦊"], "🦊"),
        ("a" * 300 + "é" + "b" * 50, ["zz", "é", "b"], "é"),
        ("STOP", ["STOP"], "STOP"),
        ("abc", ["c"], "c"),
    ],
)
def test_an_answer_ends_with_the_token_in_which_the_text_is_whole(text: str, stop: list[str], ends: str) -> None:
    batch, recorder = drawn(text, stop)
    kept = text[: text.index(ends) + len(ends)]
    assert spell(batch.response_ids(0)) == kept
    assert (batch.finish_reasons, batch.request_ids) == (("stop",), ("r",))
    count = len(kept.encode()) // PIECE + bool(len(kept.encode()) % PIECE)
    assert sorted(recorder.given) == sorted(["r", *(f"r.{n}" for n in range(1, count))])
    assert len(set(recorder.seeds.values())) == count
    for piece in recorder.given.values():
        rows = slice(int(piece.prompt_lengths[0]), min(len(piece.token_ids), len(batch.token_ids)))
        for column in ("token_ids", "mu_logp", "topk_ids", "topk_logp", "weight_versions"):
            assert np.array_equal(getattr(batch, column)[rows], getattr(piece, column)[rows]), column
    assert batch.loss_mask.tolist() == [False] * 10 + [True] * (len(batch.token_ids) - 10)


def test_an_answer_without_the_text_is_whole() -> None:
    batch, recorder = drawn("a" * 600, ["b"])
    assert len(batch.response_ids(0)) == 601
    assert (batch.finish_reasons, len(recorder.given)) == (("stop",), 3)
    batch, recorder = drawn("a" * 600, ["b"], most=PIECE)
    assert (batch.finish_reasons, len(batch.response_ids(0))) == (("length",), PIECE)
    batch, recorder = drawn("a" * 600, ["b"], most=PIECE + 1)
    assert (batch.finish_reasons, len(batch.response_ids(0))) == (("length",), PIECE + 1)
    assert len(drawn("a" * 600, [])[1].given) == 1


def test_the_last_piece_is_as_long_as_engines_want_it() -> None:
    """A prompt of an engine has a limit of its own, beside that of a whole sequence."""
    batch, recorder = drawn("a" * 1500, ["b"], most_prompt=10 + 2 * PIECE)
    assert len(batch.response_ids(0)) == 1501
    prompts = sorted(int(piece.prompt_lengths[0]) for piece in recorder.given.values())
    assert prompts == [10, 10 + PIECE, 10 + 2 * PIECE]
