"""Tests of the operators for mixtures of experts.

The ONNX functions that define the operators, and the native kernels, must compute the documented
sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from test_kernels import SETS

from dlm_calibration.precision_rounding import (
    FP16,
    QuantisedWeight,
    activation_scale,
    quantise_activation,
    quantise_weight,
)
from dlm_export.graph import experts, operators
from dlm_export.graph.body import DOMAIN
from dlm_export.network.spec import STACKS
from dlm_runtime.abi import native as _native

SHAPES = [(1, 8, 64, 264, 8), (7, 5, 16, 40, 2), (33, 8, 72, 104, 3), (600, 4, 136, 264, 2)]
"""Tokens, experts, inputs, inner features, and experts per token. They cover dimensions below a
tile, panels that are not full, and more than one band.
"""
SIMULATED = ("FP8Experts", "NVFP4Experts", "NVFP4WeightExperts")
RANGE = 4.0  # the range of the activations, from which their scales are computed
Arrays = dict[str, np.ndarray]


def mixture(shape: tuple[int, ...], seed: int = 0) -> Arrays:
    """Make tokens, the chosen experts and factors of each token, and matrices of experts ``[E, K,
    N]``. The last expert is never chosen.
    """
    tokens, count, inputs, hidden, active = shape
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(max(active, count - 1))[:active] for _ in range(tokens)])[
        None
    ]
    return {
        "x": rng.normal(size=(1, tokens, inputs)).astype(np.float32),
        "chosen": chosen.astype(np.int64),
        "weights": rng.random((1, tokens, active)).astype(np.float32),
        "gate": (rng.normal(size=(count, inputs, hidden)) / inputs**0.5).astype(np.float32),
        "up": (rng.normal(size=(count, inputs, hidden)) / inputs**0.5).astype(np.float32),
        "down": (rng.normal(size=(count, hidden, inputs)) / hidden**0.5).astype(np.float32),
    }


def laid_out(given: Arrays, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Return the inputs and attributes of a call of the operator ``name``."""
    found, attributes = {each: given[each] for each in ("x", "chosen", "weights")}, {}
    if name == "Experts":
        return given, {}
    if name in SIMULATED:
        return simulated(given, name)
    columns = [given["gate"].shape[2]] * (1 if name.startswith("Gelu") else 2)
    attributes = {"columns": columns, "out_columns": [given["down"].shape[2]]}
    if name.endswith("Fp32Experts"):
        return found | {
            stack: np.stack([experts.fp32_panels(each) for each in given[stack]])
            for stack in STACKS
        }, attributes
    for stack in STACKS:
        if name.endswith("Int8Experts"):
            weights: list[QuantisedWeight] = [
                quantise_weight(each, "int8") for each in given[stack]
            ]
            width = operators.padded(given[stack].shape[2])
            found[stack] = np.stack([operators.panels(weight.codes) for weight in weights])
            found[f"{stack}_scales"] = np.stack(
                [np.pad(each.scales, (0, width - each.scales.size)) for each in weights]
            )
        else:
            weights = [
                quantise_weight(each, "int4", group_size=32, scale_dtype=FP16)
                for each in given[stack]
            ]
            found[stack] = np.stack([operators.int4_panels(weight.codes) for weight in weights])
            found[f"{stack}_scales"] = np.stack(
                [operators.panel_scales(weight.scales.T).astype(FP16) for weight in weights]
            )
    return found, attributes | ({"group_size": 32} if name.endswith("Int4Experts") else {})


def rounded(given: Arrays, name: str) -> dict[str, list[QuantisedWeight]]:
    """Return the quantised matrices of all experts. The keys are "gate", "up" and "down".

    In NVFP4, the matrices of all experts that have the same name in an expert share a global scale.
    """
    kind = "fp8" if name == "FP8Experts" else "nvfp4"
    ranges = {
        stack: float(np.abs(given[stack]).max()) if kind == "nvfp4" else None for stack in STACKS
    }
    return {
        stack: [quantise_weight(each, kind, amax=ranges[stack]) for each in given[stack]]
        for stack in STACKS
    }


def simulated(given: Arrays, name: str) -> tuple[Arrays, dict[str, Any]]:
    """Return the inputs and attributes of a call, like ``laid_out``, for formats that are simulated
    on a CPU.
    """
    found = {each: given[each] for each in ("x", "chosen", "weights")}
    for stack, weights in rounded(given, name).items():
        if name == "FP8Experts":
            found[stack] = np.stack([weight.codes.view(np.uint8) for weight in weights])
            found[f"{stack}_scales"] = np.stack([weight.scales for weight in weights])
            continue
        found[stack] = np.stack([operators.nvfp4_panels(weight.codes) for weight in weights])
        found[f"{stack}_scales"] = np.stack(
            [operators.panel_scales(weight.scales).view(np.uint8) for weight in weights]
        )
        found[f"{stack}_global_scale"] = np.asarray(weights[0].global_scale)
    if name != "NVFP4WeightExperts":
        kind = "fp8" if name == "FP8Experts" else "nvfp4"
        found |= {
            "x_scale": np.asarray(activation_scale(kind, RANGE)),
            "hidden_scale": np.asarray(activation_scale(kind, RANGE)),
        }
    attributes = {"columns": [given["gate"].shape[2]], "out_columns": [given["down"].shape[2]]}
    return found, {} if name == "FP8Experts" else attributes


