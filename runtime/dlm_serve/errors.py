"""Defines the errors of the API, in the format that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

from dlm_runtime import BusyError, ClosedError, DlmError, EngineError, RequestError

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error that ends an HTTP request. The response contains OpenAI's error object.

    Args:
        status: The HTTP status.
        message: A text that says what is wrong, and what the client should do.
        param: The path of the wrong field in the body, such as "messages[0].content". None if no
            single field is wrong.
        code: A fixed code that programs can compare, such as "model_not_found".
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def kind(self) -> str:
        """The value of the field ``type`` in OpenAI's error object."""
        names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        if self.status >= 500:
            return "server_error"
        return names.get(self.status, "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the error adds to the response."""
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def unsupported(param: str, why: str) -> ApiError:
    """Return the error for a field whose value this server does not support."""
    return ApiError(400, f"{param}: {why}", param, "unsupported_value")


def of_runtime(
    err: DlmError, param: str | None = None, length_field: str = "max_tokens"
) -> ApiError:
    """Convert an error of the runtime into an error of the API.

    Args:
        err: The error of the runtime.
        param: The path of the wrong field in the body. None if no single field is wrong.
        length_field: The field of the body that sets the runtime's argument ``max_new_tokens``.
    """
    said = str(err)
    if isinstance(err, BusyError):
        return ApiError(429, said, code="server_busy")
    if isinstance(err, ClosedError):
        return ApiError(503, "the model is being closed or replaced: try again", code="unavailable")
    if isinstance(err, RequestError):
        return ApiError(400, said.replace("max_new_tokens", length_field), param, "invalid_value")
    if isinstance(err, EngineError):
        return ApiError(500, said, code="engine_failed")
    return ApiError(500, said)
