"""Runs a checkpoint's released code, and records its logits, so that bundles can be compared.

The released code is a Python class in the checkpoint's folder, or a class with the same name in the
package transformers. If there is no such class, dlm-export can use the trunk: a different class of
transformers that has the same layers. dlm-export then replaces the trunk's attention mask with its
own attention mask.

This is the only module that imports transformers. The module neither imports onnx nor needs a
bundle, because released code may need old versions of packages.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import platform
import re
import reprlib
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlm_export import families
from dlm_export.bundle.folder import sha256
from dlm_export.checkpoints import tokenizer as released_tokenizer
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.judging.parity import golden
from dlm_export.judging.parity.canvases import make_canvases, random_prompts, read_prompts
from dlm_export.judging.parity.golden import Golden, Provenance
from dlm_export.memory import check_host_memory
from dlm_export.network.spec import NetworkSpec
from dlm_export.progress import Progress, Silent
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.files import read_text
from dlm_runtime.text.tokenizer import Tokenizer

# Dream's code needs transformers 4.46.2. LLaDA's code runs with transformers up to 4.57.1.
PACKAGE, OLDEST = "transformers", (4, 46)
INSTALL = "pip install 'dlm-export[capture]'"
# The keys of auto_map (an entry of config.json) that may name the class to run. The first two keys
# name classes that compute logits.
AUTO_CLASSES = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
# The keys of config.json that must not be passed to the trunk (a class of transformers with the
# same layers). The values of these keys name other classes, or the type of the stored weights.
_NOT_THE_TRUNKS = (
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
)
_LISTED = 4  # maximum number of tensors that an error message lists
CODE_LIMIT_BYTES = 4 << 20  # maximum size of a Python file in bytes


class CaptureError(DlmError):
    """Raised if the released code is missing, outside the checkpoint's folder, or not trusted."""

    exit_code = ExitCode.WRONG_INPUT


