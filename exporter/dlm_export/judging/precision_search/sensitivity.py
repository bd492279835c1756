"""Measures how much the predictions change if a single layer is quantised.

The loss of a layer is the mean KL divergence between the predictions with and without quantisation
of this layer. Two losses are measured: one over all masked positions, and one over the frontier.
If a denoiser verifies drafts, the predictions of causal passes count as masked positions.
The frontier consists of the positions that the next pass would commit. All experts of a transformer
block count as one layer, because they have the same format.

There are two methods: the exact method and the estimate. The exact method quantises each layer in
turn and runs the whole denoiser. The estimate computes the losses of all layers with one forward
and one backward pass. Both need memory for one transformer block at a time.

The estimate is a second-order approximation: the loss of a layer is half the mean of
``(g . e)**2``. ``e`` is the change of the layer's output if the layer is quantised and its input
stays the same. ``g`` is a random gradient at the layer's output. The module samples random
gradients at the logits, with the Fisher information as their covariance. The gradients are then
backpropagated to each layer (as in K-FAC, arXiv:1503.05671).

A tied head uses the embedding table. Quantising the table changes both the head's output and the
table rows that are looked up at the start of a pass. The head's loss is the sum of the losses from
both changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlm_calibration.precisions import HIGH
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.judging.precision_search.assigned import Assigned
from dlm_export.network.experts import RoutedMLPs
from dlm_export.network.layered import Carried, Layered, named, room_for
from dlm_export.network.linear import Linear
from dlm_export.network.spec import EMBEDDING, HEAD, NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.workplace import Workplace

SWEPT_STATES = 16
LARGE_SWEPT = 2  # number of calibration states for large denoisers, whose passes take seconds
FRONTIER = 0.9  # a position is at the frontier if a token has at least this probability
DRAWS = 4
"""Number of random gradients for frontier positions.

The same number of gradients is used for all other masked positions. BENCHMARKS.md shows how much
the estimate would improve with more gradients.
"""
Losses = dict[str, tuple[float, float]]
"""Maps each layer or mixture of experts to ``(kl, frontier_kl)``, in nats per position."""
_Modules = dict[str, Linear | RoutedMLPs]


def swept(states: Sequence[State], network: NetworkSpec, most: int = SWEPT_STATES) -> list[State]:
    """Choose at most ``most`` evenly spaced states from the states with masked positions.

    If the network verifies drafts, at most half of the chosen states have no masked positions.
    Causal passes over these states predict the next tokens.
    """
    masked = [state for state in states if state.mask_ratio > 0]
    causal: list[State] = []
    if network.is_verifying:
        causal = _spaced([state for state in states if state.draft is None], most // 2)
    return _spaced(masked, most - len(causal)) + causal


def _spaced(states: Sequence[State], most: int) -> list[State]:
    picked = np.linspace(0, len(states) - 1, min(most, len(states))).astype(int)
    return [states[i] for i in dict.fromkeys(picked.tolist())]


def predicting_rows(state: State, network: NetworkSpec) -> Tensor:
    """Return the indices of the rows whose logits predict the masked positions of a state.

    In a causal pass that verifies drafts, each row except the last predicts the next position.
    """
    if network.is_verifying and state.draft is None:
        return torch.arange(len(state.canvas) - 1)
    positions = np.flatnonzero(state.is_masked(network.mask_token_id))
    return (torch.from_numpy(positions) - network.shift).clamp(min=0)


def log_probs(logits: Tensor, network: NetworkSpec) -> Tensor:
    """Convert raw logits ``[R, V]``, for R rows and V tokens, to log probabilities.

    The mask token, if any, gets probability 0. The function changes ``logits`` in place.
    """
    logits[:, network.mask_token_id : network.mask_token_id + 1] = -torch.inf
    return logits.float().log_softmax(-1)


def is_frontier(expected: Tensor) -> Tensor:
    """Return which of R positions belong to the frontier, as bool ``[R]``.

    A position belongs to the frontier if its best token has at least the probability ``FRONTIER``.
    The position whose best token has the highest probability always belongs to the frontier.
    """
    best = expected.exp().max(-1).values
    return (best >= FRONTIER) | (best == best.max())


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """Return each row's KL divergence between two tables of log probabilities ``[R, V]``."""
    probs = expected.exp()
    return torch.where(probs > 0, probs * (expected - found), 0.0).sum(-1)


# --- The estimate: all layers from one forward and one backward pass ---


