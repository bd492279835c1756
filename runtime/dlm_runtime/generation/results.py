"""The result of a request, and the events that report its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlm_runtime.tools import ToolCall


@dataclass(frozen=True)
class Generation:
    """The result of a request.

    Args:
        tokens: The whole canvas. A position that is ``undecided`` contains the token that the last
            pass proposed for this position. If no pass proposed a token, the position contains an
            end token, or the mask token if the denoiser has no end token.
        text: The generated text, up to the first end token or stop string. None if the bundle has
            no tokenizer.
        nfe: The number of passes for this request. A shared pass counts for each of its requests.
        timings: The seconds that each part of the call took. ``Bundle.generate`` describes the
            parts.
        cache_bytes: The most bytes of cached keys and values that the request had in memory at any
            time.
        passes: The number of passes of each kind. "prefill" passes fill a cache before a block is
            decided, "denoise" passes predict tokens, and "store" passes store a finished block in
            the cache. If the policy's commit rule is "verify", there are also "verify" passes, which
            verify the tokens of draft passes.
        finish: The reason why the request ended. "stop": an end token or a stop string. "length":
            all positions are decided, and there is no end token. "constraint": all positions are
            decided, and the constrained text is complete. "steps": ``max_steps`` was reached.
            "deadline": ``deadline_ms`` was reached. "cancelled": the request was cancelled.
            "unknown (N)": a reason of a newer native library.
        prompt_tokens: The number of tokens that the caller passed.
        completion_tokens: The number of generated tokens. The first end token and the tokens after
            it are not counted.
        log_probs: For each token, ln p in the denoiser's softmax in the pass that committed the
            token. The value is None for tokens that the caller passed, for undecided positions, and
            for tokens after an end token or stop string that ended the text early. All values are
            finite. If the probability of a token rounds to 0, for example because a constraint
            forced the token, the value is -744.44.
        undecided: True for each position that was not decided when the request ended.
        tool_calls: The calls in ``text``. Empty if the text does not consist of calls, if the
            request has no tools, or if a part of the text is undecided.
        top_log_probs: For each token of the canvas, a list of alternatives: the most likely tokens
            in the pass that committed the token. Each alternative is a pair of a token id and its
            ln p. The most likely alternative comes first. If no pass committed a token, its list is
            empty. If the request did not ask for alternatives, ``top_log_probs`` itself is empty.
        constraint_log_prob_loss: A measure of how unlikely the constraint made the text, in nats, 0
            or more. The value is the sum of one loss for each generated position. The loss of a
            position is ln p of the denoiser's best token minus ln p of the committed token, in the
            last pass that scored the position. The loss of a position is at most 745, and 0 if the
            position was filled without a pass. If tokens are sampled, the sum includes the loss
            from sampling. Without a constraint, the sum is 0.
        option_probs: For a decision, the probability of each option of each question. The value is
            None for other requests. ``Bundle.decide`` returns these probabilities by name.
        cached_tokens: The number of tokens at the start of the prompt whose keys and values came
            from other requests of the same scheduler.
        acceptance_length: For the commit rule "verify", the mean number of tokens that a "verify"
            pass decided. None for other requests, and if there was no such pass.
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
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    option_probs: list[float] | None = None
    cached_tokens: int = 0
    acceptance_length: float | None = None


@dataclass(frozen=True)
class Event:
    """The canvas after one step of a request: a pass, and the tokens that were then committed.

    Args:
        canvas: The token ids. An undecided position contains the token that the denoiser gets as
            input.
        undecided: True for each position that is not decided.
        guess: For each undecided position that the pass scored, the token that the pass proposed.
            -1 for other positions.
        score: The score of each token in ``guess``. 0 where ``guess`` is -1.
        block: The positions ``[start, end)`` of the block that is being filled.
        nfe: The number of passes so far.
        committed: The number of positions that this step committed.
        text: The text so far: all complete characters of tokens that will not change. If the last
            characters may be the start of a stop string, these characters are left out.
        delta: The part of the text that this step added.
        done: True for the last event.
        result: The result. None except in the last event.
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
