"""A reward function of the user's, found by its import path, for a worker process."""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict


@dataclass(frozen=True)
class CustomVerifier:
    """`path` is `package.module:callable` or `file.py:callable`, see `PythonReward`; modules and files are looked for
    in `folder` first."""

    path: str
    folder: str = field(default_factory=os.getcwd)

    evaluates = True
    """For all that is known of it."""

    @property
    def file(self) -> Path | None:
        name, _, _ = self.path.rpartition(":")
        return Path(self.folder, name).resolve() if name.endswith(".py") else None

    def prepare(self) -> None:
        """Raises UserError where there is no such callable."""
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        self._function()

    def _function(self) -> Callable[..., Any]:
        return load_callable(self.path, self.file)

    def __call__(self, item: Answered) -> Verdict:
        """A function that raises or returns no finite number gives no score; the response may be to blame, so that is
        counted."""
        function = self._function()
        try:
            score = function(
                question=item.question,
                reference=item.reference,
                response=item.response,
                answer=item.answer,
                metadata=dict(item.metadata),
            )
        except Exception as error:
            return Verdict(score=0.0, error=f"{self.path} raised {type(error).__name__}: {error}")
        if not isinstance(score, numbers.Real):
            said = f"{self.path} returned {score!r:.60} ({type(score).__name__}) for the question {item.question!r:.60}"
            return Verdict(score=0.0, error=f"{said}; it must return a number")
        if not math.isfinite(score):
            return Verdict(score=0.0, error=f"{self.path} returned {float(score)}")
        return Verdict(score=float(score))


_loaded: dict[str, Callable[..., Any]] = {}


def load_callable(path: str, file: Path | None) -> Callable[..., Any]:
    """The callable that `path` names, of a module or of `file`. Raises UserError with the reason where it cannot be
    had."""
    if path in _loaded:
        return _loaded[path]
    module_name, _, name = path.rpartition(":")
    try:
        if file is not None:
            spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"the reward {path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"the reward {path} cannot be used: {module_name} has no callable {name}")
    _loaded[path] = function
    return function
