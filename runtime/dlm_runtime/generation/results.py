"""The result of a request, and the events of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_runtime.tools import ToolCall


@dataclass(frozen=True)
class Generation:
    """The result of a request.

    Args:
        tokens: The whole canvas. A position with ``undecided`` True has the last pass's proposal; without one, an end
            token, or the mask token if the denoiser has no end token.
        text: The generated text, up to the first end token or stop string. None without a tokenizer.
        nfe: Passes that the request took part in.
        timings: Seconds by part of the call: see ``Bundle.generate``.
        cache_bytes: The most bytes of keys and values held for the request.
        passes: Passes by kind: "prefill" fills a cache before a block is decided, "denoise" decides tokens, "store"
            stores a finished block.
        finish: Why it ended: "stop" (an end token, or a stop string), "length" (all is decided, without an end token),
            "constraint" (the same, and the text of the constraint is complete), "steps" (``max_steps``), "deadline" or
            "cancelled". "unknown (N)" is a reason from a newer native library.
        prompt_tokens: Number of given tokens.
        completion_tokens: Number of other tokens, up to and not including the first end token.
        log_probs: ln p of each token when it was committed, in the denoiser's softmax. None for given and undecided
            tokens, and for those after an early end. Always finite: a probability that rounds to 0, such as that of a
            forced token, gives -744.44.
        undecided: True for each position that was not decided when the request ended.
        tool_calls: The calls that ``text`` consists of. Empty for any other text, without tools, or unless the whole
            text was decided.
        constraint_log_prob_loss: How much less likely the constraint made the text, in nats (0 or more): the sum over
            positions of ln p of the denoiser's best token minus ln p of the committed one, from the last pass that
            scored the position; at most 745 per position. Positions filled without a pass count 0. For sampled tokens
            it includes the cost of sampling. 0 without a constraint.
    """

    tokens: list[int]
    text: str | None
    nfe: int
    timings: dict[str, float]
    cache_bytes: int
    passes: dict[str, int]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    log_probs: list[float | None]
    undecided: list[bool]
    tool_calls: list[ToolCall]
    constraint_log_prob_loss: float = 0.0


@dataclass(frozen=True)
class Event:
    """The canvas after one step.

    Args:
        canvas: Token ids. Undecided positions have the token that the denoiser sees.
        undecided: True for each position that is not decided.
        guess: The token that a scored, undecided position would take now; -1 for other positions.
        score: The score of ``guess``; 0 for other positions.
        block: The positions ``[start, end)`` being filled.
        nfe: Passes so far.
        committed: Positions that this step committed.
        text: The text so far: whole characters of tokens that will not change, without a possible start of a stop
            string.
        delta: The text that this step added.
        done: True for the last event.
        result: The result; only in the last event.
    """

    canvas: list[int]
    undecided: list[bool]
    guess: list[int]
    score: list[float]
    block: tuple[int, int]
    nfe: int
    committed: int
    text: str | None
    delta: str | None
    done: bool
    result: Generation | None
