"""Converts a chat template to segments: its texts before, between and after messages.

A template is a program, and only some templates can be converted:

- Each message's content must appear once in the text, either unchanged or without white space
  around it.
- The text between two messages may depend only on the roles of both messages, and on whether the
  second message is the last message of the chat.

To find the segments, this module renders all combinations of roles in conversations of up to four
messages. If the template breaks one of these rules for a combination, the runtime rejects
conversations with this combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlm_export.text.refusal import NotCompiled
from dlm_runtime.text._chat_template_worker import environment

ROLES = ("system", "user", "assistant", "tool")
LEADING = "leading system"
"""The name of the role "system" for the first message of a chat.

This role is separate, because templates often treat a first system message differently from later
system messages.
"""
REFUSED, AS_IS, STRIPPED = 0, 1, 2
MOST_MESSAGES = 4  # largest number of messages in the conversations that this module renders
# Largest number of string constants in a template. The limit is needed because the module renders
# conversations with every constant.
MOST_LITERALS = 200
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
# Functions and filters whose results differ between two renderings of the same chat.
_CHANGING = {"strftime_now", "random", "lipsum"}

Message = dict[str, str]
Render = Callable[[Sequence[Sequence[Message]]], Sequence[str | None]]
"""Renders conversations with the template.

The result is ``None`` for a conversation that the template rejects.
"""


@dataclass(frozen=True)
class Chat:
    """The segments of a chat template: the texts that it writes around messages.

    Roles have the indices 0 to R - 1. The *context* of a message is the index of its role times 2,
    plus 1 if the message is the last message.

    - ``transforms``, ``[2 R]``: for each context, whether the template writes the content unchanged
      or stripped, or whether the context is not supported.
    - ``gaps``, ``[R + 1, 2 R]``, as a flat list: the text before a message. The first index is 0
      for the first message. For later messages, the first index is 1 plus the index of the previous
      message's role. The second index is the context of the message.
    - ``ends``, ``[R]``: the text after the last message. This text includes the start of the
      answer.
    - ``literals``: pairs of a context and a text. The content of a message in this context must not
      contain the text.
    - ``empties``: contexts whose content must not be empty.

    ``None`` in ``gaps`` or ``ends`` means that the runtime rejects conversations with this
    combination of messages. The role "system" may be in ``roles`` twice. The first entry is for the
    first message of a chat, and the second entry is for all other messages.
    """

    roles: tuple[str, ...] = ()
    transforms: tuple[int, ...] = ()
    gaps: tuple[str | None, ...] = ()
    ends: tuple[str | None, ...] = ()
    literals: tuple[tuple[int, str], ...] = ()
    empties: tuple[int, ...] = ()
    reason: str = ""
    """The reason why ``roles`` is empty."""


@dataclass(eq=False)
class _Segments:
    """The texts found so far, before and after messages. The keys contain the names of roles."""

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


def read_chat(constants: Constants, render: Render) -> Chat:
    """Find the segments of a template with these constants.

    Raises NotCompiled if the template does not support a chat with a single user message.
    """
    orders = [
        (LEADING, *order[1:]) if order[0] == "system" else order
        for count in range(1, MOST_MESSAGES + 1)
        for order in itertools.product(ROLES, repeat=count)
    ]
    texts = render([_conversation(order, _markers(order)) for order in orders])
    segments = _segments(orders, texts)
    for order, text in zip(orders, texts, strict=True):
        if segments.rendered(order, _markers(order)) not in (None, text):
            raise NotCompiled(
                f"its chat template rejects {', '.join(order)}, although it accepts each two of these roles"
            )
    if segments.rendered(["user"], ["a"]) is None:
        raise NotCompiled(
            "its chat template does not insert the content of a user message once and unchanged"
        )
    known = [order for order in orders if segments.rendered(order, _markers(order)) is not None]
    roles = tuple(role for role in (LEADING, *ROLES) if any(role in order for order in known))
    transforms, literals, empties = [], [], []
    for number, (role, is_last) in enumerate(itertools.product(roles, (False, True))):
        examples = [(order, at) for order in known for at in _places(order, role, is_last)][
            :_EXAMPLES_PER_CONTEXT
        ]
        fitting = (
            each
            for each in (AS_IS, STRIPPED)
            if _holds(segments, render, examples, each, _CONTENTS)
        )
        transform = next(fitting, REFUSED)
        transforms.append(transform)
        if transform == REFUSED:
            continue
        literals += [(number, text) for text in constants.tested]
        contents = [*(text for text in constants.others if text.strip()), *_NOTHING]
        wrong = [
            text for text in contents if not _holds(segments, render, examples, transform, [text])
        ]
        literals += [(number, text) for text in wrong if text.strip()]
        if any(not text.strip() for text in wrong):
            if transform == AS_IS and any(text for text in wrong if not text.strip()):
                # Reject content that consists only of white space, because the template changes it.
                transforms[-1] = REFUSED
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


def _segments(orders: Sequence[Sequence[str]], texts: Sequence[str | None]) -> _Segments:
    """Collect the texts between markers.

    A text is ``None`` if it differs between conversations.
    """
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
    """Return the texts around the markers, if each appears exactly once, in their order."""
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


def _holds(
    segments: _Segments,
    render: Render,
    examples: Sequence[tuple[Sequence[str], int]],
    transform: int,
    contents: Sequence[str],
) -> bool:
    """Return True if segments and template agree on all ``contents``, put in all ``examples``."""
    chats, expected = [], []
    for (order, at), content in itertools.product(examples, contents):
        said = _markers(order)
        said[at] = content
        chats.append(_conversation(order, said))
        said[at] = content.strip() if transform == STRIPPED else content
        expected.append(segments.rendered(order, said))
    return [*render(chats)] == expected and bool(expected)


@dataclass(frozen=True)
class Constants:
    """The constants of a template.

    - ``tested``: the strings that the template searches for in the contents of messages.
    - ``others``: all other strings.
    - ``numbers``: the positive integers.
    """

    tested: list[str]
    others: list[str]
    numbers: list[int]


def constants(template: str) -> Constants:
    """Return the constants of a template.

    Raises NotCompiled if the text of a chat depends on anything but the messages.
    """
    from jinja2 import TemplateError, nodes

    try:
        tree = environment().parse(template)
    except (TemplateError, RecursionError) as err:
        raise NotCompiled(f"its chat template is not valid Jinja: {err}") from err
    names = {each.name for each in tree.find_all((nodes.Name, nodes.Filter))}
    if changing := names & _CHANGING:
        raise NotCompiled(
            f"the text of its chat template changes from run to run ({', '.join(sorted(changing))})"
        )

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
    values = [each.value for each in tree.find_all(nodes.Const)]
    numbers = {value for value in values if type(value) is int and value > 0}
    return Constants(sorted({*tested}), sorted(others), sorted(numbers))
