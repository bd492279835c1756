"""Reads the LoRA adapters in a checkpoint's folder, in the layout of the library PEFT.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. For each
adapted matrix, the second file contains two tensors: ``lora_A`` ``[rank, inputs]`` and ``lora_B``
``[outputs, rank]`` (https://huggingface.co/docs/peft/developer_guides/checkpoint). The files are not
trusted. This module does not import torch.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from pathlib import Path

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config, read_json

DRAFT_ADAPTER = "linear_spec_lora"
"""Name of the folder in releases of Nemotron-Labs-Diffusion with the adapter for draft passes."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (f"{DRAFT_ADAPTER}/{CONFIG_FILE}", f"{DRAFT_ADAPTER}/{WEIGHTS_FILE}")
"""Paths of the adapter's files in a checkpoint."""
PREFIX = "base_model.model."
"""The start of the names of an adapter's tensors. The name of the adapted module follows it."""
WITHOUT = "To leave the adapter out, pass --no-adapter."
"""The end of error messages about an adapter."""
LARGEST_SCALE = 1e6

_SUPPORTED: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "exclude_modules": ([],),
    "layers_to_transform": ([],),
    "layers_pattern": (),
    "layer_replication": (),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
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
            f"the adapter {self.name} (rank {self.rank}{base}) is used only in the draft passes of "
            f"self-speculation{unread}"
        )


def read_adapter(checkpoint: Checkpoint, name: str) -> Adapter | None:
    """Read the adapter in the folder ``name`` of a checkpoint, and the header of its tensor file.

    Returns ``None`` if the folder does not contain an adapter. Raises CheckpointError.
    """
    folder = checkpoint.path / name
    path, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if not path.exists() and not weights.exists():
        return None
    for file in (path, weights):
        if not file.is_file():
            raise CheckpointError(
                f"{file}: the file is missing. An adapter needs {CONFIG_FILE} and {WEIGHTS_FILE}. Copy the missing file."
            )
    config = Config(path, read_json(path))
    config.require("peft_type", "LORA", is_said=True)
    for key, allowed in _SUPPORTED.items():
        config.require(key, *allowed)
    for key in _HARMLESS:
        config.get(key)
    rank, alpha = config.integer("r"), config.number("lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora") else rank)
    if not 0 < scale <= LARGEST_SCALE:
        raise CheckpointError(
            f"{path}: r {rank} and lora_alpha {alpha:g} give the scale {scale:g}; it must be above 0 and at most "
            f"{LARGEST_SCALE:g}"
        )
    base = config.get("base_model_name_or_path")
    adapter = Adapter(
        name,
        rank,
        scale,
        _modules(path, config.get("target_modules")),
        base if isinstance(base, str) and base.isprintable() and len(base) <= 200 else None,
        tuple(config.unread()),
    )
    checkpoint.include(weights, f"{name}/")
    return adapter


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
