"""Rewards by configuration: a list of kinds, each with a weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from megatron_dppo.config_base import Bounds, CallablePath, ConfigModel, Text, VariableName
from megatron_dppo.tasks.data.config import text_at
from megatron_dppo.tasks.rewards.patterns import compile_pattern
from megatron_dppo.tasks.workers.sandbox import Sandbox


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


_Values = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(_several)]


class _Reward(ConfigModel):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Under which it is logged (`reward/part/NAME`); the kind when absent. Names are distinct."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor in the sum that is trained on."""
    when: dict[str, _Values] = Field(default_factory=dict)
    """Only for questions whose row has one of these values in each of these fields, `{data_source: [gsm8k, math]}`
    (into nested values by dots); for all when absent. Others get nothing from it, and are not part of its mean."""

    def is_for(self, metadata: Mapping[str, Any]) -> bool:
        """Whether it scores answers to the question of this row."""
        return all(text_at(metadata, path) in texts for path, texts in self.when.items())

    @property
    def label(self) -> str:
        return self.name or self.kind  # type: ignore[attr-defined]  # every subclass has a kind


class VerifierReward(_Reward):
    """The task's own verdict: a reasoning-gym dataset's verifier. Runs in worker processes: some evaluate what the
    policy wrote."""

    kind: Literal["verifier"] = "verifier"
    sandbox: Sandbox = "full"
    """`full`: an answer is evaluated in a process of its own without network, children, files but its own folder, or a
    view of other processes; datasets that evaluate answers are refused where nothing can hold it (`megatron-dppo
    doctor` says). `none`: with the rights of the run's user, in an environment without secrets."""
    timeout_s: float = Field(default=10.0, gt=0)
    """After this the verifier is killed, and the answer earns 0."""


class MathVerifyReward(_Reward):
    """1 where the final answer equals the reference, else 0; see docs/data.md for what is an answer and what is equal.
    Runs in worker processes."""

    kind: Literal["math-verify"] = "math-verify"
    boxed_only: bool = False
    """Accept answers in `\\boxed{...}` only. Otherwise a response without a box gives what follows its last "answer
    is" or "Answer:", or else its last formula or number."""
    precision: int = Field(default=6, ge=1)
    """Significant digits that a decimal must have to stand for a number that it only rounds."""
    timeout_s: int = Field(default=5, ge=1)
    """For one answer; what does not stop by itself is killed two seconds later. An answer that runs out of time
    earns 0."""


class ExactMatchReward(_Reward):
    """1 where the answer is the reference, white space apart, else 0."""

    kind: Literal["exact-match"] = "exact-match"
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""


class FormatReward(_Reward):
    """1 where the whole response matches a pattern, else 0."""

    kind: Literal["format"] = "format"
    pattern: str
    """Regular expression for the whole response; `.` matches line breaks too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern


class OverlongReward(_Reward):
    """DAPO's soft punishment of long responses (arXiv 2503.14476, Eq. 13): 0 up to `L - buffer` tokens, then falling
    in a line to -1 at L tokens, and -1 beyond."""

    kind: Literal["overlong"] = "overlong"
    buffer_tokens: int = Field(ge=1)
    """Tokens before L over which the punishment grows; below L."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """L; `rollout.max_response_tokens` when absent."""


class PythonReward(_Reward):
    """A callable of yours. Runs in worker processes."""

    kind: Literal["python"] = "python"
    path: CallablePath
    """`package.module:callable` or `path/to/file.py:callable`. It is called as `f(question=..., reference=...,
    response=..., answer=..., metadata=...)`, `answer` being what `task.answer_pattern` found (None where it did not
    match), and returns a finite number. One with parameters of these names is also given `tokens`, the length of the
    response (None where a harness reported an answer), and `truncated`, whether it was cut off at its longest."""
    timeout_s: float = Field(default=10.0, gt=0)
    """After this the call is killed, and the answer earns 0."""
    bounds: Bounds = (-100.0, 100.0)
    """Least and greatest score. A score outside counts as an error and earns 0."""
    sandbox: Sandbox = "full"
    """`full`: each answer is scored in a process of its own, forked after the import, that can compute and read code
    and the folder the run was started in, and nothing else: no network, no processes or threads, no GPU, no secrets;
    what it prints is dropped, and what it keeps in variables is gone with it. `none`: for functions that need any of
    that, and do not evaluate what they are given: a process for many answers, with the rights of the run's user."""
    environment: tuple[VariableName, ...] = ()
    """Names of environment variables that the function sees besides those that programs need to run (PATH, HOME,
    PYTHONPATH, LANG, HF_HOME, CUDA_VISIBLE_DEVICES, ...): `[OPENAI_API_KEY]`, with `sandbox: none`."""


RewardConfig = Annotated[
    VerifierReward | MathVerifyReward | ExactMatchReward | FormatReward | OverlongReward | PythonReward,
    Field(discriminator="kind"),
]


def deciding(rewards: Iterable[RewardConfig], metadata: Mapping[str, Any]) -> RewardConfig | None:
    """The first that is for the question of a row: it decides what is correct and well-formed. None where none is, or
    where it cannot decide (a punishment)."""
    first = next((one for one in rewards if one.is_for(metadata)), None)
    return None if isinstance(first, OverlongReward) else first
