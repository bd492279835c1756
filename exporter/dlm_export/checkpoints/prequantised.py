"""Reads the quantised matrices of modelopt's unified checkpoints, without changing their codes.

For a linear layer X, a checkpoint stores the codes ``X.weight`` and these scales
(https://github.com/NVIDIA/Model-Optimizer, ``modelopt.torch.export``):

========  ==========================  =============================  ====================  =============
stored    ``X.weight``                ``X.weight_scale``             ``X.weight_scale_2``  ``X.input_scale``
========  ==========================  =============================  ====================  =============
FP8       E4M3 [out, in]              fp32, one or [out]             -                     amax / 448
NVFP4     E2M1 [out, in / 2] as U8,   E4M3 [out, in / 16]            fp32, one             amax / (6 * 448)
          first code in low nibble
========  ==========================  =============================  ====================  =============

``input_scale`` is one fp32 number. ``input_scale`` is missing if the activations are not quantised,
or if their ranges are dynamic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from dlm_calibration.precision_rounding import NVFP4_GROUP_SIZE, QuantisedWeight, unpack_nibbles
from dlm_export.checkpoints.adapters import DRAFT_ADAPTERS
from dlm_export.checkpoints.folder import (
    WEIGHT_DTYPES,
    Checkpoint,
    CheckpointError,
    PreQuantised,
    weight_format,
)
from dlm_runtime.precision import NUMBER_FORMATS

if TYPE_CHECKING:
    import torch

CACHE_SUFFIXES = (".k_scale", ".v_scale", ".k_bias", ".v_bias")
"""Suffixes of the tensors of a quantised key/value cache. These tensors are not used."""

_WITH_INPUT_SCALE = ("FP8", "NVFP4")  # algorithms with calibrated activation ranges
_CODES = {"fp8": "F8_E4M3", "nvfp4": "U8"}


@dataclass(frozen=True, eq=False)
class StoredQuantised:
    """The stored codes and scales of a quantised matrix, and the scale of its input.

    ``input_scale`` is ``None`` if the input has no static scale.
    """

    weight: QuantisedWeight
    input_scale: np.float32 | None

    @property
    def input_amax(self) -> float | None:
        """The largest magnitude of the input in fp32, or ``None`` if the input has no static scale.

        modelopt computes ``input_scale`` in fp32: it divides the largest magnitude by a constant of
        the format. For such a scale, dividing the returned number by the constant gives exactly
        ``input_scale``. For any other scale, the quotient differs from ``input_scale`` by at most
        one unit in the last place.
        """
        if self.input_scale is None:
            return None
        return float(
            np.float32(self.input_scale * np.float32(NUMBER_FORMATS[self.weight.format].levels))
        )


@dataclass(frozen=True)
class Expected:
    """The types and shapes that are allowed for a tensor."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_required: bool = True


