"""Tests of quantised graphs.

For each format, a graph in ONNX Runtime and a torch denoiser with the same quantised values must
give the same results.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from networks import make_network

from dlm_calibration.precision_rounding import pack_nibbles, quantise_activation, quantise_weight
from dlm_calibration.precisions import FORMATS, RECIPES, Recipe, RecipeError
from dlm_calibration.states import State
from dlm_export import families, graph
from dlm_export.building.writing import part_of
from dlm_export.graph import quantise, trace, write
from dlm_export.quantising import calibrate, quantisation
from dlm_export.sources import Source, open_source

LENGTH = 24
SIMULATED = ("fp8", "nvfp4", "nvfp4-weight")


@functools.cache
def _source(checkpoint: Path) -> Source:
    return open_source(checkpoint)


@pytest.fixture
def source(dream_checkpoint: Path) -> Source:
    return _source(dream_checkpoint)


def _states(source: Source, count: int = 6) -> list[State]:
    c, rng = source.network, np.random.default_rng(5)
    canvases = rng.integers(0, c.mask_token_id, (count, LENGTH))
    canvases[:, LENGTH // 2 :][rng.random((count, LENGTH // 2)) < 0.5] = c.mask_token_id
    return [State(canvas, "masked", 0.5, 4) for canvas in canvases]


def _quantise(source: Source, recipe: Recipe, folder: Path) -> quantisation.Quantisation:
    """Quantise a denoiser with a recipe, and write the quantised graph to ``folder``."""
    traced = _traced(source)
    formats = recipe.formats(list(source.network.quantisable()))
    done = calibrate.calibrate(
        source.parameters, source.network, recipe, formats, _states(source), lambda: None
    )
    parts = quantise.rewrite(
        traced, formats, done.amax, rotated=done.rotated, embedding=recipe.embedding
    )

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        if name not in parts:
            return done.parameters.read(name, dtype)
        layer = parts[name].layer
        return part_of(done.embedding() if layer == "embed" else done.weight(layer), parts[name])

    write.write_graph(traced, read, folder, lambda _: None)
    return done


@functools.cache
def _trace_once(path: Path) -> bytes:
    proto = ir.to_proto(_named(trace.trace_pass(_source(path).network, "fp32").model))
    return bytes(proto.SerializeToString())


def _named(model: ir.Model) -> ir.Model:
    """Set all initialisers to zeros, so that the model can be serialised. Returns the model."""
    for name, value in model.graph.initializers.items():
        value.const_value = ir.tensor(
            np.zeros([int(size) for size in value.shape or ()], np.float32), name=name
        )
    return model


def _traced(source: Source) -> trace.Graph:
    """Return the traced graph of a denoiser.

    Each denoiser is traced only once, because tracing takes a second.
    """
    model = ir.from_proto(onnx.ModelProto.FromString(_trace_once(source.path)))
    for value in model.graph.initializers.values():
        value.const_value = None
    return trace.Graph(model, source.network, torch.float32)


def _run(folder: Path, source: Source, ids: np.ndarray, simulated: bool) -> np.ndarray:
    """Compute the logits ``[L, V]`` with ONNX Runtime, with the same settings as the native
    runtime.
    """
    c = source.network
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.add_session_config_entry("session.x64quantprecision", "1")
    if simulated:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(
        folder / graph.GRAPH_FILE, options, providers=["CPUExecutionProvider"]
    )
    positions = np.arange(len(ids))[None]
    feeds = {"input_ids": ids[None], "position_ids": positions, "score_rows": positions}
    shapes = [shape for shape in c.cache_shapes() for _ in ("key", "value")]
    for name, (kv_heads, head_size) in zip(trace.input_names(c)[3:], shapes, strict=True):
        feeds[name] = np.zeros((1, kv_heads, 0, head_size), np.float32)
    return np.asarray(session.run(["logits"], feeds)[0])[0]


@torch.no_grad()
def _simulated(source: Source, done: quantisation.Quantisation, ids: np.ndarray) -> np.ndarray:
    denoiser = families.load(done.parameters, source.network)
    calibrate.simulate(dict(denoiser.named_modules()), done)
    return denoiser(torch.from_numpy(ids)[None])[0].numpy()


def _ids(source: Source, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, source.network.vocab_size, LENGTH)


def _difference(
    source: Source, done: quantisation.Quantisation, folder: Path, simulated: bool
) -> float:
    """Compare the graph with torch on three canvases, and return the smallest difference.

    On a few canvases, rounding errors make the graph and torch quantise an input of a layer to
    different codes, which differ by 6% in fp8. A defect of the graph causes a difference on every
    canvas.
    """
    canvases = [_ids(source, seed) for seed in (9, 10, 11)]
    return min(
        _relative(_run(folder, source, ids, simulated), _simulated(source, done, ids))
        for ids in canvases
    )


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / (theirs.max() - theirs.min()))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "high"])
def test_the_graph_computes_what_torch_does_on_the_same_quantised_values(
    source: Source, name: str, tmp_path: Path
) -> None:
    recipe = Recipe("test", (("*", name),))
    done = _quantise(source, recipe, tmp_path)
    onnx.checker.check_model(tmp_path / graph.GRAPH_FILE)
    assert _difference(source, done, tmp_path, name in SIMULATED) < 1e-4
    ids = _ids(source)
    ours = _run(tmp_path, source, ids, name in SIMULATED)
    exact = (
        families.load(source.parameters, source.network)(torch.from_numpy(ids)[None])[0]
        .detach()
        .numpy()
    )
    assert _relative(ours, exact) > 1e-4, "nothing was quantised"


@pytest.mark.parametrize(
    "options",
    [
        {"embedding": "int8"},
        {"smoothing": 0.5, "rotate_down": True, "embedding": "fp8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["fp8", "int4-rtn"])
def test_options_fit_every_recipe(source: Source, name: str, options: dict, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPES[name], **options)
    done = _quantise(source, recipe, tmp_path)
    assert _difference(source, done, tmp_path, name == "fp8") < 1e-4


@pytest.mark.parametrize(
    ("name", "solver"),
    [("int4", "awq"), ("int4", "gptq"), ("fp8", "gptq"), ("nvfp4-weight", "gptq")],
)
def test_solvers_fit_the_graph(source: Source, name: str, solver: str, tmp_path: Path) -> None:
    done = _quantise(source, dataclasses.replace(RECIPES[name], solver=solver), tmp_path)
    assert _difference(source, done, tmp_path, name in SIMULATED) < 1e-4


@pytest.mark.parametrize("is_clean", [False, True])
def test_a_head_is_solved_in_pieces_as_in_one(
    source: Source, is_clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``is_clean``, no positions are masked, so all positions count as inputs of the head."""
    states, c = _states(source), source.network
    if is_clean:
        states = [
            dataclasses.replace(
                state, canvas=np.where(state.canvas == c.mask_token_id, 1, state.canvas)
            )
            for state in states
        ]
    recipe = Recipe("head", (("head", "int4-g32-dynamic"),), solver="gptq")
    formats, found = recipe.formats(list(c.quantisable())), []
    for columns in (c.vocab_size, 24):
        monkeypatch.setattr(quantisation, "_HEAD_COLUMNS", columns)
        done = calibrate.calibrate(source.parameters, c, recipe, formats, states, lambda: None)
        found.append(done.solved["head"])
        assert done.observers is not None
    assert np.array_equal(found[0].codes, found[1].codes)
    assert np.array_equal(found[0].scales, found[1].scales)
    nearest = quantisation.Quantisation(recipe, formats, quantisation.Folded(source.parameters, c))
    assert not np.array_equal(found[0].codes, nearest.weight("head").codes)


