"""Finds the scales of SmoothQuant and AWQ for layer inputs, and folds the scales into parameters.

To divide a layer's input by scales, the module divides the parameters of the operator that computes
the input. It then multiplies the layer's weights by the same scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dlm_calibration import solvers
from dlm_calibration.observers import Observer, Observers
from dlm_calibration.precision_rounding import FP32
from dlm_calibration.precisions import FORMATS
from dlm_export.network.spec import LinearSpec
from dlm_export.quantising.experts import Entered, hidden_of, kept_rows
from dlm_export.quantising.quantisation import Quantisation

AWQ_ROWS = 256
# All experts of a mixture share the scales of gate and up. AWQ compares possible scales on at most
# this many experts.
AWQ_EXPERTS = 8


def fold(
    done: Quantisation,
    observers: Observers,
    sites: Mapping[str, Sequence[LinearSpec]],
    entered: Entered | None,
    fewest_tokens: int,
) -> None:
    """Find scales for the layer inputs that can be scaled, and fold them into the parameters."""
    found = {}
    for of, observer in observers.items():
        readers = sites[of]
        if readers[0].fold is None:
            continue
        if readers[0].is_stacked and readers[0].role == "down":
            assert entered is not None
            found[of] = _scales_by_expert(done, observer, readers[0], entered, fewest_tokens)
        elif done.recipe.smoothing is not None:
            amax = np.max([_row_amax(done, layer) for layer in readers], 0)
            found[of] = solvers.smooth_scales(observer.channel_amax, amax, done.recipe.smoothing)
        else:
            inputs, weights = _met(done, observer, readers, entered)
            found[of] = solvers.awq_scales(inputs, weights, _rounded_by(done, readers[0]))[0]
    for of, scales in found.items():
        done.parameters.fold(of, scales.astype(np.float32))


def _rounded_by(done: Quantisation, layer: LinearSpec) -> Callable[[np.ndarray], np.ndarray]:
    chosen = FORMATS[done.formats[layer.path]]
    return lambda w: done.rounded(w, chosen).dequantise()


def _row_amax(done: Quantisation, layer: LinearSpec) -> np.ndarray:
    """Return the largest magnitudes in the rows of a weight, over all experts, fp32 ``[K]``."""
    found: np.ndarray
    if layer.is_stacked:
        found = np.max([_row_amax_of(done, layer, expert) for expert in range(layer.count)], 0)
    else:
        found = np.abs(done.parameters.read(layer.weight, FP32)).max(1)
    return found


def _row_amax_of(done: Quantisation, layer: LinearSpec, expert: int) -> np.ndarray:
    found: np.ndarray = np.abs(_expert_matrix(done, layer, expert)).max(1)
    return found


def _expert_matrix(done: Quantisation, layer: LinearSpec, expert: int) -> np.ndarray:
    (w,) = done.parameters.read(layer.weight, FP32, (slice(expert, expert + 1),))
    return np.asarray(w)


def _met(
    done: Quantisation, observer: Observer, readers: Sequence[LinearSpec], entered: Entered | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the inputs and matrices on which AWQ tries scales.

    For a mixture of experts, the function returns the matrices of the experts with the most tokens.
    """
    plain = [done.parameters.read(layer.weight, FP32) for layer in readers if not layer.is_stacked]
    inputs, stacks = [observer.rows] * len(plain), [layer for layer in readers if layer.is_stacked]
    if not stacks:
        return inputs, plain
    assert entered is not None
    tokens = entered.tokens
    for expert in np.argsort(-tokens, kind="stable")[:AWQ_EXPERTS].tolist():
        if tokens[expert]:
            own = kept_rows(entered.inputs(entered.rows(expert)[0]), AWQ_ROWS)
            inputs += [own] * len(stacks)
            plain += [_expert_matrix(done, layer, expert) for layer in stacks]
    return inputs, plain


def _scales_by_expert(
    done: Quantisation, observer: Observer, down: LinearSpec, entered: Entered, fewest_tokens: int
) -> np.ndarray:
    """Return the scales for each expert's features before the down projection, fp32 ``[E, K]``.

    The features are divided by the scales. The function finds each expert's scales from the tokens
    that were routed to the expert. If too few tokens were routed to an expert, SmoothQuant uses the
    ranges over all experts, and AWQ uses scale 1.
    """
    scales = np.ones((down.count, down.inputs), np.float32)
    alpha, tokens = done.recipe.smoothing, entered.tokens
    for expert in range(down.count):
        rows = None
        if tokens[expert] >= fewest_tokens:
            rows = kept_rows(hidden_of(entered, expert, *entered.rows(expert)), AWQ_ROWS)
        if alpha is not None:
            amax = observer.channel_amax if rows is None else np.abs(rows).max(0)
            scales[expert] = solvers.smooth_scales(amax, _row_amax_of(done, down, expert), alpha)
        elif rows is not None:
            scales[expert] = solvers.awq_scales(
                [rows], [_expert_matrix(done, down, expert)], _rounded_by(done, down)
            )[0]
    return scales
