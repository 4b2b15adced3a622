"""The server against harnesses that mean well, and others."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from megatron_dppo.agents.server import SessionServer
from megatron_dppo.agents.sessions import Session, SessionLimits
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import EnginesFailed, GenerationRequest, GenerationTimeout, SamplingConfig
from tests.agents.families import stop_ids, tokenizer_of
from tests.agents.recorder import Recorder
from tests.agents.test_exact import check_rows

NAME = "qwen3"
HI = [{"role": "user", "content": "hi"}]
SAMPLING = SamplingConfig(top_k_logprobs=4)


def words(rng: np.random.Generator, request: GenerationRequest) -> list[int]:
    text = f"answer {rng.integers(10**9)}"
    return [*tokenizer_of(NAME).encode(text, add_special_tokens=False), stop_ids(NAME)[0]]


class Held:
    """A `Sample` that waits until it is let go, and can fail."""

    def __init__(self) -> None:
        self.recorder = Recorder(words, stop_ids(NAME))
        self.go, self.asked = threading.Event(), threading.Semaphore(0)
        self.fails: BaseException | None = None
        self.go.set()

    def __call__(self, request: GenerationRequest, sampling: SamplingConfig, training: bool) -> RolloutBatch:
        self.asked.release()
        assert self.go.wait(60)
        if self.fails is not None:
            raise self.fails
        return self.recorder(request, sampling, training)


@pytest.fixture
def sample() -> Held:
    return Held()


@pytest.fixture
def serve(sample: Held) -> Iterator[Callable[..., SessionServer]]:
    made: list[SessionServer] = []

    def make(**options: Any) -> SessionServer:
        made.append(SessionServer(sample, tokenizer_of(NAME), stop_token_ids=stop_ids(NAME), **options))
        return made[-1]

    yield make
    sample.go.set()
    for server in made:
        server.close()


def open_session(server: SessionServer, name: str = "train/0/0/0", **limits: Any) -> Session:
    most = {"max_turns": 100, "max_tokens": 2000, "max_response_tokens": 100, "max_prompt_tokens": 1900} | limits
    return server.open(name, sampling=SAMPLING, training=True, seed=lambda turn: 7 + turn, limits=SessionLimits(**most))


def client_of(session: Session, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=session.base_url, api_key=session.api_key, **{"max_retries": 0} | options)


def ask(client: openai.OpenAI, messages: Any = HI, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)


def post(session: Session, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {session.api_key}"} | options.pop("headers", {})
    return httpx.post(session.base_url.removesuffix("/v1") + path, headers=headers, timeout=60, **options)


def test_it_listens_on_loopback_alone(serve: Callable[..., SessionServer]) -> None:
    server = serve()
    at = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == server.port and not c.raddr}
    assert at == {"127.0.0.1"}
    with pytest.raises(UserError, match=f"sessions cannot listen on 127.0.0.1:{server.port}"):
        serve(port=server.port)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_a_session_answers_to_its_own_token_alone(serve: Callable[..., SessionServer]) -> None:
    server = serve()
    one, other = open_session(server, "a"), open_session(server, "b")
    assert one.api_key != other.api_key
    assert ask(client_of(one)).choices[0].message.content.startswith("answer")
    wrong = [other.api_key, "x", one.api_key[:-1], one.api_key + "x", one.api_key.upper(), "é"]
    for path in ("/v1/chat/completions", "/inference/v1/generate", "/v1/reward"):
        for token in wrong:
            reply = post(one, path, json={}, headers={"authorization": f"Bearer {token}".encode()})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), (path, token)
    assert post(one, json={}, headers={"authorization": f"Basic {one.api_key}"}).status_code == 401
    nobody = httpx.post(one.base_url.replace(one.base_url.split("/")[-2], "0" * 16) + "/chat/completions", json={})
    assert nobody.status_code == 401
    assert httpx.get(f"{one.base_url}/models").status_code == 401
    assert len(one.finish().turns) == 1
    assert len(other.finish().turns) == 0
    server.forget(one)
    with pytest.raises(openai.AuthenticationError):
        ask(client_of(one))


def test_what_is_no_request(serve: Callable[..., SessionServer]) -> None:
    session = open_session(serve())
    bodies = [b"", b"{", b"[]", b'{"messages": [NaN]}', b"\xff", b'{"a":' * 100_000, b'{"messages": []}', b"1" * 5000]
    for body in bodies:
        assert post(session, content=body).status_code == 400, body[:20]
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    reply = post(session, json={"messages": HI, "tools": [deep]})
    assert reply.status_code == 400
    half = post(session, content=b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    assert (half.status_code, "surrogate" in half.text) == (400, True)
    assert post(session, "/v1/nothing", json={}).status_code == 404
    assert httpx.get(f"{session.base_url}/chat/completions").status_code == 404
    record = session.finish()
    assert (record.turns, record.branches, record.error) == ((), (), None)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": "{}"}, "guided_json"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"tools": {}}, "tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_what_changes_the_law_or_the_question_is_refused(
    serve: Callable[..., SessionServer], options: dict[str, Any], param: str
) -> None:
    session = open_session(serve())
    reply = post(session, json={"messages": HI} | options)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    record = session.finish()
    assert (record.turns, record.refused) == ((), 1)


def test_what_changes_nothing_is_answered(serve: Callable[..., SessionServer]) -> None:
    neutral = {
        "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "logit_bias": {}, "presence_penalty": 0.0, "seed": 3,
        "response_format": {"type": "text"}, "tool_choice": "auto", "user": "u", "store": False, "n": 1, "stop": None,
        "frequency_penalty": None, "unheard_of": 5, "model": "gpt-4o", "reasoning_effort": "low",
    }  # fmt: skip
    assert post(open_session(serve()), json={"messages": HI} | neutral).status_code == 200


def test_another_temperature_can_be_answered_and_not_trained_on(
    serve: Callable[..., SessionServer], sample: Held
) -> None:
    session = open_session(serve(other_law="not_trained"))
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
    alone = open_session(serve(other_law="not_trained"), "train/0/0/1")
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
    threading.Timer(1.5, sample.go.set).start()
    assert ask(client_of(session, max_retries=5, timeout=0.5)).choices[0].message.content.startswith("answer")
    assert len(session.finish().turns) == 1


def test_answers_under_way_at_the_same_time(serve: Callable[..., SessionServer], sample: Held) -> None:
    """The first goes on with the branch, the others begin one each; every token is trained on once."""
    session = open_session(serve())
    client = client_of(session)
    first = ask(client)
    talk = [*HI, {"role": "assistant", "content": first.choices[0].message.content}]
    sample.go.clear()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(ask, client, [*talk, {"role": "user", "content": str(n)}]) for n in range(4)]
        for _ in range(5):
            assert sample.asked.acquire(timeout=30)
        sample.go.set()
        assert len({one.result().id for one in asked}) == 4
    record = session.finish()
    assert len(record.branches) == 4
    assert sum(int(one.loss_mask.sum()) for one in record.branches) == sum(turn.sampled for turn in record.turns)
    for number, branch in enumerate(record.branches):
        mine = [turn for turn in record.turns if turn.branch == number]
        check_rows(branch, mine, {t.number: [sample.recorder.given[f"train/0/0/0/{t.number}"]] for t in mine})


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


def test_a_flood_of_one_session_leaves_the_others_alone(serve: Callable[..., SessionServer], sample: Held) -> None:
    server = serve()
    flooded, other = open_session(server, "a", max_in_flight=4), open_session(server, "b")
    sample.go.clear()

    async def flood() -> list[int]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=300), timeout=60) as client:
            headers = {"authorization": f"Bearer {flooded.api_key}"}
            many = [
                client.post(f"{flooded.base_url}/chat/completions", headers=headers,
                            json={"messages": [{"role": "user", "content": str(n)}]})
                for n in range(300)
            ]  # fmt: skip
            tasks = [asyncio.ensure_future(one) for one in many]
            while flooded._refused < 296:
                await asyncio.sleep(0.01)
            sample.go.set()
            return [reply.status_code for reply in await asyncio.gather(*tasks)]

    statuses = asyncio.run(flood())
    assert (statuses.count(200), statuses.count(429)) == (4, 296)
    assert flooded.finish().refused == 296
    assert ask(client_of(other)).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("told", [True, False])
def test_a_hundred_megabytes_are_refused_before_they_are_held(serve: Callable[..., SessionServer], told: bool) -> None:
    """Also where nothing says how long the body will be."""
    session = open_session(serve(max_request_bytes=1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece = b'{"messages": "' + b"x" * (1 << 20)

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield piece

    headers = {"content-length": str(100 * len(piece))} if told else {}
    reply = post(session, content=pieces(), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # KiB
    assert post(session, "/v1/reward", json={"reward": "x" * 70_000}).status_code == 413
    assert ask(client_of(session)).choices[0].finish_reason == "stop"


def test_headers_without_end_are_not_held(serve: Callable[..., SessionServer]) -> None:
    server = serve()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as flooding:
        flooding.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nX: ")
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(100):
                flooding.sendall(b"x" * (1 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # KiB
    assert ask(client_of(open_session(server))).choices[0].finish_reason == "stop"


def test_a_slow_client_is_let_go(serve: Callable[..., SessionServer]) -> None:
    server = serve(body_timeout_s=0.5)
    session = open_session(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        path = "/" + session.base_url.split("/", 3)[3] + "/chat/completions"
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n".encode())
        slow.sendall(b'Content-Length: 1000\r\n\r\n{"messages"')
        assert ask(client_of(session)).choices[0].finish_reason == "stop"
        assert b" 408 " in slow.recv(1000).split(b"\r\n")[0]


def test_a_thousand_sessions_at_once(serve: Callable[..., SessionServer], sample: Held) -> None:
    """All of them wait for the engines at the same time; each gets its own answer, and none of another's."""
    server, count = serve(), 1000
    sessions = [open_session(server, f"train/0/{n}/0") for n in range(count)]
    sample.go.clear()

    async def one(number: int) -> tuple[int, str]:
        """httpx takes longer for a thousand connections than the server."""
        session = sessions[number]
        body = json.dumps({"messages": [{"role": "user", "content": f"I am {number}."}]})
        path = "/" + session.base_url.split("/", 3)[3] + "/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\nConnection: close\r\n"
        reading, writing = await asyncio.open_connection("127.0.0.1", server.port)
        writing.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        reply = (await reading.read()).decode()
        writing.close()
        return int(reply.split()[1]), json.loads(reply.partition("\r\n\r\n")[2])["id"]

    async def all_of_them() -> list[tuple[int, str]]:
        tasks = [asyncio.ensure_future(one(n)) for n in range(count)]
        for _ in range(count):
            while not sample.asked.acquire(blocking=False):
                await asyncio.sleep(0.01)
        sample.go.set()
        return list(await asyncio.gather(*tasks))

    replies = asyncio.run(all_of_them())
    assert replies == [(200, f"chatcmpl-train/0/{n}/0/0") for n in range(count)]
    for number, session in enumerate(sessions):
        record = session.finish()
        assert len(record.turns) == 1
        assert f"I am {number}." in tokenizer_of(NAME).decode(record.branches[0].token_ids)


@pytest.mark.parametrize(
    ("error", "status", "kept"),
    [
        (EnginesFailed("9 engine failures"), 503, True),
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
            assert sample.asked.acquire(timeout=30)
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


def test_models(serve: Callable[..., SessionServer]) -> None:
    (model,) = client_of(open_session(serve())).models.list()
    assert (model.id, model.max_model_len) == ("policy", 2000)
