"""TokenStats as the output of real Megatron-Core models under its DDP, with overlapped gradient reduction and parameter
gather and the distributed optimizer, against the same training through Megatron-Core's own output layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dppo.vocab_parallel import TokenStatsRequest, token_stats_processor
from tests.distributed import run_ranks
from tests.tiny import tiny_model
from tests.vocab_parallel.megatron_ranks import hook_equals_own_output_layer

SEQUENCE = {"tensor": 2, "sequence_parallel": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Two layers, tied and untied."""
    folder = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        tiny_model("qwen3", folder / str(tied), num_hidden_layers=2, tie_word_embeddings=tied)
    return {tied: folder / str(tied) for tied in (False, True)}


def test_two_ranks(models: dict[bool, Path]) -> None:
    """Tied at PP1 with data parallelism (one rank without rows), tied at PP2, untied with and without SP."""
    cases = [
        (models[True], {}),
        (models[True], {"pipeline": 2}),
        (models[True], SEQUENCE),
        (models[False], {"tensor": 2}),
        (models[False], SEQUENCE),
    ]
    run_ranks(hook_equals_own_output_layer, 2, cases)


def test_four_ranks(models: dict[bool, Path]) -> None:
    """TP2 x DP2 and PP2 x TP2 with sequence parallelism, PP2 x DP2; tied weights."""
    cases = [
        (models[True], SEQUENCE),
        (models[True], SEQUENCE | {"pipeline": 2}),
        (models[True], {"pipeline": 2}),
    ]
    run_ranks(hook_equals_own_output_layer, 4, cases)


@pytest.mark.parametrize(
    ("layer", "config", "message"),
    [
        ({"bias": torch.zeros(4)}, {}, "bias-free LM head"),
        ({}, {"mtp_num_layers": 1}, "multi-token prediction must be off"),
        ({}, {"use_mup": True}, "use_mup=True scales the logits"),
    ],
)
def test_models_it_does_not_fit_are_refused(layer: dict[str, object], config: dict[str, object], message: str) -> None:
    request = TokenStatsRequest(token_ids=torch.zeros(2, dtype=torch.long), vocab_size=4, group=None)
    with pytest.raises(ValueError, match=message):
        token_stats_processor(
            hidden_states=torch.zeros(2, 1, 3),
            output_layer=SimpleNamespace(**({"bias": None, "weight": torch.zeros(4, 3)} | layer)),
            output_weight=None,
            config=SimpleNamespace(**({"mtp_num_layers": None, "use_mup": False} | config)),
            context=request,
        )
