"""An engine in half precision does not round logits, as the trainer does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.rollout.engine import update_weights
from megatron_dppo.rollout.start import open_engine
from tests.rollout.conftest import CONFIG, KINDS, SAMPLING, requests
from tests.rollout.reference import other_weights
from tests.tiny import tiny_qwen3_moe


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "a tied head"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_likeliest_tokens_of_a_bfloat16_engine_are_told_apart(kind: str, tied: bool, tmp_path: Path) -> None:
    """bfloat16 has 128 numbers between 1 and 2: of logits that were rounded to it many are equal, and which tokens are
    the K likeliest is then chance. Before a weight sync and after one, and whatever config.json says of the head."""
    tiny_qwen3_moe(tmp_path, seed=1, tie_word_embeddings=tied)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dtype": "bfloat16"}))
    engine = open_engine(tmp_path, CONFIG.model_copy(update={"engine": kind, "dtype": "bfloat16"}))
    try:
        for version in (0, 1):
            if version:
                update_weights(engine, version, other_weights(tmp_path, 3).items(), bucket_mib=1)
            batch = engine.generate(requests(24, f"asked-{version}"), SAMPLING, training=True)
            likeliest = batch.topk_logp[batch.loss_mask]
            assert len(likeliest) > 200
            equal = (np.diff(likeliest, axis=1) == 0).mean()
            assert equal < 1e-3, f"{equal:.0%} of neighbours among the likeliest tokens are equally likely"
    finally:
        engine.close()
