"""A byte-level tokenizer that needs no files: for models small enough to train on a CPU within a minute."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

# One token per turn keeps prompts short. Only an assistant's turn is closed: the next turn's opening closes the others.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{ raise_exception('unknown role ' + message['role']) }}
{%- endif -%}
{{ '<|' + message['role'] + '|>' + message['content'] }}
{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (any text round-trips), five special tokens, and a chat template. 261 tokens.

    `<|end|>` ends a sequence; `<|pad|>` pads. `AutoTokenizer` loads what its `save_pretrained` writes.
    """
    special = [PAD, SYSTEM, USER, ASSISTANT, END]
    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
