"""Finds the layers to quantise first, given the loss of each layer in each format.

An assignment gives a format to every layer. ``trade_off`` returns a list of assignments. Each
assignment needs fewer bytes than the previous assignment in the list. The predicted loss of an
assignment is the sum of the layers' losses. This sum is accurate if the losses are small. The
caller measures the real losses of the assignments from which it chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One format for one layer.

    ``loss`` is the mean KL divergence in nats if only this layer is quantised. The mean is over
    the positions that the unquantised denoiser would commit. ``cost`` is the layer's size in bytes.
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
    """Return the choices that are worth trying for one layer: those on the lower convex hull of
    loss over cost, starting with the most expensive.

    Among choices with equal costs, the choice with the smallest loss is used. If losses are equal
    too, the format whose name sorts first is used. The result therefore does not depend on the
    order of the input.
    """
    ranked = sorted(choices, key=lambda c: (-c.cost, c.loss, c.format))
    hull: list[Choice] = []
    for choice in ranked:
        if hull and choice.cost == hull[-1].cost:
            continue
        # A choice is useless if a cheaper choice has the same loss or a smaller loss.
        while hull and hull[-1].loss >= choice.loss:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(dear: Choice, cheap: Choice) -> float:
    return (cheap.loss - dear.loss) / (dear.cost - cheap.cost)


def trade_off(layers: Mapping[str, list[Choice]]) -> list[Point]:
    """Return a list of assignments, from the most expensive to the cheapest.

    Each step changes the format of one layer: the layer where the change adds the least loss per
    byte saved. If this loss is equal for several layers, the first of them in the order of
    ``layers`` is changed. Every layer needs at least one choice.
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
    # Along the hull of a layer, each step adds more loss per saved byte than the previous step.
    # Sorting all steps by added loss per saved byte therefore keeps the steps of a layer in order.
    for _, _, index, layer in sorted(moves):
        now[layer] = index
        path.append(point())
    return path
