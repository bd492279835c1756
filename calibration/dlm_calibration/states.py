"""Canvases as a denoiser meets them while it unmasks: read from text, masked, or taken from its own
trajectories.

Masked states follow the forward process of masked diffusion (arXiv:2502.09992, section 2.1) at
stratified mask ratios, so that every bucket is covered. Trajectories hold what that process never
draws: canvases whose easy positions were committed first. Clean text is a third source.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dlm_calibration.errors import CalibrationError

if TYPE_CHECKING:
    from dlm_runtime.text.tokenizer import Tokenizer

MASK_RATIOS = tuple(round(0.05 + 0.1 * i, 2) for i in range(10))  # one a bucket of width 0.1
TRAJECTORY_POINTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # shares of a trajectory's passes
Source = Literal["masked", "trajectory", "clean"]
SOURCES: tuple[Source, ...] = ("masked", "trajectory", "clean")
MIX = (0.5, 0.4, 0.1)  # of SOURCES
PER_SAMPLE = 8

Trajectories = Callable[[Sequence["Sample"]], Iterable[Sequence[np.ndarray]]]

_BUILTIN = Path(__file__).parent / "builtin.jsonl"
_MOST_SAMPLES = 100_000  # each is at most a canvas long, so this bounds the memory
_MOST_BYTES = 1 << 20  # of a line, or of a paragraph of text: far more than any canvas holds


# --- Samples: text to token ids ---


@dataclass(frozen=True, eq=False)
class Sample:
    """One piece of calibration data.

    ``tokens``: int64 ``[L]``, a prompt, its completion and one eos; of plain text, the text alone.
    The first ``prompt_length`` are never masked (0 for plain text). ``prompt`` and ``answer`` are
    the texts of prompt and completion, None for plain text. A prompt that was read without its
    completion has its own tokens only, and no answer.
    """

    tokens: np.ndarray
    prompt_length: int
    answer: str | None = None
    prompt: str | None = None


def read_samples(
    path: Path,
    tokenizer: Tokenizer | None,
    *,
    eos_token_id: int | None,
    max_canvas_length: int,
    limit: int | None = None,
    prompts_only: bool = False,
) -> list[Sample]:
    """Samples of a JSONL file, or of a ``.txt`` file whose paragraphs are separated by blank lines.

    A line of JSON is an object with ``prompt`` and ``completion``, with ``messages`` (the last one
    of the assistant is the completion, what comes before it the prompt), or with ``text``, looked
    for in this order; other keys are ignored, and so are blank lines. With ``prompts_only`` a
    completion is not needed and not read, and messages may end with the user's. Reading ends after
    ``limit`` samples: what follows is not checked. Raises CalibrationError, with the line's number where a
    line is at fault: not readable, not UTF-8, not JSON, no such keys, longer than the canvas, no
    samples at all, no tokenizer or no chat template.
    """
    if tokenizer is None:
        raise CalibrationError(
            f"{path}: text needs a tokenizer, and this denoiser came without one: put tokenizer.json beside it"
        )
    if limit is not None and limit < 1:
        raise CalibrationError(f"{path}: at least 1 sample is needed, not {limit}")
    read = _text_sample
    if path.suffix != ".txt":
        read = functools.partial(_json_sample, prompts_only=prompts_only)
    records = _paragraphs(path) if path.suffix == ".txt" else _lines(path)
    samples: list[Sample] = []
    for number, text in itertools.islice((record for record in records if record[1]), limit):
        where = f"{path}, line {number}"
        try:
            sample = read(text, tokenizer, eos_token_id)
        except ValueError as err:
            raise CalibrationError(f"{where}: {err}") from err
        if len(sample.tokens) > max_canvas_length:
            raise CalibrationError(
                f"{where}: {len(sample.tokens)} tokens do not fit the canvas of {max_canvas_length}: shorten or split it"
            )
        if len(samples) == _MOST_SAMPLES:
            raise CalibrationError(
                f"{path}: more than {_MOST_SAMPLES} samples: a few hundred calibrate as well, limit their number"
            )
        samples.append(sample)
    if not samples:
        raise CalibrationError(
            f'{path}: holds no samples: write lines such as {{"prompt": "...", "completion": "..."}}'
        )
    return samples


def builtin_samples(
    tokenizer: Tokenizer | None,
    *,
    eos_token_id: int | None,
    max_canvas_length: int,
    limit: int | None = None,
) -> list[Sample]:
    """The short English prompts and completions that come with the package, as chats where the
    tokenizer has a template.

    For want of data from the denoiser's own purpose: its ranges there may differ. Those too long
    for the canvas are left out. Raises CalibrationError without a tokenizer, or if none fits.
    """
    if tokenizer is None:
        raise CalibrationError(
            "the built-in samples are text, and this denoiser came without a tokenizer: put tokenizer.json beside it"
        )
    samples = []
    for _, line in _lines(_BUILTIN):
        pair = json.loads(line)
        chat = (
            [{"role": "user", "content": pair["prompt"]}]
            if tokenizer.template is not None
            else None
        )
        sample = _completed(tokenizer, pair["prompt"], chat, pair["completion"], eos_token_id)
        if len(sample.tokens) <= max_canvas_length:
            samples.append(sample)
    if not samples:
        raise CalibrationError(
            f"none of the built-in samples fits a canvas of {max_canvas_length} tokens: give shorter ones of your own"
        )
    return samples[:limit]


def samples_sha256(samples: Iterable[Sample]) -> str:
    """Hash of the tokens, prompt lengths and answers, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        answer = b"" if sample.answer is None else sample.answer.encode("utf-8", "surrogatepass")
        digest.update(
            np.array(
                [len(sample.tokens), sample.prompt_length, len(answer), sample.answer is None],
                "<i8",
            ).tobytes()
        )
        digest.update(sample.tokens.astype("<i8").tobytes() + answer)
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and texts of a file's lines, one in memory at a time, without space at their ends.
    Raises CalibrationError.
    """
    try:
        if not path.is_file():
            raise CalibrationError(f"{path}: no such file")
        with path.open("rb") as file:
            for number in itertools.count(1):
                raw = file.readline(_MOST_BYTES + 1)
                if not raw:
                    return
                if len(raw) > _MOST_BYTES:
                    raise CalibrationError(
                        f"{path}, line {number}: longer than {_MOST_BYTES} bytes, which no canvas holds"
                    )
                try:
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                except UnicodeDecodeError as err:
                    raise CalibrationError(
                        f"{path}, line {number}: not UTF-8 ({err.reason} at byte {err.start})"
                    ) from err
    except OSError as err:
        raise CalibrationError(f"{path}: not readable ({err.strerror})") from err


def _paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """First line numbers and texts of a file's paragraphs. Raises CalibrationError."""
    lines: list[str] = []
    first = size = 0
    for number, text in itertools.chain(_lines(path), [(0, "")]):
        if text:
            first = first if lines else number
            lines.append(text)
            size += len(text)
            if size > _MOST_BYTES:
                raise CalibrationError(
                    f"{path}, line {first}: a paragraph longer than {_MOST_BYTES} bytes, which no canvas holds"
                )
        elif lines:
            yield first, "\n".join(lines)
            lines, size = [], 0


