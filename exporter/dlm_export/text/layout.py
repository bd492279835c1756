"""Writes the file with a compiled tokenizer and chat template: array sizes, then the arrays.

runtime/native/src/text/text_file.cc reads this file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm_export.text.chat_segments import Chat
from dlm_export.text.composition import Composition
from dlm_export.text.splits import Splits

MAGIC = b"DLMTEXT\x01"
SPECIAL, WHOLE, BYTE, CONTINUES = 1, 2, 4, 8
"""Flags of a token.

SPECIAL: the token is decoded to an empty text. WHOLE: the token's text is encoded to this token
alone. BYTE: the token is one byte of a character that the vocabulary lacks. CONTINUES: the token
continues a word.
"""
STRIPS_LEFT, STRIPS_RIGHT = 1, 2
SPACE_LETTER, STARTS_WITH_SPACE, BYTE_FALLBACK, STRIPS_SPACE = 1, 2, 4, 8
WORD_PIECES, DROPS_SPACE = 16, 32
"""Flags of a tokenizer.

WORD_PIECES: the model is WordPiece. In this case, WHOLE marks the tokens of the vocabulary,
``byte_ids`` contains the unknown token, and ``composition`` contains the table that ``word_pieces``
makes. DROPS_SPACE: parts of the split text that consist of white space are not encoded.
"""


@dataclass(frozen=True)
class Added:
    """A text that is always encoded as one token.

    If ``is_raw`` is true, the runtime searches the original text for the token's text. Otherwise,
    the runtime searches the normalised text.
    """

    text: bytes
    token: int
    flags: int
    is_raw: bool


@dataclass(frozen=True, eq=False)
class TextTables:
    """The content of a file with a compiled tokenizer and chat template.

    - ``tokens``: the text of each token.
    - ``token_flags``: the flags of each token, uint8 ``[V]``.
    - ``byte_ids``: the token of each byte, int32 ``[256]``, or -1 if no token stands for the byte.
    - ``chars``: the tokens that consist of one character. The keys are code points.
    - ``merges``: int32 ``[M, 3]`` for M merges in order. The columns are the left token, the right
      token and the resulting token.
    """

    tokens: Sequence[bytes]
    token_flags: np.ndarray
    byte_ids: np.ndarray
    chars: dict[int, int]
    merges: np.ndarray
    added: Sequence[Added]
    flags: int
    splits: Splits | None
    composition: Composition | None
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    chat: Chat = field(default_factory=Chat)


def as_bytes(tables: TextTables) -> bytes:
    """Return the tables as the content of a file."""
    added = sorted(tables.added, key=lambda each: (not each.is_raw, each.text))
    chars = sorted(tables.chars.items())
    composition, splits, chat = tables.composition, tables.splits, tables.chat
    class_pages, class_values = _pages(None if splits is None else splits.classes)
    nfc_pages, nfc_values = _pages(None if composition is None else composition.classes)
    decompositions = sorted(composition.decompositions.items()) if composition else []
    parts = [whole for _, whole in decompositions]
    pairs = sorted(composition.pairs.items()) if composition else []
    split_tables = [] if splits is None else splits.tables
    strings = {} if chat.roles else {chat.reason: 0}
    roles = [strings.setdefault(role, len(strings)) for role in chat.roles]
    gaps, ends, literals = (
        [-1 if text is None else strings.setdefault(text, len(strings)) for text in texts]
        for texts in (chat.gaps, chat.ends, [text for _, text in chat.literals])
    )
    spelled = [text.encode() for text in strings]
    sizes = {
        "vocab": len(tables.tokens),
        "token_bytes": sum(map(len, tables.tokens)),
        "chars": len(chars),
        "merges": len(tables.merges),
        "added": len(added),
        "raw_added": sum(each.is_raw for each in added),
        "added_bytes": sum(len(each.text) for each in added),
        "classes": splits.count if splits else 0,
        "class_pages": len(class_values) // 256,
        "splits": len(split_tables),
        "states": sum(map(len, split_tables)),
        "nfc_pages": len(nfc_values) // 256,
        "decomposed": len(decompositions),
        "decomposition_points": sum(map(len, parts)),
        "compositions": len(pairs),
        "prefix": len(tables.prefix),
        "suffix": len(tables.suffix),
        "flags": tables.flags,
        "roles": len(roles),
        "literals": len(literals),
        "empties": len(chat.empties),
        "strings": len(spelled),
        "string_bytes": sum(map(len, spelled)),
    }
    numbers: list[Iterable[int] | np.ndarray] = [
        _starts(tables.tokens),
        tables.byte_ids,
        [point for point, _ in chars],
        [token for _, token in chars],
        tables.merges.reshape(-1),
        [each.token for each in added],
        [each.flags for each in added],
        _starts([each.text for each in added]),
        class_pages,
        _starts(split_tables),
        *(table.reshape(-1) for table in split_tables),
        nfc_pages,
        [point for point, _ in decompositions],
        _starts(parts) if composition else [],
        [point for whole in parts for point in whole],
        [point for (first, second), whole in pairs for point in (first, second, whole)],
        tables.prefix,
        tables.suffix,
        roles,
        chat.transforms,
        gaps,
        ends,
        [context for context, _ in chat.literals],
        literals,
        chat.empties,
        _starts(spelled),
    ]
    return b"".join(
        [
            MAGIC,
            struct.pack(f"<{len(sizes)}i", *sizes.values()),
            *(np.asarray(each, "<i4").tobytes() for each in numbers),
            tables.token_flags.astype(np.uint8).tobytes(),
            class_values.tobytes(),
            nfc_values.tobytes(),
            *tables.tokens,
            *(each.text for each in added),
            *spelled,
        ]
    )


def _starts(parts: Sequence[Sequence[object] | np.ndarray]) -> np.ndarray:
    """Return where each part starts in the concatenation of all parts.

    The last element of the result is the length of the concatenation.
    """
    return np.cumsum([0, *map(len, parts)])


def _pages(values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Compress a table with one entry per code point. Equal pages of 256 entries are stored once.

    Returns the index of the page for each group of 256 code points, int32 ``[4352]``, and the P
    distinct pages, uint8 ``[P * 256]``.
    """
    if values is None:
        return np.zeros(0, np.int32), np.zeros(0, np.uint8)
    numbers: dict[bytes, int] = {}
    pages = [numbers.setdefault(page.tobytes(), len(numbers)) for page in values.reshape(-1, 256)]
    return np.array(pages, np.int32), np.frombuffer(b"".join(numbers), np.uint8)
