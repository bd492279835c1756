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
    """A request was carried out differently than asked. The command line prints it as one line."""


class BundleError(DlmError):
    """A bundle is missing, damaged, edited, or of a version that this runtime does not know."""

    exit_code = ExitCode.WRONG_INPUT


class RequestError(DlmError, ValueError):
    """A request (tokens, policy, lengths) is invalid for this bundle."""

    exit_code = ExitCode.WRONG_INPUT


class ClosedError(RequestError):
    """The bundle or the scheduler was closed."""


class EngineError(DlmError):
    """The inference engine is missing, too old, or failed while it ran."""


class ForkError(DlmError, RuntimeError):
    """A bundle, scheduler or job was used in a process forked from the one that created it."""


class BusyError(DlmError):
    """The scheduler's queue is full: submit the request again later."""


class CancelledError(DlmError):
    """A callback asked to stop."""


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
