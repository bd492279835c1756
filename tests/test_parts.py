"""Tests of splitting a graph into parts.

The parts of a graph, run one after another, must give exactly the results of the whole graph.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from engine_bundles import SMALL

from dlm_export.build import build
from dlm_export.building.options import BuildOptions
from dlm_export.graph import GRAPH_FILE
from dlm_export.graph.parts import PartError, cut
from dlm_export.judging.parity.graph_parts import full_pass, open_graph, run_parts
from dlm_export.network.spec import NetworkSpec
from dlm_export.sources import open_source


def _pass(network: NetworkSpec, canvases: int = 2) -> dict[str, onnxruntime.OrtValue]:
    rng = np.random.default_rng(3)
    return full_pass(
        network,
        "float32",
        rng.integers(0, network.vocab_size, (canvases, 9)),
        np.tile([1, 4, 8], (canvases, 1)),
    )


@pytest.mark.parametrize(
    ("family", "precision"),
    [("llada", "fp32"), ("llada", "nvfp4"), ("dream", "int4-rtn"), ("dream", "int8")],
)
def test_parts_one_after_the_other_give_the_whole_graphs_outputs_to_the_bit(
    family: str, precision: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    checkpoint = request.getfixturevalue(f"{family}_checkpoint")
    folder, is_simulated = tmp_path / "bundle", precision == "nvfp4"
    options = BuildOptions(precision=precision, check_parity=False, quantise=SMALL)
    build(checkpoint, folder, options)
    network = open_source(checkpoint).network
    model = ir.load(folder / GRAPH_FILE)
    names = [str(value.name) for value in model.graph.outputs]
    session = open_graph(model, folder, is_simulated=is_simulated)
    expected = session.run_with_ort_values(names, _pass(network))
    parts = cut(model)
    assert [part.name for part in parts] == ["embed", "blocks.0", "blocks.1", "end"]
    held = {part.name: set(part.model.graph.initializers) for part in parts}
    initializers = model.graph.initializers
    matrices = {
        name
        for name in set.union(*held.values())
        if name.endswith((".weight", ".panels", ".codes"))
        and len(initializers[name].shape or ()) > 1
    }
    for name in matrices:
        homes = [part.name for part in parts if f"{name}.".startswith(f"{part.name}.")]
        assert [part for part, names in held.items() if name in names] == (homes or ["end"])
    found: dict[str, np.ndarray] = {}
    for _, (values,) in run_parts(
        folder, parts, [_pass(network)], names, is_simulated=is_simulated
    ):
        found |= values
    assert found.keys() == set(names)
    for name, value in zip(names, expected, strict=True):
        assert np.array_equal(found[name], value.numpy()), name


def test_a_part_says_what_it_lacks(llada_bundle: Path, llada_checkpoint: Path) -> None:
    network = open_source(llada_checkpoint).network
    parts = cut(ir.load(llada_bundle / GRAPH_FILE))
    runs = run_parts(
        llada_bundle, [parts[0], *parts[2:]], [_pass(network)], ["logits"], is_simulated=False
    )
    with pytest.raises(
        PartError, match=r"^blocks\.1 reads .*, which neither the pass nor an earlier part provides"
    ):
        list(runs)
