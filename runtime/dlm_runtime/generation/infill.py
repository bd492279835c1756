"""Infilling: fills holes in a text and keeps the text around them.

A hole is a sequence of mask tokens. The number of tokens that a hole needs is not known in advance.
There are two ways to choose this number:

- The hole is longer than needed, and the denoiser pads the hole with end tokens.
- Several lengths are tried, and the most likely result is used.

Some denoisers change the length of a hole while they fill it (``Bundle.resizes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from dlm_runtime.errors import RequestError, shown
from dlm_runtime.generation.request import KINDS, count_of, text_of
from dlm_runtime.generation.results import Generation

if TYPE_CHECKING:
    from dlm_runtime.bundle import Bundle
    from dlm_runtime.text.tokenizer import Tokenizer

HOLE = "<mask>"
"""The text that marks a hole. The name of the denoiser's mask token marks a hole too."""
PADDED_LENGTH = 16
"""The default length of a hole if the denoiser has an end token, which pads the hole. The default
length for other denoisers is 1.
"""
HOLE_OPTIONS: dict[str, Any] = {"max_new_tokens": 0, "stop": "none"}
"""Options of a request that fills holes. In a hole, an end token is padding, and must not end the
whole text.
"""
MOST_TRIED = 64
"""The largest number of requests for all combinations of lengths."""
_CONSTRAINED = {*KINDS, "constraint"}
_CONSTRAINT_ARGUMENTS = (*KINDS, "json_layout", "max_depth", "any_order", "more_properties")


@dataclass(frozen=True)
class Infill:
    """The result of infilling: a text whose holes are filled.

    Args:
        text: The whole text.
        holes: The text of each hole, up to its first end token.
        lengths: The number of tokens of each hole in the canvas. If the denoiser changes the length
            of canvases, this is the length of the filled hole.
        log_prob: The mean ln p of the tokens in the holes. ``infill`` compares results of different
            lengths by this mean. The ln p of a token is measured in the pass that committed the
            token. The value is None if no token was committed.
        generation: The result of the request.
    """

    text: str
    holes: list[str]
    lengths: tuple[int, ...]
    log_prob: float | None
    generation: Generation


@dataclass(frozen=True)
class Canvas:
    """The token ids of the texts around the holes (the parts), and the lengths of the holes.

    There is one hole after each part except the last part.
    """

    parts: Sequence[Sequence[int]]
    lengths: tuple[int, ...]

    def tokens(self, mask_token_id: int, most: int) -> list[int]:
        """Return the whole canvas. Raises RequestError if it has more than ``most`` tokens."""
        length = sum(map(len, self.parts)) + sum(self.lengths)
        if length > most:
            raise RequestError(
                f"a canvas of {length} tokens, {sum(self.lengths)} of them in holes, is longer than the denoiser's {most}: "
                "use shorter texts or holes"
            )
        found = list(self.parts[0])
        for length, part in zip(self.lengths, self.parts[1:], strict=True):
            found += [*[mask_token_id] * length, *part]
        return found

    def resized(self, length: int) -> Canvas:
        """Return the canvas after it was filled and had ``length`` tokens.

        The length differs only if the denoiser changes the length of canvases. Then there is one hole.
        """
        change = length - sum(map(len, self.parts)) - sum(self.lengths)
        return replace(self, lengths=(self.lengths[0] + change,)) if change else self

    def holes(self) -> list[range]:
        """Return the positions of each hole in the canvas."""
        found, at = [], len(self.parts[0])
        for length, part in zip(self.lengths, self.parts[1:], strict=True):
            found.append(range(at, at + length))
            at += length + len(part)
        return found


