"""A server of sessions for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_dppo.agents.server import SessionServer
from tests.agents.families import stop_ids, tokenizer_of
from tests.agents.serving import NAME, Held


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
