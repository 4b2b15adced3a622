"""The base of every configuration class, and a type that several use."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator


class ConfigModel(BaseModel):
    """Frozen, typed, keyword-only; unknown keys are errors. A docstring under each field says what it means."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    _from_environment: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    """Of the outermost section: the place of each value that holds one of the environment's, and what was written there
    (`${oc.env:NAME}`). See `config.load.recorded`."""

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, given: Any) -> Any:
        """No shell expands the `~` of `run.dir=~/runs`, and a folder of that name is nobody's wish, nor is the one that
        one stands in of `run.dir=$UNSET`; Python takes true for the number 1."""
        values = dict(given) if isinstance(given, Mapping) else {}
        for name, value in values.items():
            if name in cls.model_fields:
                values[name] = _meant(name, cls.model_fields[name].annotation, value)
        return values or given

    @model_validator(mode="after")
    def _in_64_bits(self) -> Self:
        """What libraries hold; Python's own whole numbers have no end."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, int) and not -(2**63) <= one < 2**63:
                    raise ValueError(f"{name}={str(one)[:20]}... is beyond what 64 bits hold")
        return self


def _meant(name: str, kind: Any, value: Any) -> Any:
    kinds = _alternatives(kind)
    if isinstance(value, str | Path) and Path in kinds:
        if value == "":
            raise ValueError(f"{name} is empty; name a file or folder")
        return at_home(value)
    if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
        raise ValueError(f"{name} is a number, not {str(value).lower()}")
    if isinstance(value, float) and bool in kinds and float not in kinds:
        raise ValueError(f"{name} is true or false, not {value}")
    if isinstance(value, int | float) and datetime.date in kinds:
        raise ValueError(f"{name} is a date, not {value}")
    parts = next((get_args(one) for one in kinds if get_origin(one) in (list, tuple)), ())
    if parts and isinstance(value, list | tuple):
        entries = parts[:1] if parts[-1] is Ellipsis else parts
        return [_meant(f"{name}.{at}", entries[at % len(entries)], item) for at, item in enumerate(value)]
    return value


def _alternatives(kind: Any) -> list[Any]:
    """Of which types a value may be: the members of a union, without what Annotated adds."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _alternatives(parts[0])
    return [one for part in parts for one in _alternatives(part)] if origin in (Union, UnionType) else [kind]


def at_home(path: str | Path) -> Path:
    """`path` with `~` and `~name` at its beginning as that home folder, where there is one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user: the name of a file
        return Path(path)


def where_it_is[P: (str, Path)](path: P) -> P:
    """Whole where there is such a file or folder; another name, such as one of the Hugging Face hub, stays."""
    found = at_home(path)
    return type(path)(found.absolute()) if os.path.exists(found) else path


Folder = Annotated[Path, AfterValidator(Path.absolute)]
"""Whole, so that every process means the same, and what a run writes of it is right in any folder."""


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if not -3e38 < bounds[0] < bounds[1] < 3e38:
        raise ValueError("needs two finite numbers, the smaller first")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""Two numbers that float32 can say, the smaller first."""

Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""As the generators of all libraries take it, also with a rank's number added."""

Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, bool | int | float) else value)]
"""Of a value in data: YAML reads `3` and `true` as what they look like."""


def _names_a_callable(path: str) -> str:
    if not re.fullmatch(r"(.+\.py|[^:]+):[A-Za-z_]\w*", path):  # a folder's name may have a colon, a module's not
        raise ValueError("must be package.module:name or path/to/file.py:name")
    return path


CallablePath = Annotated[str, AfterValidator(_names_a_callable)]
"""Of a function or class of the user's."""

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Of the environment; its value is read where the run is started."""