def _json_sample(
    line: str, tokenizer: Tokenizer, eos_token_id: int | None, *, prompts_only: bool
) -> Sample:
    """Raises ValueError (a RequestError is one): what is wrong with this line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"not JSON ({err}); plain text goes into a file called .txt") from err
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, an object is needed")
    if "prompt" in record and (prompts_only or "completion" in record):
        prompt = _string(record, "prompt")
        completion = None if prompts_only else _string(record, "completion")
        return _completed(tokenizer, prompt, None, completion, eos_token_id)
    if "messages" in record:
        messages, completion = _conversation(record["messages"], prompts_only)
        if tokenizer.template is None:
            raise ValueError(
                "messages need a chat template, and this tokenizer has none: give prompt and completion"
            )
        prompt = "\n".join(message["content"] for message in messages)
        return _completed(tokenizer, prompt, messages, completion, eos_token_id)
    if "text" in record:
        return _text_sample(_string(record, "text"), tokenizer, eos_token_id)
    needed = "prompt" if prompts_only else "prompt and completion"
    raise ValueError(f"neither {needed}, nor messages, nor text among its keys")


def _string(record: dict[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is a {type(value).__name__}, a string is needed")
    return value


def _conversation(messages: Any, prompts_only: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The messages before the assistant's last one, and its text. With ``prompts_only`` all
    messages, without the last one if it is the assistant's, and None. Raises ValueError.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of objects with role and content")
    for key in ("role", "content"):
        if not all(isinstance(message.get(key), str) for message in messages):
            raise ValueError(f"a message without a {key} that is a string")
    if prompts_only:
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        prompt = messages[:-1] if is_answered else messages
        if not prompt:
            raise ValueError("messages hold no prompt")
        return prompt, None
    last = max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0
    )
    if last == 0:
        raise ValueError(
            "messages hold no answer: one of the role assistant, behind a prompt, is needed"
        )
    return messages[:last], messages[last]["content"]


def _completed(
    tokenizer: Tokenizer,
    prompt: str,
    chat: list[dict[str, Any]] | None,
    completion: str | None,
    eos_token_id: int | None,
) -> Sample:
    """Prompt, completion and, if there is one, the end token; without a completion the prompt
    alone. Raises ValueError.

    Samples are not untrusted text, so a special token that they spell is that token.
    """
    if completion is not None and not completion.strip():
        raise ValueError("an empty completion: leave this line out")
    given = (
        tokenizer.encode(prompt, True)
        if chat is None
        else tokenizer.encode_chat(chat, special_tokens=True)
    )
    tokens = list(given)
    if completion is not None:
        tokens += tokenizer.encode_plain(completion, True)
        tokens += [] if eos_token_id is None else [eos_token_id]
    return Sample(np.array(tokens, dtype=np.int64), len(given), completion, prompt)


def _text_sample(text: str, tokenizer: Tokenizer, eos_token_id: int | None) -> Sample:
    """A sample of text that is no answer; special tokens may be spelled in it. Raises ValueError."""
    plain, wrapped = tokenizer.encode_plain(text, True), tokenizer.encode(text, True)
    if not plain:
        raise ValueError("no text: leave this line out")
    # A token that opens every text belongs to it: its activations are often the largest. A prompt's
    # wrapping does not.
    tokens = wrapped if wrapped[-len(plain) :] == plain else plain
    return Sample(np.array(tokens, dtype=np.int64), 0)


# --- States: canvases with masks ---


@dataclass(frozen=True, eq=False)
class State:
    """One canvas to run the denoiser on: int64 ``[L]``, masks in it.

    ``mask_ratio`` is the share of masked positions among those behind the prompt.
    """

    canvas: np.ndarray
    source: Source
    mask_ratio: float
    prompt_length: int

    @property
    def bucket(self) -> int:
        """0..9, the mask ratio in tenths rounded down (a full mask counts as 9); -1 for clean
        states.
        """
        # The ratio is a quotient of small integers: 1e-9 is far less than one position, and more
        # than its rounding error.
        return -1 if self.source == "clean" else min(9, math.floor(self.mask_ratio * 10 + 1e-9))

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the canvas and the prompt's length."""
        return hashlib.sha256(
            np.array([self.prompt_length, *self.canvas], "<i8").tobytes()
        ).hexdigest()


