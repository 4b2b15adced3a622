"""What a session says to a request that it does not answer."""

from __future__ import annotations


class Refused(Exception):
    """A request that gets an HTTP status and one line, in the form of OpenAI's errors."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
