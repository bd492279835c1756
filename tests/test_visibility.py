"""Tests of visibility.

The visibility of a layer says to which keys each query attends. The torch network, the normal
graph, the plain graph and a built bundle must follow the same rules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network
from slow_cases import slow_except
from traces import trace_once

import dlm_runtime
from dlm_export import families, graph
from dlm_export.build import build_from
from dlm_export.graph import cuda, fuse
from dlm_export.graph.write import write_graph
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec, Rope
from dlm_export.sources import open_source
from dlm_runtime.presets import presets_for

LENGTH = 12
KINDS = ("key", "value")


def seeing(network: NetworkSpec, rules: list[tuple[str, int | None]]) -> NetworkSpec:
    """Return a copy of a network with other visibility.

    ``rules`` contains (visibility, block length) for each layer.
    """
    layers = (
        replace(
            layer,
            attention=replace(layer.attention, visibility=visibility, block_length=block_length),
        )
        for layer, (visibility, block_length) in zip(network.layers, rules, strict=True)
    )
    return replace(network, layers=tuple(layers))


def turning(network: NetworkSpec, fraction: float) -> NetworkSpec:
    """Return a copy of a network in which rotary embeddings rotate only a fraction of each head."""
    ropes = (replace(layer.attention, rope=Rope(1e4, fraction)) for layer in network.layers)
    layers = tuple(
        replace(layer, attention=rope) for layer, rope in zip(network.layers, ropes, strict=True)
    )
    return replace(network, layers=layers)


def random_denoiser(network: NetworkSpec, *, is_plain: bool = False) -> Denoiser:
    torch.manual_seed(0)
    denoiser = Denoiser(network, is_plain).eval().requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.3)
    return denoiser


def small(*rules: tuple[str, int | None]) -> NetworkSpec:
    return seeing(make_network(layers=len(rules), heads=4, kv_heads=2, head_size=8), [*rules])


@settings(max_examples=60)
@given(
    visible=st.sampled_from(
        [("causal", None), *(("block", block_length) for block_length in range(1, 8))]
    ),
    changed=st.integers(0, LENGTH - 1),
    is_plain=st.booleans(),
    order=st.permutations(range(LENGTH)),
)
def test_a_token_changes_its_own_block_and_no_row_before_it(
    visible: tuple[str, int | None], changed: int, is_plain: bool, order: list[int]
) -> None:
    """If a token changes, exactly the rows that attend to this token must change.

    The rows of a pass may be in any order, because visibility depends on their positions.
    """
    denoiser = random_denoiser(small(visible, visible), is_plain=is_plain)
    positions = torch.tensor([order, range(LENGTH)])
    ids = torch.randint(0, 99, (2, LENGTH))
    other = torch.where(positions == changed, (ids + 1) % 99, ids)
    before, after = (denoiser.hidden(canvas, positions)[0] for canvas in (ids, other))
    start = changed - changed % (visible[1] or 1)
    is_same = (before == after).all(-1)
    assert torch.equal(is_same, positions < start)


@pytest.mark.parametrize("is_plain", slow_except([True], [False, True]))
def test_a_graph_sees_what_torch_sees(is_plain: bool, tmp_path: Path) -> None:
    """The test runs the plain graph and the fused graph, both with and without cached rows.

    Every query attends to all cached rows. Rotary embeddings rotate half of each head.
    """
    network = turning(small(("block", 4), ("causal", None), ("full", None)), 0.5)
    denoiser = random_denoiser(network, is_plain=is_plain)
    parameters = denoiser.state_dict()
    traced = trace_once(network, "fp32", is_plain=is_plain)
    if not is_plain:
        assert fuse.fuse(traced).calls == {
            "CachedAttention": 1,
            "BlockCachedAttention": 2,
            "AddNorm": 6,
            "Candidates": 1,
        }
    write_graph(traced, lambda name, _: parameters[name].numpy(), tmp_path, lambda _: None)
    session = onnxruntime.InferenceSession(tmp_path / graph.GRAPH_FILE)
    torch.manual_seed(1)
    for cached in (0, 4, 8):
        ids = torch.randint(0, 99, (2, LENGTH - cached))
        positions = torch.arange(cached, LENGTH).expand(2, -1)
        past = [
            (torch.randn(2, 2, cached, 8), torch.randn(2, 2, cached, 8)) for _ in network.layers
        ]
        feed = {
            "input_ids": ids,
            "position_ids": positions,
            "score_rows": torch.arange(LENGTH - cached).expand(2, -1),
        }
        feed |= {
            f"past_{kind}.{i}": rows
            for i, each in enumerate(past)
            for kind, rows in zip(KINDS, each, strict=True)
        }
        (logits,) = session.run(["logits"], {name: value.numpy() for name, value in feed.items()})
        expected = denoiser.project(denoiser.hidden(ids, positions, past)[0])
        # ONNX Runtime and torch add fp32 numbers in different orders. The logits are around 10.
        np.testing.assert_allclose(
            logits, expected.numpy(), rtol=1e-4, atol=1e-4, err_msg=f"{cached} cached"
        )


def test_a_bundle_of_a_causal_network_computes_what_torch_does(
    dream_checkpoint: Path, tmp_path: Path
) -> None:
    source = open_source(dream_checkpoint)
    network = seeing(source.network, [("causal", None), ("block", 4)])
    presets = presets_for(network.visible_block, network.shift)
    source = replace(source, network=network, presets=presets, default_preset=next(iter(presets)))
    # The build also compares the native loop with the reference loop, with the block cache.
    report = build_from(source, tmp_path / "bundle")
    calls = {"BlockCachedAttention": 2, "AddNorm": 4, "Candidates": 1}
    assert report.kernels == {"calls": calls, "plain": {}}
    tokens = [5, 17, 9, 30, 2, 41, 8]
    with dlm_runtime.open(tmp_path / "bundle") as bundle:
        assert bundle.manifest["loop"]["visible_block"] == 4
        found = bundle.logits(tokens)
        changed = bundle.logits([*tokens[:4], 11, *tokens[5:]])
    expected = families.load(source.parameters, source.network)(torch.tensor([tokens]))[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert (found[:4] == changed[:4]).all()
    assert (found[4:] != changed[4:]).any(1).all()


@pytest.mark.parametrize(
    ("precision", "is_plain"),
    [
        ("fp16", False),
        pytest.param("fp16", True, marks=pytest.mark.slow),
        pytest.param("bf16", False, marks=pytest.mark.slow),
        ("bf16", True),
    ],
)
def test_the_mask_is_made_once_for_all_layers_of_a_rule(precision: str, is_plain: bool) -> None:
    rules = [("block", 4), ("block", 4), ("causal", None), ("block", 4)]
    traced = trace_once(small(*rules), precision, is_plain=is_plain)
    made = Counter(node.op_type for node in traced.model.graph)
    assert (made["Mod"], made["Greater"]) == (2, 2)
    if not is_plain:
        cuda.check_operators(traced)
    readers = [
        node for node in traced.model.graph if node.op_type == ("Add" if is_plain else "Attention")
    ]
    masks = {
        id(value)
        for node in readers
        for value in node.inputs[1 if is_plain else 3 :]
        if value is not None
    }
    assert is_plain or len(masks) == 2


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_device_graph_in_fp16_sees_what_torch_sees(is_plain: bool, tmp_path: Path) -> None:
    """ONNX Runtime runs a graph for TensorRT engines.

    The attention mask of this graph contains the lowest fp16 number instead of minus infinity. This
    number must also hide a key completely.
    """
    network = small(("block", 4), ("block", 4))
    denoiser = random_denoiser(network)
    parameters = denoiser.state_dict()
    traced = trace_once(network, "fp16", is_plain=is_plain)
    write_graph(
        traced, lambda name, dtype: parameters[name].numpy().astype(dtype), tmp_path, lambda _: None
    )
    session = onnxruntime.InferenceSession(tmp_path / graph.GRAPH_FILE)
    ids = torch.randint(0, 99, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    order = torch.stack(
        [torch.randperm(LENGTH, generator=torch.Generator().manual_seed(row)) for row in range(2)]
    )
    feed = {
        "input_ids": ids.numpy(),
        "position_ids": order.numpy(),
        "score_rows": np.tile(np.arange(LENGTH), (2, 1)),
    }
    nothing = np.zeros((2, 2, 0, 8), np.float16)
    feed |= {f"past_{kind}.{i}": nothing for i in range(2) for kind in KINDS}
    (found,) = session.run(["logits"], feed)
    expected = denoiser.project(denoiser.hidden(ids, order)[0]).numpy()
    # The logits are around 10. Rounding to fp16 causes small differences. If a query attended to
    # one key too many or too few, the logits would change by about 1.
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_attention_with_a_mask_of_blocks_of_other_positions_keeps_it() -> None:
    traced = trace_once(small(("block", 4)), "fp32")
    (remainder,) = (node for node in traced.model.graph if node.op_type == "Mod")
    one = ir.node("Constant", [], {"value": ir.tensor(np.int64(1))})
    later = ir.node("Add", [remainder.inputs[0], one.outputs[0]])
    traced.model.graph.insert_before(remainder, [one, later])
    remainder.replace_input_with(0, later.outputs[0])
    assert fuse.fuse(traced).plain == {
        "blocks.0.attention": "the mask is not block-causal, not a window and not that of draft passes"
    }
