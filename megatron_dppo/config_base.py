"""The base of every configuration class, and a type that several use."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr


class ConfigModel(BaseModel):
    """Frozen, typed, keyword-only; unknown keys are errors. A docstring under each field says what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    _from_environment: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    """Of the outermost section: the place of each value that holds one of the environment's, and what was written there
    (`${oc.env:NAME}`). See `config.load.recorded`."""


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if not -3e38 < bounds[0] < bounds[1] < 3e38:
        raise ValueError("needs two finite numbers, the smaller first")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""Two numbers that float32 can say, the smaller first."""

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Of the environment; its value is read where the run is started."""
