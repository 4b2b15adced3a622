"""A YAML file and `a.b=c` overrides to a checked `Config`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import BaseModel, ValidationError

from megatron_dppo.checkpoint.atomic import replace_synced
from megatron_dppo.config.schema import Config
from megatron_dppo.config_base import ConfigModel
from megatron_dppo.errors import UserError, did_you_mean, file_errors, first_line, listed, of_file
from megatron_dppo.launch.secrets import confide, redact, secret_variables


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides` in order, check everything.

    `evaluation={every: 3}` changes what it names of a section. Where entries are free, `task.parameters={min_terms: 2}`
    takes the place of the mapping that was there, and `task.parameters.min_terms=2` changes one entry. Raises UserError
    naming the key, what is wrong with it and, for unknown keys, the nearest known one.
    """
    return build_config(Config, read_tree(path), overrides, where=str(path))


def read_tree(path: Path) -> dict[str, Any]:
    """The sections of a YAML file, unchecked. Raises UserError where it cannot be read."""
    if not path.is_file():
        raise UserError(f"config file {path} does not exist")
    try:
        tree = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise of_file(error, f"config file {path} cannot be read: {reason}") from error
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise UserError(f"config file {path} is not valid YAML: {_reason(error)}") from error
    if not OmegaConf.is_dict(tree):
        raise UserError(f"config file {path} must hold sections (run:, model:, ...), found a {type(tree).__name__}")
    return OmegaConf.to_container(tree)  # type: ignore[return-value]  # a dict, checked above


def section(tree: dict[str, Any], name: str, *, where: str) -> dict[str, Any]:
    """A section of `read_tree` to be changed, {} where it is absent or empty. Raises UserError where it is none."""
    found = tree.get(name)
    if found is not None and not isinstance(found, dict):
        raise UserError(f"config key {name} of {where} must be a section with keys of its own, not {found!r:.60}")
    return dict(found or {})


def build_config[C: ConfigModel](kind: type[C], tree: dict[str, Any], overrides: Sequence[str], *, where: str) -> C:
    """A `kind` of the sections in `tree` with `overrides` applied. `where` names the tree in errors, UserErrors all."""
    merged: Any = OmegaConf.create(tree)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or override.startswith(("=", "-")):
            raise UserError(f"override {override!r} must look like section.key=value")
        if value.strip() == "???":  # merged, it would change nothing
            raise UserError(f"override {override}: ??? is what a config file has to be filled in; give a value")
        try:
            given = OmegaConf.from_dotlist([_whole(key, value)])
            if value.lstrip().startswith("{"):
                _put(merged, kind, key, OmegaConf.to_container(OmegaConf.select(given, key)))
            else:
                with _merging(override):
                    merged = OmegaConf.unsafe_merge(merged, given)  # without a copy of the tree for each override
        except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:  # `!!int x` is a ValueError
            raise UserError(f"override {_short(override)} cannot be applied to {where}: {_reason(error)}") from error
    try:
        plain: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        with _environment_as_written():
            written = OmegaConf.to_container(merged, resolve=True)
    except RecursionError:
        places = [place for place, _ in _holding(OmegaConf.to_container(merged), re.compile(r"\$\{"))]
        keys = ", ".join(".".join(map(str, place)) for place in places)
        raise UserError(f"config key {keys}: its ${{...}} stands for what holds it; write the value there") from None
    except MissingMandatoryValue as error:
        raise UserError(f"config key {error.full_key} is ???, to be filled in; set {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        key = error.full_key or where
        if absent := re.search(r"Environment variable '(.*?)' not found", str(error)):
            raise UserError(f"config key {key}: the environment variable {absent[1]} is not set; set it") from error
        raise UserError(
            f"config key {key}: {_reason(error)} (${{...}} stands for another key; as text write \\${{...}})"
        ) from error
    for place, _ in _holding(plain, re.compile(f"[{_OPEN}{_CLOSE}]")):
        raise UserError(f"config key {'.'.join(map(str, place))}: holds a control character; remove it")
    for place, value in _leaves(plain):
        if isinstance(value, int) and value.bit_length() > 14_000:  # Python prints no more than 4300 digits
            raise UserError(f"config key {'.'.join(map(str, place))}: is a number beyond what 64 bits hold")
    for name, (idle, instead) in REMOVED.items():  # a run's own config.yaml has every setting of its time
        of, _, key = name.rpartition(".")
        found = plain.get(of)
        if isinstance(found, dict) and key in found and found.pop(key) != idle:
            raise UserError(f"config key {name} is gone; {instead}")
    marked = dict(_holding(written, re.compile(_OPEN)))
    confide(name for place, text in marked.items() if place not in _SHOWN for name in _ENV.findall(text))
    try:
        config = kind.model_validate(plain)
    except ValidationError as error:
        wrong = [_explain(kind, item) for item in error.errors()]  # of a file that is another's all of it
        raise UserError(listed(wrong, 6, between="; ")) from error
    config._from_environment.update(marked)
    return config


def _whole(key: str, value: str) -> str:
    """The override, in quotes where its value is text with a `#`: YAML would take the rest for a comment."""
    text = re.match(r"(?!\s*['\"{\[])(.*?)(?<!\S)#", value, re.DOTALL)
    if text:
        before: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text[1]}"]))
        if isinstance(before["x"], str) or not text[1].strip():  # not `null # comment`, which is YAML's null
            value = json.dumps(value, ensure_ascii=False)
    return f"{key}={value}"


