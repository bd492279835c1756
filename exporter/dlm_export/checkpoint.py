"""A checkpoint folder on disk: config.json, safetensors files and tokenizer files, read as hostile data.

Nothing that ships with a checkpoint is executed. Tensors are memory-mapped by the safetensors library
(format: https://github.com/huggingface/safetensors), one at a time, so that reading a checkpoint costs its largest
tensor and not its sum.
"""

from __future__ import annotations

import json
import math
import reprlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dlm_runtime.errors import DlmError

CONFIG_LIMIT_BYTES = 64 << 20  # tokenizer_config.json with a large added vocabulary stays under 2 MiB
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
WEIGHT_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}  # safetensors' names -> bytes


class CheckpointError(DlmError):
    """A checkpoint is missing something, damaged, or not of a kind that dlm-export reads."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of bounded size. Raises CheckpointError."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path}: not a plain file")
        if info.st_size > CONFIG_LIMIT_BYTES:
            raise CheckpointError(f"{path}: {info.st_size} bytes is too large for a configuration file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise CheckpointError(f"{path}: no such file. A checkpoint folder holds config.json and *.safetensors.") from err
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(f"{path}: not readable as JSON ({err})") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Config:
    """config.json with typed access; every error names the file, the key and what was expected."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 1 << 24) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise CheckpointError(f"{self.path}: {key} must be an integer in {low}..{high}, found {reprlib.repr(value)}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{self.path}: {key} must be a positive number, found {reprlib.repr(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} must be true or false, found {reprlib.repr(value)}")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a value that changes the network in a way that the denoiser does not have."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            choices = ", ".join(json.dumps(choice) for choice in allowed)
            raise CheckpointError(f"{self.path}: {key} = {json.dumps(value)[:60]} is not supported, only {choices}")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """An opened checkpoint: ``config``, and ``tensors`` by their released names."""

    def __init__(self, path: str | Path) -> None:
        """Read config.json and every safetensors header. Raises CheckpointError."""
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: not a folder. Give the folder that holds config.json and *.safetensors.")
        self.config = Config(self.path / "config.json", read_json(self.path / "config.json"))
        self.tensors: dict[str, TensorInfo] = {}
        index = self._index()
        for file in self._files(index):
            self._read_header(file)
        if index is not None:
            self._check_index(index)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(math.prod(info.shape) * WEIGHT_DTYPES[info.dtype] for info in self.tensors.values())

    def optional_json(self, name: str) -> dict[str, Any]:
        """A JSON file beside config.json, or an empty object where there is none."""
        path = self.path / name
        return read_json(path) if path.is_file() else {}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as stored, memory-mapped. The mapping goes when the tensor goes."""
        info = self.tensors[name]
        try:
            with safe_open(info.file, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as err:
            raise CheckpointError(f"{info.file}: cannot read {name} ({err})") from err

    def _index(self) -> dict[str, str] | None:
        path = self.path / INDEX_FILE
        if not path.is_file():
            return None
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
        return weight_map

    def _files(self, index: dict[str, str] | None) -> Iterable[Path]:
        if index is None:
            single = self.path / SINGLE_FILE
            if single.is_file():
                return [single]
            others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in self.path.glob(pattern))
            hint = f" It has {others[0]}: pickled weights can run code, convert them to safetensors." if others else ""
            raise CheckpointError(f"{self.path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there.{hint}")
        names = sorted(set(index.values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{self.path / INDEX_FILE}: shard name {name!r} leaves the checkpoint's folder")
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path / name}: shard is missing ({len(names)} are listed in {INDEX_FILE})")
        return [self.path / name for name in names]

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    piece = file.get_slice(name)
                    if name in self.tensors:
                        raise CheckpointError(f"{path}: {name} is in {self.tensors[name].file.name} as well")
                    if piece.get_dtype() not in WEIGHT_DTYPES:
                        raise CheckpointError(
                            f"{path}: {name} is stored as {piece.get_dtype()}; only {', '.join(WEIGHT_DTYPES)} weights are "
                            "read. Use the checkpoint that is not quantised."
                        )
                    self.tensors[name] = TensorInfo(path, piece.get_dtype(), tuple(piece.get_shape()))
        except SafetensorError as err:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path}: damaged or truncated safetensors file of {size} bytes ({err}). Copy or download it again."
            ) from err
        except OSError as err:
            raise CheckpointError(f"{path}: cannot read ({err})") from err

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise CheckpointError(f"{self.path / file}: {name} is not in this shard, though {INDEX_FILE} says so")
