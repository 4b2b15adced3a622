"""From a question to the token ids the engine gets."""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2 import meta
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from megatron_dppo.errors import UserError, first_line
from megatron_dppo.tasks.config import TaskConfig

Messages = Sequence[Mapping[str, str]]


def user_message(config: TaskConfig, question: str, metadata: Mapping[str, Any]) -> str:
    """Fill `config.prompt`. Raises UserError where the template asks for what the dataset does not give, or where what
    comes out is blank."""
    try:
        message = _Template().format(config.prompt, question=question, metadata=metadata)
    except Exception as error:  # what a row holds decides which formats and parts it has
        known = ", ".join(sorted(metadata))
        raise UserError(
            f"task.prompt={config.prompt!r} cannot be filled ({type(error).__name__}: {error}); it may use "
            f"{{question}} and {{metadata[...]}} with {known}"
        ) from error
    if not message.strip():
        raise UserError(f"task.prompt={config.prompt!r} gives a blank message; leave the row out or fill it")
    return message


class _Template(string.Formatter):
    """`str.format`, which would write the word None for a null."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise ValueError("what it shows is null")
        return str(super().format_field(value, format_spec))


def with_system_prompt(config: TaskConfig, messages: Messages) -> list[dict[str, str]]:
    """`messages`, after the system prompt of the configuration; it replaces one that they bring along."""
    if config.system_prompt is None:
        return [dict(message) for message in messages]
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": config.system_prompt}, *(dict(message) for message in rest)]


def encode_prompt(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, messages: str | Messages
) -> tuple[np.ndarray, str]:
    """`(ids [tokens] int32, the text they spell)` of a user message, or of messages that end with the user's, up to
    where the response starts. Without chat template the contents are lines of plain text. What spells a special token
    in a message stays text.

    Raises UserError for a chat template that is missing, raises, or leaves out the opening of the assistant's turn, and
    for text that is no Unicode.
    """
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    complete = [
        {"role": message["role"], "content": split_special(tokenizer, message["content"])}
        for message in with_system_prompt(config, given)
    ]
    if not config.chat_template:
        text = "\n".join(message["content"] for message in complete)
        return encode_text(tokenizer, text, in_front=True), text.replace(_SPLIT, "")
    if tokenizer.chat_template is None:
        raise UserError(
            f"task.chat_template is true, but the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat "
            "template; set task.chat_template=false or use a model that has one"
        )
    _check_template(tokenizer, json.dumps(config.chat_template_kwargs))
    text = render(tokenizer, complete, date=config.date, given=config.chat_template_kwargs)
    # The template writes whatever special tokens belong in front, so the tokenizer must not add its own.
    return encode_text(tokenizer, text), text.replace(_SPLIT, "")


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    date: datetime.date | None = None,
    opening: bool = True,
    given: Mapping[str, Any] | None = None,
) -> str:
    """The chat template on `messages` and whatever else it is `given`, `opening` the assistant's turn; a clock that it
    asks stands at the beginning of `date` (today). Raises UserError with the template's reason."""
    now = datetime.datetime.combine(date or datetime.date.today(), datetime.time())
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opening, "strftime_now": now.strftime}
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], **how, **(given or {})))
    except Exception as error:  # a template is a program: it raises what it likes
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the tokenizer's chat template refuses messages of {roles}: {first_line(error)}; change them, set "
            "task.chat_template=false or use another template"
        ) from error


_SPLIT = "\ue5ca"
"""A character for private use, put where the text of a special token is to be cut."""