@contextmanager
def _merging(override: str) -> Iterator[None]:
    try:
        yield
    except TypeError as error:  # what OmegaConf raises for a list in place of a section, or the other way round
        raise UserError(
            f"override {override}: a list and a section do not merge; give a section as {{...}}, a list as [...]"
        ) from error


def _put(tree: Any, kind: type[BaseModel], key: str, value: Any) -> None:
    """Set `key` of `tree`: of a section what `value` names, of anything else, a free mapping included, all."""
    model: Any = kind
    for name in key.split("."):
        field = model.model_fields.get(name) if model else None
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next(filter(_is_model, kinds), None)
    inner = value if model and isinstance(value, dict) else None
    with _merging(key):
        OmegaConf.update(tree, key, value if inner is None else {}, merge=inner is not None)
    for name, item in (inner or {}).items():
        _put(tree, kind, f"{key}.{name}", item)


def save_config(config: Config, path: Path) -> None:
    """Write the configuration, readable by `load_config`, without secrets (see `recorded`) and without what of a
    rollout follows from other settings, which may be overridden where it is read. Raises UserError where it cannot be
    written; what was there is there then."""
    tree = recorded(config)
    for name in {"top_k_logprobs", "router_replay"} - config.rollout.model_fields_set:
        del tree["rollout"][name]
    # Not PyYAML's own: what OmegaConf reads as a number, '1e-6', that one writes without quotes.
    with file_errors(f"{path}: cannot write"):
        replace_synced(path, OmegaConf.to_yaml(OmegaConf.create(tree)))


