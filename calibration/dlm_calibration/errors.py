"""What calibration raises on purpose."""

from dlm_runtime.errors import DlmError, ExitCode


class CalibrationError(DlmError):
    """Calibration data or a denoiser's activations that no ranges can be found from."""

    exit_code = ExitCode.WRONG_INPUT
