"""Predicts the passes of a generation: the size and the order of all passes.

``network.loop_turns`` determines the passes of the loop. A scheduler changes the passes over the
prompt in two ways: it skips the tokens whose keys and values it reuses, and it splits a long prompt
into parts. In the native code, the functions ``skip_stored`` and ``split_prefill`` in
``decode/request_reuse.cc`` make these changes.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dlm_export.network.loop_turns import Turn, start_canvas, turns
from dlm_export.network.spec import NetworkSpec
from dlm_export.planning.bench import PassSize
from dlm_runtime import DenoiserInfo, Policy, from_callback

# Token ids that stand for all prompt tokens and for the mask token. Predictions do not depend on
# the real ids.
_GIVEN, _MASK = 1, 0


@dataclass(frozen=True)
class PlannedPass:
    """A pass, and whether the pass commits tokens."""

    size: PassSize
    commits: bool


@dataclass(frozen=True)
class Loop:
    """Everything that determines the passes of a request, apart from the request's length.

    - ``visible_block``, ``shift``, ``draft_block``, ``blocks_after_prompt``: the fields of the
      network with these names.
    - ``reused``: number of leading tokens whose keys and values are reused from other requests.
    - ``max_tokens``: the largest number of tokens in a pass over a part of a prompt. ``None`` means
      that the prompt is computed in one pass.
    - ``prompt_pass_tokens``: the property of the network with this name. Each of its passes is split
      again by ``max_tokens``.
    """

    policy: Policy
    visible_block: int | None
    shift: int
    reused: int = 0
    max_tokens: int | None = None
    draft_block: int | None = None
    prompt_pass_tokens: int | None = None
    blocks_after_prompt: bool = False

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def resizes(self) -> bool:
        return False  # the prediction assumes that canvases keep their length

    @property
    def canvases(self) -> int:
        """Number of canvases that a request has: two with guidance, otherwise one."""
        return 2 if self.policy.cfg_scale > 0 else 1


def check_policy(network: NetworkSpec, policy: Policy) -> None:
    """Raise RequestError if the network does not support the policy."""
    info = DenoiserInfo(
        vocab_size=network.vocab_size,
        mask_token_id=network.mask_token_id,
        max_canvas_length=2,
        shift=network.shift,
        has_cache=True,
        visible_block=network.visible_block,
        draft_block=network.draft_block,
        shifted_drafts=network.has_shifted_drafts,
        blocks_after_prompt=network.blocks_after_prompt,
        conditioning_size=0 if network.conditioning is None else network.hidden_size,
        expand_token_id=network.expand_token_id,
        delete_token_id=network.delete_token_id,
        split_token_id=network.split_token_id,
    )
    given = 0 if network.mask_token_id else 1  # any token but the mask token
    ended = threading.Event()
    # End the native loop before its first pass, because only its check of the policy is needed.
    ended.set()
    with from_callback(info, lambda _: None) as bundle:
        bundle.generate(tokens=[given], max_new_tokens=1, cancel=ended, **policy.as_dict())


@functools.lru_cache(maxsize=1 << 8)
def list_passes(
    prompt_tokens: int, new_tokens: int, tokens_per_pass: float, loop: Loop
) -> tuple[PlannedPass, ...]:
    """List the passes of a generation, in order.

    The prediction makes these assumptions: Each pass that scores positions commits
    ``tokens_per_pass`` tokens on average, which must be at least 1. With the commit rule "verify",
    each pass that verifies drafts commits this number of tokens on average, and draft passes commit
    no token.
    With ``remask`` "noise", a block of n positions takes n / ``tokens_per_pass`` passes.
    Passes that may edit a finished block change no token. The generation contains no end token.
    """
    canvas = start_canvas([_GIVEN] * prompt_tokens, new_tokens, _MASK)
    policy, first_block = replace(loop.policy, stop="none"), None
    found = []
    for turn in turns(canvas, policy, loop):
        first_block = turn.start if first_block is None else first_block
        is_filling = (
            turn.start == first_block
            and turn.span.kept == "append"
            and turn.span.first < turn.start
            and not turn.span.is_draft
        )
        whole = turn.span.first, turn.span.last
        is_drafted = policy.commit == "verify" and turn.span.is_draft
        wanted = turn.positions[canvas.undecided[turn.positions]]
        is_idle = not len(wanted) or is_drafted
        for start, end in _parts(turn, loop) if is_filling else (whole,):
            is_last = end == turn.span.last
            rows = max(1, len(turn.positions) + len(turn.drafts)) if is_last else 1
            cached = _cached(turn, start, len(canvas.tokens), loop)
            commits = is_last and not is_idle
            found.append(PlannedPass(PassSize(end - start, cached, rows), commits))
        if policy.remask == "noise":
            # The last pass over a block decides the whole block.
            is_done = (turn.step + 1) * tokens_per_pass >= len(turn.positions)
            if is_done or turn.step + 1 == turn.steps:
                canvas.tokens[turn.positions], canvas.undecided[turn.positions] = _GIVEN, False
        elif not is_idle:
            count = math.floor((turn.step + 1) * tokens_per_pass) - math.floor(
                turn.step * tokens_per_pass
            )
            decided = wanted[:count]
            canvas.tokens[decided], canvas.undecided[decided] = _GIVEN, False
    return tuple(found)


def _parts(turn: Turn, loop: Loop) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each pass over the part of a prompt that is not reused."""
    whole = turn.span.first, turn.span.last
    for start, end in _split(whole, loop.prompt_pass_tokens, turn.start, loop):
        if end > loop.reused:
            yield from _split((max(start, loop.reused), end), loop.max_tokens, turn.start, loop)


def _split(
    part: tuple[int, int], most: int | None, block_start: int, loop: Loop
) -> Iterator[tuple[int, int]]:
    """Split a pass over a part of the prompt into passes of at most ``most`` tokens."""
    start, last = part
    while most is not None and loop.canvases * (last - start) > most:
        assert loop.visible_block is not None
        blocks = max(1, most // loop.canvases // loop.visible_block)
        end = min(start + blocks * loop.visible_block, block_start)
        if end <= start or end >= last:  # one pass computes a whole block
            break
        yield start, end
        start = end
    yield start, last


def _cached(turn: Turn, start: int, length: int, loop: Loop) -> int:
    """Return the number of cached tokens that a pass with the first position ``start`` uses."""
    tokens = turn.span.last - start
    if loop.policy.cache == "none":
        return 0
    if loop.visible_block is None:
        return length - tokens
    if loop.draft_block is not None:
        return start
    return start if turn.span.kept == "append" else turn.end - tokens
