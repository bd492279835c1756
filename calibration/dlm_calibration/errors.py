"""The exceptions that this package raises."""

from dlm_runtime.errors import DlmError, ExitCode


class CalibrationError(DlmError):
    """Raised if the calibration data or the denoiser's activations are unusable.

    From such data or activations, no ranges of activations can be determined.
    """

    exit_code = ExitCode.WRONG_INPUT


class QuantisationError(DlmError):
    """Raised if a tensor cannot be quantised, because it contains NaN or infinity, or because its
    shape does not fit the format.
    """

    exit_code = ExitCode.WRONG_INPUT
