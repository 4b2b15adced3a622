"""A tokenizer of Llama 2's kind, a `tokenizer.model` alone: what SentencePiece itself makes of the texts decides."""

from __future__ import annotations

import importlib.util
import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece

from megatron_dppo.agents.messages import Message
from megatron_dppo.agents.rendering import ChatRenderer
from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompting import encode_prompt, encode_text
from megatron_dppo.tasks.tokenizer import load_tokenizer
from tests.tiny import tiny_model

WORDS = [
    "one",
    "two",
    "three",
    "sum",
    "of",
    "and",
    "is",
    "the",
    "answer",
    "what",
    "plus",
    "go",
    "on",
    "say",
    "now",
    "you",
    "see",
]
VOCABULARY = 360
TEMPLATE = (  # as Llama 2's, without the system prompt
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng, model = tmp_path_factory.mktemp("llama2"), random.Random(0), io.BytesIO()
    lines = [
        f"{' '.join(rng.choices(WORDS, k=12))} {rng.randrange(1000)} + {rng.randrange(1000)} = ?" for _ in range(800)
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=VOCABULARY, model_type="bpe", byte_fallback=True,
        split_digits=True, remove_extra_whitespaces=False, normalization_rule_name="identity", pad_id=-1, minloglevel=2,
    )  # fmt: skip
    tiny_model("llama", path, head_dim=32, vocab_size=VOCABULARY, num_hidden_layers=2, bos_token_id=1, eos_token_id=2)
    for file in [*path.glob("tokenizer*"), *path.glob("chat_template*"), *path.glob("special_tokens*")]:
        file.unlink()
    (path / "tokenizer.model").write_bytes(model.getvalue())
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def itself(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


BOS, EOS = 1, 2


def test_a_prompt_is_what_sentencepiece_makes_of_it(folder: Path, itself: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = load_tokenizer(folder)
    for question in ("what is 12 + 7?", "naïve 漢字 ½", "two\nlines\tand  blanks", "\\boxed{3}"):
        ids, text = encode_prompt(TaskConfig(chat_template=False), tokenizer, question)
        assert [int(i) for i in ids] == [BOS, *itself.encode(question)]
        assert tokenizer.decode(ids[1:]) == text == question
        chat, spelled = encode_prompt(TaskConfig(), tokenizer, question)
        assert spelled == f"<s>[INST] {question} [/INST]"
        assert itself.decode([int(i) for i in chat[1:]]).strip() == f"[INST] {question} [/INST]"
        assert (chat[0], list(chat).count(BOS)) == (BOS, 1)


def test_what_spells_a_special_token_stays_text_without_a_blank(
    folder: Path, itself: sentencepiece.SentencePieceProcessor
) -> None:
    ids, _ = encode_prompt(TaskConfig(chat_template=False), load_tokenizer(folder), "say </s> now")
    assert EOS not in ids
    assert itself.decode([int(i) for i in ids[1:]]) == "say </s> now"


def test_what_follows_a_turn_has_no_blank_of_its_own(
    folder: Path, itself: sentencepiece.SentencePieceProcessor
) -> None:
    tokenizer = load_tokenizer(folder)
    answer = itself.encode("the answer is 7")
    between = [int(i) for i in encode_text(tokenizer, "\nyou see 3\n", continues=True)]
    assert itself.decode(answer + between) == "the answer is 7\nyou see 3\n"
    renderer, seen = ChatRenderer(tokenizer, stop_token_ids=[EOS]), [Message("user", "you see 3")]
    for closed in (False, True):
        rendered = renderer.after(Message("assistant"), seen, None, {}, last=EOS, closed=closed)
        between = [int(i) for i in rendered.ids]
        assert [i for i in between if i in (BOS, EOS)] == ([BOS] if closed else [EOS, BOS])
        assert itself.decode(between[between.index(BOS) + 1 :]).strip() == "[INST] you see 3 [/INST]"


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "sentencepiece" else found(name, *a)
    )
    with pytest.raises(
        UserError, match=r"sentencepiece is not installed; `uv pip install megatron-dppo\[sentencepiece\]`"
    ):
        load_tokenizer(folder)


@pytest.mark.full
def test_a_model_with_such_a_tokenizer_is_evaluated(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        "".join(f'{{"problem": "what is {i} + 1?", "answer": {i + 1}}}\n' for i in range(3))
    )
    sizes = ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=8", "rollout.kv_cache_mib=64"]
    arguments = ["evaluate", str(folder), str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "out"), *sizes]
    assert main([*arguments, "rollout.max_num_seqs=8", "rollout.dtype=float32", "evaluation.samples=2"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out/q.jsonl").read_text().splitlines()[1:]]
    assert len(answers) == 6
    assert any(answer["response"] for answer in answers)
