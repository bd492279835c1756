"""Exceptions of this package."""

from dlm_runtime.errors import DlmError, ExitCode


class CalibrationError(DlmError):
    """The calibration data or a denoiser's activations cannot be used to find ranges."""

    exit_code = ExitCode.WRONG_INPUT


class QuantisationError(DlmError):
    """A tensor cannot be quantised: its values are not finite, or its shape does not fit the
    format.
    """

    exit_code = ExitCode.WRONG_INPUT
