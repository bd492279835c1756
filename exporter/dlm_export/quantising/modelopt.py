"""Finds activation ranges and scales with NVIDIA's modelopt, instead of dlm-export's calibration.

modelopt (https://github.com/NVIDIA/Model-Optimizer, Apache-2.0) quantises ``nn.Linear`` modules in
place. This module therefore gives modelopt a copy of the denoiser, in which linear layers are
``nn.Linear`` modules. It uses only two results of modelopt: the range of each layer's input, and
the scales of SmoothQuant (arXiv:2211.10438) and AWQ (arXiv:2306.00978). dlm-export's own code
rounds and writes the weights.

modelopt is optional. Users must install modelopt without its extra ``[onnx]``, because this extra
requires other versions of onnx and onnxruntime than this project. This module imports only
``modelopt.torch``. Only AWQ on NVFP4 weights needs CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlm_calibration import solvers
from dlm_calibration.errors import CalibrationError
from dlm_calibration.observers import SMALLEST_AMAX
from dlm_calibration.precisions import FORMATS
from dlm_calibration.states import State
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.linear import Linear
from dlm_export.network.states import features_of
from dlm_runtime.errors import DlmError
from dlm_runtime.providers import installed_version

PACKAGE = "nvidia-modelopt"
# The oldest tested version. Older versions need quantiser settings in a different form.
OLDEST = (0, 47)
INSTALL = "pip install 'dlm-export[modelopt]'"

# modelopt's settings for number formats. Activations have one static scale per tensor.
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "axis": None},
    "fp8": {"num_bits": (4, 3), "axis": None},
    "nvfp4": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "axis": 0},
    "int4": {"num_bits": 4},
    "fp8": {"num_bits": (4, 3), "axis": 0},
    "nvfp4": _ACTIVATIONS["nvfp4"],
}
AWQ_SWEEPS = 2
"""The number of times that AWQ runs the denoiser on every state.

For ranges and SmoothQuant, the denoiser runs once per state.
"""


class ModeloptError(DlmError):
    """Raised if modelopt is missing, too old, or cannot do the requested work on this machine."""


def require() -> Any:
    """Import ``modelopt.torch.quantization``.

    Raises ModeloptError, which names the packages to install.
    """
    found = installed_version(PACKAGE)
    if found is None:
        raise ModeloptError(
            f"the calibrator modelopt needs the package {PACKAGE}, which is not installed: {INSTALL}"
        )
    if _numbers(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModeloptError(f"{PACKAGE} {found} is too old; {oldest} or later is needed: {INSTALL}")
    try:
        with _quiet():
            return importlib.import_module("modelopt.torch.quantization")
    except ModuleNotFoundError as err:
        raise ModeloptError(
            f"{PACKAGE} {found} needs {err.name}, which is not installed: {INSTALL}"
        ) from err
    # Importing a package that was built for different versions may raise any exception.
    except Exception as err:
        beside = ", ".join(
            f"{name} {installed_version(name) or 'missing'}"
            for name in ("torch", "onnx", "onnxruntime")
        )
        raise ModeloptError(
            f"{PACKAGE} {found} cannot be imported with {beside} ({type(err).__name__}: {err}). Install it without its "
            f"[onnx] extra ({INSTALL}), or omit --calibrator modelopt."
        ) from err


def amaxes(
    denoiser: Denoiser,
    states: Sequence[State],
    formats: Mapping[str, str],
    *,
    rotated: Mapping[str, int] | None = None,
    on_state: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Use modelopt's max calibration to find the ranges of layer inputs that have static scales.

    The denoiser is not modified.

    Args:
        denoiser: The denoiser to run.
        states: Calibration states.
        formats: The format of each layer, a key of ``recipes.FORMATS``.
        rotated: For each layer whose input is rotated before quantisation, the size of the Hadamard
            matrix.
        on_state: Called once per state.

    Raises:
        ModeloptError: modelopt cannot be used.
        CalibrationError: A layer was not observed, or its range is not finite.
    """
    mtq = require()
    layers = [layer for layer, name in formats.items() if FORMATS[name].is_static]
    if not layers:
        return {}
    turned = {layer: size for layer, size in (rotated or {}).items() if layer in layers}
    settings: list[dict[str, Any]] = []
    for layer in layers:
        activations = FORMATS[formats[layer]].activations
        assert activations is not None
        settings.append(
            {
                "quantizer_name": f"{_path(layer, turned)}.input_quantizer",
                "cfg": _ACTIVATIONS[activations],
            }
        )
    calibrated = _with_torch_linears(denoiser, layers, turned, own_weights=False)
    _calibrate(mtq, calibrated, settings, "max", states, on_state)
    modules: dict[str, Any] = dict(calibrated.named_modules())
    ranges = {layer: modules[_path(layer, turned)].input_quantizer.amax for layer in layers}
    _check_observed(ranges)
    # An input that was always zero gets a small range, as in dlm-export's own calibration.
    return {layer: max(float(amax), SMALLEST_AMAX) for layer, amax in ranges.items()}


