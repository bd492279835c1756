"""The errors that dlm-export's packages raise on purpose.

Errors that a user can cause derive from ``DlmError``. The messages of these errors say what
happened, where it happened, and what to do. The command line prints such an error as one line. Any
other exception is a bug in dlm-export.
"""

import reprlib

from dlm_runtime.exit_codes import ExitCode as ExitCode


class DlmError(Exception):
    """The base class of errors that a user can fix."""

    exit_code = ExitCode.COULD_NOT


class DlmWarning(UserWarning):
    """Warns that a request was carried out with changes. The message explains the changes.

    The command line prints the warning as one line.
    """


class BundleError(DlmError):
    """Raised if a bundle is missing, damaged or edited, or has an unknown format version."""

    exit_code = ExitCode.WRONG_INPUT


class RequestError(DlmError, ValueError):
    """Raised if a request (tokens, policy, lengths) is invalid for a bundle."""

    exit_code = ExitCode.WRONG_INPUT


class ClosedError(RequestError):
    """Raised if a bundle or a scheduler is used after it was closed."""


class EngineError(DlmError):
    """Raised if ONNX Runtime or TensorRT is missing, is too old, or failed in a pass."""


class ForkError(DlmError, RuntimeError):
    """Raised if a bundle, scheduler or job is used in a forked process that did not create it."""


class BusyError(DlmError):
    """Raised if the scheduler's queue is full. The caller may submit the request again later."""


class CancelledError(DlmError):
    """Raised if a request has no result, because it was ended early."""


class SchemaWarning(DlmWarning):
    """Warns that a JSON Schema has a keyword that looks misspelled, or an unused part."""


class ConstraintWarning(DlmWarning):
    """Warns that a constraint forced a text that the denoiser considers very unlikely."""


def shown(value: object) -> str:
    """Return a short form of any value, for an error message."""
    try:
        return reprlib.repr(value)
    except Exception:  # repr may fail, for example for an integer with too many digits
        return f"a value of type {type(value).__name__}"
