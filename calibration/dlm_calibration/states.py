"""Makes calibration states from samples.

Calibration runs a denoiser on the states, and observes the inputs of the denoiser's layers.

A calibration state is a canvas. There are three kinds of state. A masked state is a sample with
random mask tokens, as in the forward process of masked diffusion (arXiv:2502.09992, section 2.1).
The mask ratios are spread evenly, so that there are states for every range of ratios. A trajectory
state is a canvas from a real generation. In this canvas, the denoiser has already committed the
positions that were easy to predict. Random masking almost never produces such a canvas. A clean
state is a sample without mask tokens.

A denoiser with draft passes decides a block at a time, after a causal pass over all earlier
positions. Its masked states are made for one block (see ``Draft``). If the denoiser has no mask
token, the block contains random tokens instead of mask tokens.
"""

from __future__ import annotations

import functools
import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dlm_calibration.errors import CalibrationError
from dlm_calibration.samples import Sample

# The mask ratios in the middle of the ten buckets.
MASK_RATIOS = tuple(round(0.05 + 0.1 * i, 2) for i in range(10))
# The shares of random tokens in a block. In the first pass over a block, all tokens are random.
NOISE_RATIOS = (*MASK_RATIOS, 1.0)
# Trajectory states are taken from these points of a generation. 0 is the canvas before the first
# pass, and 1 the canvas before the last pass.
TRAJECTORY_POINTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
Source = Literal["masked", "trajectory", "clean"]
SOURCES: tuple[Source, ...] = ("masked", "trajectory", "clean")
MIX = (0.5, 0.4, 0.1)  # the default share of each kind of state, in the order of SOURCES
PER_SAMPLE = 8

Trajectories = Callable[[Sequence["Sample"]], Iterable[Sequence["np.ndarray | State"]]]


