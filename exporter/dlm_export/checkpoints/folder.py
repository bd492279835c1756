"""Reads a checkpoint folder: config.json, safetensors files and tokenizer files.

The files are not trusted, and no code of a checkpoint is executed. Tensors are memory-mapped one at
a time, so only the largest tensor must fit into memory. The file format is specified at
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import reprlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from dlm_calibration.precisions import FORMATS
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.files import read_object

if TYPE_CHECKING:
    import torch

# Largest size of a JSON file. A tokenizer_config.json with many added tokens takes less than 2 MiB.
# A vocab.json of 262,144 ids takes less than 8 MiB. The limit is needed because a JSON file of
# empty lists and objects takes 30 times its size in Python's memory.
CONFIG_LIMIT_BYTES = 12 << 20
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# The names of types in safetensors files, with their bytes per element.
WEIGHT_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
QUANTISED_DTYPES = {"F8_E4M3": 1, "U8": 1}  # accepted only in quantised checkpoints
POSITION_IDS = ".embeddings.position_ids"
"""The suffix of the name of an integer tensor in old checkpoints of transformers.

The tensor contains the numbers 0, 1, 2 and so on, so this module ignores it.
"""
QUANTISATION_FILE = "hf_quant_config.json"
COMPARED = 1 << 24  # bytes of two tensors that are compared at a time
NAME_LIMIT_BYTES = 255  # maximum length of a file name on Linux


class CheckpointError(DlmError):
    """Raised if a checkpoint is incomplete, damaged, or of a kind that dlm-export does not support."""

    exit_code = ExitCode.WRONG_INPUT


def read_json(path: Path, hint: str = "") -> dict[str, Any]:
    """Read a JSON object from a file of limited size.

    Raises CheckpointError. ``hint`` is a sentence that is added to the error message.
    """
    return read_object(path, CONFIG_LIMIT_BYTES, CheckpointError, hint)


HARMLESS_KEYS = (
    "architectures",
    "model_type",
    "name_or_path",
    "_name_or_path",
    "transformers_version",
    "tokenizer_class",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "precision",
    "rope_full_precision",
    "flash_attention",
    "pretraining_tp",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    "problem_type",
    "id2label",
    "label2id",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "mask_token_id",
    "sep_token_id",
    "cls_token_id",
    "initializer_range",
    "init_device",
    "init_fn",
    "init_std",
    "init_cutoff_factor",
    "max_window_layers",
    "attention_dropout",
    "residual_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "dropout",
    "gradient_checkpointing",
)
"""Keys of config.json that do not change the results of a trained network."""


class Config:
    """The content of config.json. Each method checks the type of the value that it returns.

    Error messages name the file, the key and the expected value. The object records which keys the
    program has read, because an unread key might describe a part of the network that dlm-export
    does not know.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values
        self._read: set[str] = set()
        self._sections: dict[str, Config] = {}

    def get(self, key: str) -> Any:
        """Return the value of a key, or ``None`` if the key is missing."""
        self._read.add(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return key in self._values

    def at(self, path: str) -> Any:
        """Return the value of a name that ``unread`` returns."""
        name, _, rest = path.partition(".")
        return self._sections[name].at(rest) if rest else self._values.get(name)

    def unread(self) -> list[str]:
        """Return the unread keys whose values might change the network's results.

        Keys whose value is null or false are left out. ``auto_map`` counts as unread if none of its
        models has the class ``architectures[0]``.
        """
        found = [
            key
            for key, value in self._values.items()
            if key not in self._read
            and key not in HARMLESS_KEYS
            and value is not None
            and value is not False
            and not (key == "auto_map" and self._maps_own_class(value))
        ]
        return found + [
            f"{name}.{key}" for name, section in self._sections.items() for key in section.unread()
        ]

    def _maps_own_class(self, auto_map: object) -> bool:
        architectures = self._values.get("architectures")
        models = [
            str(value).rpartition(".")[2]
            for key, value in (auto_map.items() if isinstance(auto_map, dict) else ())
            if str(key).startswith("AutoModel")
        ]
        return not models or not isinstance(architectures, list) or architectures[0] in models

    def section(self, key: str) -> Config:
        """Return the object under ``key`` as a ``Config``. Raises CheckpointError."""
        if key not in self._sections:
            values = self.get(key)
            if not isinstance(values, dict):
                raise CheckpointError(
                    f"{self.path}: {key} must be an object, found {reprlib.repr(values)}"
                )
            self._sections[key] = Config(self.path, values)
        return self._sections[key]

    def integer(
        self,
        key: str,
        default: int | None = None,
        low: int = 1,
        high: int = 1 << 24,
        instead: int | None = None,
    ) -> int:
        """Return the integer that config.json stores under ``key``.

        If the key is missing, the result is ``default``. If ``instead`` is a number, the user
        replaced the value by this number.
        """
        value = self.get(key)
        if instead is not None:
            return instead
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise CheckpointError(
                f"{self.path}: {key} must be an integer in {low}..{high}, found {reprlib.repr(value)}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive number that config.json stores under ``key``.

        If the key is missing, the result is ``default``, the documented default of the
        architecture.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        return self.positive(key, value)

    def positive(self, key: str, value: object) -> float:
        """Check that a value is a positive number. The error message names the value's ``key``."""
        if value is None:
            raise CheckpointError(
                f"{self.path}: {key} is missing, and a guess would change what the network computes. Add it."
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
            raise CheckpointError(
                f"{self.path}: {key} must be a positive number, found {reprlib.repr(value)}"
            )
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{self.path}: {key} must be true or false, found {reprlib.repr(value)}"
            )
        return value

    def require(self, key: str, *allowed: object, is_said: bool = False) -> None:
        """Check that the value of a key is in ``allowed``, the values that ``Denoiser`` supports.

        Raises CheckpointError if the value is not allowed. If ``is_said`` is true, the key must be
        present.
        """
        value = self.get(key)
        if value is None and is_said:
            raise CheckpointError(
                f"{self.path}: {key} is missing, and a guess would change what the network computes. Add it."
            )
        if value is not None and not any(
            type(value) is type(choice) and value == choice for choice in allowed
        ):
            choices = ", ".join(json.dumps(choice) for choice in allowed) or "null"
            raise CheckpointError(
                f"{self.path}: {key} = {json.dumps(value)[:60]} is not supported, only {choices}"
            )


class TensorInfo(NamedTuple):
    """A tensor's file, type and shape, and the offset of its first byte in the file.

    This class is a tuple to save memory, because a checkpoint may contain tens of thousands of
    tensors.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4-weight",
}
"""Maps each supported quantisation algorithm of modelopt to the layer format that recipes use for
it. Other algorithms of modelopt are not supported, because they scale, pack or split weights
differently.
"""
MIXED = "MIXED_PRECISION"  # the algorithm of a checkpoint whose layers use different algorithms
_NVFP4_GROUP_SIZE = 16


def weight_format(algorithm: str) -> str:
    """Return the number format in which a supported algorithm stores weights: fp8 or nvfp4."""
    found = FORMATS[ALGORITHMS[algorithm]].weights
    assert found is not None, algorithm
    return found


@dataclass(frozen=True)
class PreQuantised:
    """Describes how a checkpoint is quantised, with the fields of modelopt's hf_quant_config.json.

    - ``excluded``: patterns that match the names of the modules in full precision.
    - ``layers``: the algorithm of each module. This field is used only if ``algorithm`` is
      ``MIXED_PRECISION``.
    - ``kv_cache``: the format of cached keys and values for which the checkpoint was calibrated.
    """

    path: Path
    algorithm: str
    producer: str
    kv_cache: str | None
    excluded: tuple[str, ...]
    layers: dict[str, str]

    def algorithm_of(self, module: str) -> str | None:
        """Return the algorithm with which a module's weight is quantised.

        Returns ``None`` if the module, or a module that contains it, is excluded from quantisation.
        """
        if self.algorithm == MIXED:
            return self.layers.get(module)
        parts = module.split(".")
        around = [".".join(parts[: i + 1]) for i in range(len(parts))]
        is_excluded = any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.excluded for name in around
        )
        return None if is_excluded else self.algorithm

    def as_dict(self) -> dict[str, object]:
        """Return this description as plain Python objects, for ``inspect --json``."""
        return {"algorithm": self.algorithm, "producer": self.producer, "kv_cache": self.kv_cache}

    def __str__(self) -> str:
        algorithms = sorted(set(self.layers.values()))
        return f"{' and '.join(algorithms) or self.algorithm} ({self.producer})"


def read_quantisation(folder: Path, config: Config) -> PreQuantised | None:
    """Read how a checkpoint is quantised. Returns ``None`` if the checkpoint is not quantised.

    The description is in hf_quant_config.json, or under ``quantization_config`` in config.json.
    Raises CheckpointError if the checkpoint was quantised with a tool other than modelopt, or with
    an unsupported algorithm.
    """
    embedded = config.get("quantization_config")
    if embedded is not None and not isinstance(embedded, dict):
        raise CheckpointError(
            f"{config.path}: quantization_config must be an object, found {type(embedded).__name__}"
        )
    if embedded is not None and embedded.get("quant_method") != "modelopt":
        method = embedded.get("quant_method")
        by = "a tool that it does not name" if method is None else reprlib.repr(method)
        raise CheckpointError(
            f"{config.path}: quantization_config: quantised by {by}, which is not read; only modelopt's "
            f"{', '.join(ALGORITHMS)} are. Use the checkpoint that is not quantised."
        )
    path = folder / QUANTISATION_FILE
    if path.exists():
        found = read_json(path)
        values = found.get("quantization")
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{path}: quantization must be an object, found {type(values).__name__}"
            )
        kv_cache, excluded = values.get("kv_cache_quant_algo"), values.get("exclude_modules")
    elif embedded is not None:
        path, found, values = config.path, embedded, embedded
        # In config.json, an FP8 cache is described by an object instead of a name.
        scheme = embedded.get("kv_cache_scheme")
        kv_cache, excluded = "FP8" if isinstance(scheme, dict) else scheme, embedded.get("ignore")
    else:
        return None
    algorithm = values.get("quant_algo")
    if embedded is not None and embedded.get("quant_algo", algorithm) != algorithm:
        raise CheckpointError(
            f"{path}: quant_algo is {reprlib.repr(algorithm)}, but {config.path.name} says "
            f"{reprlib.repr(embedded.get('quant_algo'))}. Copy the checkpoint again."
        )
    if algorithm is None:  # modelopt writes the file even if only the cache is quantised
        return None
    layers: dict[str, str] = {}
    if algorithm == MIXED:
        each = values.get("quantized_layers")
        if (
            not isinstance(each, dict)
            or not each
            or not all(isinstance(layer, dict) for layer in each.values())
        ):
            raise CheckpointError(
                f"{path}: {MIXED} needs quantized_layers, an object with an object for each layer"
            )
        for module, layer in each.items():
            layers[module] = _known_algorithm(path, layer, f" of {reprlib.repr(module)}")
    else:
        algorithm = _known_algorithm(path, values, "")
    excluded = [] if excluded is None else excluded
    if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
        raise CheckpointError(f"{path}: the excluded modules must be a list of names")
    return PreQuantised(path, algorithm, _producer(found), _text(kv_cache), tuple(excluded), layers)


def _known_algorithm(path: Path, values: dict[str, Any], where: str) -> str:
    algorithm = values.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{path}: quant_algo{where} is {reprlib.repr(algorithm)}, which is not read; {', '.join(ALGORITHMS)} are. "
            "Use the checkpoint that is not quantised."
        )
    group_size = values.get("group_size")
    if weight_format(algorithm) == "nvfp4" and group_size not in (None, _NVFP4_GROUP_SIZE):
        raise CheckpointError(
            f"{path}: group_size{where} is {reprlib.repr(group_size)}; {algorithm} has groups of {_NVFP4_GROUP_SIZE}"
        )
    return algorithm


def _producer(values: dict[str, Any]) -> str:
    producer = values.get("producer")
    name, version = (
        (producer.get("name"), producer.get("version"))
        if isinstance(producer, dict)
        else (None, None)
    )
    return " ".join(text for text in (_text(name), _text(version)) if text) or "unknown producer"


def _text(value: object) -> str | None:
    """Return the value if it is a short printable name, and ``None`` otherwise."""
    return (
        value if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable() else None
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a checked safetensors file. Returns its entries and the data's offset."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


class Checkpoint:
    """An open checkpoint.

    ``tensors`` maps the name of each tensor in the files to a description of the tensor.
    ``quantisation`` is ``None`` if the checkpoint is not quantised. ``notes`` contains messages for
    the user about settings and tensors that are ignored or unexpected. ``adapters`` maps names to the
    folders of LoRA adapters that are outside the checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        """Read config.json, hf_quant_config.json and all tensor headers. Raises CheckpointError."""
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}: not a folder. Give the folder that holds config.json and *.safetensors."
            )
        config = self.path / "config.json"
        self.config = Config(
            config, read_json(config, " A checkpoint folder holds config.json and *.safetensors.")
        )
        self.quantisation = read_quantisation(self.path, self.config)
        self.dtypes = (
            WEIGHT_DTYPES if self.quantisation is None else WEIGHT_DTYPES | QUANTISED_DTYPES
        )
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self.adapters: dict[str, Path] = {}
        self._included: set[Path] = set()  # the files of ``include``
        index = self._index()
        for file in self._files(index):
            self._read_header(file)
        if index is not None:
            self._check_index(index)

    @property
    def weight_bytes(self) -> int:
        """Total size of all tensors in the files, in bytes."""
        return sum(
            math.prod(info.shape) * self.dtypes[info.dtype] for info in self.tensors.values()
        )

    def optional_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file next to config.json. Returns ``{}`` if the file does not exist."""
        path = self.path / name
        return read_json(path) if path.exists() else {}

    def note(self, message: str) -> None:
        """Add a message to ``notes``. A message that is already there is not added again."""
        if message not in self.notes:
            self.notes.append(message)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored type, memory-mapped.

        When the tensor is freed, its file is unmapped. The method does not read the file's header
        again, because the header may list thousands of experts.
        """
        import torch

        info = self.tensors[name]
        kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        kind = (kinds | {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8})[info.dtype]
        size = math.prod(info.shape) * self.dtypes[info.dtype]
        if not size:
            return torch.empty(info.shape, dtype=kind)
        try:  # Map the file as private and writable, because torch rejects read-only arrays.
            stored: np.ndarray = np.memmap(info.file, np.uint8, "c", info.offset, (size,))
        except (OSError, ValueError) as err:
            raise CheckpointError(f"{info.file}: cannot read {name} ({err})") from err
        # Some tools write files with unaligned tensors. Copy an unaligned tensor.
        if info.offset % kind.itemsize:
            stored = np.array(stored)
        return torch.from_numpy(stored).view(kind).view(info.shape)

    def is_equal(self, first: str, second: str) -> bool:
        """Return True if two tensors have the same type, shape and bytes."""
        a, b = self.tensors[first], self.tensors[second]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        size = math.prod(a.shape) * self.dtypes[a.dtype]
        try:
            mine, other = (
                np.memmap(info.file, np.uint8, "r", info.offset, (size,)) for info in (a, b)
            )
        except (OSError, ValueError) as err:
            raise CheckpointError(f"{self.path}: cannot read {first} ({err})") from err
        return all(
            np.array_equal(mine[at : at + COMPARED], other[at : at + COMPARED])
            for at in range(0, size, COMPARED)
        )

    def _index(self) -> dict[str, str] | None:
        path = self.path / INDEX_FILE
        if not path.exists():
            return None
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
        return weight_map

    def _files(self, index: dict[str, str] | None) -> Iterable[Path]:
        if index is None:
            single = self.path / SINGLE_FILE
            if single.is_file():
                return [single]
            others = sorted(
                file.name
                for pattern in ("*.bin", "*.pt", "*.pth")
                for file in self.path.glob(pattern)
            )
            hint = (
                f" It has {others[0]}: pickled weights can run code, so convert them to safetensors."
                if others
                else ""
            )
            raise CheckpointError(f"{self.path}: has neither {SINGLE_FILE} nor {INDEX_FILE}.{hint}")
        names = sorted(set(index.values()))
        for name in names:
            if Path(name).name != name or len(os.fsencode(name)) > NAME_LIMIT_BYTES or "\0" in name:
                raise CheckpointError(
                    f"{self.path / INDEX_FILE}: shard name {reprlib.repr(name)} is not a file in the checkpoint's folder"
                )
            if not (self.path / name).is_file():
                raise CheckpointError(
                    f"{self.path / name}: shard is missing ({len(names)} are listed in {INDEX_FILE})"
                )
        return [self.path / name for name in names]

    def include(self, path: Path, prefix: str) -> None:
        """Add the tensors of another file to ``tensors``, with ``prefix`` before their names.

        If the tensors are already there, the method does nothing. Raises CheckpointError.
        """
        if path not in self._included:
            self._read_header(path, prefix)
            self._included.add(path)

    def _read_header(self, path: Path, prefix: str = "") -> None:
        try:
            with safe_open(path, "np"):  # checks the whole header: sizes, gaps, overlaps
                header, first = _header(path)
            for inner, entry in header.items():
                name, dtype = f"{prefix}{inner}", entry["dtype"]
                if name.endswith(POSITION_IDS):
                    continue
                if name in self.tensors:
                    raise CheckpointError(
                        f"{path}: {name} is in {self.tensors[name].file.name} as well"
                    )
                if dtype not in self.dtypes:
                    hint = (
                        f" Quantised weights need {QUANTISATION_FILE} beside them."
                        if dtype in QUANTISED_DTYPES
                        else ""
                    )
                    raise CheckpointError(
                        f"{path}: {name} is stored as {dtype}; only {', '.join(self.dtypes)} weights are read.{hint} Use the "
                        "checkpoint that is not quantised."
                    )
                self.tensors[name] = TensorInfo(
                    path, dtype, tuple(entry["shape"]), first + entry["data_offsets"][0]
                )
        except SafetensorError as err:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path}: damaged or truncated safetensors file of {size} bytes ({err}). Copy or download it again."
            ) from err
        except OSError as err:
            raise CheckpointError(f"{path}: cannot read ({err})") from err

    def _check_index(self, index: dict[str, str]) -> None:
        files = {path: path.name for path in {info.file for info in self.tensors.values()}}
        for name, file in index.items():
            if name.endswith(POSITION_IDS):
                continue
            if name not in self.tensors or files[self.tensors[name].file] != file:
                raise CheckpointError(
                    f"{self.path / file}: {name} is not in this shard, although {INDEX_FILE} says so"
                )
