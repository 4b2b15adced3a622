"""An engine that met every shape before its first rollout answers as one that did not."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.serving.engine import ServedEngine
from megatron_dppo.rollout.vllm.warm_up import CACHES, keep_compiled, warm_up, waves
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


@pytest.mark.parametrize(("prompt", "tokens", "sequences"), [(1024, 8192, 256), (7, 100, 16), (1, 4, 3), (4096, 64, 2)])
def test_steps_of_every_size_are_met(prompt: int, tokens: int, sequences: int) -> None:
    config = RolloutConfig(max_prompt_tokens=prompt, max_num_batched_tokens=tokens, max_num_seqs=sequences)
    *prompts, decode = waves(config)
    totals = [sum(length for length, _ in wave) for wave in prompts]
    assert totals[0] == 1
    assert all(b > a for a, b in itertools.pairwise(totals))
    assert min(tokens, prompt * sequences) / 2.2 < totals[-1] <= tokens
    for wave in (*prompts, decode):
        assert len(wave) <= sequences
        assert all(1 <= length <= prompt and 1 <= count <= config.max_response_tokens for length, count in wave)
    under_way = [sum(count > step for _, count in decode) for step in range(max(count for _, count in decode))]
    assert under_way[0] == sequences
    assert under_way[-1] == 1
    assert all(a <= 2 * b + 1 for a, b in itertools.pairwise(under_way))


def test_what_is_compiled_is_kept_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in CACHES:
        monkeypatch.setenv(variable, "elsewhere")
    keep_compiled(None)
    assert {os.environ[variable] for variable in CACHES} == {"elsewhere"}
    keep_compiled(tmp_path / "kept")
    folders = [Path(os.environ[variable]) for variable in CACHES]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() and folder.parent == tmp_path / "kept" for folder in folders)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"rollout.compile_cache=.*file cannot be written where an engine starts"):
        keep_compiled(tmp_path / "file")


def test_the_folder_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RolloutConfig(compile_cache=Path("kept")).compile_cache == tmp_path / "kept"
