"""From a checkpoint to a bundle: check, trace, write the weights, prove parity, move into place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import dlm_runtime
from dlm_calibration.states import MASK_RATIOS
from dlm_export import bundle as bundle_files
from dlm_export import families, graph, targets, tokenizer, verify
from dlm_export.checkpoint import Checkpoint
from dlm_export.denoiser import Capabilities
from dlm_export.families.base import Overrides
from dlm_runtime.errors import DlmError, RequestError
from dlm_runtime.policy import PRESETS, Policy

ACCURACY_FILE = "accuracy.json"


class ParityError(DlmError):
    """The bundle does not compute what PyTorch computes."""

    exit_code = 3


class Progress(Protocol):
    """Where a long command says how far it is."""

    def start(self, stage: str, total: int) -> None:
        """A stage of ``total`` units begins; the one before it has ended."""

    def advance(self, units: int = 1) -> None:
        """Part of the current stage is done."""


class Silent:
    """Progress that nobody watches."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, units: int = 1) -> None: ...


@dataclass
class BuildReport:
    """What a build did: seconds a stage, bytes a file, and the parity that it proved (None when it was told not to)."""

    output: Path
    capabilities: Capabilities
    stages_s: dict[str, float] = field(default_factory=dict)
    files_bytes: dict[str, int] = field(default_factory=dict)
    parity: verify.Parity | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "bundle": str(self.output),
            "family": self.capabilities.family,
            "parameters": self.capabilities.parameter_count(),
            "stages_s": self.stages_s,
            "files_bytes": self.files_bytes,
            "parity": None if self.parity is None else self.parity.as_dict(),
        }


def presets_for(capabilities: Capabilities) -> tuple[dict[str, Policy], str]:
    """The presets that a bundle of this denoiser offers, and its default."""
    return dict(PRESETS), families.FAMILIES[capabilities.family].default_preset


def build(
    checkpoint_path: Path,
    output: Path,
    *,
    target: str = "cpu",
    precision: str = "fp32",
    force: bool = False,
    overrides: Overrides | None = None,
    check_parity: bool = True,
    progress: Progress | None = None,
) -> BuildReport:
    """Build the bundle ``output`` from the checkpoint folder; nothing is left behind when it fails.

    Raises CheckpointError, TargetError, OutputError, and ParityError when the finished bundle differs from torch.
    """
    progress = progress or Silent()
    targets.find(target, precision)
    progress.start("read checkpoint", 1)
    checkpoint = Checkpoint(checkpoint_path)
    capabilities = families.read_capabilities(checkpoint, overrides or Overrides())
    weights = families.Weights(checkpoint, capabilities)
    text = tokenizer.read(checkpoint, capabilities)
    report = BuildReport(output, capabilities)
    parameters = capabilities.parameter_count()
    if check_parity:
        _check_memory(parameters)
    # Every tensor starts on a page of its own; the rest (graph, tokenizer, manifest) is small.
    needed = graph.data_bytes(capabilities, precision) + (32 << 20)
    presets, default_preset = presets_for(capabilities)

    @contextmanager
    def stage(name: str, total: int) -> Iterator[None]:
        progress.start(name, total)
        began = time.perf_counter()
        yield
        report.stages_s[name] = round(time.perf_counter() - began, 3)

    with bundle_files.staged(output, force=force, needed_bytes=needed) as folder:
        with stage("trace graph", 1):
            traced = graph.trace(capabilities, precision)
            progress.advance()
        with stage("write weights", graph.data_bytes(capabilities, precision)):
            graph.write(traced, weights.read, folder, progress.advance)
        chat_template = None
        if text.tokenizer is not None:
            (folder / "tokenizer.json").write_text(text.tokenizer, encoding="utf-8")
        if text.tokenizer is not None and text.chat_template is not None:
            (folder / "chat_template.jinja").write_text(text.chat_template, encoding="utf-8")
            chat_template = {"file": "chat_template.jinja", "special_tokens": text.special_tokens}
        manifest = bundle_files.make_manifest(
            capabilities,
            precision=precision,
            target=target,
            graph=graph.describe(capabilities),
            presets=presets,
            default_preset=default_preset,
            tokenizer=None if text.tokenizer is None else "tokenizer.json",
            chat_template=chat_template,
        )
        with stage("hash files", 1):
            hashed = bundle_files.finish(folder, manifest)
            progress.advance()
        if check_parity:
            with stage("check parity", 2 * check_units(presets)):
                report.parity = check(folder, checkpoint, capabilities, presets, precision, progress=progress)
            if report.parity.misses:
                raise ParityError(f"{output}: not written, it differs from PyTorch: {report.parity.summary}")
            (folder / ACCURACY_FILE).write_text(json.dumps({"parity": report.parity.as_dict()}, indent=1) + "\n")
            bundle_files.finish(folder, manifest, hashed)
    for path in sorted(output.rglob("*")):
        if path.is_file():
            report.files_bytes[path.relative_to(output).as_posix()] = path.stat().st_size
    return report


PROMPT_COUNT, NEW_TOKENS = 2, 16  # of the check at the end of a build


def check_units(presets: dict[str, Policy], prompts: int = PROMPT_COUNT) -> int:
    """How often ``check`` advances its progress in each of its two halves."""
    return len(MASK_RATIOS) + len(verify.make_cases(presets, [[0]] * prompts, 1))


def check(
    folder: Path,
    checkpoint: Checkpoint,
    capabilities: Capabilities,
    presets: dict[str, Policy],
    precision: str,
    *,
    prompts: list[list[int]] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    threads: int = 0,
    progress: Progress | None = None,
) -> verify.Parity:
    """Compare a bundle with its checkpoint in torch; random prompts where none are given.

    torch is done before the bundle is opened, so that only one of them holds weights. Raises DlmError.
    """
    progress = progress or Silent()
    if prompts is None:
        prompts = verify.random_prompts(capabilities, PROMPT_COUNT, seed)
        max_new_tokens = max(1, min(max_new_tokens, capabilities.max_canvas_length - len(prompts[0])))
    longest = max(len(prompt) for prompt in prompts)
    room = capabilities.max_canvas_length - longest
    if max_new_tokens > room:
        raise RequestError(
            f"a prompt of {longest} tokens leaves room for {room} on the canvas of {capabilities.max_canvas_length}, "
            f"not for {max_new_tokens}"
        )
    denoiser = families.load(families.Weights(checkpoint, capabilities), capabilities)
    cases = verify.make_cases(presets, prompts, max_new_tokens)
    expected = verify.expect(denoiser, prompts, cases, seed, progress.advance)
    del denoiser
    with dlm_runtime.open(folder, threads=threads, check_hashes=False) as opened:
        return verify.compare(opened, expected, precision, progress.advance)


def check_same_denoiser(folder: Path, manifest: dict[str, Any], capabilities: Capabilities) -> None:
    """Raises DlmError if a bundle's manifest describes another denoiser than a checkpoint's."""
    theirs = manifest["denoiser"] | {"family": manifest["family"]}
    for key, ours in capabilities.as_dict().items():
        if key in theirs and theirs[key] != ours:
            raise DlmError(f"{folder}: built from another checkpoint: its {key} is {theirs[key]}, the checkpoint's is {ours}")


def _check_memory(parameters: int) -> None:
    available = targets.available_memory_bytes()
    needed = 4 * parameters
    if available is not None and needed > available:
        raise DlmError(
            f"the parity check holds the denoiser in fp32, {needed:,} bytes, and {available:,} are available. "
            "Pass --no-verify, and run `dlm-export verify` on a larger machine."
        )
