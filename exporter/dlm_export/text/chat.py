"""A chat template as segments: the text before, between and after messages, by their roles.

A template is a program. Only certain templates are compiled. They must put each message's content
in one place, unchanged or stripped. The text between two messages may depend only on their roles
and on whether the second is the last. To find the segments, all conversations of up to four
messages are rendered. Conversations that depend on more are left out, and rejected later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlm_export.text.refusal import NotCompiled

ROLES = ("system", "user", "assistant", "tool")
LEADING = "leading system"
"""A system message in first place, which templates often treat differently."""
REFUSED, AS_IS, STRIPPED = 0, 1, 2
MOST_MESSAGES = 4  # length of the conversations that are tried
MOST_LITERALS = 200  # texts named in a template; each is tried in all contexts
_EXAMPLES_PER_CONTEXT = 3
_CONTENTS = (
    *(
        "a",
        "  a b  ",
        "\n\na\n",
        "\ta\r\n b",
        "\u00a0a\u3000",
        "<b> & \"c\" 'd' \\n \\",
        "{{ a }}{% b %}{# c #}",
        "héé日本🙂",
        "a\x00b",
    ),
    *("[1, 2]", '{"a": "b"}', "None", "0", "A" * 300),
)
_NOTHING = ("", " ", "\n")
_METHODS = (
    *(
        "startswith",
        "endswith",
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "replace",
        "removeprefix",
        "removesuffix",
    ),
    *("find", "index", "count"),
)

Message = dict[str, str]
Render = Callable[[Sequence[Sequence[Message]]], Sequence[str | None]]
"""Renders conversations with the template; ``None`` for those that it rejects."""


@dataclass(frozen=True)
class Chat:
    """The segments of a template; empty by default. A context is ``2 * role``, plus 1 for the last
    message.

    ``gaps`` ``[R + 1, 2 R]``, flat: the text before a message, by the previous role (0: none) and
    its context. ``ends`` ``[R]``: the text after the last message, including the start of the
    answer. ``None`` means that no such conversation is supported. ``transforms``: ``[2 R]``.
    ``literals``: texts that a context's content must not contain. ``empties``: contexts whose
    content must not be empty. A role may appear twice: first for a chat's first message, then for
    all others.
    """

    roles: tuple[str, ...] = ()
    transforms: tuple[int, ...] = ()
    gaps: tuple[str | None, ...] = ()
    ends: tuple[str | None, ...] = ()
    literals: tuple[tuple[int, str], ...] = ()
    empties: tuple[int, ...] = ()
    reason: str = ""
    """Why there are no roles."""


@dataclass(eq=False)
class _Segments:
    """Gaps and ends found so far, by role names."""

    gaps: dict[tuple[str | None, str, bool], str | None]
    ends: dict[str, str | None]

    def rendered(self, roles: Sequence[str], contents: Sequence[str]) -> str | None:
        out, before = "", None
        for at, (role, content) in enumerate(zip(roles, contents, strict=True)):
            gap = self.gaps.get((before, role, at == len(roles) - 1))
            if gap is None:
                return None
            out += gap + content
            before = role
        end = self.ends.get(str(before))
        return None if end is None else out + end


def read_chat(template: str, render: Render) -> Chat:
    """Find the segments of a template. Raises NotCompiled if not even one user message has any."""
    orders = [
        _led(order)
        for count in range(1, MOST_MESSAGES + 1)
        for order in itertools.product(ROLES, repeat=count)
    ]
    texts = render([_conversation(order, _markers(order)) for order in orders])
    segments = _segments(orders, texts)
    for order, text in zip(orders, texts, strict=True):
        if segments.rendered(order, _markers(order)) not in (None, text):
            raise NotCompiled(
                f"its chat template refuses {', '.join(order)}, which no two of these roles do alone"
            )
    if segments.rendered(["user"], ["a"]) is None:
        raise NotCompiled("its chat template has no plain place for one message of a user")
    known = [order for order in orders if segments.rendered(order, _markers(order)) is not None]
    roles = tuple(role for role in (LEADING, *ROLES) if any(role in order for order in known))
    tested, others = _literals(template)
    transforms, literals, empties = [], [], []
    for number, (role, is_last) in enumerate(itertools.product(roles, (False, True))):
        examples = [(order, at) for order in known for at in _places(order, role, is_last)][
            :_EXAMPLES_PER_CONTEXT
        ]
        transform = _transform(segments, render, examples)
        transforms.append(transform)
        if transform == REFUSED:
            continue
        literals += [(number, text) for text in tested]
        contents = [*(text for text in others if text.strip()), *_NOTHING]
        wrong = [
            text for text in contents if not _holds(segments, render, examples, transform, [text])
        ]
        literals += [(number, text) for text in wrong if text.strip()]
        if any(not text.strip() for text in wrong):
            if transform == AS_IS and any(text for text in wrong if not text.strip()):
                transforms[-1] = REFUSED  # white space alone is changed
            empties.append(number)
    gaps = [
        segments.gaps.get((before, role, is_last))
        for before in (None, *roles)
        for role in roles
        for is_last in (False, True)
    ]
    ends = [segments.ends.get(role) for role in roles]
    names = tuple("system" if role == LEADING else role for role in roles)
    return Chat(names, tuple(transforms), tuple(gaps), tuple(ends), tuple(literals), tuple(empties))


def _led(order: Sequence[str]) -> tuple[str, ...]:
    return (LEADING, *order[1:]) if order[0] == "system" else tuple(order)


def _segments(orders: Sequence[Sequence[str]], texts: Sequence[str | None]) -> _Segments:
    """Collect the texts between markers that are the same in all conversations."""
    found = _Segments({}, {})
    for order, text in zip(orders, texts, strict=True):
        pieces = None if text is None else _between(text, _markers(order))
        if pieces is None:
            continue
        for at, (before, role) in enumerate(zip([None, *order], order, strict=False)):
            key = (before, role, at == len(order) - 1)
            if found.gaps.setdefault(key, pieces[at]) != pieces[at]:
                found.gaps[key] = None
        if found.ends.setdefault(order[-1], pieces[-1]) != pieces[-1]:
            found.ends[order[-1]] = None
    return found


def _between(text: str, markers: Sequence[str]) -> list[str] | None:
    """The texts around markers that each appear once and in order, else ``None``."""
    pieces = []
    for marker in markers:
        if text.count(marker) != 1:
            return None
        piece, _, text = text.partition(marker)
        pieces.append(piece)
    return [*pieces, text]


def _markers(order: Sequence[str]) -> list[str]:
    return [f"qz{at}zq" for at in range(len(order))]


def _conversation(roles: Sequence[str], contents: Sequence[str]) -> list[Message]:
    names = ("system" if role == LEADING else role for role in roles)
    return [
        {"role": name, "content": content} for name, content in zip(names, contents, strict=True)
    ]


def _places(order: Sequence[str], role: str, is_last: bool) -> list[int]:
    return [
        at for at, each in enumerate(order) if each == role and (at == len(order) - 1) == is_last
    ]


def _transform(
    segments: _Segments, render: Render, examples: Sequence[tuple[Sequence[str], int]]
) -> int:
    for transform in (AS_IS, STRIPPED):
        if _holds(segments, render, examples, transform, _CONTENTS):
            return transform
    return REFUSED


def _holds(
    segments: _Segments,
    render: Render,
    examples: Sequence[tuple[Sequence[str], int]],
    transform: int,
    contents: Sequence[str],
) -> bool:
    """True if the segments render like the template, for each content at each example's position."""
    chats, expected = [], []
    for (order, at), content in itertools.product(examples, contents):
        said = _markers(order)
        said[at] = content
        chats.append(_conversation(order, said))
        said[at] = content.strip() if transform == STRIPPED else content
        expected.append(segments.rendered(order, said))
    return [*render(chats)] == expected and bool(expected)


def _literals(template: str) -> tuple[list[str], list[str]]:
    """The texts that a template tests for, and all other texts in it."""
    from jinja2 import Environment, TemplateError, nodes

    try:
        tree = Environment().parse(template)
    except (TemplateError, RecursionError) as err:
        raise NotCompiled(f"its chat template is not valid Jinja: {err}") from err

    def texts(places: Sequence[nodes.Node | None]) -> Iterator[str]:
        constants = (
            each.value
            for place in places
            if place
            for each in [place, *place.find_all(nodes.Const)]
            if isinstance(each, nodes.Const)
        )
        return (value for value in constants if isinstance(value, str) and value.strip())

    tested: list[str] = []
    for compare in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            tested += texts([compare.expr])
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS:
            tested += texts(call.args)
    others = {*texts([tree])} - {*tested}
    if len(others) + len(tested) > MOST_LITERALS:
        raise NotCompiled(f"its chat template names more than {MOST_LITERALS} texts")
    return sorted({*tested}), sorted(others)