# --- States ---


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft pass over the last block of a canvas.

    The positions before ``start`` are decided. The denoiser computes them in a causal pass. In the
    draft pass, all positions from ``start`` on see each other.

    - ``start``: the first position of the block.
    - ``conditioning``: the soft embeddings that the pass reads, ``[L - start, hidden]``. ``None``
      means zeros, as in the first pass over a block.
    - ``is_updated``: True if the pass uses the denoiser's low-rank updates for draft passes.
    """

    start: int
    conditioning: np.ndarray | None = None
    is_updated: bool = False


@dataclass(frozen=True, eq=False)
class State:
    """One canvas to run the denoiser on, int64 ``[L]``.

    The canvas contains mask tokens unless ``source`` is "clean". ``mask_ratio`` is the share of
    mask tokens among the positions after the prompt.

    If ``draft`` is not ``None``, ``mask_ratio`` is the share of mask tokens in the block. If the
    denoiser has no mask token, it is the share of random tokens in the block.
    """

    canvas: np.ndarray
    source: Source
    mask_ratio: float
    prompt_length: int
    draft: Draft | None = None

    def is_masked(self, mask_token_id: int) -> np.ndarray:
        """Return the undecided positions, bool ``[L]``.

        They contain mask tokens. If a block contains random tokens instead, the whole block is
        undecided, except the first token of a pass that uses low-rank updates.
        """
        found: np.ndarray = self.canvas == mask_token_id
        if self.draft is not None and not found.any():
            return np.arange(len(self.canvas)) >= self.draft.start + self.draft.is_updated
        return found

    @property
    def bucket(self) -> int:
        """The mask ratio in tenths, rounded down: 0..9.

        A ratio of 1 is in bucket 9, and clean states have bucket -1.
        """
        # The ratio is a rounded quotient of small integers, so it may be slightly too small. Adding
        # 1e-9 corrects this error. No other ratio gets into a different bucket, because one
        # position changes a ratio by far more than 1e-9.
        return -1 if self.source == "clean" else min(9, math.floor(self.mask_ratio * 10 + 1e-9))

    @functools.cached_property
    def sha256(self) -> str:
        """A hash of the canvas, the prompt length and the draft pass."""
        digest = hashlib.sha256(np.array([self.prompt_length, *self.canvas], "<i8").tobytes())
        if self.draft is not None:
            digest.update(np.int64(self.draft.start).tobytes())
            if self.draft.conditioning is not None:
                digest.update(self.draft.conditioning.astype("<f4").tobytes())
            if self.draft.is_updated:
                digest.update(b"updated")
        return digest.hexdigest()


def write_states(states: Sequence[State], path: Path) -> None:
    """Write states to a file.

    The file is written to a temporary name, and renamed when it is complete.
    """
    arrays = {
        "tokens": np.concatenate([state.canvas for state in states]),
        "lengths": np.array([len(state.canvas) for state in states], np.int64),
        "prompt_lengths": np.array([state.prompt_length for state in states], np.int64),
        "mask_ratios": np.array([state.mask_ratio for state in states], np.float64),
        "sources": np.array([SOURCES.index(state.source) for state in states], np.int64),
    }
    drafts = [state.draft for state in states]
    if any(draft is not None for draft in drafts):
        arrays |= _packed(drafts)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    partial.replace(path)


def read_states(path: Path) -> list[State]:
    """Read a file that ``write_states`` wrote. Raises CalibrationError for any other file."""
    names = ("tokens", "lengths", "prompt_lengths", "mask_ratios", "sources")
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, lengths, prompts, ratios, sources = (file[name] for name in names)
            canvases = np.split(np.asarray(tokens, np.int64), np.cumsum(lengths)[:-1])
            drafts = _unpacked(file, lengths) if "draft_starts" in file else [None] * len(canvases)
        rows = zip(
            canvases, sources.tolist(), ratios.tolist(), prompts.tolist(), drafts, strict=True
        )
        return [
            State(canvas, SOURCES[source], ratio, prompt, draft)
            for canvas, source, ratio, prompt, draft in rows
        ]
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as err:
        raise CalibrationError(
            f"{path}: not a file of calibration states ({err}). Remove it."
        ) from err


def _packed(drafts: Sequence[Draft | None]) -> dict[str, np.ndarray]:
    """Return draft passes as arrays for ``write_states``. A start of -1 means no draft pass."""
    some = [draft for draft in drafts if draft is not None]
    read = [draft.conditioning for draft in some if draft.conditioning is not None]
    return {
        "draft_starts": np.array([-1 if d is None else d.start for d in drafts], np.int64),
        "is_conditioned": np.array([draft.conditioning is not None for draft in some]),
        "is_updated": np.array([draft.is_updated for draft in some]),
        "conditioning": np.concatenate(read) if read else np.zeros((0, 0), np.float32),
    }


def _unpacked(file: Mapping[str, np.ndarray], lengths: Sequence[int]) -> list[Draft | None]:
    """Undo ``_packed``. ``lengths`` contains the length of each canvas. Raises ValueError."""
    read, starts = file["conditioning"], np.asarray(file["draft_starts"], np.int64)
    has_draft = starts >= 0
    counts = (np.asarray(lengths, np.int64) - starts)[has_draft]
    is_conditioned, is_updated = (
        np.asarray(file[name], bool) for name in ("is_conditioned", "is_updated")
    )
    if (counts < 1).any() or not is_conditioned.shape == is_updated.shape == counts.shape:
        raise ValueError("the draft passes do not fit the canvases")
    if read.ndim != 2 or len(read) != counts[is_conditioned].sum():
        raise ValueError("the soft embeddings do not fit the draft passes")
    found, first = list[Draft | None]([None] * len(starts)), 0
    flags = zip(is_conditioned.tolist(), is_updated.tolist(), strict=True)
    drafted = zip(np.flatnonzero(has_draft).tolist(), counts.tolist(), flags, strict=True)
    for number, count, (is_read, is_adapted) in drafted:
        rows = read[first : first + count] if is_read else None
        first += count if is_read else 0
        found[number] = Draft(int(starts[number]), rows, is_adapted)
    return found


def make_states(
    samples: Sequence[Sample],
    *,
    mask_token_id: int,
    pad_token_id: int | None,
    block_length: int,
    max_canvas_length: int,
    seed: int,
    per_sample: int = PER_SAMPLE,
    mix: Sequence[float] = MIX,
    trajectories: Trajectories | None = None,
    noise_vocab_size: int | None = None,
    has_drafts: bool = False,
    drafts_whole_blocks: bool = False,
) -> Iterator[State]:
    """Yield calibration states of every sample, one at a time. Equal arguments give equal states.

    At most one state of a sample is clean (without masks), so ``mix=(0, 0, 1)`` gives one state per
    sample. Over all samples, each mask ratio is used about equally often. Each trajectory point is
    also used about equally often.

    Args:
        samples: The data.
        mask_token_id: The mask token.
        pad_token_id: The token that pads a completion to a whole number of blocks, as in training
            and decoding. The padded canvas is never longer than ``max_canvas_length``. If
            ``pad_token_id`` is ``None``, completions are not padded.
        block_length: Length of a block in tokens. If 0, completions are not padded.
        max_canvas_length: Longest canvas in tokens.
        seed: Seed of the random masks.
        per_sample: States per sample.
        mix: The share of each source in ``SOURCES`` among all states of all samples.
        trajectories: A function that generates from prompts. The function is called once, with the
            samples that need trajectory states. For each of these samples, in order, the function
            returns the canvases after each pass. The states are taken from these canvases at
            ``TRAJECTORY_POINTS``: point 0 is the canvas before the first pass, and point 1 is the
            last canvas that contains a mask token. Without ``trajectories``, or if a generation has
            too few passes, randomly masked states are used instead. With ``noise_vocab_size`` or
            ``has_drafts``, the function returns the state of each draft pass instead of canvases.
        noise_vocab_size: The number of tokens, for a denoiser without a mask token. Masked states
            then contain random tokens in a random block of the completion. The shares of random
            tokens are ``NOISE_RATIOS``. ``None`` for a denoiser with a mask token.
        has_drafts: True for a denoiser with draft passes that draft or decide its text. Masked
            states then contain mask tokens in one block only (see ``mask_draft_block``), and the
            shares of mask tokens are ``NOISE_RATIOS``. If the share is 1, the draft pass uses
            low-rank updates, as in self-speculation. With ``noise_vocab_size``, random tokens
            replace the mask tokens. ``block_length`` must be at least 2.
        drafts_whole_blocks: True if all tokens of a draft pass but the first are masked. The share
            of mask tokens is then 1.

    Raises:
        CalibrationError: The mix is not valid, a sample contains the mask token, or a sample or a
            block is too short for a draft pass.
    """
    if (
        len(mix) != len(SOURCES)
        or not all(math.isfinite(share) and share >= 0 for share in mix)
        or not sum(mix) > 0
    ):
        raise CalibrationError(
            f"the mix {tuple(mix)} is not {len(SOURCES)} shares ({', '.join(SOURCES)}), such as {MIX}"
        )
    if per_sample < 1:
        raise CalibrationError(f"at least 1 state per sample is needed, not {per_sample}")
    masked, from_trajectory, clean = (share / sum(mix) for share in mix)
    if trajectories is None:
        masked, from_trajectory = masked + from_trajectory, 0.0

    for number, sample in enumerate(samples, 1):
        if (sample.tokens == mask_token_id).any():
            raise CalibrationError(
                f"sample {number}: its text contains the mask token ({mask_token_id}): leave it out"
            )
        if has_drafts and len(sample.tokens) < 2:
            raise CalibrationError(
                f"sample {number}: its text has only one token, and a draft pass needs two: leave it out"
            )
    if has_drafts and block_length < 2:
        raise CalibrationError(
            f"draft passes need blocks of at least 2 tokens, not {block_length}: choose another preset"
        )

    def states() -> Iterator[State]:
        rng = np.random.default_rng(seed)
        sources = _alternating((masked, from_trajectory, clean))
        wanted_by = [[SOURCES[next(sources)] for _ in range(per_sample)] for _ in samples]
        is_by_block = has_drafts or noise_vocab_size is not None
        every = NOISE_RATIOS if is_by_block else MASK_RATIOS
        ratios, uses = _rounds(every, rng), np.zeros(len(TRAJECTORY_POINTS), dtype=np.int64)
        runs: Iterator[Sequence[np.ndarray | State]] = iter(())
        if trajectories is not None:
            runs = iter(
                trajectories(
                    [
                        one
                        for one, own in zip(samples, wanted_by, strict=True)
                        if "trajectory" in own
                    ]
                )
            )
        for sample, wanted in zip(samples, wanted_by, strict=True):
            prompt_length = sample.prompt_length
            whole = pad_to_blocks(sample, pad_token_id, block_length, max_canvas_length)
            passes: Sequence[np.ndarray | State] = next(runs) if "trajectory" in wanted else []
            if not is_by_block:
                canvases = [each for each in passes if isinstance(each, np.ndarray)]
                passes = _pass_inputs(canvases, mask_token_id, prompt_length)
            taken: set[int] = set()
            for source in wanted:
                if source == "clean":
                    continue
                index = (
                    _next_pass(len(passes), taken, uses, rng) if source == "trajectory" else None
                )
                if index is None and noise_vocab_size is not None and not has_drafts:
                    canvas, start, is_noised = noise_block(
                        whole, next(ratios), noise_vocab_size, block_length, rng, prompt_length
                    )
                    ratio = float(is_noised[start:].mean())
                    yield State(canvas, "masked", ratio, prompt_length, Draft(start))
                elif index is None and has_drafts:
                    share = 1.0 if drafts_whole_blocks else next(ratios)
                    canvas, start = mask_draft_block(
                        whole, share, mask_token_id, block_length, rng, prompt_length
                    )
                    ratio = float((canvas[start:] == mask_token_id).mean())
                    if noise_vocab_size is not None:
                        canvas = fill_masks(canvas, noise_vocab_size, rng)
                    # In self-speculation, all positions after the first are masked.
                    draft = Draft(start, is_updated=share == 1)
                    yield State(canvas, "masked", ratio, prompt_length, draft)
                elif index is None:
                    canvas = mask_share(whole, next(ratios), mask_token_id, rng, prompt_length)
                    yield _state(canvas, "masked", mask_token_id, prompt_length)
                else:
                    found = passes[index]
                    yield (
                        found
                        if isinstance(found, State)
                        else _state(found, "trajectory", mask_token_id, prompt_length)
                    )
            if "clean" in wanted:
                yield _state(whole, "clean", mask_token_id, prompt_length)

    return states()


def mask_independently(
    tokens: np.ndarray,
    mask_ratio: float,
    mask_token_id: int,
    rng: np.random.Generator,
    protected: int = 0,
) -> np.ndarray:
    """Return a copy of ``tokens`` ``[L]`` in which each position is masked independently.

    Each position after the first ``protected`` positions is masked with probability ``mask_ratio``.
    At least one position is masked. Raises ValueError if the ratio is outside (0, 1] or if all
    positions are protected.
    """
    _check_maskable(tokens, mask_ratio, protected)
    is_masked = rng.random(len(tokens)) < mask_ratio
    is_masked[:protected] = False
    if not is_masked.any():
        is_masked[rng.integers(protected, len(tokens))] = True
    return np.where(is_masked, mask_token_id, tokens)


def mask_share(
    tokens: np.ndarray,
    mask_ratio: float,
    mask_token_id: int,
    rng: np.random.Generator,
    protected: int = 0,
) -> np.ndarray:
    """Return a copy of ``tokens`` ``[L]`` with a fixed number of random mask tokens.

    The number of mask tokens is the share ``mask_ratio`` of the positions after the first
    ``protected`` positions, rounded, and at least 1. Because the number of mask tokens is fixed
    (arXiv:2502.09992, section 2.4), the real mask ratio of a short canvas stays close to
    ``mask_ratio``. Raises ValueError if the ratio is outside (0, 1] or if all positions are
    protected.
    """
    _check_maskable(tokens, mask_ratio, protected)
    positions = len(tokens) - protected
    # Halves are rounded down, so that the real ratio stays in its bucket: 1.5 positions become 1.
    count = max(1, math.ceil(mask_ratio * positions - 0.5))
    out = np.array(tokens, dtype=np.int64)
    out[protected + rng.choice(positions, size=count, replace=False)] = mask_token_id
    return out


def _random_block(origin: int, end: int, block_length: int, rng: np.random.Generator) -> int:
    """Return the first position of a random block.

    The first block starts at ``origin``, and all other blocks start before ``end``.
    """
    blocks = max(1, -(-(end - origin) // block_length))
    return origin + int(rng.integers(blocks)) * block_length


def noise_block(
    tokens: np.ndarray,
    noise_ratio: float,
    vocab_size: int,
    block_length: int,
    rng: np.random.Generator,
    protected: int = 0,
    end: int | None = None,
) -> tuple[np.ndarray, int, np.ndarray]:
    """Replace a share of the tokens of a random block by random tokens.

    The blocks follow the first ``protected`` tokens, or the first half of the tokens if
    ``protected`` is 0. The number of random tokens is the share ``noise_ratio`` of the block,
    rounded, and at least 1. A random token may be equal to the token that it replaces.

    Args:
        tokens: The sample, int64 ``[L]``.
        noise_ratio: The share of the block.
        vocab_size: The number of tokens to choose from, with equal probabilities.
        block_length: Length of a block in tokens. The last block may be shorter.
        rng: The source of random numbers.
        protected: Number of tokens of the prompt.
        end: The block starts before this position. ``None`` means the end of ``tokens``.

    Returns:
        The tokens up to the end of the block, the first position of the block, and the positions of
        random tokens, bool.

    Raises:
        ValueError: The ratio is outside (0, 1], the block length is below 1, or there is no position
            after the prompt.
    """
    if block_length < 1:
        raise ValueError(f"block_length {block_length} is below 1")
    origin = protected or len(tokens) // 2
    _check_maskable(tokens, noise_ratio, origin)
    start = _random_block(origin, len(tokens) if end is None else end, block_length, rng)
    clean = np.array(tokens[: start + block_length], dtype=np.int64)
    is_noised = mask_share(clean, noise_ratio, -1, rng, start) == -1
    noise = random_tokens(len(clean), vocab_size, (), rng)
    return np.where(is_noised, noise, clean), start, is_noised


def fill_masks(masked: np.ndarray, vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """Replace the mask tokens of a canvas by random tokens, for a denoiser without a mask token.

    The mask token is ``vocab_size``. All tokens have equal probabilities.
    """
    return np.where(masked == vocab_size, random_tokens(len(masked), vocab_size, (), rng), masked)


def mask_draft_block(
    tokens: np.ndarray,
    mask_ratio: float,
    mask_token_id: int,
    block_length: int,
    rng: np.random.Generator,
    protected: int = 0,
    end: int | None = None,
) -> tuple[np.ndarray, int]:
    """Replace a share of the tokens of a random block by mask tokens, for a draft pass.

    The first token of the block stays as it is, because a causal pass decides it before the draft
    pass. The first token of the first block is the last of the ``protected`` tokens, or the first
    token if ``protected`` is 0.

    Args:
        tokens: The sample, int64 ``[L]``.
        mask_ratio: The share of mask tokens among the other positions of the block, rounded. At
            least one position is masked.
        mask_token_id: The mask token.
        block_length: Length of a block in tokens. The last block may be shorter.
        rng: The source of random numbers.
        protected: Number of tokens of the prompt.
        end: Some position before this position is in the block, and is not the block's first
            position. ``None`` means the end of ``tokens``.

    Returns:
        The tokens up to the end of the block, and the first position of the block.

    Raises:
        ValueError: The ratio is outside (0, 1], the block length is below 2, or there is no position
            to mask.
    """
    if block_length < 2:
        raise ValueError(f"block_length {block_length} is below 2")
    origin = max(1, protected)
    _check_maskable(tokens, mask_ratio, origin)
    # Each block starts one position earlier, because its first token is not masked.
    start = _random_block(origin, len(tokens) if end is None else end, block_length, rng) - 1
    own = tokens[: start + block_length]
    return mask_share(own, mask_ratio, mask_token_id, rng, start + 1), start


def random_tokens(
    length: int, vocab_size: int, excluded: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Return ``length`` uniformly random token ids of the vocabulary, int64.

    The ids in ``excluded`` are never returned.
    """
    allowed = np.setdiff1d(np.arange(vocab_size), np.array(excluded, dtype=np.int64))
    return rng.choice(allowed, size=length).astype(np.int64)