def run(name: str, inputs: Arrays, attributes: dict[str, Any], *, has_kernels: bool) -> np.ndarray:
    ports = [
        ir.Value(
            name=port,
            shape=ir.Shape(value.shape),
            type=ir.TensorType(ir.DataType.from_numpy(value.dtype)),
        )
        for port, value in inputs.items()
    ]
    node = ir.node(name, ports, attributes, domain=DOMAIN)
    (y,) = node.outputs
    y.name, y.shape, y.type = "y", ir.Shape(inputs["x"].shape), ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(
        ir.Graph(ports, [y], nodes=[node], opset_imports={"": 23}, name="g"), ir_version=10
    )
    operators.declare(model, name)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if has_kernels:
        options.register_custom_ops_library(_native.library()._name)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return np.asarray(session.run(None, inputs)[0])


def test_the_definition_is_the_weighted_sum_of_the_chosen_experts() -> None:
    given = mixture(SHAPES[1])
    x, wanted = given["x"][0], np.zeros_like(given["x"][0])
    for token, (mine, weights) in enumerate(
        zip(given["chosen"][0], given["weights"][0], strict=True)
    ):
        for expert, weight in zip(mine, weights, strict=True):
            gate = x[token] @ given["gate"][expert]
            wanted[token] += weight * (
                (gate / (1 + np.exp(-gate)) * (x[token] @ given["up"][expert]))
                @ given["down"][expert]
            )
    for name in ("Experts", "Fp32Experts"):
        np.testing.assert_allclose(
            run(name, *laid_out(given, name), has_kernels=False)[0], wanted, atol=1e-5
        )


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("activation", ["", "Gelu"])
@pytest.mark.parametrize("name", ["Fp32Experts", "Int8Experts", "Int4Experts"])
def test_kernels_compute_the_definition(
    name: str, activation: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLM_KERNELS", kernels)
    name = activation + name
    # The kernels for INT4 multiply eight inputs at once. The last shape is no multiple of a vector.
    for shape in SHAPES if name.endswith("Int4Experts") else [*SHAPES, (5, 3, 20, 12, 2)]:
        inputs, attributes = laid_out(mixture(shape), name)
        wanted = run(name, inputs, attributes, has_kernels=False)
        try:
            found = run(name, inputs, attributes, has_kernels=True)
        except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument as err:
            pytest.skip(str(err)[:80])
        # The two implementations add floats in different orders. If a value is on a boundary
        # between two codes, the implementations may choose different codes, which changes one of
        # many products by 1/127.
        assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max(), shape


@pytest.mark.parametrize("has_kernels", [False, True], ids=["definition", "kernels"])
@pytest.mark.parametrize("name", ["FP8Experts", "NVFP4Experts", "NVFP4WeightExperts"])
def test_formats_that_are_simulated_compute_with_the_values_they_stand_for(
    name: str, has_kernels: bool
) -> None:
    given = mixture((9, 5, 32, 48, 2))
    x, wanted = given["x"][0], np.zeros_like(given["x"][0])
    kind = "fp8" if name == "FP8Experts" else "nvfp4"

    def seen(values: np.ndarray) -> np.ndarray:
        return values if name == "NVFP4WeightExperts" else quantise_activation(values, kind, RANGE)

    matrices = {
        stack: [each.dequantise() for each in weights]
        for stack, weights in rounded(given, name).items()
    }
    for token, (mine, weights) in enumerate(
        zip(given["chosen"][0], given["weights"][0], strict=True)
    ):
        for expert, weight in zip(mine, weights, strict=True):
            gate, up = (seen(x[token][None]) @ matrices[stack][expert] for stack in ("gate", "up"))
            wanted[token] += (
                seen(gate / (1 + np.exp(-gate)) * up * weight) @ matrices["down"][expert]
            )[0]
    found = run(name, *laid_out(given, name), has_kernels=has_kernels)[0]
    # A feature on a boundary between two codes could get either code. In this test, no feature is
    # on a boundary.
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


LIES = {
    "an expert that is not there": (
        "chosen",
        lambda value: np.where(value == value.max(), 8, value),
    ),
    "an expert before the first": ("chosen", lambda value: value - 1),
    "weights of fewer experts": ("weights", lambda value: value[..., 1:]),
    "a stack of fewer experts": ("up", lambda value: value[1:]),
    "a stack of another width": ("down", lambda value: value[:, 1:]),
    "scales of another width": ("gate_scales", lambda value: value[:, :-1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_mixture_that_lies_is_refused(lie: str) -> None:
    inputs, attributes = laid_out(mixture(SHAPES[0]), "Int8Experts")
    name, change = LIES[lie]
    inputs[name] = np.ascontiguousarray(change(inputs[name]))
    with pytest.raises(Exception, match="Int8Experts"):
        run("Int8Experts", inputs, attributes, has_kernels=True)
