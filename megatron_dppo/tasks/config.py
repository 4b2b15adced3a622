"""What a run is trained on."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from megatron_dppo.config.base import ConfigModel


class TaskConfig(ConfigModel):
    """Where prompts come from, how they are put to the model, and how a response becomes an answer."""

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    """Family of tasks. `reasoning-gym`: a procedural dataset of that library, with its own verifier as the reward."""
    dataset: str = "chain_sum"
    """Name of the dataset within the family."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own parameters, for example `{min_terms: 3, max_terms: 3}`; what is absent has the dataset's
    default."""
    seed: int = Field(default=0, ge=0)
    """Draws the questions and their order; it also decides which questions are held out, so a model that was trained
    on this task under another seed may have seen them."""
    train_size: int = Field(default=2048, ge=1)
    """Distinct training questions; one epoch."""
    held_out_size: int = Field(default=256, ge=1)
    """Distinct questions for evaluation; none of them is ever a training question."""
    prompt: str = "{question}"
    """The user's message, a Python format string over the dataset's `question` and `metadata`; for example
    `{metadata[expression]}`."""
    system_prompt: str | None = None
    """A system message before the user's; none by default."""
    chat_template: bool = True
    """Wrap the messages by the tokenizer's chat template, with the opening of the assistant's turn. If false, the
    system prompt and the message are tokenized as plain text (for base models)."""
    answer_pattern: str = r"\s*(?P<answer>\S.*?)\s*"
    """Regular expression that a whole response must match (`.` matches line breaks too). Its group `answer` goes to the
    verifier; a response that does not match is malformed and earns 0. By default any non-blank response is an answer;
    `.*<answer>(?P<answer>.*?)</answer>\\s*` wants tags."""

    @field_validator("parameters")
    @classmethod
    def _not_ours(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        for name in ("seed", "size"):
            if name in parameters:
                raise ValueError(f"{name!r} is not a parameter of the dataset here; set task.seed, task.train_size")
        return parameters

    @field_validator("answer_pattern")
    @classmethod
    def _has_answer_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groupindex
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if "answer" not in groups:
            raise ValueError("needs a group (?P<answer>...) around the answer")
        return pattern