def infill(
    bundle: Bundle,
    text: str,
    lengths: int | Sequence[int | Sequence[int]] | None,
    constrain_from: int | None,
    **request: Any,
) -> Infill:
    """See ``Bundle.infill``."""
    for name in ("new_tokens",) if bundle.resizes else ("max_new_tokens", "new_tokens"):
        if name in request:
            raise RequestError(
                f"infill: {name} is for text after a prompt: give lengths, the tokens of the holes"
            )
    if lengths is None:
        lengths = PADDED_LENGTH if bundle.eos_token_ids else 1
    between = _split(bundle, text_of("text", text))
    if bundle.resizes and len(between) > 2:
        raise RequestError(
            f"infill: this denoiser changes the length of a hole, so it fills one hole at a time, and the text has "
            f"{len(between) - 1}: fill them one after the other"
        )
    parts = parts_of(
        bundle,
        between,
        request.get("special_tokens", False),
        request.pop("prompt", None),
        request.pop("chat", None),
    )
    tried = _tried(lengths, len(between) - 1)
    if constrain_from is not None:
        first = count_of("constrain_from", constrain_from)
        request, tried = _constrained(bundle, between, first, request, tried)
    canvases = [Canvas(parts, each) for each in tried]
    tokens = [canvas.tokens(bundle.mask_token_id, bundle.max_canvas_length) for canvas in canvases]
    options = HOLE_OPTIONS | request
    if bundle.resizes and "max_new_tokens" not in request:
        del options["max_new_tokens"]  # the bundle's default is how much longer a hole may become
    if bundle.eos_token_ids or not _CONSTRAINED & options.keys():
        made = bundle.generate_batch(tokens=tokens, **options)
    else:
        # Without an end token, a text must fill its hole exactly, so some lengths may not suit.
        fitting, made = list[Canvas](), list[Generation]()
        for canvas, each in zip(canvases, tokens, strict=True):
            try:
                made.append(bundle.generate(tokens=each, **options))
                fitting.append(canvas)
            except RequestError:
                if not made and canvas is canvases[-1]:
                    raise
        canvases = fitting
    found = [read(bundle, canvas, between, one) for canvas, one in zip(canvases, made, strict=True)]
    return max(found, key=lambda one: float("-inf") if one.log_prob is None else one.log_prob)


def _split(bundle: Bundle, text: str) -> list[str]:
    """Return the texts around the holes, without spaces that the mask token includes."""
    between, added = text.split(HOLE), None
    if bundle.tokenizer is not None:
        added = bundle.tokenizer.added_tokens().get(bundle.mask_token_id)
    if len(between) < 2 and added is not None:
        between = text.split(added["content"])
    if len(between) < 2:
        raise RequestError(f"infill: the text has no hole: write {HOLE} where one is")
    if added is not None and added["lstrip"]:
        between[:-1] = [part.rstrip() for part in between[:-1]]
    if added is not None and added["rstrip"]:
        between[1:] = [part.lstrip() for part in between[1:]]
    return between


def parts_of(
    bundle: Bundle,
    between: Sequence[str],
    special_tokens: bool = False,
    prompt: Any = None,
    chat: Any = None,
) -> list[list[int]]:
    """Return the token ids of the texts around the holes, for a ``Canvas``.

    Raises RequestError if the bundle has no tokenizer, or the denoiser's attention is block-causal.
    """
    if bundle.tokenizer is None:
        raise RequestError(
            "this bundle has no tokenizer: put mask tokens among the tokens of generate, with max_new_tokens=0"
        )
    if bundle.visible_block is not None:
        block = bundle.visible_block
        rule = f"block-causal, in blocks of {block}" if block > 1 else "causal"
        raise RequestError(
            f"this denoiser's attention is {rule}: a hole does not see the text after {'its block' if block > 1 else 'it'}. "
            "Infill with a denoiser of full attention."
        )
    tokenizer = bundle.tokenizer
    first, *others = (tokenizer.encode_plain(part, special_tokens) for part in between)
    given = _given(tokenizer, special_tokens, prompt, chat)
    if given is not None:
        return [[*given, *first], *others]
    front, behind = _around(tokenizer)
    if first[: len(front)] != front:
        first = [*front, *first]
    last = others[-1]
    # A denoiser without an end token was trained on whole texts, so the canvas ends with the tokens
    # that the tokenizer adds after a prompt. For other denoisers, these tokens may mark the start
    # of an answer, so they are not added.
    if behind and not bundle.eos_token_ids and last[-len(behind) :] != behind:
        others[-1] = [*last, *behind]
    return [first, *others]


