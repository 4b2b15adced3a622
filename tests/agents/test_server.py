"""The server against harnesses that mean well, and others."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from megatron_dppo.agents.server import SessionServer
from tests.agents.families import tokenizer_of
from tests.agents.serving import HI, NAME, Held, ask, client_of, open_session, post


def test_it_listens_on_loopback_alone(serve: Callable[..., SessionServer]) -> None:
    server = serve()
    at = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == server.port and not c.raddr}
    assert at == {"127.0.0.1"}
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
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_p": -(10**400)}, "top_p"),
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
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
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
    assert (record.turns, record.refused, record.error) == ((), 1, None)


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(serve: Callable[..., SessionServer], number: str) -> None:
    """In a tool's schema they would reach the template."""
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"default": {number}}}}}}}]'
    reply = post(open_session(serve()), content=f'{{"messages": {json.dumps(HI)}, "tools": {tools}}}')
    assert reply.status_code == 400
    assert f"{number} is no number of JSON" in reply.json()["error"]["message"]


def test_what_changes_nothing_is_answered(serve: Callable[..., SessionServer]) -> None:
    neutral = {
        "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "logit_bias": {}, "presence_penalty": 0.0, "seed": 3,
        "response_format": {"type": "text"}, "tool_choice": "auto", "user": "u", "store": False, "n": 1, "stop": None,
        "frequency_penalty": None, "unheard_of": 5, "model": "gpt-4o", "reasoning_effort": "low",
    }  # fmt: skip
    assert post(open_session(serve()), json={"messages": HI} | neutral).status_code == 200


def test_a_flood_of_one_session_leaves_the_others_alone(serve: Callable[..., SessionServer], sample: Held) -> None:
    server = serve()
    flooded, other = open_session(server, "a", max_in_flight=4), open_session(server, "b")
    sample.go.clear()

    async def flood() -> list[int]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=300), timeout=300) as client:
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
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as flooding:
        flooding.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nX: ")
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(100):
                flooding.sendall(b"x" * (1 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # KiB
    assert ask(client_of(open_session(server))).choices[0].finish_reason == "stop"


def test_a_slow_client_is_let_go(serve: Callable[..., SessionServer]) -> None:
    server = serve(body_timeout_s=2.0)
    session = open_session(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as slow:
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


def test_models(serve: Callable[..., SessionServer]) -> None:
    (model,) = client_of(open_session(serve())).models.list()
    assert (model.id, model.max_model_len) == ("policy", 2000)
