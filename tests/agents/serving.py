"""A server before engines that can be held, and how a harness talks to it."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import numpy as np
import openai

from megatron_dppo.agents.server import SessionServer
from megatron_dppo.agents.sessions import Session, SessionLimits
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from tests.agents.families import stop_ids, tokenizer_of
from tests.agents.recorder import Recorder

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
        assert self.go.wait(300)
        if self.fails is not None:
            raise self.fails
        return self.recorder(request, sampling, training)


def open_session(server: SessionServer, name: str = "train/0/0/0", **limits: Any) -> Session:
    most = {"max_turns": 100, "max_tokens": 2000, "max_response_tokens": 100, "max_prompt_tokens": 1900} | limits
    return server.open(name, sampling=SAMPLING, training=True, seed=lambda turn: 7 + turn, limits=SessionLimits(**most))


def client_of(session: Session, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=session.base_url, api_key=session.api_key, **{"max_retries": 0} | options)


def ask(client: openai.OpenAI, messages: Any = HI, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)


def post(session: Session, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {session.api_key}"} | options.pop("headers", {})
    return httpx.post(session.base_url.removesuffix("/v1") + path, headers=headers, timeout=300, **options)
