"""Every kind of rotary scaling against transformers, in packed sequences longer than the original context."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.models.packed_logits import packed_logits
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.tiny import VOCAB_SIZE, tiny_model

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    "yarn of half a head": {
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32},
        "partial_rotary_factor": 0.5,
    },
}
LENGTHS = [90, 7, 33]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], torch.Tensor]:
    ids = torch.randint(0, VOCAB_SIZE, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    paths = {}
    for kind, parameters in KINDS.items():
        path = tmp_path_factory.mktemp("rope") / kind
        family = "glm4_moe" if "partial_rotary_factor" in parameters else "qwen3"
        model = tiny_model(family, path, rope_parameters=parameters, num_hidden_layers=2, max_position_embeddings=128)
        with torch.no_grad():
            logits = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
        torch.save({"ids": ids, "logits": logits}, path / "reference.pt")
        paths[kind] = path
    return paths, ids


def logit_errors(rank: int, paths: dict[str, Path]) -> dict[str, float]:
    errors = {}
    for kind, path in paths.items():
        chunks, _, _ = build_from(path, {})
        reference = torch.load(path / "reference.pt", weights_only=True)
        (logits,) = packed_logits(chunks, [(reference["ids"], LENGTHS)])
        errors[kind] = (logits[:, :VOCAB_SIZE] - reference["logits"]).abs().max().item()
    return errors


def test_logits_equal_transformers_for_every_kind(models: tuple[dict[str, Path], torch.Tensor]) -> None:
    paths, _ = models
    logits = [torch.load(path / "reference.pt", weights_only=True)["logits"] for path in paths.values()]
    assert (logits[0] - logits[2]).abs().max() > 0.1  # the kinds differ, so that ignoring one would show
    errors = run_ranks(logit_errors, 1, paths)[0]
    assert set(errors) == set(KINDS)
    assert max(errors.values()) < 1e-4, errors


LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [{"rope_type": "longrope", "factor": 2.0} | LONGROPE, {"rope_type": "dynamic", "factor": 2.0}],
    ids=lambda parameters: parameters["rope_type"],
)
def test_other_kinds_are_refused(tmp_path: Path, parameters: dict[str, Any]) -> None:
    tiny_model("qwen3", tmp_path, rope_parameters=parameters | {"rope_theta": 1e4}, num_hidden_layers=1)
    with pytest.raises(UserError, match=parameters["rope_type"]):
        load_hf_config(tmp_path)
