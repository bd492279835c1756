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
from conftest import DEMO_CHECKPOINT
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network
from slow_cases import slow_except
from traces import trace_once

import dlm_runtime
from dlm_export import families, graph
from dlm_export.build import build_from
from dlm_export.graph import cuda, fuse
from dlm_export.graph.trace import Graph
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


def random_denoiser(network: NetworkSpec, *, is_plain: bool = False) -> Denoiser:
    torch.manual_seed(0)
    denoiser = Denoiser(network, is_plain).eval().requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.3)
    return denoiser


def small(*rules: tuple[str, int | None]) -> NetworkSpec:
    """A network with the given rules. Rotary embeddings rotate half of each head."""
    network = make_network(layers=len(rules), heads=4, kv_heads=2, head_size=8)
    layer = network.layers[0]
    turned = replace(layer, attention=replace(layer.attention, rope=Rope(1e4, 0.5)))
    return seeing(replace(network, layers=(turned,) * len(rules)), [*rules])


@settings(max_examples=25)
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


def test_a_bundle_of_a_causal_network_computes_what_torch_does(
    dream_checkpoint: Path, tmp_path: Path
) -> None:
    source = open_source(dream_checkpoint)
    network = seeing(source.network, [("causal", None), ("block", 4)])
    check_masks(trace_once(network, "fp32"), 2)
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


TWO = small(("block", 4), ("block", 4))
THREE = small(("block", 4), ("block", 4), ("causal", None))
AFTER_PROMPT = small(("after-prompt", 4), ("after-prompt", 4))
NETWORKS = {2: TWO, 3: THREE}
"""By the number of layers. The layers of ``TWO`` have the same rule, which is faster to trace."""
FORMS = [
    (layers, precision, is_plain)
    for layers in NETWORKS
    for precision in ("fp16", "bf16")
    for is_plain in (False, True)
]


def check_masks(traced: Graph, rules: int) -> None:
    made = Counter(node.op_type for node in traced.model.graph)
    assert (made["Mod"], made["Greater"]) == (rules, rules)
    attentions = [node for node in traced.model.graph if node.op_type == "Attention"]
    assert len({id(node.inputs[3]) for node in attentions}) == (rules if attentions else 0)


@pytest.mark.parametrize(("layers", "precision", "is_plain"), slow_except(FORMS[:2], FORMS))
def test_the_mask_is_made_once_for_all_layers_of_a_rule(
    layers: int, precision: str, is_plain: bool
) -> None:
    traced = trace_once(NETWORKS[layers], precision, is_plain=is_plain)
    check_masks(traced, layers - 1)
    if not is_plain:
        cuda.check_operators(traced)


# Logits are around 10. ONNX Runtime and torch add numbers in different orders, and fp16 rounds
# them. If a query attended to one key too many or too few, the logits would change by about 1.
TOLERANCES = {"fp16": 0.1, "fp32": 1e-3}
CASES = [
    (layers, kind, plain) for layers in (2, 3) for kind in TOLERANCES for plain in (False, True)
]


@pytest.mark.parametrize(("layers", "precision", "is_plain"), slow_except(CASES[:2], CASES))
@pytest.mark.parametrize("cached", [0, 4, 8])
def test_a_graph_sees_what_torch_sees(
    layers: int, precision: str, is_plain: bool, cached: int, tmp_path: Path
) -> None:
    """Every query attends to all cached rows, and the positions of a pass may have any order.

    The attention mask in fp16 contains the lowest fp16 number instead of minus infinity. This
    number must also hide a key completely.
    """
    check_graph(NETWORKS[layers], precision, is_plain, cached, tmp_path)


@pytest.mark.parametrize(("precision", "is_plain"), [("fp16", False), ("fp32", True)])
@pytest.mark.parametrize("cached", [0, 4])
def test_a_graph_computes_blocks_from_their_numbers(
    precision: str, is_plain: bool, cached: int, tmp_path: Path
) -> None:
    """With blocks after the prompt, position ids contain the numbers of blocks."""
    check_graph(AFTER_PROMPT, precision, is_plain, cached, tmp_path)


def check_graph(
    network: NetworkSpec, precision: str, is_plain: bool, cached: int, tmp_path: Path
) -> None:
    layers = len(network.layers)
    denoiser = random_denoiser(network)
    parameters = denoiser.state_dict()
    traced = trace_once(network, precision, is_plain=is_plain)
    write_graph(
        traced, lambda name, dtype: parameters[name].numpy().astype(dtype), tmp_path, lambda _: None
    )
    session = onnxruntime.InferenceSession(tmp_path / graph.GRAPH_FILE)
    rng, count = np.random.default_rng(2), LENGTH - cached
    ids = rng.integers(0, 99, (2, count))
    positions = np.stack([cached + rng.permutation(count) for _ in range(2)])
    if network.blocks_after_prompt:
        positions += rng.integers(0, 5, positions.shape) * network.max_canvas_length
    dtype = {"fp16": np.float16, "fp32": np.float32}[precision]
    past = rng.standard_normal((layers, 2, 2, 2, cached, 8)).astype(dtype)
    feed = {
        "input_ids": ids,
        "position_ids": positions,
        "score_rows": np.tile(np.arange(count), (2, 1)),
    }
    feed |= {f"past_{kind}.{i}": past[i, j] for i in range(layers) for j, kind in enumerate(KINDS)}
    (found,) = session.run(["logits"], feed)
    rows = torch.from_numpy(past.astype(np.float32))
    features, _ = denoiser.hidden(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        [(keys, values) for keys, values in rows],
    )
    expected = denoiser.project(features).numpy()
    np.testing.assert_allclose(found, expected, atol=TOLERANCES[precision], rtol=1e-4)


def test_attention_with_a_mask_of_blocks_of_other_positions_keeps_it() -> None:
    network = open_source(DEMO_CHECKPOINT.parent / "demo-several").network
    traced = trace_once(network, "fp32")
    (remainder,) = (node for node in traced.model.graph if node.op_type == "Mod")
    one = ir.node("Constant", [], {"value": ir.tensor(np.int64(1))})
    later = ir.node("Add", [remainder.inputs[0], one.outputs[0]])
    traced.model.graph.insert_before(remainder, [one, later])
    remainder.replace_input_with(0, later.outputs[0])
    reason = "the mask is not block-causal, not a window and not that of draft passes"
    assert fuse.fuse(traced).plain == {
        f"blocks.{i}.attention": reason for i in range(len(network.layers))
    }