def write_states(states: Sequence[State], path: Path) -> None:
    """Keep states in a file, which is there whole or not at all."""
    arrays = {
        "tokens": np.concatenate([state.canvas for state in states]),
        "lengths": np.array([len(state.canvas) for state in states], np.int64),
        "prompt_lengths": np.array([state.prompt_length for state in states], np.int64),
        "mask_ratios": np.array([state.mask_ratio for state in states], np.float64),
        "sources": np.array([SOURCES.index(state.source) for state in states], np.int64),
    }
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    partial.replace(path)


def read_states(path: Path) -> list[State]:
    """What ``write_states`` kept. Raises CalibrationError for a file that it did not write."""
    names = ("tokens", "lengths", "prompt_lengths", "mask_ratios", "sources")
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, lengths, prompts, ratios, sources = (file[name] for name in names)
        canvases = np.split(np.asarray(tokens, np.int64), np.cumsum(lengths)[:-1])
        rows = zip(canvases, sources.tolist(), ratios.tolist(), prompts.tolist(), strict=True)
        return [
            State(canvas, SOURCES[source], ratio, prompt) for canvas, source, ratio, prompt in rows
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
            f"{path}: not calibration states that a build has kept ({err}). Remove it."
        ) from err


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
) -> Iterator[State]:
    """States of every sample, one at a time, the same for the same arguments.

    ``mix`` are the shares of ``SOURCES`` and holds over all samples together, as do mask ratios and
    trajectory points: each is taken as often as any other. Completions are padded to a multiple of
    ``block_length`` (0: not at all) within the canvas, as denoisers are trained and decoded. A
    sample has one clean state at most: another would add nothing, so ``mix=(0, 0, 1)`` gives one
    state a sample.

    ``trajectories(samples)`` gives, of each in order, the canvases after each pass of a run from
    the sample's prompt; it is asked once, for those that want states of a run. They are taken at
    ``TRAJECTORY_POINTS`` of its passes, from the canvas before the first pass to the last one that
    holds a mask. Without it, or where a run is too short to give different canvases, states are
    masked ones. Raises CalibrationError: a mix that is no shares, a sample that holds the mask
    token.
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
        raise CalibrationError(f"at least 1 state a sample is needed, not {per_sample}")
    masked, from_trajectory, clean = (share / sum(mix) for share in mix)
    if trajectories is None:
        masked, from_trajectory = masked + from_trajectory, 0.0

    for number, sample in enumerate(samples, 1):
        if (sample.tokens == mask_token_id).any():
            raise CalibrationError(
                f"sample {number}: its text holds the mask token ({mask_token_id}): leave it out"
            )

    def states() -> Iterator[State]:
        rng = np.random.default_rng(seed)
        sources = _alternating((masked, from_trajectory, clean))
        wanted_by = [[SOURCES[next(sources)] for _ in range(per_sample)] for _ in samples]
        ratios, uses = _rounds(MASK_RATIOS, rng), np.zeros(len(TRAJECTORY_POINTS), dtype=np.int64)
        runs: Iterator[Sequence[np.ndarray]] = iter(())
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
            passes = (
                _pass_inputs(next(runs), mask_token_id, prompt_length)
                if "trajectory" in wanted
                else []
            )
            taken: set[int] = set()
            for source in wanted:
                if source == "clean":
                    continue
                index = (
                    _next_pass(len(passes), taken, uses, rng) if source == "trajectory" else None
                )
                if index is None:
                    canvas = mask_share(whole, next(ratios), mask_token_id, rng, prompt_length)
                    yield _state(canvas, "masked", mask_token_id, prompt_length)
                else:
                    yield _state(passes[index], "trajectory", mask_token_id, prompt_length)
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
    """A copy of ``tokens`` ``[L]`` with each position behind the first ``protected`` masked with
    this probability.

    At least one position is masked. Raises ValueError if the ratio is outside (0, 1] or nothing is
    left to mask.
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
    """A copy of ``tokens`` ``[L]`` with this share of the positions behind the first ``protected``
    masked, at least one.

    Independent masking given how many positions it took (arXiv:2502.09992, section 2.4): a short
    canvas stays in its mask ratio's bucket. Raises ValueError if the ratio is outside (0, 1] or
    nothing is left to mask.
    """
    _check_maskable(tokens, mask_ratio, protected)
    positions = len(tokens) - protected
    count = max(
        1, math.ceil(mask_ratio * positions - 0.5)
    )  # halves down: 1.5 of 10 is 1, in the bucket of 0.15
    out = np.array(tokens, dtype=np.int64)
    out[protected + rng.choice(positions, size=count, replace=False)] = mask_token_id
    return out


