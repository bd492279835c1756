"""The exceptions that this package raises."""

from dlm_runtime.errors import DlmError, ExitCode


class CalibrationError(DlmError):
    """Raised if calibration data, calibration options or a denoiser's activations are unusable.

    Activations are unusable if they contain NaN or infinity, or if no activations were observed.
    """

    exit_code = ExitCode.WRONG_INPUT


class QuantisationError(DlmError):
    """Raised if a tensor cannot be quantised, because it contains NaN or infinity, or because its
    shape does not fit the format.
    """

    exit_code = ExitCode.WRONG_INPUT
