"""What a request comes to, and what is seen of it on the way."""

from __future__ import annotations

from dataclasses import dataclass

from dlm_runtime.tools import ToolCall


@dataclass(frozen=True)
class Generation:
    """A request that has ended. ``tokens`` is the whole canvas; ``text`` decodes what was generated, up to the first end token
    or stop string.

    ``passes`` counts those made by kind: ``prefill`` and ``store`` fill a cache, before and behind what is decided.

    ``finish`` says why it ended: "stop" (an end token, or a stop string), "length" (all is decided without one), "constraint"
    (as well, and the text of its constraint is whole), "steps" (``max_steps``), "deadline" or "cancelled"; "unknown (N)" is a
    reason that a newer native library has added. Where it ended
    before all was decided, ``undecided`` says where: there ``tokens`` has what the last pass proposed, and an end token where
    that looked at nothing (the mask token, if the denoiser has none). ``prompt_tokens`` counts the given ones,
    ``completion_tokens`` the others up to the first end token.
    ``log_probs`` has ln p of each token when it was committed, by the denoiser's softmax, and None for all that were not. The
    values are finite: a probability that rounds to 0, as of a token that a constraint forces, gives -744.44.
    ``tool_calls`` are the calls that ``text`` consists of, none where it is anything else, or the request named no tools.
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


@dataclass(frozen=True)
class Event:
    """The canvas after one step.

    ``undecided`` says where a token is still wanted; what the canvas holds there is what the denoiser sees. ``guess`` holds,
    where such a position was scored, the token it would take now, else -1; ``score`` its score. ``block`` is the span
    ``[start, end)`` being filled. ``text`` is the text so far and ``delta`` what this step added to it: of tokens that will not
    change, whole characters, and nothing that may be the start of a stop string. The last event is ``done`` and carries
    ``result``.
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
