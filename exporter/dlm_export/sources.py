"""Opens the source of a bundle: a checkpoint folder, or an unquantised bundle."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

import dlm_runtime
from dlm_calibration.pieces import Index
from dlm_calibration.precision_rounding import FP16, FP32
from dlm_export import families, graph
from dlm_export.bundle.default_loop import published_of, published_presets
from dlm_export.bundle.folder import sha256
from dlm_export.bundle.manifest import network_of
from dlm_export.checkpoints import tokenizer
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.checkpoints.hub import Hub
from dlm_export.checkpoints.tokenizer import TokenizerFiles
from dlm_export.families.base import Overrides, Parameters
from dlm_export.families.reading import new_tokens, text_option
from dlm_export.graph import experts
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.constraints.layout import LAYOUTS
from dlm_runtime.errors import BundleError
from dlm_runtime.files import read_text
from dlm_runtime.manifest import MANIFEST_FILE, check_manifest, text_files
from dlm_runtime.policy import Policy
from dlm_runtime.text.tokenizer import TEMPLATE_LIMIT_BYTES, TOKENIZER_LIMIT_BYTES
from dlm_runtime.tools import FORMATS


@dataclass(frozen=True)
class Source:
    """A source that was opened: a denoiser with its text files and presets."""

    path: Path
    network: NetworkSpec
    parameters: Parameters
    text: TokenizerFiles
    presets: dict[str, Policy]
    default_preset: str
    precision: str
    """The type of most weights in the source: fp32, fp16 or bf16."""
    notes: tuple[str, ...] = ()
    """Messages for the user about parts of the checkpoint that a build ignores."""
    config_sha256: str | None = None
    """SHA-256 of the checkpoint's config.json.

    The value is ``None`` for a bundle that does not record this hash.
    """
    max_new_tokens: int | None = None
    """The length of the answers that the denoiser was trained on, in tokens.

    The value is ``None`` if neither the user nor the source says this length.
    """
    json_layout: str | None = None
    """Name of the JSON layout that the denoiser was trained on, or ``None`` if the layout is
    unknown.
    """
    call_format: str | None = None
    """Name of the tool-call format that the denoiser was trained on, or ``None`` if it is unknown.
    """
    hub: Hub | None = None
    """The place from which the checkpoint was downloaded, or ``None`` if it was not downloaded."""
    adapters: tuple[Path, ...] = ()
    """The folders of adapters outside the checkpoint."""
    has_effort: bool = False
    """True if the source is a bundle with effort levels. The new bundle does not get these levels.
    """


def open_source(path: Path, overrides: Overrides | None = None) -> Source:
    """Open the checkpoint or unquantised bundle at ``path``.

    Raises CheckpointError or BundleError.
    """
    if (path / MANIFEST_FILE).is_file():
        return _open_bundle(path, overrides or Overrides())
    checkpoint, overrides = Checkpoint(path), overrides or Overrides()
    network = families.read_network(checkpoint, overrides)
    weights = families.open_weights(checkpoint, network)
    text = tokenizer.read(checkpoint, network)
    network = replace(network, unused_tokens=text.unused_tokens)
    refuse_unknown(checkpoint, overrides.accept_unknown)
    family = families.FAMILIES[network.family]
    return Source(
        path,
        network,
        weights,
        text,
        network.presets(),
        family.preset_for(network),
        _stored_precision(checkpoint),
        tuple(checkpoint.notes),
        sha256(checkpoint.config.path),
        overrides.max_new_tokens or new_tokens(checkpoint, network.max_canvas_length),
        overrides.json_layout or text_option(checkpoint, "json_layout", LAYOUTS),
        overrides.call_format or text_option(checkpoint, "call_format", FORMATS),
        adapters=tuple(checkpoint.adapters.values()),
    )


MOST_KEYS = 8  # largest number of keys in a message


def refuse_unknown(checkpoint: Checkpoint, accepted: Collection[str] | None) -> None:
    """Raise CheckpointError if config.json has keys that no reader knows, unless they are accepted.

    Such a key may describe a different network. Call this function after the checkpoint was read.
    Accepted keys become notes of the checkpoint. ``None`` accepts all keys.
    """
    config = checkpoint.config
    found = config.unread()
    refused = [key for key in found if accepted is not None and key not in accepted]
    if refused:
        options = " ".join(f"--accept-unknown {key[:64]}" for key in refused[:MOST_KEYS])
        raise CheckpointError(
            f"{config.path}: unknown keys {_with_values(config, refused)}, which may describe a different network. "
            f"Check in the model's code that it does not. Then pass {options}"
        )
    if unused := sorted({*(accepted or ())} - {*found}):
        raise CheckpointError(
            f"--accept-unknown {unused[0]}: "
            + ("dlm-export knows this key" if config.has(unused[0]) else f"{config.path} lacks it")
        )
    if found:
        checkpoint.note(
            f"not used, although it may describe a different network: {_with_values(config, found)}"
        )


def _with_values(config: Config, keys: Collection[str]) -> str:
    told = [f"{key[:64]} = {reprlib.repr(config.at(key))}" for key in [*keys][:MOST_KEYS]]
    return ", ".join(told) + (f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else "")


def open_source_of(
    bundle: Path, manifest: Mapping[str, Any], path: Path, adapter: str | None = None
) -> Source:
    """Open ``path`` as the source that ``bundle`` was built from.

    ``adapter`` is the path of the adapter's folder, if it is outside the checkpoint.

    The bundle's ``manifest`` determines the mask token, the canvas length, the block length, the
    family if its architecture is ambiguous, and whether the source's adapter is left out.
    Raises BundleError or CheckpointError. If ``path`` contains a different denoiser,
    CheckpointError says what differs.
    """
    built = network_of(manifest)
    family, overrides = families.FAMILIES.get(built.family), None
    is_named = family is not None and (family.is_ambiguous or (adapter and family.draft_adapter))
    if not (path / MANIFEST_FILE).is_file():
        overrides = Overrides(
            built.mask_token_id if built.has_mask_token else None,
            built.max_canvas_length,
            built.layers[0].attention.block_length,
            no_adapter=not built.has_draft_updates,
            adapter=adapter or built.adapter,
            accept_unknown=None,
            family=built.family if family is not None and is_named else None,
        )
        _check_config(bundle, manifest, path, overrides)
    source = open_source(path, overrides)
    # Bundles of earlier versions do not record the unused ids.
    if (found := built.difference(source.network, but=("unused_tokens",))) is not None:
        raise CheckpointError(f"{bundle}: built from another checkpoint than {path}: {found}")
    return source


def _check_config(
    bundle: Path, manifest: Mapping[str, Any], path: Path, overrides: Overrides
) -> None:
    """Raise CheckpointError if the checkpoint's config.json describes a different network.

    The function compares the networks only if the manifest records a different hash of config.json.
    It does not compare the mask tokens. To read the checkpoint, the function uses the checkpoint's
    own mask token, because the bundle's mask token may be outside the checkpoint's vocabulary. If
    this fails, the function uses the bundle's mask token.
    """
    checkpoint = Checkpoint(path)
    theirs, ours = manifest.get("source", {}).get("config_sha256"), sha256(checkpoint.config.path)
    if theirs is None or theirs == ours:
        return
    found: str | None = None
    for asked in (replace(overrides, mask_token_id=None), overrides):
        try:
            found = network_of(manifest).difference(
                families.read_network(checkpoint, asked), but=("mask_token_id",)
            )
            break
        except CheckpointError as err:
            found = str(err)
    if found is not None:
        raise CheckpointError(
            f"{bundle}: built from another checkpoint than {path}: {found}. Its config.json has SHA-256 {theirs}, that of "
            f"{path} has {ours}."
        )


def _stored_precision(checkpoint: Checkpoint) -> str:
    elements: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        elements[info.dtype] += math.prod(info.shape)
    return {"F32": "fp32", "F16": "fp16"}.get(elements.most_common(1)[0][0], "bf16")


class BundleParameters:
    """Reads the parameters of a denoiser from the graph of an unquantised bundle."""

    def __init__(self, folder: Path, network: NetworkSpec, files: Collection[str]) -> None:
        """Open the graph in ``folder``. ``files`` are the files that the manifest lists.

        Raises CheckpointError if a parameter is missing, has a wrong shape, or is stored in a file
        that the manifest does not list.
        """
        self.path = folder / graph.GRAPH_FILE
        try:
            initializers = ir.load(self.path).graph.initializers
        except Exception as err:  # protobuf raises its own exceptions, onnx_ir raises ValueError
            raise CheckpointError(
                f"{self.path}: not a graph that onnx_ir can read ({err})"
            ) from err
        self._tensors = {
            name: value.const_value
            for name, value in initializers.items()
            if value.const_value is not None
        }
        for name, tensor in self._tensors.items():
            if isinstance(tensor, ir.ExternalTensor) and str(tensor.location) not in files:
                raise CheckpointError(
                    f"{self.path}: {name} is stored in {str(tensor.location)!r}, not in a file of the bundle: build it again"
                )
        stacks = {stack.weight: stack for mixture in network.mixtures() for stack in mixture}
        self._panels = {
            name: stack for name, stack in stacks.items() if f"{name}.panels" in self._tensors
        }
        for name, shape in network.parameters().items():
            found = tuple(self._tensors[name].shape) if name in self._tensors else None
            if name in self._panels:
                found = experts.shape_of_panels(
                    tuple(self._tensors[f"{name}.panels"].shape.numpy()), shape[-1]
                )
            if found != shape:
                raise CheckpointError(
                    f"{self.path}: {name} is {found or 'missing'}, expected {shape}: build the bundle again"
                )

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        stack = self._panels.get(parameter)
        tensor = self._tensors[parameter if stack is None else f"{parameter}.panels"]
        try:
            # Map the file here, because onnx_ir never closes its own memory mapping of a tensor.
            stored = (
                np.memmap(
                    tensor.path, tensor.dtype.numpy(), "r", tensor.offset or 0, tensor.shape.numpy()
                )
                if isinstance(tensor, ir.ExternalTensor)
                else tensor.numpy()
            )
            if stack is not None:
                stored = experts.from_panels(stored[at[:1]], stack.outputs)
                at = (slice(None), *at[1:])
            array = np.array(stored[at], dtype=dtype)
        except (OSError, ValueError) as err:
            raise CheckpointError(f"{self.path}: cannot read {parameter} ({err})") from err
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.path}: {parameter} contains NaN or infinite weights")
        return array

    def view(self, parameter: str) -> None:
        """Always return ``None``, so that callers use ``read``, which also checks the values."""

    def stored_type(self, parameter: str) -> np.dtype:
        found = FP32 if parameter in self._panels else self._tensors[parameter].dtype.numpy()
        return found if found in (FP16, np.dtype(ml_dtypes.bfloat16)) else FP32


def _open_bundle(path: Path, overrides: Overrides) -> Source:
    # Opening the bundle compares the sizes and hashes of its files with the manifest, and raises an
    # error if a file was changed.
    with dlm_runtime.open(path, engine="none") as bundle:
        manifest = bundle.manifest
        presets = {name: bundle.policy(name) for name in published_presets(manifest)}
    check_manifest(manifest, path)
    precision = manifest["precision"]["name"]
    if precision not in graph.PRECISIONS:
        raise CheckpointError(
            f"{path}: is already quantised ({precision}). Start from the checkpoint, or from a bundle in "
            f"{' or '.join(graph.PRECISIONS)}."
        )
    changed = replace(overrides, max_new_tokens=None, json_layout=None, call_format=None)
    if replace(changed, accept_unknown=()) != Overrides():
        raise CheckpointError(
            f"{path}: a bundle's family, mask token, canvas, blocks and adapter cannot be changed; start from the checkpoint"
        )
    network = network_of(manifest)
    files = text_files(manifest, path)
    text = TokenizerFiles(
        None
        if files.tokenizer is None
        else read_text(files.tokenizer, TOKENIZER_LIMIT_BYTES, BundleError),
        None
        if files.template is None
        else read_text(files.template, TEMPLATE_LIMIT_BYTES, BundleError),
        files.special_tokens,
    )
    parameters = BundleParameters(path, network, manifest["files"])
    config_sha256 = manifest.get("source", {}).get("config_sha256")
    default = published_of(manifest)
    has_effort = "effort" in manifest["loop"]
    return Source(
        path,
        network,
        parameters,
        text,
        presets,
        default,
        precision,
        config_sha256=config_sha256,
        max_new_tokens=overrides.max_new_tokens or manifest["loop"].get("max_new_tokens"),
        json_layout=overrides.json_layout or manifest.get("json_layout"),
        call_format=overrides.call_format or manifest.get("call_format"),
        has_effort=has_effort,
    )
