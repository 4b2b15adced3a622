"""The tokenizer of a model's folder, or the reason why there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_dppo.errors import UserError, first_line
from megatron_dppo.json_object import read_json_object

_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises UserError where no vocabulary is there (transformers would make a tokenizer without one, to which every
    text is empty), or where it does not load."""
    if not any((folder / name).is_file() for name in _FILES):
        described = folder / "tokenizer_config.json"
        if described.is_file() and "auto_map" in read_json_object(described):
            raise UserError(
                f"{folder} has its tokenizer as code alone (auto_map of tokenizer_config.json), which is not run; put "
                "the same as a tokenizer.json into it, which transformers' TikTokenConverter makes of a tiktoken.model"
            )
        raise UserError(
            f"{folder} has no tokenizer (none of {', '.join(_FILES)}); copy the tokenizer's files from where the "
            "weights came from"
        )
    if not any((folder / name).is_file() for name in _FILES[:2]) and importlib.util.find_spec("sentencepiece") is None:
        raise UserError(
            f"{folder} has its tokenizer in SentencePiece's format only, and sentencepiece is not installed; "
            "`uv pip install megatron-dppo[sentencepiece]`"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many types here
        reason = first_line(error)
        raise UserError(f"{folder} has no tokenizer that loads ({reason}); copy the tokenizer's files anew") from error