def estimate(
    layered: Layered,
    states: Sequence[State],
    choices: Sequence[Quantisation],
    on_done: Callable[[], None],
    *,
    memory_bytes: int | None = None,
    folder: Path | None = None,
) -> list[Losses]:
    """Estimate the losses of all quantised layers, for each quantisation in ``choices``.

    ``layered`` must be in fp32. If smoothing or AWQ was used, the weights in ``layered`` must
    already include the scales. ``on_done`` is called twice per transformer block.

    Memory contains one block, a quantised copy of the block for each quantisation in ``choices``,
    and the hidden states before every block. Hidden states that do not fit into ``memory_bytes``
    are stored in a file in ``folder``. Raises MemoryLimitError.
    """
    c, canvases = layered.network, [state.canvas for state in states]
    drafts = [state.draft for state in states]
    carried = Carried(layered, canvases, memory_bytes=memory_bytes, folder=folder, drafts=drafts)
    shape, dtype = carried.states.shape, carried.states.dtype
    entered = room_for((len(c.layers), *shape), dtype, memory_bytes, folder)
    for i in range(len(c.layers)):
        entered[i] = carried.states
        carried.through(i, layered.block(i))
        on_done()
    gradients = room_for((2 * DRAWS, *shape), dtype, memory_bytes, folder)
    (frontier, others), sums = _at_the_head(carried, states, choices, gradients)
    for i in reversed(range(len(c.layers))):
        for lost, squares in zip(
            sums, _through(i, carried, entered[i], gradients, choices), strict=True
        ):
            lost |= {layer: _by_kind(square) for layer, square in squares.items()}
        on_done()
    tables = _at_the_table(carried, gradients, choices)
    for lost, looked_up in zip(sums, tables, strict=True):
        # Add the loss from looking up embeddings in the quantised table.
        if looked_up is not None:
            (a, b), (more_a, more_b) = lost[HEAD], _by_kind(looked_up)
            lost[HEAD] = a + more_a, b + more_b
    return [
        {layer: ((a + b) / (frontier + others), a / frontier) for layer, (a, b) in lost.items()}
        for lost in sums
    ]


def _by_kind(squares: Tensor) -> tuple[float, float]:
    """Add up the losses ``(g . e)**2 / 2`` of frontier positions, and those of other positions."""
    at_frontier, elsewhere = (float(squares[part].sum()) / 2 for part in _PARTS)
    return at_frontier, elsewhere


# Indices of the gradients: the first ``DRAWS`` are for frontier positions, and the rest are for all
# other masked positions.
_PARTS = (slice(0, DRAWS), slice(DRAWS, 2 * DRAWS))


