"""Numbers of a config.json that are none, or not of their kind: for every family and every field."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.families import decoder
from megatron_dppo.models.family import families, text_fields
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from tests.distributed import run_ranks
from tests.models.hub_configs import LOADED
from tests.models.public_configs import CONFIGS
from tests.models.test_hub_configs import cut, logit_errors, publish

ODD = ['"4"', '""', "true", "null", "[4]", '{"a": 1}', "-1", "0", "2.5", "1e400", "-1e400", "NaN", "1" + 400 * "0"]
"""As they stand in the file."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
PUBLISHED = {config["model_type"]: config for config in (*LOADED.values(), *CONFIGS.values())}
PUBLISHED["qwen3"] = PUBLISHED["qwen3"] | {
    "rope_scaling": YARN | {"attention_factor": 1.1386294361119891, "attn_factor": 1.0}
}
"""Of each model type."""


def numbers(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where numbers are in a file, and where transformers has one for a field that its family reads."""
    read = decoder.READS | families()[config["model_type"]].reads
    resolved = resolve_hf_config(config).config
    fields = text_fields(config)
    before = () if fields is config else ("text_config",)
    for name in sorted(set(fields) | {name for name in read if isinstance(getattr(resolved, name, None), int | float)}):
        value = fields.get(name, 0)
        if isinstance(value, dict):
            yield from ((*before, name, inner) for inner, number in value.items() if isinstance(number, int | float))
        elif name == "rope_scaling" or isinstance(value, int | float):
            yield *before, name


def written(config: dict[str, Any], path: tuple[str, ...], odd: str) -> str:
    """The file with `odd` there."""
    result = copy.deepcopy(config)
    place = result
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "@"
    return json.dumps(result).replace('"@"', odd)


def loads(folder: Path, config: dict[str, Any], path: tuple[str, ...], odd: str) -> bool:
    """Or is refused in one line that names the file and the field."""
    folder.joinpath("config.json").write_text(written(config, path, odd))
    try:
        load_hf_config(folder)
    except UserError as refusal:
        said = str(refusal)
        assert "\n" not in said
        assert str(folder / "config.json") in said
        assert path[-1] in said, f"{path} = {odd}: {said}"
        return False
    return True


def test_every_family_is_published() -> None:
    assert set(PUBLISHED) == set(families())


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_each_number_may_be_odd(model_type: str, tmp_path: Path) -> None:
    """Of each number one odd value, another for every field."""
    found = list(numbers(PUBLISHED[model_type]))
    assert len(found) > 15
    for path, odd in zip(found, itertools.cycle(ODD), strict=False):
        loads(tmp_path, PUBLISHED[model_type], path, odd)


@pytest.mark.full
@pytest.mark.parametrize("model_type", PUBLISHED)
def test_every_number_may_be_anything(model_type: str, tmp_path: Path) -> None:
    """What loads is computed as transformers computes it, but for the rounding of float32 (3e-4 after a delta rule)."""
    config, folders = PUBLISHED[model_type], {}
    wrong: dict[str, Any] = {}
    small = cut(config)
    for number, (path, odd) in enumerate(itertools.product(numbers(config), ODD)):
        if loads(tmp_path, config, path, odd) and not path[-1].endswith("_token_id"):
            folder = tmp_path / str(number)
            try:
                publish(folder, json.loads(written(small, path, odd)), number)
            except Exception as error:
                wrong[f"{'.'.join(path)} = {odd}"] = f"transformers: {error}"
            else:
                folders[f"{'.'.join(path)} = {odd}"] = folder
    errors = run_ranks(logit_errors, 1, folders)[0]
    wrong |= {name: error for name, error in errors.items() if isinstance(error, str) or not error < 1e-3}
    assert not wrong
