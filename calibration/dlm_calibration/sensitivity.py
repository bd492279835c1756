"""Turns each layer's loss in each format into a path of ever smaller assignments.

Losses are assumed to add up over layers, which holds while they are small. The caller measures the
actual loss of the assignments it considers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One format for one layer: ``loss`` (frontier KL in nats when only this layer is quantised)
    and ``cost`` (bytes).
    """

    format: str
    loss: float
    cost: float


@dataclass(frozen=True)
class Point:
    """A format for every layer, with the predicted loss and the cost of this assignment.

    ``formats`` maps layers to formats. The predicted loss is the sum over layers.
    """

    formats: dict[str, str]
    loss: float
    cost: float


def efficient(choices: list[Choice]) -> list[Choice]:
    """Return the lower convex hull of loss over cost, most expensive choice first.

    If costs are equal, the smaller loss wins, then the smaller name, so the result does not depend on
    the input order.
    """
    ranked = sorted(choices, key=lambda c: (-c.cost, c.loss, c.format))
    hull: list[Choice] = []
    for choice in ranked:
        if hull and choice.cost == hull[-1].cost:
            continue
        # A more expensive choice with more loss is useless.
        while hull and hull[-1].loss >= choice.loss:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(dear: Choice, cheap: Choice) -> float:
    return (cheap.loss - dear.loss) / (dear.cost - cheap.cost)


def trade_off(layers: Mapping[str, list[Choice]]) -> list[Point]:
    """The path from the most expensive assignment to the cheapest: each step takes the move that
    loses least per byte saved.

    Every layer needs a choice. Deterministic: ties follow the order of ``layers``.
    """
    hulls = {layer: efficient(choices) for layer, choices in layers.items()}
    now = dict.fromkeys(layers, 0)
    moves = []
    for number, (layer, hull) in enumerate(hulls.items()):
        moves += [
            (_slope(hull[i], hull[i + 1]), number, i + 1, layer) for i in range(len(hull) - 1)
        ]

    def point() -> Point:
        taken = {layer: hulls[layer][i] for layer, i in now.items()}
        formats = {layer: choice.format for layer, choice in taken.items()}
        return Point(
            formats, sum(c.loss for c in taken.values()), sum(c.cost for c in taken.values())
        )

    path = [point()]
    # Slopes rise along a hull, so sorting keeps each layer's moves in order.
    for _, _, index, layer in sorted(moves):
        now[layer] = index
        path.append(point())
    return path
