"""Reads a tokenizer.json with a WordPiece model, such as BERT's, as tables.

BERT's normaliser and pre-tokenizer treat each character separately, except that NFD sorts combining
marks. The module therefore makes the tables by giving every character to the tokenizers library.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_export.text.composition import CODE_POINTS, STARTS, Composition, composition
from dlm_export.text.layout import (
    CONTINUES,
    DROPS_SPACE,
    STRIPS_SPACE,
    WHOLE,
    WORD_PIECES,
    Added,
    TextTables,
)
from dlm_export.text.refusal import NotCompiled
from dlm_export.text.splits import Split, Splits, compile_splits

PREFIX = "##"
"""The names of tokens that continue a word start with this prefix."""
LONGEST_WORD = 100
"""A word with more characters is encoded as the unknown token. All released BERTs use this limit."""
UNCHANGED, DROPPED, BREAKS, PADDED, REPLACED, MARKS = 0, 1, 2, 3, 4, 8
"""Classes of characters for the normaliser:

- UNCHANGED;
- DROPPED: removed;
- BREAKS: removed after marks were sorted, and marks are not moved across the character;
- PADDED: gets a space on each side;
- REPLACED: replaced by other characters;
- MARKS plus the combining class: a mark that is sorted.
"""
_SEPARATOR = "|"
_LATER, _EARLIER = "\u302e", "\U0001d165"
"""Two combining marks for tests of the normaliser.

NFD sorts them, and stripping accents does not remove them. The first mark has the higher combining
class.
"""
_AT_ONCE = 1 << 16  # number of characters per call of the tokenizers library
# Classes of characters for BERT's pre-tokenizer: letters of words, white space, and punctuation
# (_ALONE), each of which becomes a separate word.
_WORD, _SPACE, _ALONE = 0, 1, 2

Part = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """The parts of a tokenizer.json, each as a list."""

    normalisers: Sequence[Part]
    splitters: Sequence[Part]
    decoders: Sequence[Part]


def of_word_pieces(
    model: Part,
    parts: Parts,
    names: Mapping[int, str],
    added: Sequence[Added],
    token_flags: np.ndarray,
    splits_of: Callable[[Part], list[Split]],
    around: Mapping[str, Any],
) -> TextTables:
    """Make the tables of a WordPiece tokenizer. Raises NotCompiled.

    ``splits_of`` is a function that returns the split patterns of a pre-tokenizer other than
    BERT's. ``around`` contains the tokens that the tokenizer puts before and after a prompt.
    """
    if model["continuing_subword_prefix"] != PREFIX:
        raise NotCompiled(
            f"its model continues words with {model['continuing_subword_prefix']!r}; only {PREFIX!r} is compiled"
        )
    if model["max_input_chars_per_word"] != LONGEST_WORD:
        raise NotCompiled(
            f"its words have at most {model['max_input_chars_per_word']} characters; only {LONGEST_WORD} is compiled"
        )
    vocab: dict[str, int] = model["vocab"]
    if model["unk_token"] not in vocab:
        raise NotCompiled(f"its vocabulary lacks the unknown token {model['unk_token']!r}")
    kinds = [part["type"] for part in parts.normalisers]
    if kinds not in ([], ["BertNormalizer"]):
        raise NotCompiled(f"it normalises by {', '.join(kinds)}; only BertNormalizer is compiled")
    has_bert_splits = [part["type"] for part in parts.splitters] == ["BertPreTokenizer"]
    splits = _bert_splits() if has_bert_splits else None
    if not has_bert_splits and parts.splitters:
        splits = compile_splits([split for part in parts.splitters for split in splits_of(part)])
    tokens = [b""] * len(token_flags)
    for token, (text, flags) in _decoded(parts.decoders, names).items():
        tokens[token] = text.encode()
        token_flags[token] |= flags
    for token in vocab.values():
        token_flags[token] |= WHOLE
    is_spaced = parts.decoders[0]["type"] == "WordPiece"
    return TextTables(
        tokens=tokens,
        token_flags=token_flags,
        byte_ids=np.full(256, vocab[model["unk_token"]], np.int32),
        chars={},
        merges=np.zeros((0, 3), np.int32),
        added=added,
        flags=WORD_PIECES | (DROPS_SPACE * has_bert_splits) | (STRIPS_SPACE * is_spaced),
        splits=splits,
        composition=_characters(json.dumps(dict(parts.normalisers[0]))) if kinds else None,
        **around,
    )


def _decoded(decoders: Sequence[Part], names: Mapping[int, str]) -> dict[int, tuple[str, int]]:
    """For each token, return the text to which it is decoded after another token, and its flags.

    At the start of a sequence, the token may be decoded to a different text. Raises NotCompiled if
    the runtime could not compute that text from the returned text.
    """
    if [part["type"] for part in decoders] == ["Fuse"]:
        if any(name.startswith(PREFIX) for name in names.values()):
            raise NotCompiled(f"it has tokens that start with {PREFIX}, and decodes by Fuse alone")
        return {token: (name, 0) for token, name in names.items()}
    if [part["type"] for part in decoders] != ["WordPiece"] or decoders[0]["prefix"] != PREFIX:
        raise NotCompiled("it decodes neither by WordPiece nor by Fuse")
    from tokenizers import decoders as library

    decode = library.WordPiece(PREFIX, decoders[0]["cleanup"]).decode
    found = {}
    for token, name in names.items():
        start, both = decode([name]), decode(["a", name])
        text = both[1:]
        flags = CONTINUES if name.startswith(PREFIX) else 0
        if start != (PREFIX + text if flags else text.removeprefix(" ")) or both[:1] != "a":
            raise NotCompiled(f"its token {name!r} is decoded differently at the start of a text")
        found[token] = (text, flags)
    return found


def _chunks() -> Iterator[list[str]]:
    """Yield all characters except surrogates, in lists of limited length."""
    for first in range(0, CODE_POINTS, _AT_ONCE):
        points = range(first, min(first + _AT_ONCE, CODE_POINTS))
        yield [chr(point) for point in points if not 0xD800 <= point < 0xE000]


@functools.cache
def _bert_splits() -> Splits:
    """Make the splits of BERT's pre-tokenizer, at white space and around each punctuation mark."""
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    classes = np.zeros(CODE_POINTS, np.uint8)
    for letters in _chunks():
        # BERT's pre-tokenizer makes each punctuation mark a separate part. To find these marks, put
        # the letter "a" before and after each character, and split the result. If the part that
        # contains the character has length 1, the character is a punctuation mark.
        kinds = np.full(2 * len(letters) + 1, _SPACE, np.uint8)
        for _, (first, last) in split("a" + "".join(f"{letter}a" for letter in letters)):
            kinds[first:last] = _ALONE if last - first == 1 else _WORD
        classes[[ord(letter) for letter in letters]] = kinds[1::2]
    # The columns are for letters of words, white space, punctuation and the end of the text. The
    # rows are the states: at the start, after white space, and after punctuation.
    table = np.array([[0, 4, 6, 0], [1, 5, 1, 1], [1, 1, 1, 1]], np.int32)
    return Splits(classes, 3, [table])


