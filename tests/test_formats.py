"""This project's quantised values, codes and packed bytes equal those of ONNX's reference
implementation, and those of modelopt if it is installed.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from dlm_calibration import blocks
from dlm_calibration.errors import QuantisationError
from dlm_calibration.precision_rounding import (
    E2M1_VALUES,
    NUMBER_FORMATS,
    QuantisedWeight,
    activation_scale,
    e2m1_codes,
    encode,
    int4_scales,
    pack_nibbles,
    quantise_activation,
    quantise_weight,
    unpack_nibbles,
)

CODE_TYPES = {
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "nvfp4": TensorProto.FLOAT4E2M1,
}


def _weight(rows: int = 96, columns: int = 40, seed: int = 0) -> np.ndarray:
    """A weight with heavy tails, as in trained networks.

    One column and some groups contain only zeros, and one value is -0.0.
    """
    w = np.random.default_rng(seed).standard_t(3, (rows, columns)).astype(np.float32) * np.float32(
        0.05
    )
    w[:, 3] = 0
    w[16:32, 5:9] = 0
    w[0, 0] = -0.0
    return w


def _evaluate(
    nodes: list[Any], initialisers: list[Any], feeds: dict[str, np.ndarray], output: str = "y"
) -> np.ndarray:
    """Run ONNX nodes (opset 23) with onnx.reference and return ``output``."""
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), None)
        for k, v in feeds.items()
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_empty_tensor_value_info(output)], initialisers
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    value: np.ndarray = ReferenceEvaluator(model).run([output], feeds)[0]
    return value


def _codes_tensor(q: QuantisedWeight) -> onnx.TensorProto:
    """Make an ONNX initialiser from the bytes that this project writes for the codes."""
    if q.format == "nvfp4":
        raw = pack_nibbles(q.codes).tobytes()
    elif q.format == "int4":
        raw = pack_nibbles((q.codes.astype(np.int8) & 15).view(np.uint8).reshape(-1)).tobytes()
    else:
        raw = q.codes.tobytes()
    return helper.make_tensor("codes", CODE_TYPES[q.format], q.codes.shape, raw, raw=True)


def _dequantised_by_onnx(q: QuantisedWeight) -> np.ndarray:
    codes = _codes_tensor(q)
    if q.format == "nvfp4":
        scales = helper.make_tensor(
            "s", TensorProto.FLOAT8E4M3FN, q.scales.shape, q.scales.tobytes(), raw=True
        )
        nodes = [
            helper.make_node("DequantizeLinear", ["s", "s2"], ["sd"]),
            helper.make_node("DequantizeLinear", ["codes", "sd"], ["t"], axis=-1, block_size=16),
            helper.make_node("Transpose", ["t"], ["y"], perm=[1, 0]),
        ]
        return _evaluate(
            nodes, [codes, scales, numpy_helper.from_array(np.array(q.global_scale), "s2")], {}
        )
    attributes = {"axis": 0, "block_size": q.group_size} if q.format == "int4" else {"axis": 1}
    node = helper.make_node("DequantizeLinear", ["codes", "s"], ["y"], **attributes)
    return _evaluate([node], [codes, numpy_helper.from_array(q.scales, "s")], {})


@pytest.mark.parametrize("format", NUMBER_FORMATS)
def test_weights_dequantise_from_the_packed_bytes_as_in_onnx(format: str) -> None:
    q = quantise_weight(_weight(), format, group_size=32 if format == "int4" else None)
    assert np.array_equal(q.dequantise(), _dequantised_by_onnx(q))


@pytest.mark.parametrize("format", NUMBER_FORMATS)
def test_weight_codes_are_those_of_onnx_quantize_linear(format: str) -> None:
    w = _weight()
    q = quantise_weight(w, format, group_size=32 if format == "int4" else None)
    x, scales, attributes = w, q.scales, {"axis": 1}
    if format == "int4":
        attributes = {"axis": 0, "block_size": 32}
    elif format == "nvfp4":
        assert q.global_scale is not None
        x, scales, attributes = (
            w.T,
            q.scales.astype(np.float32) * q.global_scale,
            {"axis": -1, "block_size": 16},
        )
    node = helper.make_node(
        "QuantizeLinear", ["x", "s"], ["y"], output_dtype=CODE_TYPES[format], **attributes
    )
    ours = E2M1_VALUES[q.codes] if format == "nvfp4" else q.codes.astype(np.float32)
    theirs = _evaluate([node], [], {"x": np.ascontiguousarray(x), "s": scales}).astype(np.float32)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_values_half_way_between_two_codes_fall_as_in_onnx(format: str) -> None:
    scales = np.random.default_rng(4).uniform(0.01, 1, 200).astype(np.float32)
    halves = np.arange(-7, 7, dtype=np.float32)[:, None] + np.float32(0.5)
    if format == "fp8":
        halves = halves / 4 + np.float32(16)  # from 16 on, the codes of E4M3 are 2 apart
    node = helper.make_node(
        "QuantizeLinear", ["x", "s"], ["y"], axis=1, output_dtype=CODE_TYPES[format]
    )
    theirs = _evaluate([node], [], {"x": halves * scales, "s": scales})
    assert np.array_equal(
        encode(halves * scales, scales, format).astype(np.float32), theirs.astype(np.float32)
    )


# With amax 4.0, all values are within the range. With amax 0.5, some values are outside and
# saturate.
@pytest.mark.parametrize("amax", [4.0, 0.5])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_static_activations_are_those_of_onnx(format: str, amax: float) -> None:
    x = np.random.default_rng(1).standard_normal((7, 33)).astype(np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=CODE_TYPES[format]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    theirs = _evaluate(nodes, [], {"x": x, "s": np.array(activation_scale(format, amax))})
    assert np.array_equal(quantise_activation(x, format, amax), theirs)


@pytest.mark.parametrize("largest", [3.0, 1e-35, 0.0])
def test_activations_by_rows_are_those_of_onnx(largest: float) -> None:
    x = np.random.default_rng(2).uniform(-largest, largest, (7, 33)).astype(np.float32)
    x[3] *= 100
    constants = {"axes": np.array([-1]), "least": np.float32(1e-30), "most": np.float32(127)}
    node = helper.make_node
    nodes = [
        node("Abs", ["x"], ["size"]),
        node("ReduceMax", ["size", "axes"], ["largest"]),
        node("Max", ["largest", "least"], ["amax"]),
        node("Div", ["most", "amax"], ["inverse"]),
        node("Mul", ["x", "inverse"], ["scaled"]),
        node("Round", ["scaled"], ["codes"]),
        node("Div", ["amax", "most"], ["scale"]),
        node("Mul", ["codes", "scale"], ["y"]),
    ]
    assert np.array_equal(
        quantise_activation(x, "int8", None), _evaluate(nodes, [], {"x": x} | constants)
    )


def test_nvfp4_activations_are_those_of_standard_onnx_operators() -> None:
    x = np.random.default_rng(3).standard_t(3, (5, 64)).astype(np.float32)
    x[2, 16:32] = 0
    amax = 4.0  # some values below are larger than amax
    # Groups whose scale is halfway between two codes of E4M3.
    x[3, ::16] = np.float32([17, 19, 21, 23]) * np.float32(6 * activation_scale("nvfp4", amax))
    x[3] = np.where(np.arange(64) % 16 == 0, x[3], x[3].clip(-0.01, 0.01))
    constants = {"shape": np.array([5, 4, 16]), "back": np.array([5, 64]), "axes": np.array([2])}
    constants |= {
        "g": np.array(activation_scale("nvfp4", amax)),
        "six": np.float32(6),
        "nothing": np.float32(0),
    }
    constants |= {"one": np.float32(1), "low": np.float32(2**-9), "high": np.float32(448)}
    node = helper.make_node
    nodes = [
        node("Reshape", ["x", "shape"], ["groups"]),
        node("Abs", ["groups"], ["size"]),
        node("ReduceMax", ["size", "axes"], ["amax"], keepdims=0),
        node("Mul", ["six", "g"], ["six_g"]),
        node("Div", ["amax", "six_g"], ["raw"]),
        node("Equal", ["raw", "nothing"], ["is_zero"]),
        node("Where", ["is_zero", "one", "raw"], ["usable"]),
        node("Clip", ["usable", "low", "high"], ["clipped"]),
        node("Cast", ["clipped"], ["scales"], to=TensorProto.FLOAT8E4M3FN),
        node("DequantizeLinear", ["scales", "g"], ["steps"]),
        node(
            "QuantizeLinear",
            ["x", "steps"],
            ["q"],
            axis=-1,
            block_size=16,
            output_dtype=TensorProto.FLOAT4E2M1,
        ),
        node("DequantizeLinear", ["q", "steps"], ["y"], axis=-1, block_size=16),
    ]
    theirs = _evaluate(
        nodes, [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()], {"x": x}
    )
    assert np.array_equal(quantise_activation(x, "nvfp4", amax), theirs)


def test_e2m1_rounding_is_that_of_ml_dtypes_everywhere() -> None:
    exact = np.arange(0, 8, 1 / 256, dtype=np.float32)
    x = np.concatenate(
        [
            exact,
            np.nextafter(exact, np.float32(9)),
            np.nextafter(exact, np.float32(-1)),
            [1e30, 1e-30],
        ]
    )
    x = np.concatenate([x, -x]).astype(np.float32)
    theirs = x.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(E2M1_VALUES[e2m1_codes(x)], theirs.astype(np.float32))
    keeps_sign = x != 0
    assert np.array_equal(e2m1_codes(x)[keeps_sign], theirs.view(np.uint8)[keeps_sign])
    assert (e2m1_codes(np.array([0.0, -0.0], dtype=np.float32)) == 0).all()
    assert np.array_equal(e2m1_codes(E2M1_VALUES[E2M1_VALUES != 0]), np.flatnonzero(E2M1_VALUES))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nvfp4_bytes_are_those_of_modelopt(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip(
        "modelopt.torch.quantization", reason="nvidia-modelopt is not installed here"
    )
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    torch_dtype = getattr(torch, dtype)
    ties = np.tile(
        np.float32(
            [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]
        ),
        6,
    )
    rng = np.random.default_rng(5)
    between = rng.uniform(
        -0.001, 0.001, (64, 300)
    )  # groups whose scale is halfway between two codes of E4M3
    between[::16] = rng.choice([17, 19, 21, 23, 25], (4, 300)) * (6 * 0.7 / 2688)
    between[0, 0] = 0.7
    for w in (
        _weight(),
        _weight(512, 300, seed=1),
        between,
        np.stack([ties * s for s in (1, 448, 2, 0.5)], axis=1),
    ):
        tensor = torch.from_numpy(np.ascontiguousarray(w.T, dtype=np.float32)).to(torch_dtype)
        theirs, scales, global_scale = NVFP4QTensor.quantize(tensor.clone(), 16)
        ours = quantise_weight(tensor.float().numpy().T, "nvfp4")
        assert np.array_equal(pack_nibbles(ours.codes), theirs._quantized_data.numpy())
        assert np.array_equal(ours.scales.view(np.uint8), scales.view(torch.uint8).numpy())
        assert ours.global_scale == global_scale.item()
        values = theirs.dequantize(
            torch.float32, scale=scales, double_scale=global_scale, block_sizes={-1: 16}
        )
        assert np.array_equal(ours.dequantise(), values.numpy().T)


# Values from fp32's subnormal numbers to almost fp32's largest number. If the code let a scale
# underflow or overflow, a test with these values would fail.
_finite = st.floats(-(2.0**120), 2.0**120, width=32)
_matrices = st.tuples(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 1e-44, 1e-38, 1e-34, 1e-30, 1.0, 1e30]),
).flatmap(
    lambda shape: st.lists(st.floats(-1, 1, width=32) | _finite, max_size=4).map(
        lambda extra: _matrix(
            shape[0] * 16, shape[1], np.float32(shape[2]), np.array(extra, dtype=np.float32)
        )
    )
)


def _matrix(rows: int, columns: int, scale: np.float32, extra: np.ndarray) -> np.ndarray:
    w = (
        np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)
        * scale
    )
    w[: len(extra), 0] = extra
    return w


@given(_matrices, st.sampled_from(list(NUMBER_FORMATS)))
@settings(max_examples=100)
def test_weights_of_any_magnitude_give_finite_values_within_half_a_step(
    w: np.ndarray, format: str
) -> None:
    q = quantise_weight(w, format, group_size=8 if format == "int4" else None)
    values = q.dequantise()
    assert np.isfinite(values).all()
    assert (np.asarray(q.scales, dtype=np.float32) > 0).all()
    assert q.shape == w.shape == values.shape
    assert (values[w == 0] == 0).all()
    # The largest possible distance from a value to the nearest code, in units of the scale. This
    # distance occurs between the two largest codes. For E4M3, these codes are 416 and 448. For
    # E2M1, they are 4 and 6.
    half_step = {"int8": 0.5, "int4": 0.5, "fp8": 16, "nvfp4": 1}[format]
    if format == "nvfp4":
        assert q.global_scale is not None
        steps = np.repeat(q.scales.astype(np.float64).T * float(q.global_scale), 16, axis=0)
        # If E4M3 rounds a subnormal scale down, ``shortfall`` is the error of the value with the
        # largest code, 6.
        shortfall = 6 * 2.0**-10 * float(q.global_scale)
        # All values below the smallest global scale become zero.
        tiny = max(shortfall, 2688 * 2.0**-117)
    else:
        steps = (
            np.repeat(q.scales, 8, axis=0)[: len(w)]
            if format == "int4"
            else np.broadcast_to(q.scales, w.shape)
        )
        tiny = 448 * 2.0**-126
    error = np.abs(values.astype(np.float64) - w)
    allowed = half_step * steps.astype(np.float64)
    if format == "int4":  # the largest value of a group may be up to two steps above the last code
        allowed[np.isin(q.codes.astype(int), (-8, 7))] *= 4
    assert (error <= np.maximum(allowed, tiny) * (1 + 1e-5)).all()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-30, 0.02, 1e30]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60)
def test_int4_scales_leave_the_least_error_of_their_choices(
    seed: int, largest: float, is_counted: bool, is_signed: bool
) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(3, (2, 16, 5)) * largest).astype(np.float32)
    counts = rng.uniform(0.1, 9, (16, 1)) if is_counted else np.ones((16, 1))
    amax = np.abs(w).max(1)
    weights = counts.astype(np.float32) if is_counted else None
    chosen = int4_scales(w, amax, weights=weights, is_signed=is_signed)
    levels = np.array([7, 7.5, 8, 8.5, 9, 9.5])
    range_of = np.where(is_signed & (w.max(1) == amax), -amax, amax)
    scales = range_of[..., None].astype(np.float64) / levels  # [G, N, choices]
    codes = np.clip(np.rint(w[..., None] / scales[:, None]), -8, 7)
    error = (
        counts[..., None]
        * (w[..., None] / largest) ** 2
        * (codes * scales[:, None] / largest - w[..., None] / largest) ** 2
    ).sum(1)
    found = np.abs(scales - chosen[..., None]).argmin(-1)
    assert np.allclose(
        np.take_along_axis(scales, found[..., None], -1)[..., 0], chosen, rtol=1e-6, atol=0
    )
    assert (
        np.take_along_axis(error, found[..., None], -1)[..., 0] <= error.min(-1) * (1 + 1e-4)
    ).all()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["int8", "fp8", "nvfp4"]),
    st.sampled_from([1e-45, 1e-38, 1e-20, 0.1, 3.0, 1e30]),
)
@settings(max_examples=80)
def test_activations_stay_finite_within_the_range_and_keep_zeros(
    seed: int, format: str, amax: float
) -> None:
    x = np.random.default_rng(seed).standard_normal((3, 2, 32)).astype(np.float32)
    x[0] = 0
    fake = quantise_activation(x, format, amax)
    assert fake.shape == x.shape
    assert fake.dtype == np.float32
    assert np.isfinite(fake).all()
    assert (fake[0] == 0).all()
    assert (fake * x >= 0).all()
    limit = {"int8": 128, "fp8": 448, "nvfp4": 6 * 448}[format] * activation_scale(format, amax)
    assert np.abs(fake).max() <= limit * (1 + 1e-6)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_nibbles_survive_packing_with_the_first_one_low(seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (3, 8)).astype(np.uint8)
    assert np.array_equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert pack_nibbles(np.array([1, 2], dtype=np.uint8)).tolist() == [0x21]


@pytest.mark.parametrize("format", NUMBER_FORMATS)
def test_blocks_of_rows_do_not_show_in_the_result(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = _weight(80, 24)
    whole = quantise_weight(w, format, group_size=24 if format == "int4" else None)
    x = quantise_activation(w.T, format, 1.0) if format != "int4" else None
    monkeypatch.setattr(blocks, "_BLOCK", 100)
    pieces = quantise_weight(w, format, group_size=24 if format == "int4" else None)
    assert np.array_equal(whole.codes, pieces.codes)
    assert np.array_equal(whole.scales, pieces.scales)
    assert np.array_equal(whole.dequantise(), pieces.dequantise())
    assert x is None or np.array_equal(x, quantise_activation(w.T, format, 1.0))


def test_a_short_last_group_has_a_scale_of_its_own() -> None:
    w = np.ones((20, 2), dtype=np.float32)
    w[16:] = 100
    q = quantise_weight(w, "int4", group_size=16)
    assert np.allclose(q.scales, [[1 / 7] * 2, [100 / 7] * 2])
    assert np.allclose(q.dequantise(), w)


def test_a_given_range_saturates_what_is_beyond_it() -> None:
    w = np.array([[1.0, -10.0], [-1.0, 0.5]], dtype=np.float32)
    assert quantise_weight(w, "int8", amax=1.0).codes.tolist() == [[127, -127], [-127, 64]]
    assert quantise_weight(w * 0.75, "int4", group_size=2, amax=0.75).codes.astype(int).tolist()[
        0
    ] == [7, -8]
    assert quantise_weight(w, "fp8", amax=np.array([1.0, 2.0])).dequantise().tolist() == [
        [1.0, -2.0],
        [-1.0, 0.5],
    ]
    assert np.abs(quantise_weight(np.tile(w, (8, 1)), "nvfp4", amax=1.0).dequantise()).max() == 1.0


@pytest.mark.parametrize("largest", [1e-30, 1e-34, 1e-37, 1e-42])
def test_nvfp4_scales_multiply_to_normal_numbers(largest: float) -> None:
    w = np.full((32, 1), largest * 1e-6, dtype=np.float32)
    w[16] = largest
    q = quantise_weight(w, "nvfp4")
    assert q.global_scale is not None
    assert (q.scales.astype(np.float32) * q.global_scale).min() >= np.finfo(np.float32).tiny
    assert (q.dequantise()[16] > 0) == (largest == 1e-30)


@pytest.mark.parametrize("largest", [3e38, 1e-39])
def test_dynamic_activations_of_extreme_ranges_stay_finite(largest: float) -> None:
    x = np.array([-largest, 0, largest], dtype=np.float32)
    fake = quantise_activation(x, "int8", None)
    assert np.isfinite(fake).all()
    assert fake[1] == 0
    # If ``largest`` is 1e-39, the smallest possible scale is larger than the values, so the values
    # become 0.
    assert np.abs(fake - x).max() <= (0.01 * largest if largest > 1 else largest)


@pytest.mark.parametrize("format", NUMBER_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(format: str, bad: float) -> None:
    w = _weight()
    w[40, 7] = bad
    w[41, 8] = bad
    for amax in (None, 1.0):
        with pytest.raises(
            QuantisationError,
            match=r"2 of 3840 values are NaN or infinite, the first at row 40, column 7",
        ):
            quantise_weight(w, format, amax=amax)
    if format != "int4":
        with pytest.raises(QuantisationError, match="2 of 3840 values"):
            quantise_activation(w.T, format, 1.0)


def test_what_a_format_does_not_take_is_refused() -> None:
    w = _weight()
    for arguments, message in (
        (("int3",), "unknown format 'int3': choose one of int8, int4, fp8, nvfp4"),
        (("int8", 32), "no groups, but a group size"),
        (("nvfp4", 32), "groups of 16, not of 32"),
        (("int4", 0), "not positive"),
    ):
        with pytest.raises(QuantisationError, match=message):
            quantise_weight(
                w, arguments[0], group_size=arguments[1] if len(arguments) > 1 else None
            )  # type: ignore[arg-type]
    with pytest.raises(QuantisationError, match="24 input channels cannot be nvfp4"):
        quantise_weight(w[:24], "nvfp4")
    with pytest.raises(QuantisationError, match=r"shape \[0, 40\]"):
        quantise_weight(w[:0], "int8")
    with pytest.raises(QuantisationError, match=r"\[3\] does not fit scales of shape \[40\]"):
        quantise_weight(w, "int8", amax=np.ones(3))
    with pytest.raises(QuantisationError, match="negative, NaN or infinite"):
        quantise_weight(w, "int8", amax=float("nan"))
    with pytest.raises(QuantisationError, match="cannot be packed"):
        pack_nibbles(np.zeros(3, dtype=np.uint8))
    with pytest.raises(QuantisationError, match="choose int8, fp8 or nvfp4"):
        quantise_activation(w, "int4", 1.0)
    with pytest.raises(QuantisationError, match="does not divide"):
        quantise_activation(w[:, :24], "nvfp4", 1.0)
    for amax in (None, 0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(QuantisationError, match="need a positive range"):
            quantise_activation(w, "fp8", amax)