def expected_tensors(tensor: str, algorithm: str, inputs: int, outputs: int) -> dict[str, Expected]:
    """Return the tensors that make up a quantised weight ``[outputs, inputs]``, by name.

    ``tensor`` is the name of the weight.
    """
    base = tensor.removesuffix(".weight")
    floats, one = tuple(WEIGHT_DTYPES), ((), (1,))
    if weight_format(algorithm) == "fp8":
        found = {
            tensor: Expected((_CODES["fp8"],), ((outputs, inputs),)),
            f"{base}.weight_scale": Expected(floats, (*one, (outputs,), (outputs, 1))),
        }
    else:
        found = {
            tensor: Expected((_CODES["nvfp4"],), ((outputs, inputs // 2),)),
            f"{base}.weight_scale": Expected(
                ("F8_E4M3",), ((outputs, inputs // NVFP4_GROUP_SIZE),)
            ),
            f"{base}.weight_scale_2": Expected(floats, one),
        }
    if algorithm in _WITH_INPUT_SCALE:
        found[f"{base}.input_scale"] = Expected(floats, one, is_required=False)
    return found


def algorithm_of(checkpoint: Checkpoint, tensor: str) -> str | None:
    """Return the algorithm with which a matrix was quantised, or ``None`` if it was not quantised.

    A matrix that is stored as BF16, F16 or F32 was not quantised, even if hf_quant_config.json does
    not exclude it.
    """
    info = checkpoint.tensors.get(tensor)
    if checkpoint.quantisation is None or (info is not None and info.dtype in WEIGHT_DTYPES):
        return None
    return _algorithm(checkpoint.quantisation, tensor)


def _algorithm(said: PreQuantised, tensor: str) -> str | None:
    """Return the algorithm that hf_quant_config.json names for a matrix. Adapters have none."""
    if tensor.startswith(tuple(f"{name}/" for name in DRAFT_ADAPTERS)):
        return None
    return said.algorithm_of(tensor.removesuffix(".weight"))


def not_excluded(checkpoint: Checkpoint, tensors: Iterable[str]) -> list[str]:
    """Return the unquantised matrices that hf_quant_config.json does not exclude from quantisation."""
    said = checkpoint.quantisation
    return [
        tensor
        for tensor in tensors
        if said is not None
        and tensor in checkpoint.tensors
        and checkpoint.tensors[tensor].dtype in WEIGHT_DTYPES
        and _algorithm(said, tensor) is not None
    ]


def read(checkpoint: Checkpoint, tensor: str, algorithm: str) -> StoredQuantised:
    """Read the codes and scales of a weight.

    The caller must have checked the types and shapes of the tensors. Raises CheckpointError if
    codes are NaN, or if scales are not finite and positive. Group scales may be zero.
    """
    base = tensor.removesuffix(".weight")
    number_format = weight_format(algorithm)
    codes = checkpoint.tensor(tensor)
    if number_format == "fp8":
        values = _e4m3(codes)
        _refuse(checkpoint, tensor, "codes are NaN", np.isnan(values))
        scales = _scales(checkpoint, f"{base}.weight_scale").reshape(-1)
        scales = np.ascontiguousarray(np.broadcast_to(scales, (values.shape[0],)))
        weight = QuantisedWeight("fp8", np.ascontiguousarray(values.T), scales)
    else:
        name = f"{base}.weight_scale"
        groups = _e4m3(checkpoint.tensor(name))
        numbers = groups.astype(np.float32)
        _refuse(checkpoint, name, "group scales are NaN or negative", ~(numbers >= 0))
        weight = QuantisedWeight(
            "nvfp4",
            unpack_nibbles(codes.numpy()),
            groups,
            global_scale=np.float32(_scales(checkpoint, f"{base}.weight_scale_2").item()),
            group_size=NVFP4_GROUP_SIZE,
        )
    name = f"{base}.input_scale"
    has_input = algorithm in _WITH_INPUT_SCALE and name in checkpoint.tensors
    return StoredQuantised(
        weight, np.float32(_scales(checkpoint, name).item()) if has_input else None
    )


def _scales(checkpoint: Checkpoint, name: str) -> np.ndarray:
    scales: np.ndarray = checkpoint.tensor(name).float().numpy()
    _refuse(
        checkpoint,
        name,
        "scales are not finite and positive",
        ~(np.isfinite(scales) & (scales > 0)),
    )
    return scales


def _refuse(checkpoint: Checkpoint, name: str, what: str, is_bad: np.ndarray) -> None:
    if is_bad.any():
        raise CheckpointError(
            f"{checkpoint.tensors[name].file}: {int(is_bad.sum())} of {is_bad.size} {what} in {name}. "
            "Copy the checkpoint again, or export it again with every layer calibrated."
        )


def _e4m3(tensor: torch.Tensor) -> np.ndarray:
    """Convert a torch E4M3 tensor to numpy without changing bits."""
    import torch

    bits: np.ndarray = tensor.contiguous().view(torch.uint8).numpy()
    return bits.view(ml_dtypes.float8_e4m3fn)