def scales(
    denoiser: Denoiser,
    states: Sequence[State],
    formats: Mapping[str, str],
    groups: Mapping[str, Sequence[str]],
    *,
    alpha: float | None = None,
    on_state: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Find the scales for the inputs of each group of layers.

    For a group with K inputs, the scales are fp32 ``[K]``. A graph divides the inputs by the
    scales, and multiplies the rows of the weights by the scales.

    Args:
        denoiser: The denoiser to run.
        states: Calibration states.
        formats: The format of each layer, a key of ``recipes.FORMATS``.
        groups: Maps each group's name to the layers of the group, which all have the same input.
            The scales of a group's layers are averaged, as in modelopt's export.
        alpha: The strength of SmoothQuant. If ``None``, AWQ is used instead, with the number
            formats of the weights.
        on_state: Called once per state by SmoothQuant, and ``AWQ_SWEEPS`` times by AWQ.

    Raises:
        ModeloptError, CalibrationError: Raised in the same cases as by ``amaxes``.
    """
    mtq = require()
    layers = [layer for members in groups.values() for layer in members]
    settings: list[dict[str, Any]] = []
    for layer in layers:
        chosen = FORMATS[formats[layer]]
        assert chosen.weights is not None
        if alpha is not None:
            # Use INT8 for every layer, because modelopt computes SmoothQuant's scales only for
            # INT8. The scales depend only on ranges, so they are the same for every format.
            settings.append(
                {"quantizer_name": f"{layer}.weight_quantizer", "cfg": _WEIGHTS["int8"]}
            )
            settings.append(
                {"quantizer_name": f"{layer}.input_quantizer", "cfg": _ACTIVATIONS["int8"]}
            )
        else:
            cfg = dict(_WEIGHTS[chosen.weights])
            if chosen.weights == "int4":
                cfg["block_sizes"] = {-1: chosen.group_size, "type": "static"}
            settings.append({"quantizer_name": f"{layer}.weight_quantizer", "cfg": cfg})
    calibrated = _with_torch_linears(denoiser, layers, {}, own_weights=True)
    if alpha is None and any(FORMATS[formats[layer]].weights == "nvfp4" for layer in layers):
        if not torch.cuda.is_available():
            raise ModeloptError(
                "modelopt runs AWQ on NVFP4 weights with CUDA only, and there is no CUDA. Use another solver or calibrator."
            )
        calibrated = calibrated.to("cuda")
    method = {"method": "awq_lite"} if alpha is None else {"method": "smoothquant", "alpha": alpha}
    _calibrate(mtq, calibrated, settings, method, states, on_state)
    modules: dict[str, Any] = dict(calibrated.named_modules())
    found = {
        layer: getattr(modules[layer].input_quantizer, "_pre_quant_scale", None) for layer in layers
    }
    _check_observed(found)
    merged = {}
    for name, members in groups.items():
        each = [
            factors.float().flatten().cpu()
            for layer, factors in found.items()
            if layer in members and factors is not None
        ]
        factors = torch.stack(each).mean(0)
        merged[name] = (1 / factors).numpy()
    return merged


def _calibrate(
    mtq: Any,
    denoiser: Denoiser,
    settings: list[dict[str, Any]],
    method: str | dict[str, Any],
    states: Sequence[State],
    on_state: Callable[[], None],
) -> None:
    mask_token_id = denoiser.network.mask_token_id
    has_head = any(setting["quantizer_name"].startswith("head.") for setting in settings)

    def run(module: nn.Module) -> None:
        for state in states:
            # The head is not computed for committed positions.
            rows = torch.from_numpy(np.flatnonzero(state.is_masked(mask_token_id)))
            features = features_of(denoiser, state.canvas, rows, state.draft)
            if has_head and len(rows):
                denoiser.project(features)
            on_state()

    config = {
        "quant_cfg": [{"quantizer_name": "*", "enable": False}, *settings],
        "algorithm": method,
    }
    with torch.no_grad(), _quiet():
        try:
            mtq.quantize(denoiser, config, run)
        except (AssertionError, RuntimeError, ValueError) as err:
            raise CalibrationError(
                f"modelopt {installed_version(PACKAGE)} could not calibrate: {' '.join(str(err).split())}"
            ) from err


def _with_torch_linears(
    denoiser: Denoiser, layers: Sequence[str], rotated: Mapping[str, int], *, own_weights: bool
) -> Denoiser:
    """Return a copy of the denoiser in which linear layers are ``nn.Linear`` modules.

    Unless ``own_weights`` is true, the copy and the denoiser share the weights in memory.
    """
    shared: dict[int, Any] = {}
    for tensor in (*denoiser.parameters(), *denoiser.buffers()):
        shared[id(tensor)] = tensor
    copied = copy.deepcopy(denoiser, shared)
    for layer in layers:
        parent, name = layer.rsplit(".", 1) if "." in layer else ("", layer)
        ours = copied.get_submodule(layer)
        assert isinstance(ours, Linear), layer
        # modelopt scales weights in place, but SmoothQuant and AWQ must not change the original
        # denoiser.
        weight = ours.weight.detach().T.clone() if own_weights else ours.weight.detach().T
        if layer in rotated:
            weight = torch.from_numpy(solvers.rotate_rows(weight.T.float().numpy())).T
        linear: nn.Module = _torch_linear(weight, ours.bias)
        setattr(
            copied.get_submodule(parent),
            name,
            nn.Sequential(_Rotation(rotated[layer]), linear) if layer in rotated else linear,
        )
    return copied.requires_grad_(False)


def _torch_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an ``nn.Linear`` that uses ``weight`` and ``bias`` without copying the two tensors."""
    outputs, inputs = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class _Rotation(nn.Module):
    """Rotates its input in torch with a Hadamard matrix of ``size`` rows, like ``solvers.rotate``."""

    matrix: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.from_numpy(solvers.hadamard(size)))

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = x.reshape(*x.shape[:-1], -1, len(self.matrix)) @ self.matrix
        return turned.flatten(-2)


def _path(layer: str, rotated: Mapping[str, int]) -> str:
    """Return the path of a layer's ``nn.Linear`` in the copy, where rotated layers are wrapped."""
    return f"{layer}.1" if layer in rotated else layer


def _check_observed(found: Mapping[str, Tensor | None]) -> None:
    unseen = [layer for layer, value in found.items() if value is None]
    if unseen:
        raise CalibrationError(
            f"modelopt did not observe {', '.join(unseen)}: no calibration state ran it. Give states with mask tokens."
        )
    broken = [
        layer
        for layer, value in found.items()
        if value is not None and not bool(value.isfinite().all())
    ]
    if broken:
        raise CalibrationError(
            f"the input of {', '.join(broken)} is NaN or infinite: check the checkpoint"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that do not apply, and send modelopt's output to stderr."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _numbers(text: str) -> tuple[int, ...]:
    """Return the major and minor number of a version, for example ``(0, 47)`` for ``0.47.0rc1``."""
    parts = text.split(".")[:2]
    return tuple(int("".join(digit for digit in part if digit.isdigit()) or 0) for part in parts)
