"""The errors that dlm-export's packages raise on purpose.

Everything a user can cause derives from ``DlmError`` and reads: what happened, where, what to do.
The command line prints such an error as one line; any other exception is a defect of ours.
"""


class DlmError(Exception):
    """Something a user can act on: the message says what, where and what to do."""

    exit_code = 1  # 1 could not, 2 wrong usage, 3 ran, but parity, an accuracy budget or an engine's audit failed


class BundleError(DlmError):
    """A bundle is missing, damaged, edited, or of a version that this runtime does not know."""

    exit_code = 2


class RequestError(DlmError, ValueError):
    """A request (tokens, policy, lengths) is outside what the bundle takes."""

    exit_code = 2


class EngineError(DlmError):
    """The inference engine is missing, too old, or failed while it ran."""


class CancelledError(DlmError):
    """A step callback asked the loop to stop."""
