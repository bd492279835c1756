"""Describes how a network scales rotary positions, to support longer canvases than its training.

RoPE rotates each pair of features by an angle: the position times the frequency of the pair. Each
class of this module describes one way to lower the frequencies. ``kind`` is the name of the
``rope_type`` in transformers with the same formula
(https://huggingface.co/docs/transformers/internal/rope_utils). The original length is the longest
canvas in the part of the training that used no scaling. This module does not import torch.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

LOWEST, HIGHEST = 1e-6, 1e6
"""Limits of the numbers in a scaling's description. Between these limits, no formula overflows."""
LONGEST = 1 << 24
"""The largest number of positions."""
_VALUES: dict[str, tuple[str, tuple[type, ...], float, float]] = {
    "float": ("a number between {low:g} and {high:g}", (int, float), LOWEST, HIGHEST),
    "int": ("an integer between {low} and {high}", (int,), 1, LONGEST),
    "bool": ("true or false", (bool,), False, True),
}
"""Maps the type of a field to a description, Python types, and the smallest and largest value."""


@dataclass(frozen=True)
class Scaling(ABC):
    """The base class of all kinds of scaling.

    A frequency is divided by at most ``factor``, which is at least ``lowest_factor``.
    """

    lowest_factor: ClassVar[float] = 1

    kind: str = field(init=False)
    factor: float

    def __post_init__(self) -> None:
        """Raises ValueError if a field has a wrong type or is out of range."""
        for each in fields(self):
            if each.name == "kind":
                continue
            wanted, types, low, high = _VALUES[str(each.type)]
            low = self.lowest_factor if each.name == "factor" else low
            value = getattr(self, each.name)
            if type(value) not in types or not low <= value <= high:
                wanted = wanted.format(low=low, high=high)
                raise ValueError(f"{each.name} must be {wanted}, found {reprlib.repr(value)}")

    @abstractmethod
    def kept(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Return a share between 0 and 1 for each of the unscaled ``frequencies``.

        A frequency with share 1 is not scaled. A frequency with share 0 is divided by ``factor``.
        For shares between 0 and 1, the result is interpolated linearly.
        """

    @property
    def magnitude(self) -> float:
        """The number by which cosines and sines are multiplied."""
        return 1.0

    @property
    def longest_canvas(self) -> int | None:
        """The longest canvas whose frequencies do not depend on the canvas's length.

        ``None`` if the frequencies are the same for all lengths.
        """
        return None


@dataclass(frozen=True)
class Linear(Scaling):
    """All frequencies are divided by ``factor``."""

    kind: str = field(default="linear", init=False)

    def kept(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return np.zeros_like(frequencies)


@dataclass(frozen=True)
class Dynamic(Scaling):
    """Frequencies are not scaled on canvases up to ``original_length``.

    For longer canvases, the frequencies would depend on the canvas's length. This module does not
    compute these frequencies, because a bundle contains only one table of cosines and sines.
    """

    kind: str = field(default="dynamic", init=False)
    original_length: int

    def kept(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return np.ones_like(frequencies)

    @property
    def longest_canvas(self) -> int | None:
        return self.original_length


@dataclass(frozen=True)
class Llama3(Scaling):
    """The scaling of Llama 3.1.

    Over ``original_length`` positions, RoPE rotates a pair of features by a number of full turns.
    If this number is at most ``low_freq_factor``, the frequency is divided by ``factor``. If this
    number is at least ``high_freq_factor``, the frequency is not scaled. Between the two numbers,
    the share is linear in the number of turns.
    """

    kind: str = field(default="llama3", init=False)
    original_length: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        """Raises ValueError if a number is out of range, or if numbers contradict each other."""
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} must be greater than low_freq_factor "
                f"{self.low_freq_factor:g}"
            )

    def kept(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_length * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        share: np.ndarray = (turns - self.low_freq_factor) / width
        return share.clip(0, 1)


@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN (arXiv:2309.00071).

    The frequency of a pair of features that makes at least ``beta_fast`` turns in
    ``original_length`` positions is not scaled. The frequency of a pair that makes at most
    ``beta_slow`` turns is divided by ``factor``. Between these pairs, the share is linear in the
    pair's index. If ``truncate`` is true, the range of indices between these pairs is extended to
    whole numbers. Cosines and sines are multiplied by ``attention_factor``. As in transformers,
    ``factor`` may be below 1. It then raises frequencies.
    """

    lowest_factor: ClassVar[float] = LOWEST

    kind: str = field(default="yarn", init=False)
    original_length: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def __post_init__(self) -> None:
        """Raises ValueError if a number is out of range, or if numbers contradict each other."""
        super().__post_init__()
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast {self.beta_fast:g} must be at least beta_slow {self.beta_slow:g}"
            )

    def kept(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        size = 2 * len(frequencies)

        def index(turns: float) -> float:
            """Return the (possibly fractional) index of the pair that makes ``turns`` turns."""
            ratio = self.original_length / (turns * 2 * math.pi)
            return size * math.log(ratio) / (2 * math.log(theta))

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # As in transformers, the upper limit is computed from the number of features, not of pairs,
        # and a range of width 0 gets the width 0.001.
        first, last = max(first, 0), min(last, size - 1)
        share: np.ndarray = (np.arange(size // 2) - first) / ((last - first) or 0.001)
        return 1 - share.clip(0, 1)

    @property
    def magnitude(self) -> float:
        return self.attention_factor


@dataclass(frozen=True)
class QueryScale:
    """Multiplies queries by a factor that grows with the position, as in Llama 4 and Ministral 3.

    The query at position p is multiplied by ``1 + beta * ln(1 + floor(p / original_length))``. This
    factor is 1 at the positions before ``original_length``.
    """

    beta: float
    original_length: int

    def __post_init__(self) -> None:
        """Raises ValueError if a number is out of range."""
        if not 0 <= self.beta <= HIGHEST:
            raise ValueError(f"beta must be between 0 and {HIGHEST:g}, found {self.beta:g}")
        if self.original_length < 1:
            raise ValueError(f"original_length must be at least 1, found {self.original_length}")


KINDS: dict[str, type[Scaling]] = {kind.kind: kind for kind in (Linear, Dynamic, Llama3, Yarn)}


def scaling_from(values: Mapping[str, Any]) -> Scaling:
    """Read a description from the fields of a scaling.

    Raises ValueError for an unknown kind, and for missing, unknown and invalid fields.
    """
    kind = values["kind"]
    if kind not in KINDS:
        raise ValueError(f"scaling {reprlib.repr(kind)} is not one of {', '.join(KINDS)}")
    names = [each.name for each in fields(KINDS[kind])]
    if values.keys() != set(names):
        found = ", ".join(map(reprlib.repr, list(values)[:9]))
        raise ValueError(f"scaling {kind} has the fields {', '.join(names)}, found {found}")
    return KINDS[kind](**{name: value for name, value in values.items() if name != "kind"})


@dataclass(frozen=True)
class RotaryTable:
    """A table of cosines and sines for ``size`` rotated features, which have ``size / 2`` angles.

    Layers whose tables are equal share one table. ``turning`` is the share of the angles that
    depend on the position. All other angles are 0.
    """

    theta: float
    scaling: Scaling | None
    size: int
    turning: float = 1.0

    def frequencies(self) -> np.ndarray:
        """Return the angle per position for each pair of features, float64 ``[size / 2]``."""
        plain: np.ndarray = self.theta ** (-np.arange(0, self.size, 2) / self.size)
        plain[int(self.turning * self.size // 2) :] = 0
        if self.scaling is None:
            return plain
        kept = self.scaling.kept(plain, self.theta)
        mixed: np.ndarray = plain * kept + plain / self.scaling.factor * (1 - kept)
        return mixed

    @property
    def magnitude(self) -> float:
        """The number by which cosines and sines are multiplied."""
        return 1.0 if self.scaling is None else self.scaling.magnitude