class ReleasedCodeError(CaptureError):
    """Raised if the released code does not work with the installed versions of packages."""

    exit_code = ExitCode.COULD_NOT


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture.

    - ``trust_remote_code``: allows running Python files in the checkpoint's folder.
    - ``trunk``: runs a transformers class with the same layers and dlm-export's attention mask,
      instead of the released class.
    - ``prompts``: text file with one prompt per line. If ``None``, random token IDs are used.
    - ``count``: number of prompts per mask ratio.
    - ``seed``: seed of random prompts and canvases.
    """

    trust_remote_code: bool = False
    trunk: bool = False
    prompts: Path | None = None
    count: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Choice:
    """The class to run. The first file in ``files`` defines the class.

    If ``files`` is empty, the class belongs to transformers.
    """

    kind: str
    name: str
    files: tuple[str, ...] = ()


def capture(
    path: Path,
    options: CaptureOptions,
    overrides: Overrides | None = None,
    progress: Progress | None = None,
) -> Golden:
    """Run a checkpoint's released code in fp32 on the CPU, and return its logits.

    Args:
        path: The checkpoint's folder.
        options: The options that select the class and the prompts.
        overrides: Values for keys that are missing in config.json.
        progress: The object that is notified when one of the three stages starts or advances.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        CaptureError: The released code is missing, not trusted or does not run.
        RequestError: The prompts cannot be used.
    """
    progress = progress or Silent()
    checkpoint = Checkpoint(path)
    overrides = overrides or Overrides()
    family = families.find(checkpoint, overrides)
    network = families.read_network(checkpoint, overrides)
    if network.blocks_after_prompt:
        raise CaptureError(
            f"{path}: --family {family.name}: the released code of {network.architecture} has full attention, and no "
            "released code computes the attention of this family"
        )
    if checkpoint.quantisation is not None:
        raise CaptureError(
            f"{path}: is quantised ({checkpoint.quantisation}); capture the checkpoint it was made from"
        )
    needed = 4 * network.parameter_count()
    instead = "Run it on a larger machine; the file it writes is small."
    check_host_memory(needed, "capture holds the denoiser in fp32", instead)
    choice = choose(checkpoint, family, options)
    canvases = make_canvases(network, _prompts(checkpoint, network, options), options.seed)
    progress.start("load released code", 1)
    # The released code may print text. Show this text on stderr, because stdout is for results.
    with contextlib.redirect_stdout(sys.stderr):
        released = _Released(checkpoint, choice, network)
        progress.start("capture logits", len(canvases))
        released.check_visibility(canvases[0].tokens)
        logits = []
        for canvas in canvases:
            logits.append(released.logits(canvas.tokens)[canvas.rows])
            progress.advance()
    progress.start("hash weights", 1)
    provenance = Provenance(
        kind=choice.kind,
        class_name=type(released.model).__name__,
        # If the class comes from the checkpoint, transformers uses a hash as the module's name. In
        # this case, record the name of the Python file instead of the hash.
        module=type(released.model).__module__
        if choice.kind != golden.RELEASED
        else choice.files[0],
        attention=_sight(network) if choice.kind == golden.TRUNK else "chosen by the class",
        code={name: sha256(path / name) for name in choice.files},
        checkpoint=_printable(path.resolve().name),
        config_sha256=sha256(checkpoint.config.path),
        weights={
            file.name: sha256(file)
            for file in sorted({info.file for info in checkpoint.tensors.values()})
        },
        mask_token_id=network.mask_token_id,
        seed=options.seed,
        prompts="random" if options.prompts is None else _printable(options.prompts.name),
        versions={"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", PACKAGE, "numpy", "dlm-export")},
    )
    return Golden(provenance, canvases, logits)


def _sight(network: NetworkSpec) -> str:
    """Describe in words which positions each position attends to."""
    block = network.visible_block
    return (
        "every position visible"
        if block is None
        else f"blocks of {block}, each visible to itself and later ones"
    )


def _printable(name: str) -> str:
    """Replace unprintable characters in a file name, because golden files must not contain them."""
    kept = "".join(letter if letter.isprintable() else "?" for letter in name)
    return kept[: golden.TEXT_LIMIT] or "?"


def _prompts(
    checkpoint: Checkpoint, network: NetworkSpec, options: CaptureOptions
) -> list[list[int]]:
    if options.prompts is None:
        return random_prompts(network, options.count, options.seed)
    text = released_tokenizer.read(checkpoint, network).tokenizer
    found = None if text is None else Tokenizer(text.encode(), None, {}, checkpoint.path)
    return read_prompts(options.prompts, found, options.count)


# ---- Which class ----


def choose(checkpoint: Checkpoint, family: Family, options: CaptureOptions) -> Choice:
    """Choose the class to run, which is the first existing class in this list:

    1. The class in the checkpoint's folder.
    2. The class of the same name in transformers.
    3. The class in transformers with the same layers (the trunk).

    If ``options.trunk`` is true, the trunk is always used. Raises CaptureError if no class exists,
    or if the class is in the checkpoint's folder and the user does not trust the code.
    """
    config = checkpoint.config
    architecture = config.get("architectures")[0]
    if options.trunk:
        if family.trunk is None:
            raise CaptureError(
                f"{checkpoint.path}: transformers has no class with the layers of {family.name} under these names"
            )
        return Choice(golden.TRUNK, family.trunk)
    own = _own_code(checkpoint, architecture)
    if own is not None:
        if not options.trust_remote_code:
            instead = (
                f", or pass --trunk to use transformers' {family.trunk}"
                if family.trunk is not None
                else ""
            )
            raise CaptureError(
                f"{checkpoint.path}: this would execute its released code: {', '.join(own.files)}. Read it, then pass "
                f"--trust-remote-code to run it{instead}."
            )
        return own
    if architecture != family.trunk and hasattr(_transformers(), architecture):
        return Choice(golden.OWN, architecture)
    if family.trunk is not None:
        return Choice(golden.TRUNK, family.trunk)
    raise CaptureError(
        f"{config.path}: names no code (auto_map), and transformers {metadata.version(PACKAGE)} has no {architecture}: "
        "download the checkpoint with its .py files"
    )


def _own_code(checkpoint: Checkpoint, architecture: str) -> Choice | None:
    """Find the class in config.json's auto_map, if there is one, and the files it needs."""
    auto_map = checkpoint.config.get("auto_map")
    if not isinstance(auto_map, dict):
        return None
    entries: dict[str, Any] = {
        name: auto_map[name] for name in AUTO_CLASSES if auto_map.get(name) is not None
    }
    if not entries:
        return None
    for entry in entries.values():
        if not isinstance(entry, str) or not re.fullmatch(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", entry):
            raise CaptureError(
                f"{checkpoint.config.path}: auto_map names {reprlib.repr(entry)}; only classes in files of the checkpoint's "
                "folder can be run, as module.Class: download the code into the folder"
            )
    found = [entry for entry in entries.values() if entry.split(".")[1] == architecture] or list(
        entries.values()
    )
    module, class_name = found[0].split(".")
    return Choice(golden.RELEASED, class_name, _files_run(checkpoint.path, module))


def _files_run(folder: Path, module: str) -> tuple[str, ...]:
    """Return the file of ``module``, and all files in ``folder`` that it imports, recursively."""
    names = [f"{module}.py"]
    for name in names:  # the list grows during the loop
        path = folder / name
        try:
            tree = ast.parse(
                read_text(
                    path, CODE_LIMIT_BYTES, CaptureError, " auto_map or its code refers to it."
                )
            )
        except (ValueError, SyntaxError, RecursionError, MemoryError) as err:
            raise CaptureError(
                f"{path}: auto_map or its code refers to it, but it is not valid Python ({err})"
            ) from err
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                beside = [node.module] if node.module else [alias.name for alias in node.names]
                names += [
                    file for each in beside if (file := f"{each.replace('.', '/')}.py") not in names
                ]
    return tuple(names)


# ---- Running it ----


def _version() -> tuple[int, ...]:
    """Return the major and minor version of transformers."""
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version(PACKAGE))[:2])