def random_tokens(
    length: int, vocab_size: int, excluded: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """``length`` ids drawn evenly from the vocabulary without the excluded ones, int64."""
    allowed = np.setdiff1d(np.arange(vocab_size), np.array(excluded, dtype=np.int64))
    return rng.choice(allowed, size=length).astype(np.int64)


def _check_maskable(tokens: np.ndarray, mask_ratio: float, protected: int) -> None:
    if not 0 < mask_ratio <= 1:
        raise ValueError(f"mask_ratio {mask_ratio} is outside (0, 1]")
    if protected >= len(tokens):
        raise ValueError(f"no position is left to mask: {protected} of {len(tokens)} are protected")


def _rounds(values: Sequence[float], rng: np.random.Generator) -> Iterator[float]:
    """The values in endless rounds, each round in an order of its own: no value goes with every
    n-th sample.
    """
    while True:
        for i in rng.permutation(len(values)):
            yield values[i]


def _alternating(shares: Sequence[float]) -> Iterator[int]:
    """Indices in an endless row that keeps each one's count at its share, as closely as integers
    allow, all along.
    """
    owed = [0.0] * len(shares)
    while True:
        owed = [debt + share for debt, share in zip(owed, shares, strict=True)]
        chosen = max(range(len(shares)), key=lambda i: (shares[i] > 0, owed[i]))
        owed[chosen] -= 1
        yield chosen


def pad_to_blocks(
    sample: Sample, pad_token_id: int | None, block_length: int, max_canvas_length: int
) -> np.ndarray:
    """The sample's tokens ``[L]``, a completion filled up to whole blocks or to the canvas's end;
    None: not at all.
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
    """What each pass of a run saw: the canvas before the first pass, then those after a pass that
    hold a mask.
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
    """Index among a run's ``count`` passes at the point used least so far; None if no point leads
    to one not yet taken.

    Adds to ``taken`` and to ``uses``, int64 counts, one a point.
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
