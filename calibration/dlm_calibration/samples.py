"""Reads samples from files: prompts with their completions, or plain text, as token ids."""

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
_MOST_SAMPLES = 100_000  # limits the memory for samples, as does the limit on the canvas length
_MOST_BYTES = 1 << 20  # size limit of a line or paragraph; a canvas contains far less text


@dataclass(frozen=True, eq=False)
class Sample:
    """One piece of calibration data.

    There are three kinds of samples. The kind determines what ``tokens``, int64 ``[L]``, contains:

    - a prompt, its completion and one end token; or
    - a prompt without its completion (``answer`` is ``None``); or
    - plain text (``prompt`` and ``answer`` are ``None``).

    The first ``prompt_length`` tokens are never masked. ``prompt_length`` is 0 for plain text.
    ``prompt`` and ``answer`` are the texts of the prompt and of its completion.
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

    A JSON line is an object with one of the following keys. If an object contains several of these
    keys, the key that comes first in the list below is used. All other keys and blank lines are
    ignored.

    - ``prompt`` and ``completion``.
    - ``messages``: a chat. The assistant's last message is the completion, and the messages before
      it are the prompt.
    - ``text``: plain text.

    Args:
        path: The file.
        tokenizer: The denoiser's tokenizer, or ``None``.
        eos_token_id: End token to add after completions.
        max_canvas_length: Longest sample in tokens.
        limit: Stop after this many samples, without checking the rest.
        prompts_only: If True, read only prompts. Lines may then omit the completion, and messages
            may end with the user's message.

    Raises:
        CalibrationError: A line is not UTF-8, is not JSON, has none of the keys above, or is too
            long. The message contains the line number. This error is also raised if the file is
            unreadable or contains no samples, or if a tokenizer or chat template is needed and
            missing.
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
    """Return the short English prompts and completions that come with this package.

    The built-in samples are used if the user does not pass data from the denoiser's real task.
    Activation ranges on the real task may differ from the ranges on the built-in samples. If the
    tokenizer has a chat template, the samples are formatted as chats. Samples that are too long for
    the canvas are skipped. Raises CalibrationError without a tokenizer, or if no sample fits.
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
    """Return a hash of the samples' tokens, prompt lengths and answers, in order."""
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
    """Yield each line's number and its text, stripped on the right. Raises CalibrationError."""
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
    """Yield each paragraph's text with the number of its first line. Raises CalibrationError."""
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
    """Read one JSON line. Raises ValueError (or RequestError, a subclass) with the reason."""
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
    """Split a chat into the messages before the assistant's last message, and the text of the
    assistant's last message.

    With ``prompts_only``, the function returns the prompt and ``None``. The prompt then consists of
    all messages, except the last message if it is the assistant's. Raises ValueError.
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
    """Encode a prompt and its completion as a sample.

    ``eos_token_id``, if not ``None``, is appended.

    Without a completion, the sample contains only the prompt. Samples are trusted text, so the text
    of a special token is encoded as that token. Raises ValueError if the completion is empty.
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
    """Encode plain text, with special tokens, as a sample. Raises ValueError if it is empty."""
    plain, wrapped = tokenizer.encode_plain(text, True), tokenizer.encode(text, True)
    if not plain:
        raise ValueError("there is no text: leave this line out")
    # Some tokenizers put a special token before every text. The sample includes this token, because
    # its activations are often the largest. If the tokenizer also adds tokens after the text, the
    # sample contains no added tokens at all.
    tokens = wrapped if wrapped[-len(plain) :] == plain else plain
    return Sample(np.array(tokens, dtype=np.int64), 0)
