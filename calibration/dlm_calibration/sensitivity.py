"""Finds which layers to quantise first, from the loss of each layer in each format.

The result is a path of assignments of formats to layers. Each assignment on the path needs fewer
bytes than the one before. Its predicted loss is the sum of the layers' losses, which is accurate
while they are small. The caller measures the real loss of the assignments that it considers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One format for one layer.

    ``loss`` is the frontier KL in nats when only this layer is quantised. ``cost`` is its size in
    bytes.
    """

    format: str
    loss: float
    cost: float


@dataclass(frozen=True)
class Point:
    """An assignment of formats to all layers, with its predicted loss and its cost.

    ``formats`` maps layers to formats. The predicted loss is the sum of the layers' losses.
    """

    formats: dict[str, str]
    loss: float
    cost: float


def efficient(choices: list[Choice]) -> list[Choice]:
    """Return the lower convex hull of loss over cost, starting with the most expensive choice.

    If costs are equal, the smaller loss wins. If losses are equal too, the name that sorts first
    wins, so that the result does not depend on the order of the input.
    """
    ranked = sorted(choices, key=lambda c: (-c.cost, c.loss, c.format))
    hull: list[Choice] = []
    for choice in ranked:
        if hull and choice.cost == hull[-1].cost:
            continue
        # A choice that is more expensive and loses at least as much is useless.
        while hull and hull[-1].loss >= choice.loss:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(dear: Choice, cheap: Choice) -> float:
    return (cheap.loss - dear.loss) / (dear.cost - cheap.cost)


def trade_off(layers: Mapping[str, list[Choice]]) -> list[Point]:
    """Return the path of assignments from the most expensive to the cheapest.

    Each step changes the format of one layer: the one where the change loses least per byte saved.
    Every layer needs at least one choice. The result is deterministic, because ties are resolved by
    the order of ``layers``.
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
    # Slopes rise along a hull, so the sorted order keeps the moves of each layer in their order.
    for _, _, index, layer in sorted(moves):
        now[layer] = index
        path.append(point())
    return path
