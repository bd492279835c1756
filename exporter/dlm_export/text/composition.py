"""Makes tables of canonical composition (NFC) for the tokenizers library's Unicode version."""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass

import numpy as np

CODE_POINTS = 0x110000
LAST_PLANE = 0x30000  # Characters from this code point on are never composed.
STARTS = 255
"""The class of starters that may change together with a neighbour.

A starter is a character of combining class 0.
"""


@dataclass(frozen=True, eq=False)
class Composition:
    """Tables of canonical composition.

    - ``classes``, uint8 ``[0x110000]``: the combining class of a mark, STARTS for other characters
      that composition may change, and 0 for characters that it never changes.
    - ``decompositions``: the full decomposition of characters. The keys are code points.
    - ``pairs``: the composition of two code points.

    Hangul syllables are computed by a rule. These syllables are in neither ``decompositions`` nor
    ``pairs``.
    """

    classes: np.ndarray
    decompositions: dict[int, tuple[int, ...]]
    pairs: dict[tuple[int, int], int]


@functools.cache
def composition() -> Composition:
    """Make the tables from the tables in Python's module ``unicodedata``.

    Characters that the Python library tokenizers does not know are left out. The module ``proof``
    compares the result with the tokenizers library.
    """
    from tokenizers import normalizers

    composed, decomposed = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str
    classes = np.zeros(CODE_POINTS, np.uint8)
    decompositions: dict[int, tuple[int, ...]] = {}
    pairs: dict[tuple[int, int], int] = {}
    for point in range(0x80, LAST_PLANE):
        letter = chr(point)
        order, mapping = unicodedata.combining(letter), unicodedata.decomposition(letter)
        # The tokenizers library knows a mark if it moves the mark before U+0345, which has the
        # highest combining class.
        if order and (order >= 240 or decomposed("\u0345" + letter)[0] != "\u0345"):
            classes[point] = order
        if not mapping or mapping.startswith("<"):
            continue
        whole = decomposed(letter)
        if whole == letter:
            continue  # the character is newer than the library
        decompositions[point] = tuple(map(ord, whole))
        if composed(letter) == letter:
            first, second = (int(part, 16) for part in mapping.split())
            pairs[first, second] = point
        elif not classes[point]:
            classes[point] = STARTS
    for _, second in pairs:
        if not classes[second]:
            classes[second] = STARTS
    # The vowels and final consonants of Hangul.
    classes[0x1161:0x1176] = classes[0x11A8:0x11C3] = STARTS
    return Composition(classes, decompositions, pairs)
