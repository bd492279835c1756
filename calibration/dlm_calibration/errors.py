"""What calibration raises on purpose."""

from dlm_runtime.errors import DlmError, ExitCode


class CalibrationError(DlmError):
    """Calibration data or a denoiser's activations that no ranges can be found from."""

    exit_code = ExitCode.WRONG_INPUT


class QuantisationError(DlmError):
    """Something cannot be quantised as asked: values are not finite, or the format does not take
    the shape.
    """

    exit_code = ExitCode.WRONG_INPUT
