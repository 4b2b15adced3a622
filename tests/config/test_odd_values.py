"""Every key of the configuration, taken from its classes, with values that somebody may type: each is refused by its
name, or kept as what it was meant to be, also in the file that a run leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from megatron_dppo.config.load import load_config, save_config
from megatron_dppo.config.schema import Config
from megatron_dppo.config_base import _alternatives
from megatron_dppo.errors import UserError
from megatron_dppo.preflight.rules import check_sections

ODD = (
    *("null", '""', "-1", "0", "1", "3", "0.5", "-0.0", "2.0", "1e308", "1e400", "1e-400", "1e-6", "'1e-6'", "'3'"),
    *("' 3'", "'3.0'", "9" * 23, "9" * 400, "9" * 5000, ".nan", "nan", ".inf", "-.inf", "inf", "true", "'true'", "off"),
    *("[]", "[1]", "[a, 2]", "{}", "{a: 1}", "é漢🙂", r'"a\0b"', r'"a\nb"', "'\udcff'", "/no/such/path", "2024-01-01"),
    *(
        "???",
        "${run.dir}",
        "${oc.env:HOME}",
        "${x}",
        "${oc.select:run}",
        "*",
        "!!int x",
        "x" * 5000,
        "[" * 3000,
        "%s {x}",
    ),
)
READ: dict[str, Any] = {
    "${run.dir}": "out",
    "${oc.select:run}": {},
    "${oc.env:HOME}": "/home/somebody",
    "1e308": 1e308,
    "1e-400": 0.0,
    "1e-6": 1e-6,
}
"""Of the odd values what PyYAML reads otherwise than OmegaConf."""
EACH = 7
"""Values that a key is tried with, other ones than the next: all keys with all values take minutes."""
BASE: dict[str, dict[str, Any]] = {
    "lora": {"lora": {}},
    "task.data": {"task": {"kind": "data", "data": {"path": "x"}}},
    "task.data.fields": {"task": {"kind": "data", "data": {"path": "x", "fields": {"question": "q", "answer": "a"}}}},
    "task.environment": {"task": {"kind": "environment", "environment": {"name": "a", "factory": "a:b"}}},
    "task.agent": {"task": {"kind": "agent", "agent": {"command": "x"}}},
    "algorithm.reference_kl": {"algorithm": {"reference_kl": {"coefficient": 0.1}}},
}
"""What a section needs to be there at all."""
ENTRIES: dict[str, dict[str, Any]] = {
    "task.rewards": {"format": {"pattern": "x"}, "overlong": {"buffer_tokens": 3}, "python": {"path": "a:b"}},
    "evaluation.sets": {"": {"name": "a", "data": {"path": "x"}}},
}
"""What the entries of a list need, by their kind."""


def keys(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each key, with the entry that it is of where it is a list's."""
    for name, field in section.model_fields.items():
        yield place + name, None
        for kind in _alternatives(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, f"{place}{name}.")
            for entry in entries(kind) if get_origin(kind) is tuple else ():
                word = entry.model_fields["kind"].default if "kind" in entry.model_fields else ""
                needs = ENTRIES[place + name].get(word, {}) | ({"kind": word} if word else {})
                yield from ((f"{place}{name}.0.{inner}", needs) for inner in entry.model_fields)


def entries(kind: Any) -> list[type[BaseModel]]:
    """The classes of a list's entries."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [entry for part in get_args(kind) for entry in entries(part)]


KEYS = list(keys(Config))


def put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    *sections, name = key.split(".")
    inner = tree
    for section in sections:
        inner[section] = dict(inner.get(section) or {})
        inner = inner[section]
    inner[name] = value
    return tree


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
    return config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", "/home/somebody")
    return tmp_path


@pytest.mark.parametrize("section", Config.model_fields)
def test_odd_values_are_refused_by_name_or_kept_as_they_are_meant(section: str, folder: Path) -> None:
    file, saved = folder / "c.yaml", folder / "saved.yaml"
    for number, (key, entry) in enumerate(KEYS):
        if key.split(".")[0] != section:
            continue
        base = next((BASE[one] for one in sorted(BASE, key=len, reverse=True) if key.startswith(f"{one}.")), {})
        for turn in range(EACH):
            odd = ODD[(EACH * number + turn) % len(ODD)]
            tree: dict[str, Any] = {"run": {"dir": "out"}, "model": {"path": "model"}, **base}
            list_key, _, name = key.partition(".0.") if entry is not None else (key, "", "")
            mark = "mark" if entry is None else [{name: "mark"} | {k: v for k, v in entry.items() if k != name}]
            overrides = []
            if turn % 2:
                word = yaml.safe_dump(mark, default_flow_style=True, width=1000).splitlines()[0]
                overrides = [f"{list_key}={word}".replace("mark", odd)]
            else:
                tree = put(tree, list_key, mark)
            text = yaml.safe_dump(tree).replace("mark", odd)
            file.write_bytes(text.encode(errors="surrogateescape"))
            try:
                config = load_config(file, overrides)
            except UserError as error:
                said = str(error).replace("[0]", ".0")  # as OmegaConf writes it
                above, _, last = key.rpartition(".")
                named = (rf"{re.escape(key)}\b", rf"config (section|key) {re.escape(above)}[:=].*\b{last}\b",
                         rf"config file {file} is not valid YAML", f"override {list_key}=")  # fmt: skip
                assert any(re.search(one, said) for one in named), (key, odd[:40], said)
                continue
            for _ in check_sections(config):
                pass
            kept = at(config, key)
            assert is_meant(odd, kept), (key, odd[:40], kept)
            save_config(config, saved)
            assert load_config(saved) == config, (key, odd[:40])


def is_meant(odd: str, kept: Any) -> bool:
    """Whether what was kept is what was typed, by the reader's rules: a number may be written as text or with a point,
    a truth value as 0 or 1, one word for a list of words."""
    meant = READ[odd] if odd in READ else yaml.safe_load(odd)
    if isinstance(kept, BaseModel | dict):
        return isinstance(meant, dict)
    if isinstance(kept, bool):
        return (meant in (True, False) and not isinstance(meant, float)) or meant == "true"
    if isinstance(kept, tuple):
        return list(kept) in (meant, str(meant).split())
    if isinstance(kept, int | float):
        return not isinstance(meant, bool) and meant is not None and float(meant) == kept
    return kept == meant or str(kept) == str(meant) or kept == Path(str(meant)).absolute()
