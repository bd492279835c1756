"""What a request comes to, and what is seen of it on the way."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_runtime.tools import ToolCall


@dataclass(frozen=True)
class Generation:
    """The result of a request.

    Args:
        tokens: The whole canvas. Where ``undecided`` is True it has the proposal of the last pass. If there was none, it has an
            end token, or the mask token if the denoiser has no end token.
        text: The generated text, up to the first end token or stop string. None without a tokenizer.
        nfe: Passes that the request took part in.
        timings: Seconds by part of the call: see ``Bundle.generate``.
        cache_bytes: Bytes of cached keys and values.
        passes: Passes by kind: "prefill" fills a cache before a block is decided, "denoise" decides tokens, "store" fills a
            cache afterwards.
        finish: Why it ended: "stop" (an end token, or a stop string), "length" (all is decided, without an end token),
            "constraint" (likewise, and the text of the constraint is complete), "steps" (``max_steps``), "deadline" or
            "cancelled". "unknown (N)" is a reason that a newer native library has added.
        prompt_tokens: Number of given tokens.
        completion_tokens: Number of other tokens, up to and not including the first end token.
        log_probs: ln p of each token when it was committed, by the denoiser's softmax. None for given and undecided tokens, and
            for those after an early end. Always finite: a probability that rounds to 0, as of a token that a constraint forces,
            gives -744.44.
        undecided: True for each position whose token was not decided when the request ended.
        tool_calls: The calls that ``text`` consists of. Empty if the text is anything else, if the request had no tools, or
            unless the whole text was decided.
        constraint_log_prob_loss: How much less likely the constraint made the text, in nats (0 or more). It is the sum over
            positions of ln p of the denoiser's best token minus ln p of the committed one, by the last pass that scored the
            position; at most 745 per position. Positions that were filled before a pass scored them count 0. For draws it
            includes the cost of drawing. 0 without a constraint.
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

    ``undecided`` says where a token is still wanted; what the canvas holds there is what the
    denoiser sees. ``guess`` holds, where such a position was scored, the token it would take now,
    else -1; ``score`` its score. ``block`` is the span ``[start, end)`` being filled. ``text`` is
    the text so far and ``delta`` what this step added to it: of tokens that will not change, whole
    characters, and nothing that may be the start of a stop string. The last event is ``done`` and
    carries ``result``.
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
