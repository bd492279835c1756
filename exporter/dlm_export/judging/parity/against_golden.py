"""Compares the logits of a bundle with a golden file, without torch or the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm_export.bundle.manifest import read_manifest
from dlm_export.graph import PRECISIONS
from dlm_export.judging.parity.golden import Golden, GoldenError
from dlm_export.judging.parity.verdict import TOLERANCES, Parity, compare_logits
from dlm_export.opening import ON_CPU, Opening
from dlm_export.progress import Progress, Silent


def check(
    folder: Path,
    path: Path,
    golden: Golden,
    *,
    opening: Opening = ON_CPU,
    progress: Progress | None = None,
) -> Parity:
    """Compare the logits of an unquantised bundle with the logits in a golden file.

    ``path`` is the golden file's path, which error messages show.

    Raises GoldenError if the bundle and the file belong to different checkpoints, or if the bundle
    is quantised.
    """
    progress = progress or Silent()
    manifest = read_manifest(folder)
    precision = manifest["precision"]["name"]
    if precision not in PRECISIONS:
        raise GoldenError(
            f"{folder}: is quantised ({precision}), so its logits differ from the released code's by the quantisation error. "
            "Verify the unquantised bundle with the golden file, then compare this one with that bundle."
        )
    _check_same(folder, manifest, path, golden)
    progress.start("check parity", len({canvas.mask_ratio for canvas in golden.canvases}))
    with opening.open(folder, check_hashes=False) as bundle:
        graph = compare_logits(bundle, golden.canvases, golden.logits, progress.advance)
    return Parity(precision, TOLERANCES[precision], graph, [], golden.provenance.reference)


def _check_same(folder: Path, manifest: Mapping[str, Any], path: Path, golden: Golden) -> None:
    config, loop = manifest.get("source", {}).get("config_sha256"), manifest["loop"]
    name, theirs = golden.provenance.checkpoint, golden.provenance.config_sha256
    found = None
    if loop["vocab_size"] != golden.vocab_size:
        found = f"its vocabulary has {golden.vocab_size} tokens, that of {folder} has {loop['vocab_size']}"
    elif config is not None and config != theirs:
        found = f"its config.json has SHA-256 {theirs}, that of {folder} has {config}"
    if found is not None:
        raise GoldenError(
            f"{path}: captured from another checkpoint ({name}): {found}. Capture the checkpoint that was built."
        )
    if golden.max_length > loop["max_canvas_length"]:
        raise GoldenError(
            f"{path}: has canvases of {golden.max_length} tokens, {folder} allows {loop['max_canvas_length']}: build it "
            "without --max-canvas-length"
        )