def split_special(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """`content` with a mark inside of everything that spells a control token; `encode_text` cuts there."""
    content = content.replace(_SPLIT, "")
    for token in _special_tokens(tokenizer):
        if len(token) > 1 and token in content:
            content = content.replace(token, token[0] + _SPLIT + token[1:])
    return content


_CONTROL = re.compile(r"<[|｜][^|｜]+[|｜]>")
"""How control tokens are written. DeepSeek's tokenizer does not call <｜User｜> special."""


def is_control(token: AddedToken) -> bool:
    """Whether a token of the tokenizer's own may come from nobody's text."""
    return token.special or _CONTROL.fullmatch(token.content) is not None


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if is_control(token))


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    in_front: bool = False,
    continues: bool = False,
    mark: str = _SPLIT,
) -> np.ndarray:
    """Token ids int32 of `text`, cut at every `mark` (where `split_special` put it); `in_front` after what the
    tokenizer puts before a text of its own accord, or as what `continues` a text. Raises UserError for text that is no
    Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the prompt holds half of a surrogate pair; write the whole character") from None
    first, *rest = text.split(mark)
    if continues:
        begin = _continued(tokenizer, first)
    else:
        begin = tokenizer.encode(first, add_special_tokens=in_front)
    # The response goes on where the text ends: a tokenizer that closes every text would end it there.
    if in_front and begin and begin[-1] == tokenizer.eos_token_id and not first.endswith(str(tokenizer.eos_token)):
        begin = begin[:-1]
    parts = [begin, *(_continued(tokenizer, part) for part in rest)]
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def _continued(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text that goes on after another. Tokenizers of SentencePiece's kind (Llama 2) begin every text with a
    blank that it does not have; behind a line break, a token of its own to them, there is none."""
    plain: list[int] = tokenizer.encode(text, add_special_tokens=False)
    broken: list[int] = tokenizer.encode("\n", add_special_tokens=False)
    if tokenizer.convert_ids_to_tokens(broken[:1]) != ["\N{LOWER ONE EIGHTH BLOCK}"]:
        return plain
    behind: list[int] = tokenizer.encode(f"\n{text}", add_special_tokens=False)
    return behind[len(broken) :] if behind[: len(broken)] == broken else plain


APPLIED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters).union(
    {"messages", "strftime_now"}
) - {"tools", "documents"}
"""What a chat template is applied with, besides its variables."""

_SAID = "THE ASSISTANT SAID THIS"


@functools.lru_cache(maxsize=8)
def _check_template(tokenizer: PreTrainedTokenizerBase, kwargs: str) -> None:
    """`kwargs`: JSON of `task.chat_template_kwargs`. Raises UserError for one that the template does not read, and for
    a template that leaves out the opening of the assistant's turn."""
    given = json.loads(kwargs)
    for name in given:
        if name in APPLIED:
            raise UserError(f"task.chat_template_kwargs has {name}, which is set here; leave it out")
        if name not in (read := _variables(tokenizer)):
            raise UserError(
                f"task.chat_template_kwargs has {name}, which the tokenizer's chat template does not read (it reads "
                f"{', '.join(sorted(read)) or 'nothing'}); leave it out"
            )
    _check_opening(tokenizer, given)


def _variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that a chat template reads and does not set itself."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    template = re.sub(r"{%-? *(end)?generation *-?%}", "", tokenizer.get_chat_template())  # transformers' own tag
    try:
        return meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError as error:
        raise UserError(f"the tokenizer's chat template cannot be read: {error}; use another") from None


def _check_opening(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> None:
    """Some templates know no `add_generation_prompt`. That is right where nothing stands between the user's turn and
    the assistant's words, as in `[INST] ... [/INST]`; elsewhere the model would go on with the user's turn."""
    asked = [{"role": "user", "content": "?"}]
    try:
        opened, closed = (render(tokenizer, asked, opening=opening, given=given) for opening in (True, False))
        answered = render(tokenizer, [*asked, {"role": "assistant", "content": _SAID}], opening=False, given=given)
    except UserError:
        return  # a template that takes no such conversation; the rows will say what it refuses
    opening = answered.partition(_SAID)[0].removeprefix(opened)
    if opened == closed and _SAID in answered and opening.strip() and answered.startswith(opened):
        raise UserError(
            f"the tokenizer's chat template ignores add_generation_prompt: {opening!r}, which begins the assistant's "
            "turn, would be missing from every prompt; add it to the template, or set task.chat_template=false"
        )
