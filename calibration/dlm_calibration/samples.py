"""Samples: prompts and completions read from files, as token ids."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_calibration.errors import CalibrationError

if TYPE_CHECKING:
    from dlm_runtime.text.tokenizer import Tokenizer

_BUILTIN = Path(__file__).parent / "builtin.jsonl"
_MOST_SAMPLES = 100_000  # bounds memory: a sample is at most one canvas long
_MOST_BYTES = 1 << 20  # per line, or per paragraph of text: far more than any canvas holds


@dataclass(frozen=True, eq=False)
class Sample:
    """One piece of calibration data.

    ``tokens``, int64 ``[L]``, are a prompt, its completion and one end token, or plain text. The
    first ``prompt_length`` are never masked (0 for plain text). ``prompt`` and ``answer`` are the
    texts of prompt and completion, ``None`` for plain text. A prompt read without its completion has
    only its own tokens, and no answer.
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
    """Read samples from a JSONL file, or from the paragraphs of a ``.txt`` file.

    A JSON line is an object with ``prompt`` and ``completion``, with ``messages`` (the assistant's
    last message is the completion, the messages before it are the prompt), or with ``text``; the
    first of these that exists is used. Other keys and blank lines are ignored.

    Args:
        path: The file.
        tokenizer: The denoiser's tokenizer, or ``None``.
        eos_token_id: End token to add after completions.
        max_canvas_length: Longest sample in tokens.
        limit: Stop after this many samples, without checking the rest.
        prompts_only: Completions are optional and not read, and messages may end with the user's.

    Raises:
        CalibrationError: With the line's number if a line is wrong: not UTF-8, not JSON, without
            these keys, or too long. Also for an unreadable file, no samples, no tokenizer or no
            chat template.
    """
    if tokenizer is None:
        raise CalibrationError(
            f"{path}: text needs a tokenizer, and this denoiser has none: put tokenizer.json beside it"
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
                f"{path}: more than {_MOST_SAMPLES} samples: limit their number; a few hundred calibrate as well"
            )
        samples.append(sample)
    if not samples:
        raise CalibrationError(
            f'{path}: contains no samples: write lines such as {{"prompt": "...", "completion": "..."}}'
        )
    return samples


def builtin_samples(
    tokenizer: Tokenizer | None,
    *,
    eos_token_id: int | None,
    max_canvas_length: int,
    limit: int | None = None,
) -> list[Sample]:
    """The short English prompts and completions of this package, as chats if the tokenizer has a
    template.

    For use without data from the denoiser's own task; its ranges there may differ. Samples too long
    for the canvas are skipped. Raises CalibrationError without a tokenizer, or if none fits.
    """
    if tokenizer is None:
        raise CalibrationError(
            "the built-in samples are text, and this denoiser has no tokenizer: put tokenizer.json beside it"
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
    """Yield the number and text of each line, one at a time, without trailing space. Raises
    CalibrationError.
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
                        f"{path}, line {number}: longer than {_MOST_BYTES} bytes, which is too long for any canvas"
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
    """Yield the first line number and text of each paragraph. Raises CalibrationError."""
    lines: list[str] = []
    first = size = 0
    for number, text in itertools.chain(_lines(path), [(0, "")]):
        if text:
            first = first if lines else number
            lines.append(text)
            size += len(text)
            if size > _MOST_BYTES:
                raise CalibrationError(
                    f"{path}, line {first}: a paragraph is longer than {_MOST_BYTES} bytes, which is too long for any canvas"
                )
        elif lines:
            yield first, "\n".join(lines)
            lines, size = [], 0


def _json_sample(
    line: str, tokenizer: Tokenizer, eos_token_id: int | None, *, prompts_only: bool
) -> Sample:
    """Read one JSON line. Raises ValueError (RequestError is one) with the reason."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ValueError(
            f"not JSON ({err}); put plain text into a file with the suffix .txt"
        ) from err
    if not isinstance(record, dict):
        raise ValueError(f"is a JSON {type(record).__name__}, expected an object")
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
    raise ValueError(f"it has none of these keys: {needed}, messages, text")


def _string(record: dict[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is a {type(value).__name__}, expected a string")
    return value


def _conversation(messages: Any, prompts_only: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The messages before the assistant's last one, and its text.

    With ``prompts_only``: all messages except a final one of the assistant, and ``None``. Raises
    ValueError.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of objects with role and content")
    for key in ("role", "content"):
        if not all(isinstance(message.get(key), str) for message in messages):
            raise ValueError(f"a message has no {key}, or it is not a string")
    if prompts_only:
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        prompt = messages[:-1] if is_answered else messages
        if not prompt:
            raise ValueError("messages contain no prompt")
        return prompt, None
    last = max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0
    )
    if last == 0:
        raise ValueError(
            "messages contain no answer: a message of the role assistant must follow a prompt"
        )
    return messages[:last], messages[last]["content"]


def _completed(
    tokenizer: Tokenizer,
    prompt: str,
    chat: list[dict[str, Any]] | None,
    completion: str | None,
    eos_token_id: int | None,
) -> Sample:
    """Encode a prompt and its completion as a sample. ``eos_token_id``, if given, is appended.

    Without a completion, the sample has only the prompt. Samples are trusted text, so the text of a
    special token is encoded as that token. Raises ValueError if the completion is empty.
    """
    if completion is not None and not completion.strip():
        raise ValueError("the completion is empty: leave this line out")
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
    """Encode plain text as a sample. The text of a special token is encoded as that token. Raises
    ValueError if the text is empty.
    """
    plain, wrapped = tokenizer.encode_plain(text, True), tokenizer.encode(text, True)
    if not plain:
        raise ValueError("there is no text: leave this line out")
    # Keep a token that starts every text: its activations are often the largest. Leave out the
    # wrapping of a prompt.
    tokens = wrapped if wrapped[-len(plain) :] == plain else plain
    return Sample(np.array(tokens, dtype=np.int64), 0)