@torch.no_grad()
def test_folding_leaves_the_function_as_it_was(source: Source) -> None:
    c, rng = source.network, np.random.default_rng(3)
    folded = quantisation.Folded(source.parameters, c)
    for site, readers in quantisation.by_site(c.linear_layers()).items():
        folded.fold(site, rng.uniform(0.2, 5.0, readers[0].inputs).astype(np.float32))
    ids = torch.from_numpy(_ids(source))[None]
    before, after = (
        families.load(source.parameters, c)(ids)[0].numpy(),
        families.load(folded, c)(ids)[0].numpy(),
    )
    assert _relative(after, before) < 1e-5
    assert not np.array_equal(
        folded.read("blocks.0.mlp.up.weight", np.dtype("f4")),
        source.parameters.read("blocks.0.mlp.up.weight", np.dtype("f4")),
    )


@torch.no_grad()
def test_the_fp8_graph_equals_a_fake_quantised_torch_forward(
    source: Source, tmp_path: Path
) -> None:
    """The comparison uses torch's float8 instead of this project's numpy formats."""
    done = _quantise(source, dataclasses.replace(RECIPES["fp8"], solver="nearest"), tmp_path)
    denoiser = families.load(source.parameters, source.network)

    def fake(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    for layer, name in done.formats.items():
        if name == "high":
            continue
        linear = denoiser.get_submodule(layer)
        weight = linear.weight.data
        linear.weight.data = fake(weight, weight.abs().amax(0) / 448)
        scale = torch.tensor(np.float32(done.amax[layer]) / np.float32(448))
        linear.register_forward_pre_hook(lambda _, inputs, scale=scale: fake(inputs[0], scale))
    ids = _ids(source)
    expected = denoiser(torch.from_numpy(ids)[None])[0].numpy()
    assert _relative(_run(tmp_path, source, ids, True), expected) < 1e-3


def _matmul_graph(K: int, N: int) -> trace.Graph:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["B", "T", K]))
    w = ir.Value(name="layer.weight", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([K, N]))
    node = ir.node("MatMul", [x, w], metadata_props={graph.LAYER_KEY: "layer"})
    # Add an Identity node, because in a real graph some node reads the output of each layer.
    last = ir.node("Identity", [node.outputs[0]])
    last.outputs[0].name, last.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    inner = ir.Graph(
        [x],
        [last.outputs[0]],
        nodes=[node, last],
        initializers=[w],
        opset_imports={"": graph.OPSET},
        name="g",
    )
    return trace.Graph(ir.Model(inner, ir_version=11), make_network(), torch.float32)