@functools.cache
def _characters(normaliser: str) -> Composition:
    """Make the table of characters of a BertNormalizer, which is given as JSON.

    The table has the fields of ``Composition``, but other contents: ``classes`` contains the
    classes of this module (UNCHANGED to MARKS), and ``decompositions`` maps replaced characters to
    their replacements.
    """
    from tokenizers import Tokenizer, models

    holder = json.loads(Tokenizer(models.WordPiece()).to_str())
    holder["normalizer"] = json.loads(normaliser)
    normalise = Tokenizer.from_str(json.dumps(holder)).normalizer.normalize_str
    # The normaliser uses NFD if it strips accents. By default, it strips accents if it lowercases
    # text.
    is_sorted = normalise("e\u0301") == "e"
    orders = composition().classes
    classes = np.zeros(CODE_POINTS, np.uint8)
    replaced: dict[int, tuple[int, ...]] = {}
    for letters in _chunks():
        several = [letter for letter in letters if letter != _SEPARATOR]
        found = normalise(_SEPARATOR.join(several)).split(_SEPARATOR)
        if len(found) != len(several):
            raise NotCompiled("its normaliser does not treat each character separately")
        for letter, made in zip(several, found, strict=True):
            point = ord(letter)
            order = int(orders[point]) if is_sorted and orders[point] != STARTS else 0
            if made == letter:
                classes[point] = MARKS + order if order else UNCHANGED
            elif not made:
                between = normalise(f"{_LATER}{letter}{_EARLIER}")
                breaks = is_sorted and not order and between == _LATER + _EARLIER
                classes[point] = BREAKS if breaks else DROPPED
            elif made == f" {letter} ":
                classes[point] = PADDED
            else:
                classes[point] = REPLACED
                replaced[point] = tuple(map(ord, made))
    return Composition(classes, replaced, {})
