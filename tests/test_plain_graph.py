"""Tests of the plain graph, which only uses elementary operators, for TensorRT before 10.14.

The plain graph and the normal graph must give the same results.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from engine_bundles import dlm_export, read_manifest, refused, tiny
from traces import trace_once

from dlm_export import graph
from dlm_export.graph.write import write_graph
from dlm_export.sources import open_source

# Operators that are new in ONNX opset 23.
NEW = {"Attention", "RotaryEmbedding", "RMSNormalization"}


def write(checkpoint: Path, folder: Path, *, is_plain: bool) -> onnx.ModelProto:
    source = open_source(checkpoint)
    folder.mkdir()
    traced = trace_once(source.network, "fp32", is_plain=is_plain)
    write_graph(traced, source.parameters.read, folder, lambda _: None)
    onnx.checker.check_model(str(folder / graph.GRAPH_FILE), full_check=True)
    return onnx.load(folder / graph.GRAPH_FILE, load_external_data=False)


def test_both_graphs_compute_the_same(dream_checkpoint: Path, tmp_path: Path) -> None:
    whole = write(dream_checkpoint, tmp_path / "whole", is_plain=False)
    plain = write(dream_checkpoint, tmp_path / "plain", is_plain=True)
    assert {node.op_type for node in whole.graph.node} >= NEW
    assert not {node.op_type for node in plain.graph.node} & NEW
    assert [item.version for item in plain.opset_import] == [21]
    for ports, wanted in (
        (plain.graph.input, whole.graph.input),
        (plain.graph.output, whole.graph.output),
    ):
        assert [value.name for value in ports] == [value.name for value in wanted]
    rng = np.random.default_rng(3)
    sessions = [
        onnxruntime.InferenceSession(tmp_path / name / graph.GRAPH_FILE)
        for name in ("whole", "plain")
    ]
    for T, S, rows in ((7, 5, [0, 6]), (1, 0, [0]), (12, 0, [1, 2, 11]), (3, 30, [2])):
        feed = {
            "input_ids": rng.integers(0, 150, (1, T)),
            "position_ids": np.arange(S, S + T)[None],
            "score_rows": np.array([rows]),
        }
        for value in whole.graph.input[3:]:
            heads, size = (value.type.tensor_type.shape.dim[axis].dim_value for axis in (1, 3))
            feed[value.name] = rng.standard_normal((1, heads, S, size)).astype(np.float32)
        names = [value.name for value in whole.graph.output]
        expected, found = ([*session.run(names, feed)] for session in sessions)
        for name, one, other in zip(names, expected, found, strict=True):
            # The graphs add fp32 numbers in another order.
            np.testing.assert_allclose(
                other, one, rtol=1e-4, atol=1e-5, err_msg=f"{name} at T={T}, S={S}"
            )


@pytest.mark.parametrize(
    "options", [("agx-orin,sm87",), ("thor", "--plain-graph", "--no-verify")], ids=lambda o: o[0]
)
def test_a_bundle_holds_the_plain_graph(tmp_path: Path, options: tuple[str, ...]) -> None:
    out = tmp_path / "bundle"
    given = ("--precision", "fp16", "-o", out, "--target", *options)
    done = dlm_export("build", tiny(), *given)
    assert done.exit_code == 0, done.output
    assert f"dlm-export engine {out} --target {options[0].partition(',')[0]}" in done.stdout
    assert read_manifest(out)["opset"] == graph.PLAIN_OPSET
    for name in (graph.GRAPH_FILE, graph.DEVICE_FILE):
        model = onnx.load(out / name, load_external_data=False)
        assert not {node.op_type for node in model.graph.node} & NEW


def test_orin_and_other_gpus_do_not_share_a_bundle(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    done = dlm_export("build", tiny(), "--target", "agx-orin,rtx5090", "-o", out)
    refused(done, 2, ["agx-orin, rtx5090", "build two bundles"])
    assert not out.exists()