@pytest.mark.parametrize("is_shared", [False, True], ids=["panels", "spelled out"])
def test_the_nvfp4_image_multiplies_quantised_inputs_and_weights(is_shared: bool) -> None:
    K, N, rng = 64, 40, np.random.default_rng(0)
    w, x = (
        rng.standard_t(4, (K, N)).astype(np.float32),
        rng.standard_t(4, (1, 7, K)).astype(np.float32),
    )
    w[:16, 3] = 0.0
    x[0, 2, 16:32] = 0.0
    traced, amax = _matmul_graph(K, N), float(np.abs(x).max())
    parts = quantise.rewrite(traced, {"layer": "nvfp4"}, {"layer": amax}, is_shared=is_shared)
    assert any(node.op_type == "NVFP4Linear" for node in traced.model.graph) is not is_shared
    weight = quantise_weight(w, "nvfp4")
    values = {name: part_of(weight, part) for name, part in parts.items()}
    values = {
        name: value if isinstance(value, np.ndarray) else value[(slice(0, value.shape[0]),)]
        for name, value in values.items()
    }
    for name, value in traced.model.graph.initializers.items():
        if value.const_value is None:
            array = values[name].astype("uint8") if name.endswith("codes") else values[name]
            is_codes = name.endswith("codes")
            raw = pack_nibbles(array).tobytes() if is_codes else array.tobytes()
            proto = onnx.helper.make_tensor(name, int(value.dtype or 0), array.shape, raw, raw=True)
            value.const_value = ir.from_proto(proto)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(ir.to_proto(traced.model).SerializeToString(), options)
    ours = np.asarray(session.run(None, {"x": x})[0])
    theirs = quantise_activation(x, "nvfp4", amax) @ weight.dequantise()
    assert _relative(ours, theirs) < 1e-6
    assert _relative(ours, x @ w) > 1e-3


def test_a_layer_that_does_not_suit_its_format_is_named() -> None:
    down = make_network(mlp_size=102).quantisable()["blocks.0.mlp.down"]
    assert quantise.misfit(down, "nvfp4") == "nvfp4 has groups of 16; 102 inputs is not a multiple"
    assert (
        quantise.misfit(down, "int8-dynamic")
        == "int8-dynamic multiplies 4 inputs at once; 102 is not a multiple"
    )
    assert (
        quantise.misfit(down, "int4-g64-dynamic")
        == "int4-g64-dynamic multiplies 8 inputs at once; 102 is not a multiple"
    )
    assert quantise.misfit(down, "int4-g32") is None  # the last group is shorter
    assert (
        quantise.misfit(down, "int4-g32", form="tensorrt")
        == "int4-g32 has groups of 32; 102 inputs is not a multiple"
    )
    assert quantise.misfit(down, "fp8", form="tensorrt") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('layers = {"blocks.9.mlp" = "int8-dynamic"}', "no layer matches 'blocks.9.mlp'"),
        ('layers = {"blocks.*" = "int3"}', "format of 'blocks.*' is 'int3', expected one of"),
        (
            'observer = "p99"\nlayers = {"blocks.*" = "fp8"}',
            "observer is 'p99', expected one of max, percentile",
        ),
        ('smoothing = 2\nlayers = {"blocks.*" = "fp8"}', "smoothing 2 is outside 0..1"),
        (
            'smoothing = true\nlayers = {"blocks.*" = "fp8"}',
            "smoothing is of type bool, expected a number",
        ),
        ('colour = "blue"', "unknown key 'colour'"),
        ("[layers]\nblocks.0 = 'fp8'", "quote module paths"),
        ("name = 'x'", "quantises nothing"),
        ("name = ", "not TOML"),
        ("\xff", "not readable as UTF-8"),
    ],
)
def test_a_bad_recipe_file_is_refused_by_what_is_wrong(
    text: str, says: str, tmp_path: Path
) -> None:
    from dlm_calibration.precisions import find

    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RecipeError) as caught:
        find(str(path)).formats(["blocks.0.mlp.up", "head"])
    assert says in str(caught.value)


def test_a_recipe_survives_its_manifest() -> None:
    from dlm_calibration.precisions import recipe_from

    for recipe in RECIPES.values():
        assert recipe_from(recipe.as_dict(), "manifest") == recipe
