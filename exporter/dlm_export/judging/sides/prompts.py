"""Splits samples into prompts and answers, and converts generated token IDs to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import dlm_runtime
from dlm_calibration.metrics import Decode, Run, as_run
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.side import JudgeError, Side
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.policy import Policy


def prompt_of(sample: Sample, max_new_tokens: int, max_canvas_length: int) -> tuple[list[int], int]:
    """Return the prompt of a sample, and the number of tokens to generate after the prompt.

    If the sample is plain text, the prompt is the first half of the text.
    """
    start = sample.prompt_length or max(1, len(sample.tokens) // 2)
    return sample.tokens[:start].tolist(), min(max_new_tokens, max_canvas_length - start)


def asked_of(sample: Sample, number: int, max_new_tokens: int, limit: int) -> tuple[list[int], int]:
    """Like ``prompt_of``, but raises JudgeError if the prompt fills the canvas."""
    prompt, room = prompt_of(sample, max_new_tokens, limit)
    if room < 1:
        raise JudgeError(
            f"sample {number + 1}: its prompt of {len(prompt)} tokens fills the canvas. Remove this sample."
        )
    return prompt, room


def new_tokens(
    samples: Sequence[Sample], policy: Policy, network: NetworkSpec, bundle: dlm_runtime.Bundle
) -> int:
    """Return the number of tokens to generate after each prompt.

    The number is the length of the longest answer, rounded up to whole blocks. Rounding up never
    exceeds the default length that the bundle records, because denoisers with full attention may
    fail at lengths that they were not trained with. The longest prompt and the generated tokens
    always fit on the canvas.
    """
    block_length = policy.block_length or 32
    starts = [sample.prompt_length or len(sample.tokens) // 2 for sample in samples]
    longest = max(len(sample.tokens) - start for sample, start in zip(samples, starts, strict=True))
    blocks = -(-longest // block_length) * block_length
    recorded: int = bundle.manifest["loop"].get("max_new_tokens", blocks)
    wanted = min(blocks, max(longest, recorded))
    return max(1, min(wanted, network.max_canvas_length - max(starts)))


def decoder(bundle: dlm_runtime.Bundle) -> Callable[[list[int]], str | None]:
    """Return a function that converts generated IDs to text, up to the first end token.

    The returned function returns ``None`` if the bundle has no tokenizer.
    """
    tokenizer, stops = bundle.tokenizer, bundle.eos_token_ids

    def decode(tokens: list[int]) -> str | None:
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        return None if tokenizer is None else tokenizer.decode(tokens[:end])

    return decode


def runs_of(
    side: Side,
    asked: Sequence[tuple[list[int], int]],
    policy: Policy,
    decode: Decode,
    on_done: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Generate text after each prompt, as in ``Side.texts``. ``on_done`` is called per text."""
    found = []
    for (prompt, _), (tokens, nfe) in zip(asked, side.texts(asked, policy), strict=True):
        found.append(as_run(tokens, prompt, nfe, side.eos_token_ids, decode))
        on_done()
    return found