def _transformers() -> Any:
    """Import transformers. Raises ReleasedCodeError if transformers is missing or too old."""
    try:
        if _version() < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ReleasedCodeError(
                f"{PACKAGE} {metadata.version(PACKAGE)} is too old; {oldest} or later is needed: {INSTALL}"
            )
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as err:
        raise ReleasedCodeError(
            f"capture needs {err.name}, which is not installed: {INSTALL}"
        ) from err


class _Released:
    """Runs the chosen class in fp32, with the checkpoint's weights."""

    def __init__(self, checkpoint: Checkpoint, choice: Choice, network: NetworkSpec) -> None:
        """Load the class and the weights.

        Raises ReleasedCodeError if loading fails for any reason.
        """
        self.checkpoint, self.choice = checkpoint, choice
        self.vocab_size, self.visible_block = network.vocab_size, network.visible_block
        transformers = _transformers()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        settings: dict[str, Any] = {
            "dtype" if _version() >= (4, 56) else "torch_dtype": torch.float32,
            "local_files_only": True,
            "output_loading_info": True,
        }
        try:
            if choice.kind == golden.RELEASED:
                # Do not use the auto classes of transformers, because the auto classes cache the
                # classes that they load. For a second checkpoint with a similar config, an auto
                # class would return the first checkpoint's class.
                entry = f"{choice.files[0].removesuffix('.py')}.{choice.name}"
                factory = transformers.dynamic_module_utils.get_class_from_dynamic_module(
                    entry, str(checkpoint.path)
                )
            else:
                factory = getattr(transformers, choice.name)
            if choice.kind == golden.TRUNK:
                values = checkpoint.optional_json("config.json")
                kept = {
                    name: value for name, value in values.items() if name not in _NOT_THE_TRUNKS
                }
                settings["config"] = factory.config_class.from_dict(kept)
                settings["attn_implementation"] = (
                    "eager"  # in this mode, every version applies the mask unchanged
                )
            self.model, loading = factory.from_pretrained(str(checkpoint.path), **settings)
        except Exception as err:  # third-party code may raise any exception
            raise self._failure("does not load", err) from err
        self._check_weights(loading)
        self.model.eval()
        self.takes = inspect.signature(self.model.forward).parameters

    def _failure(self, what: str, err: Exception) -> ReleasedCodeError:
        written = self.checkpoint.config.get("transformers_version")
        hint = (
            f" Its config.json was written by {PACKAGE} {written[:20]}: try that version."
            if isinstance(written, str)
            else ""
        )
        reason = " ".join(f"{type(err).__name__}: {err}".split())[:500]
        found = metadata.version(PACKAGE)
        return ReleasedCodeError(
            f"{self.checkpoint.path}: {self.choice.name} {what} with {PACKAGE} {found} ({reason}).{hint}"
        )

    def _check_weights(self, loading: dict[str, Any]) -> None:
        """Raise ReleasedCodeError if the class and the checkpoint contain different tensors."""
        kinds = {
            "missing_keys": "expects",
            "unexpected_keys": "does not know",
            "mismatched_keys": "expects another size for",
        }
        for kind, said in kinds.items():
            names = sorted(
                str(name)
                for name in loading.get(kind, ())
                if not str(name).endswith("rotary_emb.inv_freq")
            )
            if names:
                more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
                raise ReleasedCodeError(
                    f"{self.checkpoint.path}: {self.choice.name} {said} {', '.join(names[:_LISTED])}{more}: it does not match "
                    "these weights"
                )

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Compute the raw logits of a canvas of L token ids: fp32 ``[L, V]`` for V tokens.

        Raises ReleasedCodeError.
        """
        length = len(tokens)
        arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in self.takes else {}
        if self.choice.kind == golden.TRUNK:
            # The trunk's own attention mask would hide all later positions. This mask hides only
            # later blocks.
            blocks = torch.arange(length) // (self.visible_block or length)
            is_hidden = blocks > blocks.unsqueeze(1)
            arguments["attention_mask"] = torch.zeros(1, 1, length, length).masked_fill(
                is_hidden, -torch.inf
            )
        try:
            out = self.model(torch.from_numpy(tokens).unsqueeze(0), **arguments).logits
        except Exception as err:
            raise self._failure("does not run", err) from err
        if tuple(out.shape) != (1, length, self.vocab_size):
            raise ReleasedCodeError(
                f"{self.checkpoint.path}: {self.choice.name} returns logits {list(out.shape)}, expected "
                f"{[1, length, self.vocab_size]}"
            )
        logits: np.ndarray = out[0].float().numpy()
        if not np.isfinite(logits).all():
            raise ReleasedCodeError(
                f"{self.checkpoint.path}: {self.choice.name} returns NaN or infinite logits"
            )
        return logits

    def check_visibility(self, tokens: np.ndarray) -> None:
        """Check that position 0 attends to its own block, but not to later blocks.

        The check changes one token of the canvas at a time. If the changed token is a later token
        of the first block, the logits of position 0 must change. If the changed token is the first
        token after the first block, the logits of position 0 must not change. Raises
        ReleasedCodeError if the check fails.
        """
        # number of positions in the first block
        seen = min(self.visible_block or len(tokens), len(tokens))
        place = seen - 1 if self.choice.kind == golden.TRUNK else min(1, seen - 1)
        which = f"{self.checkpoint.path}: {self.choice.name}"
        version = f"{PACKAGE} {metadata.version(PACKAGE)}"
        if not self._is_seen(tokens, place):
            raise ReleasedCodeError(
                f"{which} attends causally with {version}: position 0 does not see position {place}, but a denoiser must see "
                "later positions; try another version."
            )
        if seen < len(tokens) and self._is_seen(tokens, seen):
            raise ReleasedCodeError(
                f"{which} needs an attention mask with {version}: position 0 sees position {seen}, after its block. Pass "
                "--trunk, which supplies the mask."
            )

    def _is_seen(self, tokens: np.ndarray, place: int) -> bool:
        """Return True if a different token at position ``place`` changes the logits of position 0."""
        changed = tokens.copy()
        changed[place] = (changed[place] + 1) % self.vocab_size
        return not np.array_equal(self.logits(tokens)[0], self.logits(changed)[0])
