"""A conversation between a harness and the policy, as token ids: what was sampled is never tokenised again."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from megatron_dppo.agents.asked import Asked, OtherSampling, read_chat, read_ids
from megatron_dppo.agents.drawing import Sample, draw
from megatron_dppo.agents.history import Branch, History, Turn, TurnRecord
from megatron_dppo.agents.messages import Message, Refused, ToolCall, read_messages
from megatron_dppo.agents.parsing import AnswerParser
from megatron_dppo.agents.rendering import CannotContinue, ChatRenderer
from megatron_dppo.agents.replies import Answered, chat_reply, ids_reply
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError, typed_line
from megatron_dppo.rollout.engine import GenerationRequest, GenerationTimeout, NoWeights, SamplingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Of one session. A request beyond them is refused, and named in `SessionRecord.cut`."""

    max_turns: int
    max_tokens: int
    """Of a conversation, the answer under way included."""
    max_response_tokens: int
    """Of one answer; it ends there with finish reason "length", and the conversation may go on."""
    max_prompt_tokens: int
    """Before an answer."""
    max_in_flight: int = 16
    """Answers under way at once."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all sessions of a server have."""

    renderer: ChatRenderer | None
    """None where the tokenizer has no chat template: ids alone are answered."""
    parser: AnswerParser | None
    vocab_size: int
    template_kwargs: Mapping[str, Any]
    other_sampling: OtherSampling
    """What a request for another temperature or top-p gets: a refusal, or an answer that is not trained on."""
    edited: Literal["branch", "refuse"]
    """What a request gets that does not go on from the last turn of a branch."""


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """What is left of a session."""

    branches: tuple[RolloutBatch, ...]
    """One sequence each, see `join_turns`; the first has the session's name, the others `name+1`, `name+2`, ..."""
    turns: tuple[TurnRecord, ...]
    cut: str
    """The first limit that a request met, or empty."""
    refused: int
    """Requests answered with a status of 400 to 499."""
    reported: dict[str, Any] | None
    """The last object sent to `.../v1/reward`."""
    error: BaseException | None
    """What engines failed with where that is no fault of the request."""


@dataclass(eq=False)
class _Request:
    """One that was answered, or is about to be."""

    digest: bytes
    done: Future[dict[str, Any]] = field(default_factory=Future)
    again: int = 0


