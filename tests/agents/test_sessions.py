"""What a session makes of its requests: turns, branches, retries, ids, limits and its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from megatron_dppo.agents.parsing import AnswerParser
from megatron_dppo.agents.rendering import ChatRenderer
from megatron_dppo.agents.server import SessionServer
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import EnginesFailed, GenerationTimeout, NoWeights
from tests.agents.families import FAMILIES, stop_ids, tokenizer_of
from tests.agents.recorder import Recorder
from tests.agents.serving import HI, NAME, Held, ask, client_of, open_session, post, words
from tests.agents.test_exact import check_rows
from tests.agents.test_rendering import EXPECTED, TOOLS


def test_another_temperature_can_be_answered_and_not_trained_on(
    serve: Callable[..., SessionServer], sample: Held
) -> None:
    session = open_session(serve(other_sampling="not_trained"))
    client = client_of(session)
    first = ask(client)
    talk = [*HI, {"role": "assistant", "content": first.choices[0].message.content}, *HI]
    second = ask(client, talk, temperature=0.5)
    talk += [{"role": "assistant", "content": second.choices[0].message.content}, *HI]
    ask(client, talk)
    record = session.finish()
    assert [turn.why_not for turn in record.turns] == ["", "temperature=0.5 (the session's is 1)", ""]
    assert [sample.recorder.trained[f"train/0/0/0/{n}"] for n in range(3)] == [True, False, True]
    (branch,) = record.branches
    trained = [turn for turn in record.turns if turn.trained]
    check_rows(branch, trained, {t.number: [sample.recorder.given[f"train/0/0/0/{t.number}"]] for t in trained})
    assert int(branch.loss_mask.sum()) == sum(turn.sampled for turn in trained)
    alone = open_session(serve(other_sampling="not_trained"), "train/0/0/1")
    ask(client_of(alone), temperature=0.0)
    record = alone.finish()
    assert (record.branches, record.turns[0].branch) == ((), -1)


def test_the_same_request_again(serve: Callable[..., SessionServer], sample: Held) -> None:
    session = open_session(serve())
    client = client_of(session)
    retry = {"x-stainless-retry-count": "1"}
    first = ask(client).choices[0].message.content
    assert ask(client, extra_headers=retry).choices[0].message.content == first
    other = ask(client).choices[0].message.content  # nobody said that it was a retry
    assert other != first
    assert ask(client, extra_headers=retry).choices[0].message.content == other
    key = {"Idempotency-Key": "k"}
    third = ask(client, extra_headers=key).choices[0].message.content
    assert third not in (first, other)
    assert ask(client, extra_headers=key).choices[0].message.content == third
    with pytest.raises(openai.UnprocessableEntityError, match="same Idempotency-Key"):
        ask(client, [*HI, *HI], extra_headers=key)
    sample.go.clear()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(ask, client, [*HI, *HI]) for _ in range(5)]
        while max(one.again for one in session._requests.values()) < 4:
            time.sleep(0.01)
        sample.go.set()
        assert len({one.result().id for one in asked}) == 1
    record = session.finish()
    assert [turn.retries for turn in record.turns] == [1, 1, 1, 4]
    assert len(record.branches) == 4  # no answer is the beginning of another
    assert record.branches[1].request_ids == ("train/0/0/0+1",)


def test_a_client_that_gave_up_gets_its_answer_when_it_tries_again(
    serve: Callable[..., SessionServer], sample: Held
) -> None:
    session = open_session(serve())
    sample.go.clear()
    threading.Timer(2.5, sample.go.set).start()
    assert ask(client_of(session, max_retries=5, timeout=1.0)).choices[0].message.content.startswith("answer")
    assert len(session.finish().turns) == 1


def test_answers_under_way_at_the_same_time(serve: Callable[..., SessionServer], sample: Held) -> None:
    """The first goes on with the branch, the others begin one each; every token is trained on once. What the branch has
    on record comes to none but the first."""
    session = open_session(serve())
    client = client_of(session)
    first = ask(client)
    talk = [*HI, {"role": "assistant", "content": first.choices[0].message.content}]
    sample.go.clear()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(ask, client, [*talk, {"role": "user", "content": str(n)}]) for n in range(4)]
        for _ in range(5):
            assert sample.asked.acquire(timeout=300)
        sample.go.set()
        assert len({one.result().id for one in asked}) == 4
    record = session.finish()
    known = [sample.recorder.known[f"train/0/0/0/{number}"] for number in range(5)]
    assert sorted(known) == [0, 0, 0, 0, len(sample.recorder.given["train/0/0/0/0"].token_ids)]
    assert [turn.branch for turn in record.turns if known[turn.number] or not turn.number] == [0, 0]
    assert len(record.branches) == 4
    assert sum(int(one.loss_mask.sum()) for one in record.branches) == sum(turn.sampled for turn in record.turns)
    for number, branch in enumerate(record.branches):
        mine = [turn for turn in record.turns if turn.branch == number]
        check_rows(branch, mine, {t.number: [sample.recorder.given[f"train/0/0/0/{t.number}"]] for t in mine})


def test_an_answer_that_failed_leaves_its_branch_to_others(serve: Callable[..., SessionServer], sample: Held) -> None:
    session = open_session(serve())
    client = client_of(session)
    talk = [*HI, {"role": "assistant", "content": ask(client).choices[0].message.content}, *HI]
    sample.fails = GenerationTimeout("too long")
    with pytest.raises(openai.InternalServerError):
        ask(client, talk)
    sample.fails = None
    ask(client, talk)
    (branch,) = session.finish().branches
    assert branch.loss_mask.sum() == sum(len(one.response_ids(0)) for one in sample.recorder.given.values())


def test_an_engine_that_answers_what_is_known_is_noticed(serve: Callable[..., SessionServer], sample: Held) -> None:
    session = open_session(serve())
    client = client_of(session)
    talk = [*HI, {"role": "assistant", "content": ask(client).choices[0].message.content}, *HI]
    sample.recorder.whole = True
    with pytest.raises(openai.InternalServerError, match="not what is beyond"):
        ask(client, talk)


def test_what_comes_of_a_turn_does_not_grow_with_the_turns_before_it(
    serve: Callable[..., SessionServer], sample: Held
) -> None:
    session = open_session(serve(), max_tokens=6000, max_prompt_tokens=5900)
    client, talk = client_of(session), list(HI)
    for _ in range(20):
        answer = ask(client, talk).choices[0].message.content
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "word " * 50}]
    (branch,) = session.finish().branches
    came, given = sample.recorder.came, sample.recorder.given.values()
    assert sum(came) == len(branch.token_ids) + 19, "the last token before a turn comes with it, for its route"
    assert max(came[1:]) < 1.5 * min(came[1:])
    assert sum(len(one.token_ids) for one in given) > 9 * sum(came)


def test_a_history_that_was_edited_can_be_refused(serve: Callable[..., SessionServer]) -> None:
    session = open_session(serve(edited="refuse"))
    client = client_of(session)
    said = {"role": "assistant", "content": ask(client).choices[0].message.content}
    ask(client, [*HI, said, *HI])
    for messages in ([*HI, said | {"content": "no"}, *HI], [*HI, said, {"role": "user", "content": "x"}], HI):
        with pytest.raises(openai.BadRequestError, match="not the session's conversation") as caught:
            ask(client, messages)
        assert caught.value.code == "history_edited"
    assert len(session.finish().branches) == 1


def test_tools_and_reasoning(serve: Callable[..., SessionServer], sample: Held) -> None:
    text = '<think>\nr\n</think>\n\nWell.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    ids = [*tokenizer_of(NAME).encode(text * 1, add_special_tokens=False), stop_ids(NAME)[0]]
    sample.recorder._write = lambda rng, request: ids
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    session = open_session(serve())
    client = client_of(session)
    (choice,) = ask(client, tools=tools).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
    assert choice.message.reasoning_content == "r"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    echo = choice.message.model_dump(exclude={"reasoning_content", "reasoning"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    pieces = list(ask(client, [*HI, echo, result], tools=tools, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.tool_calls[0].function.arguments == '{"a": 1}'
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None, "tool_calls"]
    assert pieces[-1].usage.completion_tokens == len(ids)
    assert ask(client, tool_choice="none", tools=tools).choices[0].message.tool_calls is None
    record = session.finish()
    assert [turn.branch for turn in record.turns] == [0, 0, 1]  # other tools are another conversation
    assert record.turns[1].asked[0].content == "ok"


def test_log_probabilities_and_ids(serve: Callable[..., SessionServer], sample: Held) -> None:
    session = open_session(serve())
    reply = ask(client_of(session), logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    batch = sample.recorder.given["train/0/0/0/0"]
    prompt = int(batch.prompt_lengths[0])
    assert reply.prompt_token_ids == batch.token_ids[:prompt].tolist()
    assert reply.choices[0].token_ids == batch.response_ids(0).tolist()
    told = reply.choices[0].logprobs.content
    assert [one.logprob for one in told] == batch.mu_logp[prompt:].tolist()
    assert [len(one.top_logprobs) for one in told] == [2] * len(told)
    assert told[-1].token == "<|im_end|>"


def test_ids_for_ids(serve: Callable[..., SessionServer], sample: Held) -> None:
    session = open_session(serve())

    def generate(ids: list[int], **parameters: Any) -> httpx.Response:
        return post(session, "/inference/v1/generate", json={"token_ids": ids, "sampling_params": parameters})

    first = generate([5, 6, 7], logprobs=1, skip_special_tokens=False, temperature=1.0, max_tokens=50).json()
    (choice,) = first["choices"]
    batch = sample.recorder.given["train/0/0/0/0"]
    assert choice["token_ids"] == batch.response_ids(0).tolist()
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{n}" for n in choice["token_ids"]]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == batch.mu_logp[3:].tolist()
    generate([5, 6, 7, *choice["token_ids"], 8], stop_token_ids=[choice["token_ids"][1]])
    generate([5, 6], max_tokens=1)
    for ids in ([], [-1], [10**6], [2**40], ["a"], [True], None):
        assert generate(ids).status_code == 400  # type: ignore[arg-type]
    assert generate([5], n=2).json()["error"]["param"] == "n"
    assert generate([5], temperature=0.1).json()["error"]["param"] == "temperature"
    record = session.finish()
    assert [turn.branch for turn in record.turns] == [0, 0, 1]
    assert [turn.finish_reason for turn in record.turns] == ["stop", "stop", "length"]
    assert record.turns[1].sampled == 2
    check_rows(record.branches[0], list(record.turns[:2]),
               {n: [sample.recorder.given[f"train/0/0/0/{n}"]] for n in (0, 1)})  # fmt: skip


def test_ids_that_the_tokenizer_has_not(serve: Callable[..., SessionServer], sample: Held) -> None:
    """A model with more ids than its tokenizer may sample one: it goes on from there, and nobody may send another."""
    unknown = len(tokenizer_of(NAME)) + 3
    sample.recorder._write = lambda rng, request: [unknown, 5, stop_ids(NAME)[0]]
    session = open_session(serve())
    client = client_of(session)
    said = {"role": "assistant", "content": ask(client, logprobs=True).choices[0].message.content}
    ask(client, [*HI, said, *HI])
    first, second = session.finish().turns
    assert (first.branch, second.branch) == (0, 0)
    session = open_session(serve(), "train/0/0/1")
    (choice,) = post(session, "/inference/v1/generate", json={"token_ids": [5]}).json()["choices"]
    assert choice["token_ids"][0] == unknown
    more = {"token_ids": [5, *choice["token_ids"], 6]}
    assert post(session, "/inference/v1/generate", json=more).status_code == 200
    assert post(session, "/inference/v1/generate", json={"token_ids": [5, unknown]}).status_code == 400
    assert [turn.branch for turn in session.finish().turns] == [0, 0]


def test_limits_are_named(serve: Callable[..., SessionServer]) -> None:
    server = serve()
    session = open_session(server, "turns", max_turns=1)
    client = client_of(session)
    ask(client)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [*HI, *HI])
    assert caught.value.code == "max_turns"
    assert session.finish().cut == "max_turns"
    session = open_session(server, "long", max_tokens=30)
    assert ask(client_of(session)).choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client_of(session), HI * 10)
    assert caught.value.code == "context_length_exceeded"
    assert session.finish().cut == "max_tokens"
    session = open_session(server, "prompt", max_prompt_tokens=5)
    with pytest.raises(openai.BadRequestError):
        ask(client_of(session))
    assert session.finish().cut == "max_prompt_tokens"
    session = open_session(server, "short", max_response_tokens=2)
    assert ask(client_of(session)).choices[0].finish_reason == "length"
    assert session.finish().turns[0].sampled == 2


@pytest.mark.parametrize(
    ("error", "status", "kept"),
    [
        (EnginesFailed("9 engine failures"), 503, True),
        (NoWeights("no engine has got weights yet"), 503, True),
        (RuntimeError("broken"), 503, True),
        (UserError("request x: too long"), 400, False),
        (GenerationTimeout("request x had not ended"), 504, False),
    ],
)
def test_what_engines_fail_with(
    serve: Callable[..., SessionServer], sample: Held, error: Exception, status: int, kept: bool
) -> None:
    session = open_session(serve())
    sample.fails = error
    with pytest.raises(openai.APIStatusError, match=str(error)) as caught:
        ask(client_of(session))
    assert caught.value.status_code == status
    sample.fails = None
    retry = ask(client_of(session), extra_headers={"x-stainless-retry-count": "1"})  # nothing was answered: it is new
    assert retry.choices[0].finish_reason == "stop"
    record = session.finish()
    assert (record.error is error) is kept
    assert [turn.number for turn in record.turns] == [1]


def test_a_fault_of_the_session_itself_is_no_fault_of_the_engines(
    serve: Callable[..., SessionServer], sample: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends by what engines fail with; a request that nobody foresaw costs its own episode at most."""
    session = open_session(serve())
    with monkeypatch.context() as patched:
        patched.setattr(AnswerParser, "parse", lambda *given, **named: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as caught:
            ask(client_of(session))
    assert caught.value.status_code == 500
    assert ask(client_of(session)).choices[0].finish_reason == "stop"
    record = session.finish()
    assert (record.error, len(record.turns)) == (None, 1)


def test_turns_stand_in_the_order_in_which_they_were_asked_for(serve: Callable[..., SessionServer]) -> None:
    """Reports name turns by number; the first to be asked for may be the last to end."""
    recorder, slow = Recorder(words, stop_ids(NAME)), threading.Event()
    begun = threading.Semaphore(0)

    def sample(request: Any, sampling: Any, training: bool) -> Any:
        begun.release()
        assert not request.request_id.endswith("/0") or slow.wait(300)
        return recorder(request, sampling, training)

    server = SessionServer(sample, tokenizer_of(NAME), stop_token_ids=stop_ids(NAME))
    try:
        session = open_session(server)
        with ThreadPoolExecutor() as threads:
            first = threads.submit(ask, client_of(session))
            assert begun.acquire(timeout=300)
            ask(client_of(session), [*HI, *HI])
            slow.set()
            assert first.result().id.endswith("/0")
        record = session.finish()
    finally:
        server.close()
    assert [(turn.number, turn.branch) for turn in record.turns] == [(0, 1), (1, 0)]
    assert [len(turn.asked) for turn in record.turns] == [1, 2]


def test_conversations_that_cannot_fit_are_not_rendered(
    serve: Callable[..., SessionServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million messages fit into a request, and would keep other sessions waiting."""
    session = open_session(serve(), max_tokens=50)
    monkeypatch.setattr(ChatRenderer, "conversation", lambda *given, **named: 1 / 0)
    reply = post(session, json={"messages": HI * 51})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "has 51 messages; 49 tokens may stand" in reply.text
    assert session.finish().cut == "max_tokens"


def test_retries_of_one_answer_are_a_flood_too(serve: Callable[..., SessionServer], sample: Held) -> None:
    """Everyone who waits has a thread, and all sessions share those."""
    session = open_session(serve(), max_in_flight=3)
    sample.go.clear()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(post, session, json={"messages": HI}) for _ in range(4)]
        while max((one.again for one in session._requests.values()), default=0) < 3:
            time.sleep(0.01)
        assert post(session, json={"messages": HI}).status_code == 429
        sample.go.set()
        assert {one.result().status_code for one in asked} == {200}
    again = post(session, json={"messages": HI}, headers={"x-stainless-retry-count": "1"})
    assert (again.status_code, len(session.finish().turns)) == (200, 1)


def test_long_keys_of_requests_are_compared_whole(serve: Callable[..., SessionServer]) -> None:
    session = open_session(serve())
    said = [ask(client_of(session), extra_headers={"Idempotency-Key": "k" * 300 + end}).id for end in "aba"]
    assert said[0] == said[2] != said[1]


def test_the_end_of_a_session(serve: Callable[..., SessionServer], sample: Held) -> None:
    session = open_session(serve())
    client = client_of(session)
    ask(client)
    assert post(session, "/v1/reward", json={"reward": 1}).status_code == 200
    assert post(session, "/v1/reward", json={"reward": 0.5, "solved": True}).status_code == 200
    assert post(session, "/v1/reward", json=[1]).status_code == 400
    sample.go.clear()
    with ThreadPoolExecutor() as threads:
        late = threads.submit(ask, client, [*HI, *HI])
        for _ in range(2):
            assert sample.asked.acquire(timeout=300)
        record = session.finish()
        sample.go.set()
        with pytest.raises(openai.APIStatusError, match="the session is over"):
            late.result()
    assert len(record.turns) == 1
    assert record.reported == {"reward": 0.5, "solved": True}
    for path in ("/v1/chat/completions", "/v1/reward"):
        assert post(session, path, json={"messages": HI}).status_code == 410
    assert json.loads(post(session, json={}).text)["error"]["code"] == "session_over"
    assert len(session.finish().turns) == 1


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_engines_know_stop_tokens_that_nobody_named_here(name: str) -> None:
    """Those of the model's generation_config.json, beside its tokenizer's."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    last = stop_ids(name)[-1 if name != "qwen3" else 0]
    texts = iter([family.call.format(text="x"), family.answer + "A"])
    recorder = Recorder(lambda rng, request: [*tokenizer.encode(next(texts), add_special_tokens=False), last], [last])
    server = SessionServer(recorder, tokenizer)
    try:
        session = open_session(server)
        client = client_of(session)
        (choice,) = ask(client, tools=TOOLS).choices
        assert choice.finish_reason == "tool_calls"
        assert tokenizer.decode([last]) not in (choice.message.content or "")
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "T"}
        (choice,) = ask(client, [*HI, choice.message.model_dump(exclude_none=True), result], tools=TOOLS).choices
        assert choice.message.content == "A"
        first, second = session.finish().turns
    finally:
        server.close()
    prompt = recorder.given[f"{session.name}/1"].token_ids[: second.prompt]
    between = tokenizer.decode(prompt[first.prompt + first.sampled - 1 :])
    said = "" if name == "glm4" else tokenizer.decode([last])  # GLM's says who speaks next
    assert between == said + EXPECTED[name][2]


def test_a_word_that_a_request_names_as_stop_token_closes_no_message() -> None:
    tokenizer, (end, *_) = tokenizer_of(NAME), stop_ids(NAME)
    answers = iter([tokenizer.encode("aab", add_special_tokens=False), [*tokenizer.encode("A"), end]])
    recorder = Recorder(lambda rng, request: next(answers), [end])
    server = SessionServer(recorder, tokenizer, stop_token_ids=[end])
    try:
        session = open_session(server)
        word = tokenizer.encode("aab", add_special_tokens=False)[-1]
        said = post(session, json={"messages": HI, "stop_token_ids": [word]}).json()["choices"][0]
        assert said["finish_reason"] == "stop"
        assert said["message"]["content"] == tokenizer.decode(tokenizer.encode("aab", add_special_tokens=False)[:-1])
        post(session, json={"messages": [*HI, {"role": "assistant", "content": said["message"]["content"]}, *HI]})
        first, second = session.finish().turns
    finally:
        server.close()
    prompt = recorder.given[f"{session.name}/1"].token_ids[: second.prompt]
    assert tokenizer.decode(prompt[first.prompt :]).startswith("aab<|im_end|>\n<|im_start|>user")
    assert not second.rendered_anew
