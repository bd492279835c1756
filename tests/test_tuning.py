"""Tests of the option ``--tune``.

``--tune`` measures the runtime's matrix products, so that ``auto`` can choose the fastest formats.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from referencing import Registry
from test_quantise_cli import SCHEMA, SMALL

from dlm_calibration.precisions import HIGH
from dlm_export.cli import main
from dlm_export.judging.precision_search import layer_times, search
from dlm_export.judging.precision_search.layer_times import Tuning
from dlm_export.sources import open_source
from dlm_runtime.errors import RequestError

INT4, INT8 = "int4-g32-dynamic", "int8-dynamic"


def _tuning(**seconds: float) -> Tuning:
    by_format = {name.replace("_", "-"): value for name, value in seconds.items()}
    return Tuning(
        8, "a processor", {(8, 4): 3, (4, 8): 1}, {(8, 4): by_format, (4, 8): {HIGH: 10.0}}
    )


def test_a_layer_that_a_format_does_not_suit_counts_in_full_precision() -> None:
    assert _tuning(high=2.0, int8_dynamic=1.0).totals() == {HIGH: 16.0, INT8: 13.0}
    assert _tuning(high=2.0).as_dict()["ms_by_shape"] == {
        "8x4": {HIGH: 2000.0},
        "4x8": {HIGH: 10000.0},
    }


@pytest.mark.parametrize("format", [INT8, INT4])
def test_what_is_timed_is_the_product_that_a_graph_calls(format: str) -> None:
    session = layer_times._session((40, 33), format, 3)
    outputs = session.run(None, {"x": np.ones((5, 40), np.float32)})
    assert [output.shape for output in outputs] == [(5, 33)] * 3
    assert all(np.isfinite(output).all() and np.abs(output).max() > 0 for output in outputs)
    assert not np.array_equal(outputs[0], outputs[1]), "weights are read anew for each"


def test_every_shape_is_timed_in_every_format_that_suits_it(llada_checkpoint: Path) -> None:
    layers, done = (
        [layer for (layer,) in search.searched(open_source(llada_checkpoint).network).values()],
        [],
    )
    found = layer_times.measure(layers, [INT8, INT4], 8, lambda: done.append(1))
    assert sum(found.shapes.values()) == len(layers)
    assert len(done) == len(found.shapes) == len(found.seconds)
    for layer in layers:
        assert all(
            found.cost(layer, name) > 0 for name in found.seconds[layer.inputs, layer.outputs]
        )
    with pytest.raises(RequestError, match="fp8 has none"):
        layer_times.measure(layers, ["fp8"], 8, lambda: None)


@pytest.mark.parametrize("table", [ir.DataType.FLOAT, ir.DataType.BFLOAT16])
def test_a_tied_head_is_timed_as_the_product_by_its_table(table: ir.DataType) -> None:
    session = layer_times._session((40, 33), HIGH, 2, table)
    (y, _) = session.run(None, {"x": np.ones((3, 40), np.float32)})
    assert y.shape == (3, 33)
    inputs = [
        name for name, _ in layer_times._weight(np.random.default_rng(0), HIGH, (40, 33), table)
    ]
    assert inputs == ["table"]


@pytest.mark.parametrize(("slow", "fast"), [(INT8, INT4)])
def test_auto_takes_the_format_that_is_fastest_here(
    slow: str, fast: str, llada_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(
        layers: object, formats: object, rows: int, on_done: object, **_: object
    ) -> Tuning:
        searched = search.searched(open_source(llada_checkpoint).network)
        shapes = layer_times.shapes_of((layer for (layer,) in searched.values()), rows)
        times = {HIGH: 2e-3, fast: 1e-3, slow: 3e-3}
        return Tuning(rows, "a processor", shapes, dict.fromkeys(shapes, times))

    monkeypatch.setattr(layer_times, "measure", measured)
    options = ("--precision", "auto", "--tune", *SMALL, "--max-ce-increase", "10", "--json")
    result = CliRunner().invoke(
        main, ["build", str(llada_checkpoint), *options, "-o", str(tmp_path / "bundle")]
    )
    assert result.exit_code == 0, result.output
    chosen = next(point for point in json.loads(result.stdout)["curve"] if point["chosen"])
    assert set(chosen["formats"]) == {fast}
    assert chosen["seconds"] == pytest.approx(1e-3 * chosen["formats"][fast])
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    assert manifest["precision"]["tuning"]["processor"] == "a processor"