def directions(probs: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield ``draws`` random gradients at the logits ``[R, V]`` of R predictions over V tokens.

    The sum of the gradients' outer products has the Fisher information as its mean. For a
    prediction p, the Fisher information is ``diag(p) - p p^T``. This matrix is equal to the sum of
    ``b_j b_j^T`` over all tokens j, where ``b_j = sqrt(p_j) (e_j - p)``.

    Each token j is randomly assigned to one gradient, and ``b_j`` is added to that gradient with a
    random sign. Only the products ``b_i b_j^T`` of two distinct tokens in the same gradient are
    then random. The usual method, which samples labels from p, would need hundreds of gradients if
    probabilities in p are near 0 or 1.
    """
    signs = torch.randint(0, 2, probs.shape, generator=generator) * 2 - 1
    draw = torch.randint(0, draws, probs.shape, generator=generator)
    columns = signs * probs.sqrt()
    for number in range(draws):
        part = torch.where(draw == number, columns, 0.0)
        yield part - probs * part.sum(-1, keepdim=True)


def _at_the_head(
    carried: Carried,
    states: Sequence[State],
    choices: Sequence[Quantisation],
    gradients: Tensor,
) -> tuple[tuple[int, int], list[Losses]]:
    """Compute the losses of the head, and store the gradients at the output of the last block.

    Returns the number of frontier positions and of all other masked positions, and the head's
    losses, summed over the positions of each kind. The seed of a canvas's random gradients is the
    canvas's index in ``carried``.
    """
    layered, c = carried.layered, carried.layered.network
    end, head = layered.end(), layered.head()
    plain = Linear(0, 0)
    if head.bias is not None:
        plain.bias = nn.Parameter(head.bias, requires_grad=False)
    quantised = [_quantised({HEAD: plain}, done) for done in choices]
    lost = [[0.0, 0.0] for _ in choices]
    counts = [0, 0]
    for batch in carried.batches:
        x = carried.read(batch).requires_grad_()
        features = end(x)
        pulled = torch.zeros(2 * DRAWS, *x.shape)
        for place, number in enumerate(batch.numbers):
            generator = torch.Generator().manual_seed(number)
            rows = predicting_rows(states[number], c)
            mine = features[place, rows.to(x.device)].detach()
            logits = head(mine)
            expected = log_probs(logits.clone(), c)
            at_frontier = is_frontier(expected)
            for part, chosen in zip(_PARTS, (at_frontier, ~at_frontier), strict=True):
                draws = directions(expected[chosen].exp(), DRAWS, generator)
                scored = logits[chosen]
                for gradient, direction in zip(pulled[part], draws, strict=True):
                    back = head.pull(direction, scored)
                    gradient[place].index_add_(0, rows[chosen], back)
            for losses, heads in zip(lost, quantised, strict=True):
                for module in heads.values():
                    kl = divergence(expected, log_probs(module(mine.cpu()), c))
                    losses[0] += float(kl[at_frontier].sum())
                    losses[1] += float(kl[~at_frontier].sum())
            counts[0] += int(at_frontier.sum())
            counts[1] += int((~at_frontier).sum())
        for number, gradient in enumerate(pulled.to(x)):
            gradients[number, batch.rows] = (
                torch.autograd.grad(features, x, gradient, retain_graph=True)[0].flatten(0, 1).cpu()
            )
    found = [
        dict.fromkeys(heads, (losses[0], losses[1]))
        for losses, heads in zip(lost, quantised, strict=True)
    ]
    return (counts[0], counts[1]), found


def _through(
    i: int, carried: Carried, entered: Tensor, gradients: Tensor, choices: Sequence[Quantisation]
) -> list[dict[str, Tensor]]:
    """Backpropagate the gradients through transformer block ``i``, and compute the block's losses.

    Returns a mapping for each quantisation in ``choices``. The keys are the paths of linear layers
    and mixtures of experts. The values are the sums of ``(g . e)**2`` over all canvases, with one
    element per random gradient g.
    """
    layered, block = carried.layered, carried.layered.block(i)
    modules = named(i, block)
    own: _Modules = {path: m for path, m in modules.items() if isinstance(m, (Linear, RoutedMLPs))}
    quantised = [_quantised(own, done) for done in choices]
    seen: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
    watched = dict.fromkeys(path for mine in quantised for path in mine)

    def keep(path: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[path] = inputs, output

    for path in watched:
        modules[path].register_forward_hook(partial(keep, path))
    squares = [{path: torch.zeros(len(gradients)) for path in mine} for mine in quantised]
    for batch in carried.batches:
        x = entered[batch.rows].view(*batch.ids.shape, -1).to(layered.device).requires_grad_()
        out, _ = block(x, *layered.beside(i, batch))
        with torch.no_grad():
            errors = [
                {path: _changed(module, *seen[path]).flatten(1) for path, module in mine.items()}
                for mine in quantised
            ]
        sources = [x, *(seen[path][1] for path in watched)]
        for number, carried_back in enumerate(gradients):
            gradient = carried_back[batch.rows].view(out.shape).to(out)
            before, *inside = torch.autograd.grad(out, sources, gradient, retain_graph=True)
            by_path = dict(zip(watched, inside, strict=True))
            for error, square in zip(errors, squares, strict=True):
                for path, e in error.items():
                    square[path][number] += (
                        torch.linalg.vecdot(by_path[path].flatten(1), e).square().sum().cpu()
                    )
            # This assignment replaces the gradient at the block's output by the gradient at the
            # block's input. It must come last, because the code above needs the old gradient.
            carried_back[batch.rows] = before.flatten(0, 1).cpu()
    return squares


def _at_the_table(
    carried: Carried, gradients: Tensor, choices: Sequence[Quantisation]
) -> list[Tensor | None]:
    """Compute the loss from looking up embeddings in a quantised table.

    For each quantisation in ``choices``, the function returns the sum of ``(g . e)**2`` over all
    canvases, with one element per random gradient g. For a quantisation that leaves a tied table
    unquantised, the function returns ``None``. ``gradients`` must be the gradients at the input of
    the first block.
    """
    found: list[Tensor | None] = []
    for done in choices:
        if not done.has_tied_table:
            found.append(None)
            continue
        squares = torch.zeros(len(gradients))
        for batch in carried.batches:
            ids, places = torch.unique(batch.ids.cpu(), return_inverse=True)
            table = carried.layered.read(EMBEDDING, torch.float32, ids).numpy()
            rounded = done.embedding_rows(table, ids.numpy())
            error = torch.from_numpy(rounded - table)[places].flatten(1)
            for number, gradient in enumerate(gradients):
                mine = gradient[batch.rows].view(*batch.ids.shape, -1).float().flatten(1)
                squares[number] += torch.linalg.vecdot(mine, error).square().sum()
        found.append(squares)
    return found


def _changed(twin: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return how much quantisation changes a layer's output, for the same inputs.

    ``twin`` is the quantised layer.
    """
    found: Tensor = twin(*(each.detach().cpu() for each in inputs)).to(output.device) - output
    return found


def _quantised(modules: Mapping[str, Linear | RoutedMLPs], done: Quantisation) -> _Modules:
    """Copy the layers and mixtures that ``done`` quantises to the CPU, and quantise the copies."""
    twins: _Modules = {}
    inside: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if isinstance(module, RoutedMLPs):
            if done.formats.get(f"{path}.gate", HIGH) == HIGH:
                continue
            with torch.device("meta"):
                twins[path] = RoutedMLPs(module.spec, module.down.outputs).requires_grad_(False)
            inside |= {f"{path}.{name}": stack for name, stack in twins[path].named_children()}
        elif done.formats.get(path, HIGH) != HIGH:
            twin = Linear(0, 0).requires_grad_(False).to(module.weight.device)
            twin.bias = (
                None
                if module.bias is None
                else nn.Parameter(module.bias.cpu(), requires_grad=False)
            )
            twins[path] = inside[path] = twin
    calibrate.simulate(inside, done, list(inside))
    return twins


# --- The exact method: one layer at a time, through the whole denoiser ---


@torch.no_grad()
def _log_probs(layered: Layered, states: Sequence[State], place: Workplace) -> list[Tensor]:
    c = layered.network
    carried = Carried(
        layered,
        [state.canvas for state in states],
        memory_bytes=place.activation_bytes,
        folder=place.folder,
        drafts=[state.draft for state in states],
    )
    carried.through_all()
    head = layered.head()
    features = carried.features([predicting_rows(state, c).numpy() for state in states])
    return [log_probs(head(each), c) for each in features]


def _loss(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[float, float]:
    """Return ``(kl, frontier_kl)`` in nats per position, from the predictions on each state."""
    kl = [divergence(a, b) for a, b in zip(expected, found, strict=True)]
    frontier_kl = [each[is_frontier(a)] for a, each in zip(expected, kl, strict=True)]
    return float(torch.cat(kl).mean()), float(torch.cat(frontier_kl).mean())


# --- Both methods ---


def units(network: NetworkSpec, layers: int, *, exact: bool) -> int:
    """Return the maximum number of times that ``losses`` calls ``on_done``.

    ``layers`` is the total number of quantised layers in all quantisations that are compared. A
    mixture of experts counts as one layer.
    """
    return layers if exact else 2 * len(network.layers)


def losses(
    parameters: families.base.Parameters,
    network: NetworkSpec,
    choices: Sequence[Quantisation],
    states: Sequence[State],
    on_done: Callable[[], None],
    *,
    exact: bool,
    workplace: Workplace | None = None,
) -> list[Losses]:
    """Measure the loss of each quantised layer, for each quantisation in ``choices``.

    All quantisations must have been computed from the same ``parameters``.
    """
    place = workplace or Workplace()
    if not exact:
        layered = families.layered(parameters, network, device=place.device)
        most = place.activation_bytes
        # Three kinds of data get a third of the memory each: the hidden states of the current
        # block, the inputs of all blocks, and the gradients.
        shared = None if most is None else most // 3
        chosen = swept(states, network, _most(network))
        return estimate(layered, chosen, choices, on_done, memory_bytes=shared, folder=place.folder)
    chosen = swept(states, network)
    expected = _log_probs(families.layered(parameters, network, device=place.device), chosen, place)
    found: list[Losses] = []
    for done in choices:
        found.append({})
        for unit, layers in network.units().items():
            format = done.formats.get(layers[0].path, HIGH)
            if format != HIGH:
                alone = {layer.path: format for layer in layers}
                layered = Assigned(parameters, network, {format: done}, alone, place.device)
                found[-1][unit] = _loss(expected, _log_probs(layered, chosen, place))
                on_done()
    return found


def _most(network: NetworkSpec) -> int:
    """Return the maximum number of states on which the estimate is computed."""
    return LARGE_SWEPT if network.parameter_count() > calibrate.LARGE else SWEPT_STATES


def as_rows(
    found: Losses, network: NetworkSpec, formats: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Format losses for accuracy.json, in the order in which a pass computes the layers."""
    return [
        {
            "layer": unit,
            "format": formats[layers[0].path],
            "kl": found[unit][0],
            "frontier_kl": found[unit][1],
        }
        for unit, layers in network.units().items()
        if unit in found
    ]
