"""The errors that dlm-export's packages raise on purpose.

Everything a user can cause derives from ``DlmError`` and reads: what happened, where, what to do.
The command line prints such an error as one line; any other exception is a defect of ours.
"""

import reprlib

from dlm_runtime.exit_codes import ExitCode as ExitCode


class DlmError(Exception):
    """Something a user can act on: the message says what, where and what to do."""

    exit_code = ExitCode.COULD_NOT


class DlmWarning(UserWarning):
    """Something was done in another way than it was asked for. The command line prints it as one
    line.
    """


class BundleError(DlmError):
    """A bundle is missing, damaged, edited, or of a version that this runtime does not know."""

    exit_code = ExitCode.WRONG_INPUT


class RequestError(DlmError, ValueError):
    """A request (tokens, policy, lengths) is outside what the bundle takes."""

    exit_code = ExitCode.WRONG_INPUT


class ClosedError(RequestError):
    """The bundle or the scheduler takes no more requests, as it was closed."""


class EngineError(DlmError):
    """The inference engine is missing, too old, or failed while it ran."""


class ForkError(DlmError, RuntimeError):
    """A bundle, scheduler or job was used in a process that was forked from the one that opened it."""


class BusyError(DlmError):
    """As many requests wait as may: hand this one in again later."""


class CancelledError(DlmError):
    """A step callback asked the loop to stop."""


class SchemaWarning(DlmWarning):
    """A keyword of a JSON Schema looks misspelled, or a part of a schema is not used."""


class ConstraintWarning(DlmWarning):
    """A constraint made a text far less likely than the denoiser's own choice."""


def shown(value: object) -> str:
    """A short form of any value, for a message."""
    try:
        return reprlib.repr(value)
    except Exception:  # such as an integer of more digits than Python prints
        return f"a value of type {type(value).__name__}"
