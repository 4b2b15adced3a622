"""What becomes of a message on its way to the engine: special tokens, templates that fail, text that is none."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers.processors import TemplateProcessing

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompting import encode_prompt
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.task import Prompt

CHAT, PLAIN = TaskConfig(), TaskConfig(chat_template=False)


@pytest.fixture
def own():
    """A tokenizer that a test may change."""
    return byte_tokenizer()


def specials(tokenizer) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


@pytest.mark.parametrize("config", [CHAT, PLAIN], ids=["chat", "plain"])
def test_what_spells_a_special_token_in_a_question_stays_text(own, config):
    question = "Is " + " or ".join(specials(own)) + " a word?"
    ids, text = encode_prompt(config, own, question)
    clean, _ = encode_prompt(config, own, "Is a word?")
    ours = set(own.all_special_ids) | {own.convert_tokens_to_ids(token) for token in specials(own)}
    assert [i for i in ids if i in ours] == [i for i in clean if i in ours]
    assert own.decode(ids) == text
    assert question in text


def test_a_tokenizer_that_closes_every_text(own):
    eos = own.eos_token
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{eos} $A {eos}", special_tokens=[(eos, own.eos_token_id)]
    )
    assert own.encode("1")[-1] == own.eos_token_id
    ids, _ = encode_prompt(PLAIN, own, "1 + 1")
    assert ids[0] == own.eos_token_id  # what it puts in front stays
    assert ids[-1] != own.eos_token_id
    assert own.decode(ids[1:]) == "1 + 1"
    marked, _ = encode_prompt(PLAIN, own, f"1 {eos} 1")
    assert own.decode(marked[1:]) == f"1 {eos} 1"
    assert list(marked).count(own.eos_token_id) == 1


def test_a_template_without_the_opening_of_the_assistants_turn(own):
    own.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=r"ignores add_generation_prompt: '<\|assistant\|>', which begins"):
        encode_prompt(CHAT, own, "1 + 1")


def test_a_template_that_needs_no_opening(own):
    own.chat_template = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}{% endfor %}"
    )
    assert encode_prompt(CHAT, own, "1 + 1")[1] == "[INST] 1 + 1 [/INST]"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_raises_is_named_with_the_row(tmp_path, own, template, reason):
    own.chat_template = template
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1", "answer": "2"}) + "\n")
    config = TaskConfig(kind="data", data={"path": str(path)}, system_prompt="Add.")
    with pytest.raises(
        UserError, match=rf"^{path}, line 1: .*chat template refuses messages of system, user: .*{reason}"
    ):
        build_task(config, own)


def test_text_that_is_no_unicode_is_named_with_the_row(tmp_path, own):
    path = tmp_path / "q.jsonl"
    path.write_text('{"problem": "1 + 1", "answer": "2", "hint": "\\ud83d"}\n')
    config = TaskConfig(kind="data", data={"path": str(path)}, prompt="{question} {metadata[hint]}")
    with pytest.raises(UserError, match=rf"^{path}, line 1: the prompt holds half of a surrogate pair"):
        build_task(config, own)


def test_a_question_of_millions_of_characters_is_left_out_untokenized(tmp_path, own):
    path = tmp_path / "q.jsonl"
    rows = [{"problem": "9" * 5_000_000, "answer": "2"}, {"problem": "1 + 1", "answer": "2"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(TaskConfig(kind="data", data={"path": str(path)}), own)
    assert task.epoch_size == 1
    assert f"{path}, line 1 (5,000,000 characters)" in "\n".join(task.report)


def test_references_that_no_answer_can_meet_are_named_and_kept(tmp_path, own):
    path = tmp_path / "q.jsonl"
    answers = ["2", "\\frac{1}{", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\$36", "?"]
    rows = [{"problem": str(i), "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(TaskConfig(kind="data", data={"path": str(path)}), own)
    assert task.epoch_size == 5
    report = "\n".join(task.report)
    assert f"2 references that no answer can meet: {path}, line 2 ('\\\\frac{{1}}{{'); {path}, line 5 ('?')" in report
    words = build_task(TaskConfig(kind="data", data={"path": str(path)}, rewards=[{"kind": "exact-match"}]), own)
    assert "no answer can meet" not in "\n".join(words.report)


THINKS = (  # as Qwen3's: thinking is on unless it is switched off, and then an empty one stands in the prompt
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_what_the_template_is_given_besides(own):
    own.chat_template = THINKS
    asked = "<|user|>1 + 1<|end|><|assistant|>"
    for given, text in (({}, asked), ({"enable_thinking": True}, asked), ({"enable_thinking": False}, None)):
        config = TaskConfig(chat_template_kwargs=given)
        ids, spelled = encode_prompt(config, own, "1 + 1")
        assert spelled == (text or asked + "<think>\n\n</think>\n\n")
        assert own.decode(ids) == spelled


def test_thinking_on_and_off_is_graded_alike(own):
    """Off, the model answers at once; on, what it thinks does not count, and who does not end it has no answer."""
    own.chat_template = THINKS
    for thinking in (True, False):
        data = {"path": "sums.jsonl"}
        config = TaskConfig(kind="data", data=data, chat_template_kwargs={"enable_thinking": thinking})
        ids, text = encode_prompt(config, own, "1 + 1")
        prompt = Prompt(index=0, prompt_ids=ids, text=text, question="1 + 1", answer="2")
        grader = build_grader(config, max_response_tokens=100)
        answers = ["\\boxed{2}", "<think>\\boxed{3}</think>\\boxed{2}", "<think>so \\boxed{2}"]
        rewards = grader.score([prompt] * 3, answers, [1] * 3, ["stop"] * 3)
        grader.close()
        assert rewards.reward.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"enable_thinkng": False},
            "has enable_thinkng, which the tokenizer's chat template does not read (it reads add_",
        ),
        ({"add_generation_prompt": False}, "has add_generation_prompt, which is set here"),
        ({"tokenize": True}, "has tokenize, which is set here"),
        ({"strftime_now": "x"}, "has strftime_now, which is set here"),
        ({"messages": []}, "has messages, which is set here"),
    ],
)
def test_what_a_template_is_not_given(own, given, reason):
    own.chat_template = THINKS
    with pytest.raises(UserError, match=re.escape(reason)):
        encode_prompt(TaskConfig(chat_template_kwargs=given), own, "1 + 1")


def test_no_template_is_given_nothing():
    with pytest.raises(ValueError, match="uses no chat_template_kwargs"):
        TaskConfig(chat_template=False, chat_template_kwargs={"enable_thinking": False})
