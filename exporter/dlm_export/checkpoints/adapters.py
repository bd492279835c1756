"""Reads the LoRA adapters of a checkpoint, in the layout of the library PEFT.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. For each
adapted matrix, the second file contains two tensors: ``lora_A`` ``[rank, inputs]`` and ``lora_B``
``[outputs, rank]`` (https://huggingface.co/docs/peft/developer_guides/checkpoint). The files are not
trusted. This module does not import torch.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config, read_json

DRAFT_ADAPTERS = ("linear_spec_lora", "adapter")
"""Names of the folders in releases of Nemotron-Labs-Diffusion and of Uno with the adapter for draft
passes.
"""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BESIDE = "."
"""Name of an adapter whose files are in the checkpoint's own folder, not in a folder of their own."""
PREFIX = "base_model.model."
"""The start of the names of an adapter's tensors. The name of the adapted module follows it."""
WITHOUT = "To leave the adapter out, pass --no-adapter."
"""The end of error messages about an adapter."""
LARGEST_SCALE = 1e6
_PLAIN = re.compile(r"\^?[\w.]+")
"""Matches the keys of ``alpha_pattern`` that are names. PEFT allows regular expressions."""

_SUPPORTED: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "layer_replication": (),
    "target_parameters": ([],),
    "trainable_token_indices": (),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "lora_bias": (False,),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "velora_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "megatron_config": (),
    # Other methods of initialisation also change the weights of the network.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""The settings that change what an adapter computes, with their supported values besides null."""
_OF_SOME: dict[str, tuple[object, ...]] = {
    "exclude_modules": ([],),
    "layers_to_transform": ([],),
    "layers_pattern": (),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}
"""The settings that differ by module. An adapter for draft passes is the same in every layer."""
_HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""The settings that do not change what an adapter computes after training."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. Its tensors are in ``Checkpoint.tensors``, under ``FOLDER/NAME``.

    - ``modules``: the last parts of the names of the adapted modules, for example ``o_proj``.
    - ``scale``: the number by which the product of the two matrices is multiplied.
    - ``base``: the name of the network that the adapter was trained for, if the file contains it.
    - ``unread``: the settings in the file that this module does not know.
    """

    name: str
    rank: int
    scale: float
    modules: tuple[str, ...]
    base: str | None
    unread: tuple[str, ...]

    def describe(self) -> str:
        """Describe the adapter in one sentence, for a message to the user."""
        base = "" if self.base is None else f", trained for {self.base}"
        unread = f"; unknown settings: {', '.join(self.unread)}" if self.unread else ""
        return (
            f"the adapter {self.name} (rank {self.rank}{base}) is used only for the drafts of "
            f"self-speculation{unread}"
        )


def names_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all adapters: those beside the checkpoint's weights, and those attached."""
    files = [*checkpoint.path.glob("adapter_*"), *checkpoint.path.glob("*/adapter_*")]
    folders = {file.parent for file in files if file.name in (CONFIG_FILE, WEIGHTS_FILE)}
    names = {folder.relative_to(checkpoint.path).as_posix() for folder in folders}
    return sorted(names | checkpoint.adapters.keys())


def attach(checkpoint: Checkpoint, folder: Path, name: str) -> None:
    """Give the adapter in ``folder``, which is outside the checkpoint, a name in the checkpoint.

    Raises CheckpointError if another adapter has this name.
    """
    if checkpoint.adapters.get(name) != folder and name in names_of(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path}: --adapter {folder}: the checkpoint already has an adapter {name}. Rename the folder, or move "
            "the other adapter away."
        )
    checkpoint.adapters[name] = folder


def config_file(checkpoint: Checkpoint, name: str) -> Path:
    """Return the path of an adapter's adapter_config.json."""
    return checkpoint.adapters.get(name, checkpoint.path / name) / CONFIG_FILE


def read_adapter(checkpoint: Checkpoint, name: str) -> Adapter | None:
    """Read the adapter ``name`` of a checkpoint, which is for draft passes.

    Returns ``None`` if there is no such adapter. Raises CheckpointError.
    """
    if name not in names_of(checkpoint):
        return None
    config = _open(checkpoint, name, _SUPPORTED | _OF_SOME)
    rank = config.integer("r")
    base = config.get("base_model_name_or_path")
    return Adapter(
        name,
        rank,
        _scale(config, rank, config.number("lora_alpha")),
        _modules(config.path, config.get("target_modules")),
        base if isinstance(base, str) and base.isprintable() and len(base) <= 200 else None,
        tuple(config.unread()),
    )


@dataclass(frozen=True)
class Update:
    """An update of one matrix ``[out, in]``: ``scale`` times the tensor ``b`` times the tensor ``a``."""

    a: str
    b: str
    scale: float


