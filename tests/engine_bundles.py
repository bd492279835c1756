"""Bundles for GPUs that several tests share, and functions that edit copies of these bundles.

Each bundle is built once per test session.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from checkpoints import dream_config, write_checkpoint
from click.testing import CliRunner, Result

from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.bundle.folder import finish
from dlm_export.bundle.manifest import network_of
from dlm_export.cli import main
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.tensorrt.audit import differs
from dlm_export.tensorrt.estimate import EngineOptions

SMALL = QuantiseOptions(calibration=CalibrationOptions(samples=4, states_per_sample=2))
# All formats for which TensorRT-RTX builds engines, each with every kind of device that supports
# the format.
BUILDS = {
    "fp16": ("rtx5090",),
    "bf16": ("rtx5090",),
    "int8": ("rtx5090",),
    "int4": ("rtx5090",),
    "fp8": ("rtx4090", "rtx5090"),
    "nvfp4": ("rtx5090",),
    "mixed": ("rtx5090", "gb10"),
}
LONGEST, BLOCK = 256, 32  # the canvas and the block of ``tiny``, in tokens

_bundles: dict[tuple[object, ...], Path] = {}
# These folders are removed at the end of the test session.
_folders: list[tempfile.TemporaryDirectory[str]] = []


def _folder() -> Path:
    _folders.append(tempfile.TemporaryDirectory())
    return Path(_folders[-1].name)


@functools.cache
def tiny() -> Path:
    """A random denoiser in bf16 whose matrices can be divided into INT4's groups of 64."""
    config = dream_config(intermediate_size=128)
    return write_checkpoint(_folder() / "checkpoint", config, seed=4, dtype=torch.bfloat16)


def gpu_bundle(
    precision: str,
    *targets: str,
    source: Path | None = None,
    activations: str | None = None,
    engines: bool = False,
    rotate_down: bool = False,
) -> Path:
    """Build ``source`` for GPUs. By default, this is the checkpoint ``tiny``.

    Tests must not change the bundle. If ``engines`` is true, TensorRT-RTX also builds the engines
    of the bundle on this machine.
    """
    key = (precision, targets, source, activations, engines, rotate_down)
    if key not in _bundles:
        output = _folder() / "bundle"
        options = BuildOptions(
            targets,
            precision,
            activations=activations,
            engine=EngineOptions() if engines else None,
            check_parity=False,
            quantise=replace(SMALL, recipe_changes={"rotate_down": True} if rotate_down else {}),
        )
        build(source or tiny(), output, options)
        _bundles[key] = output
    return _bundles[key]


def with_engines(precision: str) -> Path:
    """The bundle of ``tiny`` with the engines of ``BUILDS``. Tests must not change the bundle."""
    return gpu_bundle(precision, *BUILDS[precision], engines=True)


def check_audits(bundle: Path, names: Sequence[str]) -> None:
    """Check that each engine holds every layer in the format that the manifest lists."""
    manifest = read_manifest(bundle)
    precision, network = manifest["precision"], network_of(manifest)
    full = {"fp16": "float16", "bf16": "bfloat16"}
    asked = dict.fromkeys(network.quantisable(), full.get(precision["name"], "high"))
    asked |= precision.get("layers", {})
    assert sorted(manifest["loop"]["engines"]) == sorted(manifest["audits"]) == sorted(names)
    for audit in manifest["audits"].values():
        assert audit["fallbacks"] == {}
        assert audit["layers"].keys() >= asked.keys()
        for layer, wanted in asked.items():
            assert not differs(wanted, audit["layers"][layer]), layer


def copy_of(bundle: Path, to: Path) -> Path:
    """Copy a bundle, so that a test may change the copy."""
    return Path(shutil.copytree(bundle, to))


def row_inputs(tokens: int, cached: int) -> dict[str, np.ndarray]:
    """The inputs with which a graph for cuda reads all cached rows, for one request per canvas."""
    counts = {"cached_requests": cached, "token_requests": tokens}
    first = {name: np.zeros(count, np.int64) for name, count in counts.items()}
    return first | {"cached_rows": np.arange(cached)}


def read_manifest(bundle: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def edit_device_graph(bundle: Path, edit: Callable[[onnx.ModelProto], None]) -> None:
    """Change ``device.onnx`` of a bundle in place and update its hashes in the manifest.

    The result looks like a bundle that a defective exporter wrote.
    """
    path = bundle / "device.onnx"
    model = onnx.load(path, load_external_data=False)
    edit(model)
    onnx.save(model, path)
    manifest = read_manifest(bundle)
    del manifest["files"]
    finish(bundle, manifest)


def dlm_export(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result: Result, code: int, says: Sequence[str]) -> None:
    """Check that a command ended with the exit code ``code`` and printed one line that contains all
    texts in ``says``.
    """
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for text in says:
        assert text in result.stderr, result.stderr
