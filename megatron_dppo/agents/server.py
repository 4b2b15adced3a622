"""The HTTP server of sessions, on loopback unless told otherwise.

```
harness ── HTTP ──► event loop: token, size, JSON ──► a thread a request: Session.answer ──► engines
   ▲                    │ refuses before it reads            │ renders, samples, commits
   └──── reply ◄────────┴────────────────────────────────────┘
```
A request waits in a thread for its answer, as everything that asks engines does. Threads are made as they are needed; a
thousand of them cost little beside a thousand conversations.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerBase

from megatron_dppo.agents import MODEL
from megatron_dppo.agents.drawing import Sample
from megatron_dppo.agents.messages import Refused, strict_json
from megatron_dppo.agents.parsing import AnswerParser
from megatron_dppo.agents.rendering import ChatRenderer
from megatron_dppo.agents.replies import events
from megatron_dppo.agents.sessions import Session, SessionLimits, Shared
from megatron_dppo.launch.network import LOOPBACK
from megatron_dppo.rollout.engine import SamplingConfig

MOST_BYTES = 16 << 20
"""Of the body of a request."""
BODY_TIMEOUT_S = 60.0
"""In which all of it has to come."""
_REPORT_BYTES = _HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 300  # longer than most tools take: a connection that closes while a client writes is an error to it
_MOST_THREADS = 4096


class SessionServer:
    """Listens from when it is made until `close`, on a thread of its own."""

    def __init__(
        self,
        sample: Sample,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Iterable[int] = (),
        chat_template_kwargs: dict[str, Any] | None = None,
        date: Any = None,
        tool_format: str = "auto",
        other_sampling: Literal["refuse", "not_trained"] = "refuse",
        edited: Literal["branch", "refuse"] = "branch",
        max_request_bytes: int = MOST_BYTES,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """
        sample                called from many threads, one sequence a call
        stop_token_ids        that end an answer, beside the tokenizer's end of sequence, as far as they are known here
        chat_template_kwargs  further variables of the tokenizer's chat template; `date` that of a clock which it asks
        tool_format           how the model writes calls of tools, see `parsing.FORMATS`; "auto" goes by the template
        other_sampling        "refuse" or "not_trained": what a request for another temperature or top-p gets
        edited                "branch" or "refuse": what a request gets that does not go on from the last turn
        """
        stops = frozenset(stop_token_ids) | ({tokenizer.eos_token_id} - {None})
        renderer = None
        if tokenizer.chat_template:
            renderer = ChatRenderer(tokenizer, stop_token_ids=stops, date=date)
        self._shared = Shared(
            renderer=renderer,
            parser=None if renderer is None else AnswerParser(renderer.template, tool_format=tool_format),
            vocab_size=len(tokenizer),
            template_kwargs=dict(chat_template_kwargs or {}),
            other_sampling=other_sampling,
            edited=edited,
        )
        self._sample, self._most_bytes, self._body_timeout = sample, max_request_bytes, body_timeout_s
        self._sessions: dict[str, Session] = {}
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="session")
        _raise_file_limit()
        self._socket = socket.create_server((LOOPBACK, 0), backlog=4096)
        self.port = int(self._socket.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(), log_level="error", access_log=False, lifespan="off", loop="asyncio", http="h11",
                h11_max_incomplete_event_size=_HEADER_BYTES, ws="none", backlog=4096, proxy_headers=False,
                server_header=False, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="sessions", daemon=True
        )
        self._thread.start()

    def open(
        self,
        name: str,
        *,
        sampling: SamplingConfig,
        training: bool,
        seed: Callable[[int], int],
        limits: SessionLimits,
    ) -> Session:
        """A new conversation, see `Session`. It answers until it is finished; `forget` it then."""
        place = secrets.token_hex(8)
        url = f"http://{LOOPBACK}:{self.port}/{place}/v1"
        session = Session(
            name,
            self._sample,
            self._shared,
            base_url=url,
            sampling=sampling,
            training=training,
            seed=seed,
            limits=limits,
        )
        self._sessions[place] = session
        return session

    def forget(self, session: Session) -> None:
        """Whoever asks for it from now on gets the answer of an unknown token."""
        self._sessions.pop(session.base_url.split("/")[-2], None)

    def close(self) -> None:
        """Stop listening. Idempotent. Answers that engines still owe are not waited for."""
        self._server.should_exit = True
        self._thread.join(timeout=10.0)
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.exception_handler(Refused)
        async def refuse(request: Request, error: Refused) -> JSONResponse:
            return JSONResponse(error.body(), error.status)

        @app.exception_handler(404)
        @app.exception_handler(405)
        async def unknown(request: Request, error: Exception) -> JSONResponse:
            return JSONResponse(
                Refused(404, f"no {request.method} {request.url.path} here", code="not_found").body(), 404
            )

        @app.post("/{place}/v1/chat/completions")
        async def chat(place: str, request: Request) -> Response:
            session = self._session(place, request)
            reply, body = await self._answer(session, "chat", request)
            if not body.get("stream"):
                return JSONResponse(reply)
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(events(reply, usage=usage), media_type="text/event-stream")

        @app.post("/{place}/inference/v1/generate")
        async def generate(place: str, request: Request) -> Response:
            return JSONResponse((await self._answer(self._session(place, request), "generate", request))[0])

        @app.get("/{place}/v1/models")
        async def models(place: str, request: Request) -> Response:
            session = self._session(place, request)
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-dppo"}
            return JSONResponse({"object": "list", "data": [model | {"max_model_len": session.limits.max_tokens}]})

        @app.post("/{place}/v1/reward")
        async def reward(place: str, request: Request) -> Response:
            session = self._session(place, request)
            session.report(_object(await self._body(request, _REPORT_BYTES)))
            return JSONResponse({})

        return app

    def _session(self, place: str, request: Request) -> Session:
        """Whose token the request has. Nothing else of it was read."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(place)
        known = session.api_key if session is not None else secrets.token_hex()
        same = hmac.compare_digest(known.encode(), token.strip().encode("utf-8", "replace"))
        if session is None or not same or kind.lower() != "bearer":
            raise Refused(401, "not the token of this session", code="invalid_api_key")
        return session

    async def _answer(
        self, session: Session, kind: Literal["chat", "generate"], request: Request
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        text = await self._body(request, self._most_bytes)
        key, count = (
            request.headers.get("idempotency-key", ""),
            request.headers.get("x-stainless-retry-count", "0"),
        )

        def work() -> tuple[dict[str, Any], dict[str, Any]]:
            body = _object(text)
            digest = hashlib.blake2b(kind.encode() + text).digest()
            return session.answer(kind, body, digest, key=key, retried=count.strip() not in ("", "0")), body

        # Shielded: a client that went away comes again for the answer, which is part of the conversation by then.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

    async def _body(self, request: Request, most: int) -> bytes:
        """Raises `Refused` for one that is too long, before it is held, or too slow."""
        length = request.headers.get("content-length", "0")
        too_long = Refused(413, f"the request has more than {most} bytes", code="request_too_large")
        if length.isdigit() and int(length) > most:
            raise too_long
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._body_timeout):
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        raise too_long
                    pieces.append(piece)
        except TimeoutError:
            raise Refused(408, f"the request was not whole after {self._body_timeout:g} s", code="timeout") from None
        except ClientDisconnect:
            raise Refused(400, "the client went away") from None
        return b"".join(pieces)


def _object(text: bytes) -> dict[str, Any]:
    try:
        body = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request must be a JSON object")
    return body


def _raise_file_limit() -> None:
    """A connection is a file; many systems allow 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
