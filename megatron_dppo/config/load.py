"""A YAML file and `a.b=c` overrides to a checked `Config`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from megatron_dppo.config.base import ConfigModel
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides` in order, check everything.

    Raises UserError naming the key, what is wrong with it and, for unknown keys, the nearest known one.
    """
    return build_config(Config, read_tree(path), overrides, where=str(path))


def read_tree(path: Path) -> dict[str, Any]:
    """The sections of a YAML file, unchecked. Raises UserError where it cannot be read."""
    if not path.is_file():
        raise UserError(f"config file {path} does not exist")
    try:
        tree = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"config file {path} cannot be read: {reason}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"config file {path} is not valid YAML: {_first_line(error)}") from error
    if not OmegaConf.is_dict(tree):
        raise UserError(f"config file {path} must hold sections (run:, model:, ...), found a {type(tree).__name__}")
    return OmegaConf.to_container(tree)  # type: ignore[return-value]  # a dict, checked above


def build_config[C: ConfigModel](kind: type[C], tree: dict[str, Any], overrides: Sequence[str], *, where: str) -> C:
    """A `kind` of the sections in `tree` with `overrides` applied. `where` names the tree in errors, UserErrors all."""
    for override in overrides:
        if "=" not in override or override.startswith(("=", "-")):
            raise UserError(f"override {override!r} must look like section.key=value")
    try:
        merged = OmegaConf.merge(OmegaConf.create(tree), OmegaConf.from_dotlist(list(overrides)))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"overrides {' '.join(overrides)} cannot be applied to {where}: {_first_line(error)}"
        ) from error
    try:
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"config key {error.full_key} is ???, to be filled in; set {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        key = error.full_key or where
        raise UserError(
            f"config key {key}: {_first_line(error)} (${{...}} stands for another key; as text write \\${{...}})"
        ) from error
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise UserError("; ".join(_explain(kind, item) for item in error.errors())) from error


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration, readable by `load_config`."""
    path.write_text(yaml.safe_dump(_escaped(config.model_dump(mode="json")), sort_keys=False), encoding="utf-8")


def _escaped(value: Any) -> Any:
    """With every `${` of a text written so that it does not stand for another key."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _explain(kind: type[BaseModel], error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown config key {key}{_nearest(kind, error['loc'])}"
    if error["type"] == "missing":
        return f"config key {key} is required; set {key}=... or put it in the config file"
    message = error["msg"].removeprefix("Value error, ")
    return f"config key {key}={error['input']!r}: {message}" if key else message


def _nearest(kind: type[BaseModel], location: tuple[Any, ...]) -> str:
    """The known key most like the last part of `location`, in the section it was written in."""
    section: Any = kind
    for part in location[:-1]:
        field = section.model_fields.get(part) if _is_model(section) else None
        section = (
            next((t for t in (field.annotation, *get_args(field.annotation)) if _is_model(t)), None) if field else None
        )
    known = list(section.model_fields) if _is_model(section) else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    prefix = ".".join(str(p) for p in location[:-1])
    if close:
        return f"; did you mean {prefix + '.' if prefix else ''}{close[0]}?"
    return f"; known keys{' of ' + prefix if prefix else ''}: {', '.join(known)}" if known else ""


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _first_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error).strip().splitlines()[0]
