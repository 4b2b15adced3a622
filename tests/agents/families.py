"""Tokenizers with the control tokens and the chat templates of five families. No hub is reached: the vocabulary is
trained here; templates are those that trl ships (Apache-2.0; of Qwen3, Llama 3.1, GLM-4.5 and gpt-oss as published with
the models), and templates/deepseek_v3_1.jinja."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """template  file of trl, or of this folder
    special    control tokens that the tokenizer knows as special; the first ends a text
    added      further tokens of its own
    stops      that end an answer
    call       a call of the tool `search` as the model writes it, with {text} as an argument's value
    answer     what an answer begins with before its text"""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    stops: tuple[str, ...]
    call: str
    answer: str = ""
    bos: str | None = None


_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
             "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>",
             "</think>")  # fmt: skip

FAMILIES = {
    "qwen3": Family(
        "qwen3.jinja",
        ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
        _TAGS,
        ("<|im_end|>", "<|endoftext|>"),
        '<tool_call>\n{{"name": "search", "arguments": {{"text": "{text}"}}}}\n</tool_call>',
        "<think>\nmhm\n</think>\n\n",
    ),
    "llama3": Family(
        "llama3_1.jinja",
        ("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
         "<|python_tag|>"),
        (),
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        '{{"name": "search", "parameters": {{"text": "{text}"}}}}',
        bos="<|begin_of_text|>",
    ),
    "glm4": Family(
        "glm4moe.jinja",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "<tool_call>search\n<arg_key>text</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "\n<think>mhm</think>\n",
    ),
    "deepseek_v3_1": Family(
        "deepseek_v3_1.jinja",
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        _DEEPSEEK,
        ("<｜end▁of▁sentence｜>",),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{{\"text\": \"{text}\"}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gpt_oss": Family(
        "gptoss.jinja",
        ("<|return|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
         "<|call|>"),
        (),
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        " to=functions.search<|channel|>commentary json<|message|>{{\"text\": \"{text}\"}}",
        "<|channel|>final<|message|>",
    ),
}  # fmt: skip

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what is the weather in Paris today? naïve café — 東京 🦊",
    '{"name": "search", "arguments": {"text": "tool"}}',
    "assistant system user tool think answer",
    "   \n\n\t  1234567890 3.14 -17",
    "def f(x):\n    return x + 1\n",
    "The answer is 42. The answer is not known.",
] * 3


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's, Llama's and most tokenizers cut text into words."""


@functools.lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.special[0], bos_token=family.bos)
    made.chat_template = _template(family.template)
    return made


def stop_ids(name: str) -> list[int]:
    return [tokenizer_of(name).convert_tokens_to_ids(token) for token in FAMILIES[name].stops]


def _template(name: str) -> str:
    own = Path(__file__).parent / "templates" / name
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = importlib.util.find_spec("trl")  # a file of it; nothing of it is imported
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / name).read_text(encoding="utf-8")
