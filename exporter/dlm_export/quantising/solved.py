"""Stores weights that a solver has rounded, in memory or in files, until the graph is written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dlm_calibration.errors import CalibrationError
from dlm_calibration.precision_rounding import (
    CODE_TYPES,
    QuantisedWeight,
    pack_nibbles,
    unpack_nibbles,
)
from dlm_runtime.precision import NUMBER_FORMATS


class Solved:
    """The rounded weight of each layer that a solver has processed.

    If ``folder`` is set, each weight is stored in a file, which is written atomically and contains
    a hash of its content. If ``folder`` is not set, the weights are in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._held: dict[str, QuantisedWeight] = {}

    def __contains__(self, layer: str) -> bool:
        return layer in self._held or (self._folder is not None and self._path(layer).is_file())

    def __setitem__(self, layer: str, weight: QuantisedWeight) -> None:
        if self._folder is None:
            self._held[layer] = weight
            return
        nibbles = NUMBER_FORMATS[weight.format].bits == 4
        codes = weight.codes.astype(np.int8) if weight.format == "int4" else weight.codes
        flat = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
        arrays = {
            "codes": pack_nibbles(np.pad(flat & np.uint8(15), (0, flat.size % 2)))
            if nibbles
            else flat,
            "scales": np.ascontiguousarray(weight.scales).view(np.uint8),
        }
        described = {
            "layer": layer,
            "format": weight.format,
            "shape": " ".join(map(str, weight.codes.shape)),
            "scales": " ".join(map(str, weight.scales.shape)),
            "group_size": str(weight.group_size or 0),
            "global_scale": "" if weight.global_scale is None else float(weight.global_scale).hex(),
        }
        partial = self._path(layer).with_suffix(".partial")
        save_file(arrays, partial, described | {"sha256": _digest(described, **arrays)})
        os.replace(partial, self._path(layer))

    def __getitem__(self, layer: str) -> QuantisedWeight:
        """Return a layer's rounded weight. Raises CalibrationError if the weight's file is damaged."""
        if layer in self._held:
            return self._held[layer]
        path = self._path(layer)
        try:
            with safe_open(path, "numpy") as file:
                described = file.metadata()
                codes = file.get_tensor("codes")
                scales = file.get_tensor("scales")
            if (
                described.pop("sha256") != _digest(described, codes=codes, scales=scales)
                or described["layer"] != layer
            ):
                raise ValueError("its SHA-256 is wrong, or it belongs to another layer")
            format, shape = described["format"], tuple(map(int, described["shape"].split()))
            if NUMBER_FORMATS[format].bits == 4:
                codes = unpack_nibbles(codes)[: shape[0] * shape[1]]
            if format == "int4":
                codes = ((codes ^ np.uint8(8)).view(np.int8) - np.int8(8)).astype(ml_dtypes.int4)
            elif format != "nvfp4":
                codes = codes.view(CODE_TYPES[format])
            kind = ml_dtypes.float8_e4m3fn if format == "nvfp4" else np.float32
            return QuantisedWeight(
                format,
                codes.reshape(shape),
                scales.view(kind).reshape(tuple(map(int, described["scales"].split()))),
                np.float32(float.fromhex(described["global_scale"]))
                if described["global_scale"]
                else None,
                int(described["group_size"]) or None,
            )
        except (SafetensorError, OSError, KeyError, ValueError) as err:
            raise CalibrationError(
                f"{path}: not a solved weight written by a build ({err}). Remove it, and build again."
            ) from err

    def __iter__(self) -> Iterator[str]:
        """The names of the layers whose weights are stored."""
        yield from self._held
        if self._folder is not None:
            yield from (path.stem for path in sorted(self._folder.glob("*.safetensors")))

    def _path(self, layer: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{layer}.safetensors"


def _digest(described: Mapping[str, str], codes: np.ndarray, scales: np.ndarray) -> str:
    digest = hashlib.sha256(json.dumps(dict(described), sort_keys=True).encode())
    digest.update(codes.data)
    digest.update(scales.data)
    return digest.hexdigest()
