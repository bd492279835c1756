"""Tests of smoothing, AWQ, GPTQ and rotation.

Each method must reduce the loss from quantising. Without quantising, the method must not change the
results of the network.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_calibration.errors import QuantisationError
from dlm_calibration.precision_rounding import (
    QuantisedWeight,
    int4_scales,
    quantise_activation,
    quantise_weight,
)
from dlm_calibration.solvers import awq_scales, hadamard, rotate, rotate_rows, smooth_scales
from dlm_export.quantising import gptq as solver


def gptq(
    w: np.ndarray, gram: np.ndarray, *, damping: float = 0.01, **format: Any
) -> QuantisedWeight:
    """Quantise a weight matrix with GPTQ. ``gram`` is the Gram matrix of the layer's inputs."""
    return solver.gptq(
        w, solver.inverse_factor(torch.from_numpy(np.float32(gram)), damping), **format
    )


def _correlated(rows: int, channels: int, seed: int = 0) -> np.ndarray:
    """Make inputs ``[rows, channels]`` that resemble activations: each row is a mix of a few fixed
    directions, plus a little noise in each channel.
    """
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((rows, max(channels // 8, 1))) @ rng.standard_normal(
        (max(channels // 8, 1), channels)
    )
    return np.asarray(shared + 0.3 * rng.standard_normal((rows, channels)), dtype=np.float32)


def _weight(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def _output_error(x: np.ndarray, w: np.ndarray, quantised: np.ndarray) -> float:
    return float(np.square((x @ (quantised - w)).astype(np.float64)).mean())


# SmoothQuant


@given(st.integers(0, 2**32 - 1), st.integers(1, 64), st.floats(0, 1))
@settings(max_examples=60)
def test_smoothing_scales_are_positive_bounded_and_leave_the_product(
    seed: int, channels: int, alpha: float
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((5, channels)) * np.exp(4 * rng.standard_normal(channels))).astype(
        np.float32
    )
    w = rng.standard_normal((channels, 3)).astype(np.float32)
    x[:, rng.random(channels) < 0.2] = 0
    w[rng.random(channels) < 0.2] = 0
    scales = smooth_scales(np.abs(x).max(axis=0), np.abs(w).max(axis=1), alpha)
    assert scales.dtype == np.float32
    assert ((scales >= 0.99e-4) & (scales <= 1.01e4)).all()
    assert (scales[(x == 0).all(axis=0) | (w == 0).all(axis=1)] == 1).all()
    expected, bound = x @ w, np.abs(x) @ np.abs(w)
    assert (np.abs((x / scales) @ (scales[:, None] * w) - expected) <= 1e-5 * bound + 1e-30).all()


def test_smoothing_takes_activation_outliers_away() -> None:
    x, w = _correlated(64, 64), _weight(64, 32)
    x[:, 5] *= 100
    scales = smooth_scales(np.abs(x).max(axis=0), np.abs(w).max(axis=1))

    def error(x: np.ndarray, w: np.ndarray) -> float:
        fake = (
            quantise_activation(x, "int8", float(np.abs(x).max()))
            @ quantise_weight(w, "int8").dequantise()
        )
        return float(np.square(fake - x @ w).mean())

    assert error(x / scales, w * scales[:, None]) < 0.2 * error(x, w)


# AWQ


def _nearest_int4(w: np.ndarray) -> np.ndarray:
    return quantise_weight(w, "int4", group_size=32).dequantise()


def test_awq_protects_the_channels_that_carry_the_input() -> None:
    x = _correlated(96, 64)
    x[:, [3, 40]] *= 30
    weights = [_weight(64, 32), _weight(64, 16, seed=2)]
    scales, before, after = awq_scales([x] * len(weights), weights, _nearest_int4)
    assert scales.dtype == np.float32
    assert scales[[3, 40]].min() > np.delete(scales, [3, 40]).max()
    assert np.isclose(
        before, sum(_output_error(x, w, _nearest_int4(w)) for w in weights), rtol=1e-4
    )
    scaled = [_nearest_int4(w * scales[:, None]) / scales[:, None] for w in weights]
    assert np.isclose(
        after, sum(_output_error(x, w, s) for w, s in zip(weights, scaled, strict=True)), rtol=1e-4
    )
    assert after < 0.7 * before


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_awq_never_does_worse_than_no_scales_and_keeps_unused_channels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 32)).astype(np.float32)
    x[:, 4:7] = 0
    scales, before, after = awq_scales([x], [_weight(32, 4, seed)], _nearest_int4, grid=4)
    assert after <= before
    assert (scales[4:7] == 1).all()
    assert (np.isfinite(scales) & (scales > 0)).all()


# GPTQ


def _gptq_by_elimination(
    w: np.ndarray, hessian: np.ndarray, group_size: int, format: str, *, is_signed: bool
) -> np.ndarray:
    """Compute GPTQ with the recurrence of OBQ, in float64 and without batches.

    The function quantises the rows in order. After each row, it removes the row and the column with
    the same index from the inverse of ``hessian``.
    """
    low, high, levels = (
        (-8, 7, (7, 7.5, 8, 8.5, 9, 9.5)) if format == "int4" else (-127, 127, (127,))
    )
    inverses = [np.linalg.inv(hessian)]
    for _ in range(len(w) - 1):
        inverse = inverses[-1]
        inverses.append((inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:])
    # A scale is chosen by a sum of squared errors. ``counts`` contains the factor for each row.
    counts = 1 / np.array([[inverse[0, 0]] for inverse in inverses])
    left, out = w.astype(np.float64), np.zeros(w.shape)
    for i, inverse in enumerate(inverses):
        if i % group_size == 0:
            group = left[i : i + group_size]
            largest = np.abs(group).max(axis=0)
            if is_signed:
                largest = np.where(group.max(axis=0) == largest, -largest, largest)
            choices = [largest / level for level in levels]
            errors = [
                (
                    counts[i : i + group_size]
                    * group**2
                    * (np.clip(np.rint(group / c), low, high) * c - group) ** 2
                )
                for c in choices
            ]
            scale = np.choose(np.argmin(np.sum(errors, 1), 0), choices)
        out[i] = np.clip(np.rint(left[i] / scale), low, high) * scale
        left[i:] -= np.outer(inverse[:, 0] / inverse[0, 0], left[i] - out[i])
    return out


@pytest.mark.parametrize(
    ("format", "rows", "group_size", "is_signed"),
    [
        ("int4", 96, 32, False),
        ("int4", 96, 32, True),
        ("int4", 300, 64, False),
        ("int4", 150, 40, True),
        ("int8", 300, None, False),
    ],
)
def test_gptq_equals_the_recurrence_it_reorders(
    format: str, rows: int, group_size: int | None, is_signed: bool
) -> None:
    x, w = _correlated(2 * rows, rows), _weight(rows, 6)
    gram = x.T @ x
    ours = gptq(w, gram, format=format, group_size=group_size, is_signed=is_signed).dequantise()
    damped = gram.astype(np.float64) + 0.01 * np.mean(np.diag(gram)) * np.eye(rows)
    expected = _gptq_by_elimination(w, damped, group_size or rows, format, is_signed=is_signed)
    # The tested code uses fp32, so it may round a value near the middle of two codes differently.
    # This changes all later rows of the column, so only 80% of the columns must agree.
    assert (np.abs(ours - expected).max(axis=0) < 1e-4).mean() >= 0.8


@pytest.mark.parametrize(
    ("format", "group_size"),
    [("int4", 32), ("int4", None), ("int8", None), ("fp8", None), ("nvfp4", None)],
)
def test_gptq_beats_rounding_to_nearest_on_correlated_inputs(
    format: str, group_size: int | None
) -> None:
    x, unseen = np.split(_correlated(1024, 160), 2)
    w = _weight(160, 24)
    nearest = quantise_weight(w, format, group_size=group_size)
    solved = gptq(w, x.T @ x, format=format, group_size=group_size)
    assert solved.codes.dtype == nearest.codes.dtype
    assert solved.scales.shape == nearest.scales.shape
    assert solved.group_size == nearest.group_size
    assert _output_error(x, w, solved.dequantise()) < 0.5 * _output_error(
        x, w, nearest.dequantise()
    )
    assert _output_error(unseen, w, solved.dequantise()) < 0.6 * _output_error(
        unseen, w, nearest.dequantise()
    )


def test_gptq_on_independent_inputs_is_rounding_to_nearest() -> None:
    w = _weight(64, 8)
    solved = gptq(w, np.eye(64), group_size=32)
    nearest = quantise_weight(w, "int4", group_size=32)
    assert np.array_equal(solved.codes, nearest.codes)
    assert np.array_equal(solved.scales, nearest.scales)


def test_gptq_scales_groups_for_the_inputs_that_are_large() -> None:
    w, sizes = _weight(64, 8), np.geomspace(0.01, 1, 64)
    solved = gptq(w, np.diag(sizes), group_size=32)
    amax = np.abs(w.reshape(2, 32, 8)).max(1)
    damped = (sizes + 0.01 * sizes.mean()).astype(np.float32)
    assert np.array_equal(
        solved.scales, int4_scales(w.reshape(2, 32, 8), amax, weights=damped.reshape(2, 32, 1))
    )
    assert not np.array_equal(solved.scales, quantise_weight(w, "int4", group_size=32).scales)


def test_gptq_rounds_dead_channels_to_nearest_and_lets_them_correct_nothing() -> None:
    x, w = _correlated(128, 64), _weight(64, 8)
    dead = [0, 17, 63]
    x[:, dead] = 0
    solved = gptq(w, x.T @ x, format="int8")
    assert np.array_equal(solved.codes[dead], quantise_weight(w, "int8").codes[dead])
    assert np.isfinite(gptq(w, np.zeros((64, 64))).dequantise()).all()
    zero_column = w.copy()
    zero_column[:, 2] = 0
    assert (gptq(zero_column, x.T @ x, group_size=32).dequantise()[:, 2] == 0).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 2100))
@settings(max_examples=6)
def test_a_gram_matrix_sums_weighted_outer_products_in_any_portions(
    seed: int, channels: int
) -> None:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(
        (rng.standard_normal((40, channels)) * rng.choice([0, 0.01, 1, 1000], (40, 1))).astype(
            np.float32
        )
    )
    weight = torch.from_numpy(rng.random(40).astype(np.float32))
    gram, cut = solver.Gram(channels, torch.device("cpu")), int(rng.integers(0, 41))
    gram.add(x[:cut], weight[:cut])
    gram.add(x[cut:], weight[cut:])
    unit = x.double() / x.double().square().mean(1, keepdim=True).sqrt().clamp_min(
        1e-9
    )  # the solver also ignores the lengths of the vectors
    exact = (unit * weight[:, None].double()).T @ unit
    assert (gram.matrix.triu() - exact.triu()).abs().max() <= 1e-5 * exact.abs().max()


def test_a_vector_a_thousand_times_as_long_as_the_others_does_not_rule_gptq() -> None:
    x, w = torch.from_numpy(_correlated(512, 96)), _weight(96, 24)
    errors = []
    for longest in (1, 1000):
        x[0] *= longest
        gram = solver.Gram(96, x.device)
        gram.add(x, torch.ones(len(x)))
        solved = solver.gptq(w, solver.inverse_factor(gram.matrix), group_size=32)
        errors.append(_output_error(x[1:].numpy(), w, solved.dequantise()))
    assert errors[1] < 1.1 * errors[0] < 0.6 * _output_error(x[1:].numpy(), w, _nearest_int4(w))


def test_the_factor_of_many_inputs_is_nearly_the_exact_one() -> None:
    x = torch.from_numpy(_correlated(200, 96))
    gram = x.T @ x
    exact, limit = solver.inverse_factor(gram), solver.EXACT
    try:
        solver.EXACT = 0
        rough = solver.inverse_factor(gram)
    finally:
        solver.EXACT = limit
    assert rough.dtype == exact.dtype == torch.float32
    assert (rough - exact).abs().max() < 1e-3 * exact.abs().max()
    damped = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(
        96, dtype=torch.float64
    )
    assert ((exact.T @ exact).double() @ damped - torch.eye(96)).abs().max() < 1e-2


# Rotation


@pytest.mark.parametrize(
    ("size", "n"), [(1, 1), (7, 1), (12, 4), (96, 32), (1024, 1024), (4096, 1024), (11008, 256)]
)
def test_hadamard_is_orthonormal_symmetric_and_as_large_as_it_may_be(size: int, n: int) -> None:
    matrix = hadamard(size)
    assert matrix.shape == (n, n)
    assert matrix.dtype == np.float32
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix @ matrix, np.eye(n), atol=1e-5)
    assert np.allclose(np.abs(matrix), 1 / np.sqrt(n))


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 6, 24, 64, 160]))
@settings(max_examples=40)
def test_rotating_both_sides_leaves_the_product(seed: int, channels: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, channels)).astype(np.float32)
    w = rng.standard_normal((channels, 5)).astype(np.float32)
    assert rotate(x).shape == x.shape
    assert np.allclose(rotate(x) @ rotate_rows(w), x @ w, atol=1e-4)
    assert np.allclose(rotate(rotate(x)), x, atol=1e-5)


