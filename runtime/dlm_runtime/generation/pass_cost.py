"""The measured cost of passes on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from dlm_runtime.errors import RequestError
from dlm_runtime.files import read_object

_MOST_BYTES = 1 << 20  # size limit of a file with the output of ``dlm-export bench``


@dataclass(frozen=True)
class PassCost:
    """The time of a pass in milliseconds, as a linear model.

    The time of a pass is the sum of four parts: a fixed part, a part per token, a part per scored
    row, and a part per pair of a token and a position that the token sees. ``dlm-export bench
    --cost`` measures these parts. Each part is finite and 0 or more.
    """

    pass_ms: float
    token_ms: float
    row_ms: float
    pair_ms: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if (
                not isinstance(value, (int, float))
                or isinstance(value, bool)
                or not 0 <= value < math.inf
            ):
                raise RequestError(
                    f"cost: {each.name} = {value!r} is not a time: give milliseconds"
                )

    @classmethod
    def read(cls, path: str | Path) -> PassCost:
        """Read the four parts from the output of ``dlm-export bench BUNDLE --cost --json``.

        Raises RequestError.
        """
        hint = " Write it with `dlm-export bench BUNDLE --cost --json`."
        found = read_object(Path(path), _MOST_BYTES, RequestError, hint).get("cost")
        names = [each.name for each in fields(cls)]
        if not isinstance(found, dict) or not set(names) <= set(found):
            raise RequestError(f"{path}: has no cost with {', '.join(names)}.{hint}")
        return cls(*(found[name] for name in names))
