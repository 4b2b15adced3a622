from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.tasks.config import TaskConfig


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def sums() -> TaskConfig:
    """Three one-digit numbers, 4,000 questions in all, of which these sizes take most."""
    return TaskConfig(
        dataset="chain_sum",
        parameters={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        prompt="{metadata[expression]}",
        answer_pattern=r"(?P<answer>-?\d+)",
        train_size=1500,
        held_out_size=200,
    )