def _given(tokenizer: Tokenizer, special_tokens: bool, prompt: Any, chat: Any) -> list[int] | None:
    """Encode the prompt or the chat. Returns None if the request has neither."""
    if prompt is not None and chat is not None:
        raise RequestError("infill: give prompt or chat, not both")
    if prompt is not None:
        return tokenizer.encode(prompt, special_tokens)
    if chat is not None:
        return tokenizer.encode_chat(chat, None, special_tokens)
    return None


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds at the start and at the end of a prompt."""
    alone, around = tokenizer.encode_plain("a"), tokenizer.encode("a")
    count = next((at for at in range(len(around)) if around[at : at + len(alone)] == alone), 0)
    return around[:count], around[count + len(alone) :]


def _constrained(
    bundle: Bundle,
    between: Sequence[str],
    first: int,
    request: dict[str, Any],
    tried: list[tuple[int, ...]],
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Compile the constraint of a request with ``constrain_from``, and add it to the request.

    The constraint covers the text from the character ``first`` to the end of the text.

    Returns the new request, and those lengths of ``tried`` that are at least the length of the
    shortest valid text for the hole.
    """
    given = {name: request.pop(name) for name in _CONSTRAINT_ARGUMENTS if name in request}
    if not given:
        raise RequestError(
            f"infill: constrain_from = {first} without a constraint: give one of {', '.join(KINDS)}"
        )
    if len(between) != 2:
        raise RequestError(
            f"infill: constrain_from needs a text with one hole, and this one has {len(between) - 1}"
        )
    if not 0 <= first <= len(between[0]):
        raise RequestError(
            f"infill: constrain_from = {first} is not before the hole, in 0..{len(between[0])}"
        )
    constraint = bundle.constraint(before=between[0][first:], behind=between[1], **given)
    fits = [each for each in tried if each[0] >= constraint.shortest]
    if not fits:
        raise RequestError(
            f"infill: the shortest text for the hole has {constraint.shortest} tokens: give it at least that many"
        )
    return request | {"constraint": constraint}, fits


def _tried(lengths: int | Sequence[int | Sequence[int]], holes: int) -> list[tuple[int, ...]]:
    """Return all combinations of lengths to try, with one length for every hole."""
    try:
        given = [lengths] if isinstance(lengths, int) else list(lengths)
        choices = [[each] if isinstance(each, int) else list(each) for each in given]
    except TypeError:
        raise RequestError(
            f"infill: lengths = {shown(lengths)}: give tokens, 1 or more, or a list with an entry for each hole"
        ) from None
    if len(choices) == 1:
        choices *= holes
    if len(choices) != holes:
        raise RequestError(
            f"infill: {len(choices)} lengths for {holes} holes: give one for all, or one for each"
        )
    count = 1
    for each in choices:
        if not each or any(
            not isinstance(length, int) or not 1 <= length < 1 << 24 for length in each
        ):
            raise RequestError(
                f"infill: {shown(each)} is not a length of a hole: give tokens, 1 or more, or a list of lengths to try"
            )
        count *= len(each)
    if count > MOST_TRIED:
        raise RequestError(
            f"infill: trying all lengths takes {count} requests; the limit is {MOST_TRIED}: give fewer"
        )
    return list(product(*choices))


def read(bundle: Bundle, canvas: Canvas, between: Sequence[str], made: Generation) -> Infill:
    """Return the filled text. ``made`` is the result of a request with the tokens of ``canvas``."""
    assert bundle.tokenizer is not None
    canvas = canvas.resized(len(made.tokens))
    ends, holes, said = {*bundle.eos_token_ids, bundle.mask_token_id}, [], []
    for hole in canvas.holes():
        end = next((at for at in hole if made.tokens[at] in bundle.eos_token_ids), hole.stop)
        said += [
            log_prob
            for at in range(hole.start, min(end + 1, hole.stop))
            if (log_prob := made.log_probs[at]) is not None
        ]
        holes.append(
            bundle.tokenizer.decode(
                [token for token in made.tokens[hole.start : end] if token not in ends]
            )
        )
    text = between[0] + "".join(hole + part for hole, part in zip(holes, between[1:], strict=True))
    log_prob = sum(said) / len(said) if said else None
    return Infill(text, holes, canvas.lengths, log_prob, replace(made, text=text))
