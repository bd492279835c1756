"""What parity is: the canvases that two sides see, the tolerances they are held to, and the
verdict.

Two parities are told apart. A bundle is compared with our own denoiser in torch (``verify``, at the
end of every build): that cannot see a checkpoint that we misread, because both sides misread it. A
bundle is compared with logits of the released code (``golden``): that can. Nothing here imports
torch, so that a board judges golden files as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_calibration.states import MASK_RATIOS, mask_independently, random_tokens
from dlm_export import targets
from dlm_runtime import Bundle
from dlm_runtime.errors import DlmError, ExitCode, RequestError
from dlm_runtime.files import read_text

if TYPE_CHECKING:
    from dlm_export.network.spec import NetworkSpec
    from dlm_runtime.text.tokenizer import Tokenizer

PROMPT_LENGTH = 12  # tokens of a random prompt
TAIL_LENGTH = 48  # random tokens behind a prompt
PROMPTS_LIMIT_BYTES = 16 << 20
ROWS_PER_CANVAS = 16  # logits rows compared a canvas; 126,464 fp32 logits a row are 0.5 MB
OUR_DENOISER = "our torch denoiser"
ROUTER = "fp32"  # what a row of parts says that a router is held in, whatever the full precision is
LOGITS = "logits"  # what a row of parts calls the network's end


class ParityError(DlmError):
    """The bundle does not compute what its reference computes."""

    exit_code = ExitCode.MISSED


@dataclass(frozen=True)
class Tolerance:
    """``relative``: worst logit difference over the logits' range. ``agreement``: share of canvases
    equal in every token.
    """

    relative: float
    agreement: float


# fp32: sums of a few thousand terms in another order. fp16: 11-bit significands through every
# layer; ties may flip tokens. bf16: 8-bit significands, eight times as coarse as fp16's; torch's
# side stays fp32.
TOLERANCES = {
    "fp32": Tolerance(2e-4, 1.0),
    "fp16": Tolerance(2e-2, 0.8),
    "bf16": Tolerance(1.6e-1, 0.5),
}
# A key or value between two codes of the cache may be stored as either: ties may flip tokens.
ROUNDED_CACHE_AGREEMENT = 0.8
# One layer, or what lies between two, by the full precision around quantised layers.
PART_TOLERANCES = {
    "fp32": Tolerance(2e-5, 0.0),
    "fp16": Tolerance(5e-3, 0.0),
    "bf16": Tolerance(4e-2, 0.0),
}


def tolerance_of(precision: str, cache_dtype: str) -> Tolerance:
    """What whole passes and canvases are held to in a full precision, over a cache of this type."""
    found = TOLERANCES[precision]
    return (
        found
        if cache_dtype == "float32"
        else replace(found, agreement=min(found.agreement, ROUNDED_CACHE_AGREEMENT))
    )


@dataclass(frozen=True, eq=False)
class Canvas:
    """A canvas to compare on: ids int64 ``[L]``, masked at ``mask_ratio``, and which of its rows
    ``[R]`` are looked at.
    """

    mask_ratio: float
    tokens: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class GraphRow:
    """Parity of one mask-ratio bucket. ``argmax_ties``: rows whose best two are closer than the
    worst difference.
    """

    mask_ratio: float
    rows: int
    worst_difference: float
    logit_range: float
    relative: float
    argmax_equal: int
    argmax_ties: int


@dataclass(frozen=True)
class LoopRow:
    """Parity of one policy over its prompts."""

    name: str
    canvases: int
    canvases_equal: int
    nfe: int
    nfe_equal: bool
    first_difference: str | None


@dataclass(frozen=True)
class LayerRow:
    """Parity of one quantised layer from equal inputs, over all canvases: worst differences over
    the range of values.

    ``input_relative`` is of what lies between the layers before and this one. ``output_relative``
    leaves out what an input on the boundary between two codes may move; None where a fused operator
    keeps the output to itself, so that the next row's input has it. The row ``LOGITS`` is what
    follows the last layer.
    """

    layer: str
    format: str
    input_relative: float
    output_relative: float | None

    @property
    def worst(self) -> float:
        return max(self.input_relative, self.output_relative or 0.0)


@dataclass(frozen=True)
class Parity:
    """The verdict, with what it rests on; ``reference`` says in words what the bundle was compared
    with.

    Of a quantised bundle ``layers`` are held to the tolerance, and ``graph`` shows a whole pass of
    each side alone, which is judged instead: codes that flip carry on from layer to layer. Of any
    other there are no ``layers``, and ``graph`` and ``loop`` are held to it.
    """

    precision: str
    tolerance: Tolerance
    graph: list[GraphRow]
    loop: list[LoopRow]
    reference: str = OUR_DENOISER
    layers: list[LayerRow] = field(default_factory=list)

    @property
    def misses(self) -> list[str]:
        """One sentence for everything outside the tolerance; empty when parity holds."""
        if self.layers:
            return [miss for row in self.layers for miss in self._missed(row)]
        found = []
        for row in self.graph:
            if not row.relative <= self.tolerance.relative:
                found.append(
                    f"mask ratio {row.mask_ratio}: logits differ by {row.relative:.2e} of their range, "
                    f"more than {self.tolerance.relative:.1e}"
                )
            if self.precision == "fp32" and row.argmax_equal + row.argmax_ties < row.rows:
                found.append(
                    f"mask ratio {row.mask_ratio}: argmax differs in {row.rows - row.argmax_equal} of {row.rows} rows"
                )
        total = sum(row.canvases for row in self.loop)
        equal = sum(row.canvases_equal for row in self.loop)
        if total and equal < self.tolerance.agreement * total:
            first = next(row.first_difference for row in self.loop if row.first_difference)
            found.append(f"{total - equal} of {total} canvases differ, first {first}")
        if self.tolerance.agreement == 1.0:
            found += [
                f"{row.name}: NFE differs from the reference"
                for row in self.loop
                if not row.nfe_equal
            ]
        return found

    def _missed(self, row: LayerRow) -> list[str]:
        limit = self.tolerance.relative
        if row.format == ROUTER:
            limit = PART_TOLERANCES[ROUTER].relative
            if row.worst <= limit:
                return []
            return [
                f"{row.layer} chooses experts that are worse than those that torch chooses of the same tokens, or weighs them "
                f"otherwise: by {row.worst:.2e} of the largest, more than {limit:.1e}"
            ]
        where = (
            "the logits, after the last layer,"
            if row.layer == LOGITS
            else f"what goes into {row.layer}"
        )
        found = []
        if not row.input_relative <= limit:
            found.append(
                f"{where} differs from torch's by {row.input_relative:.2e} of its range, more than {limit:.1e}, though the "
                "layers before it gave both sides the same"
            )
        if row.output_relative is not None and not row.output_relative <= limit:
            found.append(
                f"{row.layer} ({row.format}) gives another result than torch's from the same input: apart by "
                f"{row.output_relative:.2e} of its range, more than {limit:.1e} beyond one code's step"
            )
        return found

    @property
    def summary(self) -> str:
        """The first misses and how many more there are."""
        more = len(self.misses) - 2
        return "; ".join(self.misses[:2]) + (f"; and {more} more" if more > 0 else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as accuracy.json and ``--json`` show them."""
        return asdict(self) | {"passed": not self.misses, "misses": self.misses}


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


