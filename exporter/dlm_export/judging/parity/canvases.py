"""The canvases that parity is measured on: prompts, random ids after them, and masks."""

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


PROMPT_LENGTH = 12  # tokens of a random prompt
TAIL_LENGTH = 48  # random tokens behind a prompt
PROMPTS_LIMIT_BYTES = 16 << 20
ROWS_PER_CANVAS = 16  # logits rows compared a canvas; 126,464 fp32 logits a row are 0.5 MB


@dataclass(frozen=True, eq=False)
class Canvas:
    """A canvas to compare on: ids int64 ``[L]``, masked at ``mask_ratio``, and which of its rows
    ``[R]`` are looked at.
    """

    mask_ratio: float
    tokens: np.ndarray
    rows: np.ndarray


def random_prompts(network: NetworkSpec, count: int, seed: int) -> list[list[int]]:
    """Seeded prompts of random ids without special ones, at most ``PROMPT_LENGTH`` and half a
    canvas long.
    """
    c, rng = network, np.random.default_rng(seed)
    length = max(1, min(PROMPT_LENGTH, c.max_canvas_length // 2))
    return [
        random_tokens(length, c.vocab_size, (c.mask_token_id, *c.eos_token_ids), rng).tolist()
        for _ in range(count)
    ]


def read_prompts(path: Path, tokenizer: Tokenizer | None, count: int) -> list[list[int]]:
    """The first ``count`` lines of a text file as ids, without empty lines. Raises RequestError.

    A special token that a line spells is that token, as in the released code.
    """
    if tokenizer is None:
        raise RequestError(f"{path}: there is no tokenizer for text; leave --prompts out")
    lines = [
        line
        for line in read_text(path, PROMPTS_LIMIT_BYTES, RequestError).splitlines()
        if line.strip()
    ]
    if not lines:
        raise RequestError(f"{path}: holds no prompt")
    return [tokenizer.encode(line, True) for line in lines[:count]]


def make_canvases(
    network: NetworkSpec, prompts: Sequence[Sequence[int]], seed: int
) -> list[Canvas]:
    """Every prompt, followed by random ids, at each of ``MASK_RATIOS``; a prompt's own ids stay."""
    c, rng = network, np.random.default_rng(seed)
    canvases = []
    for ratio in MASK_RATIOS:
        for prompt in prompts:
            length = max(1, min(TAIL_LENGTH, c.max_canvas_length - len(prompt)))
            tail = random_tokens(length, c.vocab_size, (c.mask_token_id,), rng)
            canvas = np.array([*prompt, *tail])[: c.max_canvas_length]
            canvas = mask_independently(
                canvas, ratio, c.mask_token_id, rng, protected=min(len(prompt), len(canvas) - 1)
            )
            rows = np.sort(
                rng.choice(len(canvas), size=min(ROWS_PER_CANVAS, len(canvas)), replace=False)
            )
            canvases.append(Canvas(ratio, canvas, rows))
    return canvases