def _check_maskable(tokens: np.ndarray, mask_ratio: float, protected: int) -> None:
    if not 0 < mask_ratio <= 1:
        raise ValueError(f"mask_ratio {mask_ratio} is outside (0, 1]")
    if protected >= len(tokens):
        raise ValueError(f"no position is left to mask: {protected} of {len(tokens)} are protected")


def _rounds(values: Sequence[float], rng: np.random.Generator) -> Iterator[float]:
    """Yield the values forever. Each round yields every value once, in a new random order.

    Without a new order in each round, some values would always be used for the same samples.
    """
    while True:
        for i in rng.permutation(len(values)):
            yield values[i]


def _alternating(shares: Sequence[float]) -> Iterator[int]:
    """Yield indices of ``shares`` forever, at any time as close to their shares as possible."""
    owed = [0.0] * len(shares)
    while True:
        owed = [debt + share for debt, share in zip(owed, shares, strict=True)]
        chosen = max(range(len(shares)), key=lambda i: (shares[i] > 0, owed[i]))
        owed[chosen] -= 1
        yield chosen


def pad_to_blocks(
    sample: Sample, pad_token_id: int | None, block_length: int, max_canvas_length: int
) -> np.ndarray:
    """Return the sample's tokens ``[L]``, with a completion padded to a whole number of blocks.

    The result is not padded beyond ``max_canvas_length``.
    """
    if sample.answer is None or block_length < 1 or pad_token_id is None:
        return sample.tokens
    blocks = -(-(len(sample.tokens) - sample.prompt_length) // block_length)
    length = max(
        len(sample.tokens), min(sample.prompt_length + blocks * block_length, max_canvas_length)
    )
    return np.pad(sample.tokens, (0, length - len(sample.tokens)), constant_values=pad_token_id)


def _pass_inputs(
    canvases: Sequence[np.ndarray], mask_token_id: int, prompt_length: int
) -> list[np.ndarray]:
    """Return the canvas before each pass of a generation: the initial canvas, and each later canvas
    that still contains a mask token.
    """
    inputs = [canvas for canvas in canvases if (canvas == mask_token_id).any()]
    if not len(canvases):
        return inputs
    start = np.array(canvases[0], dtype=np.int64)
    start[prompt_length:] = mask_token_id
    return inputs if inputs and np.array_equal(inputs[0], start) else [start, *inputs]


def _next_pass(
    count: int, taken: set[int], uses: np.ndarray, rng: np.random.Generator
) -> int | None:
    """Choose the pass of the least used trajectory point whose pass is not in ``taken``.

    Returns ``None`` if there is no such point. Updates ``taken`` and ``uses``.
    """
    for point in np.lexsort((rng.random(len(uses)), uses)) if count else ():
        index = round(TRAJECTORY_POINTS[point] * (count - 1))
        if index not in taken:
            taken.add(index)
            uses[point] += 1
            return index
    return None


def _state(canvas: np.ndarray, source: Source, mask_token_id: int, prompt_length: int) -> State:
    ratio = float((canvas[prompt_length:] == mask_token_id).mean())
    return State(np.asarray(canvas, dtype=np.int64), source, ratio, prompt_length)