def compare_logits(
    bundle: Bundle,
    canvases: Sequence[Canvas],
    expected: Sequence[np.ndarray],
    on_done: Callable[[], None],
) -> list[GraphRow]:
    """Run the bundle on canvases and compare with their rows' logits fp32 ``[R, V]``: one row a
    mask ratio.

    ``on_done`` is called once a mask ratio.
    """
    found: list[np.ndarray] = []
    for number, canvas in enumerate(canvases, start=1):
        found.append(bundle.logits(canvas.tokens.tolist())[canvas.rows])
        if number == len(canvases) or canvases[number].mask_ratio != canvas.mask_ratio:
            on_done()
    return graph_rows(canvases, found, expected)


def graph_rows(
    canvases: Sequence[Canvas], found: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> list[GraphRow]:
    """Compare two sides' logits fp32 ``[R, V]`` of every canvas: one row a mask ratio."""
    by_ratio: dict[float, list[int]] = {}
    for number, canvas in enumerate(canvases):
        by_ratio.setdefault(canvas.mask_ratio, []).append(number)
    return [
        _graph_row(
            ratio,
            np.concatenate([found[i] for i in numbers]),
            np.concatenate([expected[i] for i in numbers]),
        )
        for ratio, numbers in by_ratio.items()
    ]


def _graph_row(ratio: float, ours: np.ndarray, theirs: np.ndarray) -> GraphRow:
    worst = float(np.abs(ours - theirs).max()) if np.isfinite(ours).all() else float("inf")
    span = float(theirs.max() - theirs.min())
    best_two = np.partition(theirs, -2, axis=-1)[:, -2:]
    is_equal = ours.argmax(-1) == theirs.argmax(-1)
    is_tie = ~is_equal & (best_two[:, 1] - best_two[:, 0] <= 2 * worst)
    return GraphRow(
        ratio,
        len(theirs),
        worst,
        span,
        worst / max(span, 1e-30),
        int(is_equal.sum()),
        int(is_tie.sum()),
    )


def require_parity(parity: Parity, where: str) -> None:
    """Raises ParityError with what is outside the tolerance."""
    if parity.misses:
        raise ParityError(f"{where}: {parity.summary}")


def check_host_memory(needed: int, holder: str, instead: str) -> None:
    """Raises DlmError if this machine has no room for so many bytes, as far as it tells; ``holder``
    says what holds what.
    """
    available = targets.available_memory_bytes()
    if available is not None and needed > available:
        raise DlmError(f"{holder}, {needed:,} bytes, and {available:,} are available. {instead}")