def recorded(config: ConfigModel) -> dict[str, Any]:
    """What may be kept of a configuration, as a tree for YAML: other keys' values put in, but what came from the
    environment as it was written, to be resolved again. A secret that was typed in place of its variable's name is
    written by that name, and what else looks like a secret is hidden."""
    secrets = sorted(secret_variables().items(), key=lambda item: len(item[1]), reverse=True)

    def text(value: str) -> str:
        for name, secret in secrets:
            value = value.replace(secret, f"{_OPEN}oc.env:{name}{_CLOSE}")
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", redact(value))  # a `${` of a text does not stand for another key
        return value.replace(_OPEN, "${").replace(_CLOSE, "}")

    def tree(value: Any, place: tuple[str | int, ...]) -> Any:
        value = config._from_environment.get(place, value)
        if isinstance(value, dict):
            return {key: tree(item, (*place, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [tree(item, (*place, number)) for number, item in enumerate(value)]
        return text(value) if isinstance(value, str) else value

    return tree(config.model_dump(mode="json"), ())


REMOVED = {
    "trainer.engine_weight_noise": (
        0.0,
        "noise on an engine's weights is an engine now: rollout.engine=examples/noisy_engine.py:noise_10000_seed_3",
    )
}
"""Settings that there were: the value that did nothing, and what takes the place of others."""
_OPEN, _CLOSE = "\0", "\1"
"""Around what is to become `${...}`."""
_ENV = re.compile(f"{_OPEN}oc\\.env:([^,{_CLOSE}]+)")
_SHOWN = (("run", "name"), ("tracking", "project"))
"""Whatever is there is there to be shown."""


@contextmanager
def _environment_as_written() -> Iterator[None]:
    """Inside, a value of the environment is resolved to what was written in its place, marked."""

    def env(name: str, *default: Any) -> str:
        given = ("null" if value is None else json.dumps(str(value)) for value in default)
        return f"{_OPEN}oc.env:{','.join([name, *given])}{_CLOSE}"

    def decode(value: Any, _parent_: Any, _node_: Any) -> Any:
        if isinstance(value, str) and _OPEN in value:
            return f"{_OPEN}oc.decode:{value}{_CLOSE}"
        return oc.decode(value, _parent_, _node_)

    try:
        OmegaConf.register_resolver("oc.env", env, replace=True)
        OmegaConf.register_resolver("oc.decode", decode, replace=True)
        yield
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True)
        OmegaConf.register_resolver("oc.decode", oc.decode, replace=True)


def _holding(tree: Any, what: re.Pattern[str]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each text of a tree that holds `what`, with its place."""
    return ((place, leaf) for place, leaf in _leaves(tree) if isinstance(leaf, str) and what.search(leaf))


def _leaves(tree: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each value of a tree that holds no others, with its place."""
    if not isinstance(tree, dict | list):
        yield place, tree
        return
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(item, (*place, key))


_PLAIN = {
    "tuple_type": "must be a list, [...]",
    "dict_type": "must be a mapping, {name: value}",
    "model_attributes_type": "must be a section, {key: value}",
    "path_type": "must be a file or folder",
    "string_type": "must be text; put it in quotes (in a shell twice: 'a.b=\"...\"')",
}
"""What is said in place of pydantic's words, which are Python's."""


def _explain(kind: type[BaseModel], error: Any) -> str:
    key, sections = _place(kind, error["loc"])
    given = _short(repr(error["input"]))
    if error["type"] == "extra_forbidden":
        return f"unknown config key {key}{_nearest(key, sections)}"
    if error["type"] == "missing":
        return f"config key {key} is required; set {key}=... or put it in the config file"
    if error["type"] == "model_type":
        return f"config key {key}={given}: is a section; give it settings, or leave it out"
    if error["type"] == "union_tag_not_found":
        kinds = ", ".join(map(str, map(_tag, sections)))
        return f"config key {key}={given}: has no kind; set kind to one of {kinds}"
    message = _PLAIN.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] == "value_error" and isinstance(error["input"], dict):  # a section's own check, which names keys
        return f"config section {key}: {message}" if key else message
    return f"config key {key}={given}: {message}" if key else message


def _short(text: str) -> str:
    text = redact(text)  # which knows no secret by a part of it
    return text if len(text) <= 200 else f"{text[:197]}..."


def _nearest(key: str, sections: list[type[BaseModel]]) -> str:
    """The known key most like the last part of `key`, in the section it was written in."""
    section, dot, name = key.rpartition(".")
    known = [field for one in sections for field in one.model_fields]
    if hint := did_you_mean(name, known, prefix=section + dot):
        return hint
    of = f" of {section}" if section else ""
    return f"; known keys{of}: {', '.join(known)}" if known else ""


def _place(kind: type[BaseModel], location: tuple[Any, ...]) -> tuple[str, list[type[BaseModel]]]:
    """A location as one writes it, and the sections that its last part may stand in. Of an entry that may be of several
    kinds pydantic has the kind in its location too."""
    sections, inside, written = [kind], [kind], []
    for part in location:
        if chosen := [one for one in inside if _tag(one) == part]:
            inside = chosen
            continue
        sections = inside
        if isinstance(part, str):
            fields = [model.model_fields[part].annotation for model in sections if part in model.model_fields]
            inside = [one for annotation in fields for one in sections_of(annotation)]
        written.append(str(part))
    return ".".join(written), sections


def sections_of(kind: Any) -> list[type[BaseModel]]:
    """Those that a value of this type is or holds."""
    return [kind] if _is_model(kind) else [one for part in get_args(kind) for one in sections_of(part)]


def _tag(section: type[BaseModel]) -> Any:
    """By which pydantic knows one of several kinds."""
    return section.model_fields["kind"].default if "kind" in section.model_fields else None


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return first_line(error)
