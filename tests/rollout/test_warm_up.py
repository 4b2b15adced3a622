"""An engine that met every shape before its first rollout answers as one that did not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.vllm.warm_up import CACHES, keep_compiled, sizes, warm_up, waves
from tests.rollout.conftest import SAMPLING, Served, only_vllm, requests


@only_vllm
def test_answers_are_the_same_afterwards(served_mixed: Served) -> None:
    engine = served_mixed.engine
    assert isinstance(engine, ServedEngine)
    before = engine.generate(requests(12, "before"), SAMPLING, training=True)
    engine._loop.run(warm_up(engine.core, engine.facts, engine.config))
    after = engine.generate(requests(12, "before"), SAMPLING, training=True)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    np.testing.assert_allclose(before.mu_logp, after.mu_logp, atol=1e-5)


@pytest.mark.parametrize("answer", [2, 16, 64])
@pytest.mark.parametrize(("prompt", "tokens", "sequences"), [(1024, 8192, 256), (7, 100, 16), (1, 4, 3), (4096, 64, 2)])
def test_steps_of_every_size_are_met(prompt: int, tokens: int, sequences: int, answer: int) -> None:
    config = RolloutConfig(
        max_prompt_tokens=prompt, max_num_batched_tokens=tokens, max_num_seqs=sequences, max_response_tokens=answer
    )
    found, totals = list(waves(config)), sizes(min(tokens, prompt * sequences))
    prompts, decode = found[: len(totals)], found[len(totals) :]
    assert [sum(length for length, _ in wave) for wave in prompts] == totals
    for wave in found:
        assert len(wave) <= sequences
        assert all(1 <= length <= prompt and 1 <= count <= answer for length, count in wave)
    under_way = [sum(count > step for _, count in w) for w in decode for step in range(max(count for _, count in w))]
    assert sorted(under_way) == [size for size in sizes(sequences) for _ in range(2)]


def test_sizes_are_those_that_kernels_tell_apart() -> None:
    assert sizes(20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 20]
    # Of published tables of fused experts' kernels (E=128, N=768, H200), the nearest of which is taken.
    tuned = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
    for odd in (0, 1):
        met = [size for size in sizes(8192) if size % 2 == odd]
        assert {min(tuned, key=lambda key: abs(key - size)) for size in met} >= set(tuned) - {1 + odd}


def test_what_is_compiled_is_kept_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in CACHES:
        monkeypatch.setenv(variable, "elsewhere")
    keep_compiled(None)
    assert {os.environ[variable] for variable in CACHES} == {"elsewhere"}
    keep_compiled(tmp_path / "kept")
    folders = [Path(os.environ[variable]) for variable in CACHES]
    assert len(set(folders)) == len(CACHES)
    assert all(folder.is_dir() and folder.parent == tmp_path / "kept" for folder in folders)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"rollout.compile_cache=.*file, where an engine starts, cannot be written"):
        keep_compiled(tmp_path / "file")