def read_updates(checkpoint: Checkpoint, name: str) -> dict[str, Update]:
    """Read an adapter that changes all passes, and return its updates by the name of the matrix.

    Raises CheckpointError if the adapter would change anything else, because it could not be merged.
    """
    if name not in names_of(checkpoint):
        known = ", ".join(names_of(checkpoint)) or "none"
        raise CheckpointError(
            f"{checkpoint.path}: --adapter {reprlib.repr(name)}: there is no such adapter. Adapters beside the weights: "
            f"{known}. If the adapter is in another folder, pass the path of this folder."
        )
    config = _open(checkpoint, name, _SUPPORTED)
    keys = ("target_modules", "base_model_name_or_path", "lora_alpha", "use_rslora", *_OF_SOME)
    for key in keys:
        config.get(key)
    if unknown := config.unread():
        raise CheckpointError(
            f"{config.path}: {', '.join(map(reprlib.repr, unknown))}: not a setting of LoRA that can be merged"
        )
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(_PLAIN.fullmatch(key) for key in alphas):
        raise CheckpointError(
            f"{config.path}: alpha_pattern: only names of modules can be merged, found {reprlib.repr(alphas)}"
        )
    updates: dict[str, Update] = {}
    for tensor in [tensor for tensor in checkpoint.tensors if tensor.startswith(f"{name}/")]:
        module = tensor.removeprefix(f"{name}/").removeprefix(PREFIX)
        if module.endswith(".lora_B.weight"):
            continue
        a, b = tensor, tensor.replace(".lora_A.", ".lora_B.")
        matrix = _matrix(checkpoint, name, module.removesuffix(".lora_A.weight"))
        if not module.endswith(".lora_A.weight") or b not in checkpoint.tensors or matrix is None:
            raise CheckpointError(
                f"{config.path}: {tensor} cannot be merged: only pairs of lora_A and lora_B for a matrix of the checkpoint can"
            )
        rank, outputs = checkpoint.tensors[a].shape[0], checkpoint.tensors[b].shape[0]
        if rank != config.integer("r") and not config.get("rank_pattern"):
            raise CheckpointError(
                f"{config.path}: r is {config.integer('r')}, but the rank of {tensor} is {rank}"
            )
        shapes = (outputs, *checkpoint.tensors[a].shape[1:]), checkpoint.tensors[b].shape[1:]
        if shapes != (checkpoint.tensors[matrix].shape, (rank,)) or matrix in updates:
            raise CheckpointError(f"{config.path}: {tensor} does not fit {matrix}")
        alpha = next(
            (value for key, value in alphas.items() if _names(key, module)),
            config.get("lora_alpha"),
        )
        updates[matrix] = Update(a, b, _scale(config, rank, config.positive("lora_alpha", alpha)))
    if not updates:
        raise CheckpointError(f"{config.path}: the adapter contains no tensors")
    return updates


def _names(key: str, module: str) -> bool:
    """Return True if a key of a pattern names a module, as in PEFT."""
    module = module.removesuffix(".lora_A.weight")
    return module == key.removeprefix("^") or (
        not key.startswith("^") and module.endswith(f".{key}")
    )


def _matrix(checkpoint: Checkpoint, name: str, module: str) -> str | None:
    """Return the name of an adapted matrix. The adapter's names may lack the start of its name."""
    if f"{module}.weight" in checkpoint.tensors:
        return f"{module}.weight"
    found = [
        tensor
        for tensor in checkpoint.tensors
        if tensor.endswith(f".{module}.weight") and not tensor.startswith(f"{name}/")
    ]
    return found[0] if len(found) == 1 else None


def _open(checkpoint: Checkpoint, name: str, supported: dict[str, tuple[object, ...]]) -> Config:
    """Check an adapter's settings, and read its tensors' header. Raises CheckpointError."""
    path = config_file(checkpoint, name)
    weights = path.with_name(WEIGHTS_FILE)
    for file in (path, weights):
        if not file.is_file():
            raise CheckpointError(
                f"{file}: the file is missing. An adapter needs {CONFIG_FILE} and {WEIGHTS_FILE}. Copy the missing file."
            )
    config = Config(path, read_json(path))
    config.require("peft_type", "LORA", is_said=True)
    for key, allowed in supported.items():
        config.require(key, *allowed)
    for key in _HARMLESS:
        config.get(key)
    config.integer("r")
    checkpoint.include(weights, f"{name}/")
    return config


def _scale(config: Config, rank: int, alpha: float) -> float:
    """Return the number by which the product of two matrices is multiplied."""
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora") else rank)
    if not 0 < scale <= LARGEST_SCALE:
        raise CheckpointError(
            f"{config.path}: r {rank} and lora_alpha {alpha:g} give the scale {scale:g}; it must be above 0 and at most "
            f"{LARGEST_SCALE:g}"
        )
    return scale


def _modules(path: Path, found: object) -> tuple[str, ...]:
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(module, str) and module for module in found)
    ):
        raise CheckpointError(
            f"{path}: target_modules must be a list of names of modules, found {reprlib.repr(found)}"
        )
    return tuple(sorted(set(found)))
