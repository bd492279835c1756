"""The errors that dlm-export's packages raise on purpose.

Errors that a user can cause derive from ``DlmError``. Messages say what happened, where, and what
to do. The command line prints such an error as one line; any other exception is a defect of
dlm-export.
"""

import reprlib

from dlm_runtime.exit_codes import ExitCode as ExitCode


class DlmError(Exception):
    """An error that a user can fix. The message says what is wrong, where, and what to do."""

    exit_code = ExitCode.COULD_NOT


class DlmWarning(UserWarning):
    """A request was carried out, but not exactly as it was made. The command line prints the
    warning as one line.
    """


class BundleError(DlmError):
    """A bundle is missing, damaged or edited, or its format version is unknown to this runtime."""

    exit_code = ExitCode.WRONG_INPUT


class RequestError(DlmError, ValueError):
    """A request (tokens, policy, lengths) is invalid for this bundle."""

    exit_code = ExitCode.WRONG_INPUT


class ClosedError(RequestError):
    """A bundle or a scheduler was used after it was closed."""


class EngineError(DlmError):
    """The inference engine is missing, too old, or failed while it ran."""


class ForkError(DlmError, RuntimeError):
    """A bundle, scheduler or job was used in a process that was forked from the process that
    created it.
    """


class BusyError(DlmError):
    """The scheduler's queue is full. Submit the request again later."""


class CancelledError(DlmError):
    """A callback ended the request."""


class SchemaWarning(DlmWarning):
    """A keyword of a JSON Schema looks misspelled, or a part of a schema is not used."""


class ConstraintWarning(DlmWarning):
    """A constraint forced a text that is far less likely than the text that the denoiser would
    choose.
    """


def shown(value: object) -> str:
    """A short form of any value, for an error message."""
    try:
        return reprlib.repr(value)
    except Exception:  # such as an integer of more digits than Python prints
        return f"a value of type {type(value).__name__}"
