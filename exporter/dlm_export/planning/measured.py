"""Reads the results of ``dlm-export bench``, and corrects predictions with these results."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from dlm_export.planning.bench import PassSize
from dlm_export.planning.queueing import Service
from dlm_export.planning.roofline import Machine, Rates
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.files import read_object

_MOST_BYTES = 1 << 20
_Kind = TypeVar("_Kind", int, float, str, "list[Any]", "dict[str, Any]")


class MeasuredError(DlmError):
    """Raised if a file was not written by ``dlm-export bench --json``."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class MeasuredPass:
    """The measured time of a pass, and the shortest possible time by the roofline model."""

    made: PassSize
    ms: float
    limit_ms: float

    @property
    def ratio(self) -> float:
        return self.ms / self.limit_ms


def interpolated_ratio(passes: Sequence[MeasuredPass], asked: PassSize) -> float:
    """Return the ratio of a pass's real time to the pass's shortest possible time.

    If no pass of the same size was measured, the ratio is interpolated from the ratios of the
    measured passes (Shepard 1968). The logarithm of the result is a weighted average of the
    logarithms of the measured ratios. The weight of a measured pass is the inverse of its squared
    distance to the requested pass. To compute distances, a pass with T tokens, S cached tokens and
    R rows of logits is the point (log T, log(S + T), log(R + 1)). The result is never smaller than
    the smallest measured ratio, and never larger than the largest measured ratio.
    """

    def place(made: PassSize) -> tuple[float, ...]:
        return math.log(made.tokens), math.log(made.cached + made.tokens), math.log(made.rows + 1)

    weights = []
    for known in passes:
        squared = math.dist(place(known.made), place(asked)) ** 2
        if squared == 0:
            return known.ratio
        weights.append(1 / squared)
    logs = [math.log(known.ratio) for known in passes]
    return math.exp(
        math.fsum(w * r for w, r in zip(weights, logs, strict=True)) / math.fsum(weights)
    )


@dataclass(frozen=True)
class MeasuredGeneration:
    """The measurement of a whole request. ``changes`` contains the preset's changed fields."""

    preset: str
    changes: dict[str, Any]
    prompt_tokens: int
    new_tokens: int
    nfe: int
    tokens_per_s: float


@dataclass(frozen=True)
class Measured:
    """The results of ``dlm-export bench`` for one bundle.

    ``parameters`` is the denoiser's parameter count. ``service`` describes the measured requests,
    or is ``None`` if no requests were measured.
    """

    file: str
    precision: str
    parameters: int
    memory_bytes: int
    rates: Rates
    passes: tuple[MeasuredPass, ...]
    generation: MeasuredGeneration
    service: Service | None = None

    def leave_one_out(self) -> list[float]:
        """Predict the time of each pass from all other passes, and return the relative errors.

        If only one pass was measured, returns an empty list.
        """
        return [
            interpolated_ratio([other for other in self.passes if other is not each], each.made)
            / each.ratio
            - 1
            for each in self.passes
            if len(self.passes) > 1
        ]


def service_of(
    nfe: Sequence[int],
    times: Sequence[tuple[float, float, int]],
    overhead_ms: float,
    paces: Sequence[float],
) -> Service:
    """Make a ``Service`` from the results of ``measure_service``.

    ``times`` contains ``(shares, ms_per_pass, passes)`` for each number of running requests. If a
    limit on tokens keeps passes small, different numbers of running requests lead to passes of the
    same size. Such measurements are averaged, weighted by their number of passes.
    """
    groups: dict[int, list[tuple[float, float, int]]] = {}
    for each in sorted(times):
        groups.setdefault(round(each[0]), []).append(each)
    pass_ms = []
    for group in groups.values():
        passes = sum(max(1, each[2]) for each in group)
        shares, ms = (sum(each[i] * max(1, each[2]) for each in group) / passes for i in (0, 1))
        pass_ms.append((shares, ms))
    return Service(tuple(nfe), tuple(pass_ms), overhead_ms, (min(1.0, *paces), max(1.0, *paces)))


def read_measured(path: Path) -> Measured:
    """Read a file that ``dlm-export bench --json`` has written.

    Raises MeasuredError, which names the missing value.
    """
    value = read_object(
        path, _MOST_BYTES, MeasuredError, " Write it with `dlm-export bench BUNDLE --json`."
    )

    def get(kind: type[_Kind], *keys: str | int) -> _Kind:
        found: Any = value
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                found = None
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (
            isinstance(found, (int, float)) and not 0 <= found < math.inf
        ):
            raise MeasuredError(
                f"{path}: {'.'.join(map(str, keys))} is missing or not a valid {kind.__name__}. "
                "Write the file with `dlm-export bench BUNDLE --json`, with onnx installed."
            )
        return found

    def positive(*keys: str | int) -> float:
        # Replace zero by the smallest positive number, because a time or a rate of zero would later
        # cause a division by zero.
        return max(get(float, *keys), sys.float_info.min)

    machine = Machine(*(positive("roofline", each.name) for each in fields(Machine)))
    passes = []
    for i in range(len(get(list, "passes"))):
        made = PassSize(
            *(get(int, "passes", i, name) for name in (each.name for each in fields(PassSize)))
        )
        passes.append(
            MeasuredPass(made, positive("passes", i, "ms"), positive("passes", i, "limit_ms"))
        )
        if made.tokens < 1:
            raise MeasuredError(f"{path}: passes.{i} has no tokens")
    if not passes:
        raise MeasuredError(
            f"{path}: contains no pass: measure one, such as `dlm-export bench BUNDLE --passes 32,224,32 --json`"
        )
    service = None
    if value.get("requests") is not None:
        nfe, loads = (get(list, "requests", name) for name in ("nfe", "loads"))
        times = [
            (
                max(1.0, get(float, "requests", "loads", i, "shares")),
                positive("requests", "loads", i, "ms_per_pass"),
                get(int, "requests", "loads", i, "passes"),
            )
            for i in range(len(loads))
        ]
        passes_of = [get(int, "requests", "nfe", i) for i in range(len(nfe))]
        paces = [
            positive("requests", "paces", i) for i in range(len(get(list, "requests", "paces")))
        ]
        if not times or not passes_of or min(passes_of) < 1 or not paces:
            raise MeasuredError(
                f"{path}: requests contains no passes: measure `dlm-export bench BUNDLE --data FILE --json` again"
            )
        service = service_of(passes_of, times, get(float, "requests", "overhead_ms"), paces)
    return Measured(
        str(path),
        get(str, "bundle", "precision"),
        get(int, "bundle", "parameters"),
        get(int, "machine", "memory_bytes"),
        machine.rates(),
        tuple(passes),
        MeasuredGeneration(
            get(str, "generation", "preset"),
            get(dict, "generation", "changes"),
            get(int, "generation", "prompt_tokens"),
            get(int, "generation", "new_tokens"),
            get(int, "generation", "nfe"),
            positive("generation", "tokens_per_s"),
        ),
        service,
    )