# Refusals


def test_what_cannot_be_solved_is_refused() -> None:
    w, gram, x = _weight(32, 4), np.eye(32), np.ones((3, 32), dtype=np.float32)
    nan = np.full(32, np.nan)
    indefinite = np.eye(32)
    indefinite[0, 1] = indefinite[1, 0] = 5
    with pytest.raises(QuantisationError, match=r"alpha\) 1\.5 is outside 0\.\.1"):
        smooth_scales(np.ones(3), np.ones(3), alpha=1.5)
    with pytest.raises(QuantisationError, match=r"\[3\] and \[4\] do not belong"):
        smooth_scales(np.ones(3), np.ones(4))
    with pytest.raises(QuantisationError, match=r"the weight range of channel 1 is -1\.0"):
        smooth_scales(np.ones(2), np.array([1.0, -1.0]))
    with pytest.raises(QuantisationError, match="do not fit weights of shapes"):
        awq_scales([x], [_weight(31, 4)], _nearest_int4)
    with pytest.raises(QuantisationError, match="of shapes none"):
        awq_scales([], [], _nearest_int4)
    with pytest.raises(QuantisationError, match="too small"):
        awq_scales([x], [w], _nearest_int4, grid=0)
    with pytest.raises(QuantisationError, match="channel 0 are not finite"):
        awq_scales([x * nan.astype(np.float32)], [w], _nearest_int4)
    with pytest.raises(QuantisationError, match="unknown format 'fp6'"):
        gptq(w, gram, format="fp6")
    with pytest.raises(QuantisationError, match="damping of 0"):
        gptq(w, gram, damping=0)
    with pytest.raises(QuantisationError, match=r"\[31, 31\] does not belong to a weight of 32"):
        gptq(w, gram[1:, 1:])
    with pytest.raises(QuantisationError, match="not finite, or a negative diagonal"):
        gptq(w, np.diag(nan))
    with pytest.raises(QuantisationError, match=r"not positive definite with damping 0\.01"):
        gptq(w, indefinite)
    with pytest.raises(QuantisationError, match="NaN or infinite"):
        gptq(w * np.float32(np.nan), gram)
    with pytest.raises(ValueError, match="not positive"):
        hadamard(0)
