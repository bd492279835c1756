"""Creates canvases for parity checks, from prompts and partly masked random token IDs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlm_calibration.states import MASK_RATIOS, mask_independently, random_tokens
from dlm_runtime.errors import RequestError
from dlm_runtime.files import read_text

if TYPE_CHECKING:
    from dlm_export.network.spec import NetworkSpec
    from dlm_runtime.text.tokenizer import Tokenizer


PROMPT_LENGTH = 12  # number of tokens in a random prompt
TAIL_LENGTH = 48  # number of random tokens after a prompt
PROMPTS_LIMIT_BYTES = 16 << 20
# The number of rows of logits to compare on each canvas. For a vocabulary of 126,464 tokens, a row
# takes 0.5 MB.
ROWS_PER_CANVAS = 16


@dataclass(frozen=True, eq=False)
class Canvas:
    """A canvas to compare.

    ``tokens`` contains L token IDs, int64 ``[L]``. ``rows`` contains the indices of the rows whose
    logits are compared.
    """

    mask_ratio: float
    tokens: np.ndarray
    rows: np.ndarray


def random_prompts(network: NetworkSpec, count: int, seed: int) -> list[list[int]]:
    """Create random prompts without special tokens.

    Each prompt contains ``PROMPT_LENGTH`` tokens, or half the canvas length if that is smaller.
    """
    c, rng = network, np.random.default_rng(seed)
    length = max(1, min(PROMPT_LENGTH, c.max_canvas_length // 2))
    return [
        random_tokens(length, c.vocab_size, (c.mask_token_id, *c.eos_token_ids), rng).tolist()
        for _ in range(count)
    ]


def read_prompts(path: Path, tokenizer: Tokenizer | None, count: int) -> list[list[int]]:
    """Read prompts from a text file with one prompt per line, and convert the prompts to token IDs.

    Returns at most ``count`` prompts. Empty lines are skipped. As in the released code, a text that
    looks like a special token becomes that special token. Raises RequestError.
    """
    if tokenizer is None:
        raise RequestError(f"{path}: there is no tokenizer for text; omit --prompts")
    lines = [
        line
        for line in read_text(path, PROMPTS_LIMIT_BYTES, RequestError).splitlines()
        if line.strip()
    ]
    if not lines:
        raise RequestError(f"{path}: contains no prompt")
    return [tokenizer.encode(line, True) for line in lines[:count]]


def make_canvases(
    network: NetworkSpec, prompts: Sequence[Sequence[int]], seed: int
) -> list[Canvas]:
    """Create the canvases of a parity check: one per prompt and mask ratio.

    A canvas consists of a prompt and random token IDs. The function masks a share of the random
    IDs. The share is one of ``MASK_RATIOS``. If the network has no mask token, no ID is masked.
    """
    c, rng = network, np.random.default_rng(seed)
    canvases = []
    for ratio in MASK_RATIOS:
        for prompt in prompts:
            length = max(1, min(TAIL_LENGTH, c.max_canvas_length - len(prompt)))
            tail = random_tokens(length, c.vocab_size, (c.mask_token_id,), rng)
            canvas = np.array([*prompt, *tail])[: c.max_canvas_length]
            if c.has_mask_token:
                canvas = mask_independently(
                    canvas, ratio, c.mask_token_id, rng, protected=min(len(prompt), len(canvas) - 1)
                )
            rows = np.sort(
                rng.choice(len(canvas), size=min(ROWS_PER_CANVAS, len(canvas)), replace=False)
            )
            canvases.append(Canvas(ratio, canvas, rows))
    return canvases
