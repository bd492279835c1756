r"""Anchors at the start of a regular expression, ``^`` and ``\A``, which the compiler of automata
does not support.

Texts match as a whole, so an anchor at the start of the expression, or of one of its branches,
always holds and can be removed. Any other one is rejected. Anchors at the end, ``$`` and ``\z``,
and ``^`` with the flag m are left to the compiler. The syntax is that of Rust's regex crate:
https://docs.rs/regex/latest/regex/#syntax
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from dlm_runtime.errors import RequestError

_NAMED_GROUP = re.compile(r"\(\?P?<[^=!>][^>]*>|\((?!\?)")
_FLAGS = re.compile(r"\(\?([A-Za-z]*)(?:-([A-Za-z]*))?([:)])")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.DOTALL)
_REPETITION = re.compile(r"\?*[*+{]")


@dataclass
class _Group:
    """An open group: whether it is at the start of the expression, the flags inside it, and the
    anchors before it.
    """

    is_at_start: bool
    flags: frozenset[str]
    anchors: int


def without_start_anchors(expression: str) -> str:
    """The same expression with an empty group in place of each anchor at its start.

    Raises RequestError for an anchor that is not at the start, that may repeat, or that is in an
    expression with the flag x. Does not check the syntax otherwise.
    """
    written, groups, removed = list[str](), [_Group(True, frozenset(), 0)], list[int]()
    at, is_start, is_verbose = 0, True, False

    def reject(place: int) -> NoReturn:
        anchor = expression[place : place + 1 + (expression[place] == "\\")]
        raise RequestError(
            f"regex: the anchor {anchor} at character {place} is not supported there: an anchor has to be at the start of the "
            "expression or of one of its branches, outside of repetitions and of the flag x. Texts match as a whole, so most "
            "expressions need no anchor"
        )

    while at < len(expression):
        letter, begin, group = expression[at], at, groups[-1]
        if letter == "\\" and (escape := _ESCAPE.match(expression, at)):
            at = escape.end()
        elif letter == "[":
            at = _behind_class(expression, at, "x" in group.flags)
        elif letter == "#" and "x" in group.flags:
            at += len(expression[at:].partition("\n")[0])
        elif flags := _FLAGS.match(expression, at):
            at = flags.end()
            is_verbose |= "x" in flags[1]
            inside = (group.flags | set(flags[1])) - set(flags[2] or "")
            if flags[3] == ")":
                group.flags = inside
            else:
                groups.append(_Group(is_start, inside, len(removed)))
        elif named := _NAMED_GROUP.match(expression, at):
            at = named.end()
            groups.append(_Group(is_start, group.flags, len(removed)))
        else:
            at += 1
        piece = expression[begin:at]
        if piece == r"\A" or (piece == "^" and "m" not in group.flags):
            if not is_start:
                reject(begin)
            removed.append(begin)
            piece = "(?:)"
        elif letter == "|":
            is_start = group.is_at_start
        elif letter == ")" and len(groups) > 1:
            groups.pop()
            is_start = False
            if len(removed) > group.anchors and _REPETITION.match(expression, at):
                reject(removed[-1])
        elif letter not in "(^":
            is_start = False
        written.append(piece)
    if removed and is_verbose:
        reject(removed[0])
    return "".join(written)


def _behind_class(expression: str, at: int, is_verbose: bool) -> int:
    """The place after the character class that starts at ``at``. Classes can contain classes, and
    with the flag x comments.
    """
    skipped = re.compile(r"(?:\s|#[^\n]*)*" if is_verbose else "")
    first = re.compile(
        rf"{skipped.pattern}\^?{skipped.pattern}\]?"
    )  # a ] at the start is a character
    depth = 0
    while at < len(expression):
        at = skipped.match(expression, at).end()  # type: ignore[union-attr]  # it matches the empty text as well
        letter = expression[at : at + 1]
        at += 1
        if letter == "\\":
            at += 1
        elif letter == "[":
            depth += 1
            at = first.match(expression, at).end()  # type: ignore[union-attr]
        elif letter == "]":
            depth -= 1
            if not depth:
                break
    return min(at, len(expression))
