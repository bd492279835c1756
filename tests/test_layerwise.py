"""Tests of the check that compares each layer of a quantised graph with torch.

The check must accept correct graphs, and find a single wrong value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from checkpoints import a2d_qwen3_config, llada_config, write_checkpoint

from dlm_calibration.precisions import FORMATS
from dlm_export.build import build
from dlm_export.building.options import BuildOptions, QuantiseOptions
from dlm_export.building.quantising import quantise
from dlm_export.building.request import check_job, check_request
from dlm_export.graph import DATA_FILE, GRAPH_FILE, trace
from dlm_export.graph.taps import find_taps
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.parity import by_layer
from dlm_export.judging.parity.verdict import (
    PART_TOLERANCES,
    LayerRow,
    Parity,
    ParityError,
    require_parity,
)
from dlm_export.progress import Stages
from dlm_export.quantising import calibrate
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.sources import open_source
from dlm_export.workplace import Workplace

SMALL = QuantiseOptions(
    calibration=CalibrationOptions(samples=2, states_per_sample=2), effort=Effort(judged=2)
)


@dataclass(frozen=True)
class Made:
    """A bundle that has not been compared with torch yet, and its quantised weights."""

    folder: Path
    numbers: Quantisation
    base: str
    graph: dict[str, Any]

    def check(self) -> Parity:
        network = self.numbers.parameters.network
        taps = find_taps(trace.trace_pass(network, self.base))
        return by_layer.check_layers(
            self.folder,
            network,
            self.numbers,
            self.base,
            taps,
            cache_dtype=self.graph["cache_dtype"],
            is_simulated=self.graph["simulated"],
            on_done=lambda: None,
        )


def make(
    checkpoint: Path,
    output: Path,
    precision: str,
    target: str = "cpu",
    activations: str | None = None,
) -> Made:
    options = BuildOptions((target,), precision, activations, check_parity=False, quantise=SMALL)
    build(checkpoint, output, options)
    job = check_job(check_request(options), open_source(checkpoint))
    numbers = quantise(job, None, Workplace(), Stages()).numbers
    graph = json.loads((output / "manifest.json").read_text())["loop"]["graph"]
    return Made(output, numbers, job.base, graph)


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = {"llada": llada_config, "a2d": a2d_qwen3_config}[request.param]()
    return write_checkpoint(tmp_path / request.param, config, seed=4)


@pytest.mark.parametrize(
    ("checkpoint", "precision", "target", "activations"),
    [
        ("llada", "int8", "cpu", None),
        ("llada", "nvfp4", "rtx5090", "bf16"),
        ("a2d", "nvfp4", "cpu", None),
        pytest.param("a2d", "mixed", "rtx5090", "fp16", marks=pytest.mark.slow),
    ],
    indirect=["checkpoint"],
)
def test_layers_hold_from_equal_inputs_where_a_whole_pass_drifts(
    checkpoint: Path, tmp_path: Path, precision: str, target: str, activations: str | None
) -> None:
    made = make(checkpoint, tmp_path / "bundle", precision, target, activations)
    parity = made.check()
    assert parity.misses == []
    quantised = {
        layer for layer, name in made.numbers.formats.items() if FORMATS[name].weights is not None
    }
    rows = {row.layer: row for row in parity.layers}
    assert rows.keys() - {"logits"} == quantised
    assert ("logits" in rows) == ("head" not in quantised)
    if precision == "int8":
        hidden = {layer for layer, row in rows.items() if row.output_relative is None} - {"logits"}
        assert hidden == {f"blocks.{i}.mlp.{name}" for i in (0, 1) for name in ("gate", "up")}, (
            "of the fused gated product"
        )
    # In a correct bundle, small differences of the layers add up to a far larger difference of the
    # logits. A check of the logits alone therefore misses small errors.
    drift = max(row.relative for row in parity.graph)
    assert drift > 100 * PART_TOLERANCES["fp32"].relative or target == "cpu"
    assert max(row.worst for row in parity.layers) < PART_TOLERANCES[made.base].relative


@pytest.fixture(scope="module")
def fp8(llada_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(llada_checkpoint, tmp_path_factory.mktemp("damaged") / "bundle", "fp8")


def _negate(folder: Path, initialiser: str) -> tuple[int, bytes]:
    """Flip the signs of the elements in the first 64 bytes of an initialiser.

    Returns the offset of the initialiser in the data file, and the original 64 bytes.
    """
    tensor = ir.load(folder / GRAPH_FILE).graph.initializers[initialiser].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    offset, width = tensor.offset or 0, tensor.dtype.itemsize
    with (folder / DATA_FILE).open("r+b") as data:
        data.seek(offset)
        before = data.read(64)
        data.seek(offset)
        data.write(
            bytes(each ^ 0x80 if i % width == width - 1 else each for i, each in enumerate(before))
        )
    return offset, before


@pytest.mark.parametrize(
    ("initialiser", "says"),
    [
        (
            "blocks.1.attention.v.weight.codes",
            "blocks.1.attention.v (fp8) gives a different result from torch for the same",
        ),
        ("blocks.0.mlp_norm.weight", "the input of blocks.0.mlp.gate differs from torch's by"),
        ("final_norm.weight", "the logits, after the last layer, differs from torch's by"),
    ],
)
def test_one_wrong_value_is_found_and_the_message_names_where(
    fp8: Made, initialiser: str, says: str
) -> None:
    assert fp8.check().misses == []
    offset, before = _negate(fp8.folder, initialiser)
    try:
        parity = fp8.check()
    finally:
        with (fp8.folder / DATA_FILE).open("r+b") as data:
            data.seek(offset)
            data.write(before)
    assert says in parity.misses[0]
    with pytest.raises(ParityError, match=r"though the layers before|beyond one code.s step"):
        require_parity(parity, "bundle")
    layer = initialiser.removesuffix(".weight.codes")
    sound = [
        row
        for row in parity.layers
        if row.layer != layer and row.worst <= PART_TOLERANCES["fp32"].relative
    ]
    assert len(sound) >= len(parity.layers) - 2, (
        "what lies behind is judged from equal inputs: the damage is not carried on"
    )


@pytest.mark.parametrize(
    ("format_", "name", "limit"),
    [
        ("fp8", "input_relative", 5e-3),
        ("fp8", "output_relative", 5e-3),
        ("fp32", "output_relative", 2e-5),
    ],
)
def test_a_layer_may_differ_by_the_tolerance_and_not_by_more(
    format_: str, name: str, limit: float
) -> None:
    exact = LayerRow("blocks.0.mlp.up", format_, 0.0, 0.0)
    kept, missed = (replace(exact, **{name: limit * times}) for times in (1.0, 1.01))
    undefined = replace(exact, **{name: math.nan})
    parity = Parity(
        "fp16", PART_TOLERANCES["fp16"], [], [], layers=[exact, kept, missed, undefined]
    )
    assert len(parity.misses) == 2
    assert all(f"more than {limit:.1e}" in miss for miss in parity.misses)


def test_slack_is_one_step_of_an_input_on_a_boundary_and_nothing_elsewhere(fp8: Made) -> None:
    layer = "blocks.0.attention.q"
    weight = (
        calibrate.families.load(fp8.numbers.parameters, fp8.numbers.parameters.network)
        .get_submodule(layer)
        .weight.numpy()
    )
    scale = np.float32(fp8.numbers.amax[layer] / 448)
    x = np.zeros((1, 1, weight.shape[0]), np.float32)
    x[0, 0, 3] = 17.0 * scale  # halfway between 16 and 18
    slack = by_layer._slack(fp8.numbers, layer, x, weight)
    np.testing.assert_allclose(slack[0, 0], 2 * scale * np.abs(weight[3]), rtol=1e-3)
    x[0, 0, 3] = 16.4 * scale
    assert not np.any(by_layer._slack(fp8.numbers, layer, x, weight))
