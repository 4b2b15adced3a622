"""What a rollout engine may answer instead of a rollout."""

from __future__ import annotations

from megatron_dppo.errors import UserError


class EngineClosed(RuntimeError):
    """The engine was closed, or its gate is shut after a weight sync that did not finish."""


class EngineDead(RuntimeError):
    """The engine's core process ended or hung. Nothing can be asked of it any more; the reason is in its log."""


class GenerationTimeout(TimeoutError):
    """A request took longer than `rollout.request_timeout_s`; it was aborted with the others of its call."""


class EnginesFailed(UserError):
    """Engines failed more often in this run than `rollout.max_engine_failures` allows."""