class Session:
    """One conversation. `answer` blocks and may be called from several threads: requests that are under way at the same
    time each get an answer, and the first that the engines were asked for goes on with the branch."""

    def __init__(
        self,
        name: str,
        sample: Sample,
        shared: Shared,
        *,
        base_url: str,
        sampling: SamplingConfig,
        training: bool,
        seed: Callable[[int], int],
        limits: SessionLimits,
    ) -> None:
        """
        name      unique in the run; requests are `name/turn`
        base_url  what a harness gets as OPENAI_BASE_URL, and `api_key` as OPENAI_API_KEY
        sampling  how tokens are drawn; `max_tokens` of it is of no use here
        seed      of the answer of a turn's number
        """
        self.name, self.base_url, self.api_key = name, base_url, f"session-{secrets.token_urlsafe(32)}"
        self.limits = limits
        self._sample, self._shared, self._sampling, self._training = sample, shared, sampling, training
        self._seed = seed
        self._lock = threading.Lock()  # of all that follows; never held while something is rendered or sampled
        self._history = History(name)
        self._requests: dict[bytes, _Request] = {}
        self._answered: dict[int, _Request] = {}
        self._begun = self._under_way = self._refused = 0
        self._cut, self._closed = "", False
        self._error: BaseException | None = None
        self._reported: dict[str, Any] | None = None

    def answer(
        self, kind: Literal["chat", "generate"], body: dict[str, Any], digest: bytes, *, key: str = "", retried: bool
    ) -> dict[str, Any]:
        """The reply to a request, or the same again: to one with the same Idempotency-Key, to one that a client says it
        has `retried`, and to the same while it is under way. Raises `Refused`."""
        named = b"key:" + key.encode() if key else b"body:" + digest
        with self._lock:
            self._check_open()
            known = self._requests.get(named)
            if known is not None and known.digest != digest:
                self._refused += 1
                raise Refused(422, "the same Idempotency-Key came with another request", code="idempotency_key_reused")
            again = known is not None and (bool(key) or retried or not known.done.done())
            waiting = 0 if known is None or known.done.done() else known.again
            if max(waiting, 0 if again else self._under_way) >= self.limits.max_in_flight:
                self._refused += 1  # whoever waits has a thread, and the server has so many
                raise Refused(429, f"{self.limits.max_in_flight} answers of this session are under way", code="flood")
            if known is None or not again:
                known = self._requests[named] = _Request(digest)
                self._under_way += 1
            known.again += again
        if again:
            return known.done.result()
        try:
            number, reply = self._chat(body) if kind == "chat" else self._generate(body)
        except BaseException as error:
            failure = self._failure(error)
            with self._lock:
                self._under_way -= 1
                self._refused += failure.status < 500
                del self._requests[named]
            known.done.set_exception(failure)
            raise failure from error
        with self._lock:
            self._under_way -= 1
            self._answered[number] = known
        known.done.set_result(reply)
        return reply

    def report(self, value: dict[str, Any]) -> None:
        """What the harness says of itself; the last word counts."""
        with self._lock:
            self._check_open()
            self._reported = value

    def finish(self) -> SessionRecord:
        """End it: from now on requests are refused, and answers under way are dropped. Idempotent."""
        with self._lock:
            self._closed = True
            branches, turns = self._history.samples({n: one.again for n, one in self._answered.items()})
            return SessionRecord(
                branches=branches,
                turns=turns,
                cut=self._cut,
                refused=self._refused,
                reported=self._reported,
                error=self._error,
            )

    def _chat(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The number of the turn and a chat completion."""
        renderer, parser = self._shared.renderer, self._shared.parser
        if renderer is None or parser is None:
            raise Refused(400, "the model's tokenizer has no chat template; send token ids to /inference/v1/generate")
        asked = read_chat(body, self._sampling, self._shared.other_sampling, vocab_size=self._shared.vocab_size)
        messages = read_messages(body.get("messages"))
        if len(messages) > self.limits.max_tokens:  # each has a token at least; to render them takes others' time
            raise self._too_long(f"{len(messages)} messages", "max_tokens")
        tools, given = asked.tools, {**self._shared.template_kwargs, **asked.given}
        with self._lock:
            before = self._history.longest([tools, given], messages)
            why = self._why_new(before)
        rendered, new = None, messages
        if before is not None and before.messages is not None:
            new, last = messages[len(before.messages) :], before.messages[-1]
            try:
                rendered = renderer.after(last, new, tools, given, last=int(before.ids[-1]), closed=before.closed)
                prompt = np.concatenate([before.ids, rendered.ids])
            except CannotContinue as error:
                why = self._refuse_edited(str(error))
        if rendered is None:
            before, new = None, messages
            rendered = renderer.conversation(messages, tools, given)
            prompt = rendered.ids
        with self._branch_for(before) as branch:
            number, started, batch = self._draw(prompt, asked, branch.recorded)
            ids, stopped, closed = self._sampled(batch, asked)
            text = self._spell(ids[:-1] if stopped else ids)
            text = text[: min((at for one in asked.stop if (at := text.find(one)) >= 0), default=len(text))]
            parsed = parser.parse(text, tools, thinking=rendered.thinking)
            earlier = sum(len(message.tool_calls) for message in messages)
            calls = tuple(ToolCall(parser.call_id(c[0], number, n, earlier), *c) for n, c in enumerate(parsed.calls))
            answer = Message("assistant", parsed.content, parsed.reasoning, calls[:1] if asked.one_call else calls)
            record = _record(number, prompt, batch, asked, started, new, answer, why)
            told = (*messages, answer)
            with self._lock:
                self._check_open()
                self._history.add(branch, record, prompt, batch, closed=closed, root=[tools, given], messages=told)
        answered = Answered(self.name, number, prompt, batch, asked)
        return number, chat_reply(answered, answer, lambda one: renderer.spell([one], keep=frozenset(renderer.added)))

    def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The number of the turn and ids for ids."""
        given, asked = read_ids(body, self._sampling, self._shared.other_sampling, vocab_size=self._shared.vocab_size)
        prompt = np.asarray(given, dtype=np.int32)
        with self._lock:
            before = self._history.longest_ids(prompt)
            why = self._why_new(before)
        # A model may sample ids that its tokenizer has not; engines take nobody else's.
        if (prompt[0 if before is None else before.length :] >= self._shared.vocab_size).any():
            raise Refused(400, f"token_ids: the ids are those below {self._shared.vocab_size}", param="token_ids")
        with self._branch_for(before) as branch:
            number, started, batch = self._draw(prompt, asked, branch.recorded)
            record = _record(number, prompt, batch, asked, started, (), None, why)
            with self._lock:
                self._check_open()
                self._history.add(branch, record, prompt, batch, closed=self._sampled(batch, asked)[2])
        return number, ids_reply(Answered(self.name, number, prompt, batch, asked))

    @contextmanager
    def _branch_for(self, before: Turn | None) -> Iterator[Branch]:
        """The branch of an answer that is drawn meanwhile, and nobody else's until then."""
        with self._lock:
            branch = self._history.branch_for(before)
        try:
            yield branch
        finally:
            with self._lock:
                branch.under_way = False

    def _draw(self, prompt: np.ndarray, asked: Asked, known: int) -> tuple[int, float, RolloutBatch]:
        """The number of a turn, when the engines were asked, and what of their answer is beyond what is known."""
        limits = self.limits
        with self._lock:
            self._check_open()
            number = self._begun
            if number >= limits.max_turns:
                self._cut = self._cut or "max_turns"
                raise Refused(400, f"the session had its {number} turns", code="max_turns")
            room = min(limits.max_response_tokens, limits.max_tokens - len(prompt))
            fits = room >= 1 and len(prompt) <= limits.max_prompt_tokens
            self._begun += fits
        if not fits:
            raise self._too_long(f"{len(prompt)} tokens", "max_tokens" if room < 1 else "max_prompt_tokens")
        request = GenerationRequest(
            request_id=f"{self.name}/{number}",
            prompt_ids=prompt,
            seed=self._seed(number),
            affinity=self.name,
            known=known,
        )
        sampling = replace(asked.sampling, max_tokens=min(room, asked.max_tokens or room))
        started = time.monotonic()
        batch = draw(
            self._ask_engines,
            request,
            sampling,
            training=self._training and not asked.why_not,
            most_prompt=limits.max_prompt_tokens,
            stop=asked.stop,
            spell=self._spell,
        )
        return number, started, batch

    def _ask_engines(self, request: GenerationRequest, sampling: SamplingConfig, training: bool) -> RolloutBatch:
        """What engines fail with is the run's to know. What fails before and behind them is this harness's alone."""
        try:
            return self._sample(request, sampling, training)
        except BaseException as error:
            if isinstance(error, UserError | GenerationTimeout) and not isinstance(error, NoWeights):
                raise
            with self._lock:
                self._error = self._error or error
            raise Refused(503, f"no answer: {typed_line(error)}", code="no_answer") from error

    def _too_long(self, what: str, limit: str) -> Refused:
        """The refusal of a conversation that has so much."""
        most = min(self.limits.max_tokens - 1, self.limits.max_prompt_tokens)
        with self._lock:
            self._cut = self._cut or limit
        told = f"the conversation has {what}; {most} tokens may stand before an answer"
        return Refused(400, told, code="context_length_exceeded", param="messages")

    def _why_new(self, before: Turn | None) -> str:
        """Why history is to be rendered: empty where there is none, or its ids are known."""
        if before is None:
            return self._refuse_edited("no turn is the beginning of it") if self._history.turns else ""
        if not before.is_last:
            self._refuse_edited(f"turn {before.record.number} was gone on from already")
        return ""

    def _refuse_edited(self, why: str) -> str:
        """`why`, or the refusal."""
        if self._shared.edited == "refuse":
            raise Refused(400, f"this is not the session's conversation with something new at its end: {why}",
                          code="history_edited", param="messages")  # fmt: skip
        return why

    def _sampled(self, batch: RolloutBatch, asked: Asked) -> tuple[np.ndarray, bool, bool]:
        """The ids of an answer, whether the last of them is a stop token, and whether that closes the message: engines
        know the model's own, and an answer that no text ended is one that a stop token did. A word that the request
        named as one closes nothing."""
        ids, renderer = batch.response_ids(0), self._shared.renderer
        cut = asked.stop and any(one in self._spell(ids) for one in asked.stop)
        stopped = batch.finish_reasons[0] == "stop" and not cut
        named = int(ids[-1]) in {*asked.sampling.stop_token_ids} - {*self._sampling.stop_token_ids}
        word = renderer is not None and int(ids[-1]) not in renderer.added.values()
        return ids, stopped, stopped and not (named and word)

    def _spell(self, ids: np.ndarray) -> str:
        renderer, parser = self._shared.renderer, self._shared.parser
        if renderer is None or parser is None:
            raise Refused(400, "stop: the model has no chat template; end answers by stop_token_ids", param="stop")
        return renderer.spell(ids, keep=parser.markers)

    def _check_open(self) -> None:
        if self._closed:
            raise Refused(410, "the session is over", code="session_over")

    def _failure(self, error: BaseException) -> Refused:
        """An error as an answer."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, RecursionError):
            return Refused(400, "the request is nested too deeply")
        if isinstance(error, GenerationTimeout):
            return Refused(504, typed_line(error), code="generation_timeout")
        if isinstance(error, UserError):
            return Refused(400, str(error))
        logger.warning("session %s could not answer a request", self.name, exc_info=error)
        return Refused(500, f"the request cannot be answered: {typed_line(error)}", code="internal_error")


def _record(
    number: int,
    prompt: np.ndarray,
    batch: RolloutBatch,
    asked: Asked,
    started: float,
    new: tuple[Message, ...],
    answer: Message | None,
    why: str,
) -> TurnRecord:
    return TurnRecord(
        number=number,
        asked=new,
        answer=answer,
        started=started,
        ended=time.monotonic(),
        prompt=len(prompt),
        sampled=len(batch.response_ids(0)),
        finish_reason=batch.finish_reasons[0],
        why_not=asked.why_not,
        rendered_anew=why,
    )
