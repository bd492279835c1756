"""Tests of ``NetworkSpec``, the description of a network.

The shapes in a description must equal the shapes of the torch network. A manifest must store a
description without changes.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network

from dlm_calibration.precisions import RECIPES
from dlm_export.network.denoiser import Denoiser, UnbuiltNetworkError, rotate
from dlm_export.network.experts import Router
from dlm_export.network.rope_scaling import Dynamic, Linear, Llama3, Yarn
from dlm_export.network.spec import (
    ACTIVATIONS,
    BIASES,
    NEVER_QUANTISED,
    NORM_KINDS,
    NORMS,
    SCORES,
    AttentionSpec,
    EmbeddingSpec,
    ExpertsSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    Rope,
    RouterSpec,
)
from dlm_export.planning.roofline import Costs
from dlm_export.tensorrt.estimate import Limits, estimate

HIDDEN = 24
scalings = st.sampled_from(
    [
        None,
        Linear(4.0),
        Dynamic(4.0, 20),
        Llama3(8.0, 8, 1.0, 4.0),
        Yarn(4.0, 8, 1.1, 2.0, 1.0, truncate=False),
    ]
)
ropes = st.one_of(
    st.none(),
    st.builds(Rope, st.floats(1e2, 1e6), st.sampled_from([0.5, 1.0]), scalings),
)
CACHED = 7
visibilities = st.sampled_from([("full", None), ("causal", None), ("block", CACHED)])
attentions = st.builds(
    lambda kv_heads, group, head_size, rope, qk_norm, qkv_bias, out_bias, visible: AttentionSpec(
        kv_heads * group, kv_heads, head_size, rope, qk_norm, qkv_bias, out_bias, *visible
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([4, 8, 12]),
    ropes,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    visibilities,
)
mlps = st.builds(
    MlpSpec, st.integers(1, 40), st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans()
)
routers = st.builds(
    lambda score, bias, renormalise, scale, groups: RouterSpec(
        score, bias, renormalise, scale, *groups
    ),
    st.sampled_from(SCORES),
    st.sampled_from(BIASES),
    st.booleans(),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from([(1, 1), (3, 2)]),
)
experts = st.builds(
    lambda count, active, size, shared, router: ExpertsSpec(
        count * router.groups,
        min(active, count * router.active_groups),
        size,
        shared,
        router=router,
    ),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(0, 8),
    routers,
)
embeddings = st.builds(
    EmbeddingSpec,
    st.sampled_from([0, 22]),
    st.sampled_from([0, 2]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
heads = st.builds(
    HeadSpec,
    st.booleans(),
    st.sampled_from([None, *ACTIVATIONS]),
    st.booleans(),
    st.booleans(),
)
norms = st.lists(st.sampled_from(NORMS), unique=True).map(tuple)


def networks(mlp: st.SearchStrategy[MlpSpec | ExpertsSpec]) -> st.SearchStrategy[NetworkSpec]:
    kinds = st.sampled_from(NORM_KINDS)
    layers = st.lists(
        st.builds(LayerSpec, attentions, mlp, st.floats(1e-6, 1e-3), norms, kinds),
        min_size=1,
        max_size=3,
    ).map(tuple)
    return st.builds(
        lambda layers, tied, kind, embedding, head: make_network(
            hidden_size=HIDDEN,
            layers=layers,
            tied_head=tied,
            max_canvas_length=20,
            norm_kind=kind,
            embedding=embedding,
            head=head,
        ),
        layers,
        st.booleans(),
        kinds,
        embeddings,
        heads,
    )


@settings(max_examples=60)
@given(network=networks(st.one_of(mlps, experts)))
def test_the_parameters_are_those_that_torch_builds(network: NetworkSpec) -> None:
    with torch.device("meta"):
        built = {
            name: tuple(parameter.shape) for name, parameter in Denoiser(network).named_parameters()
        }
    assert network.parameters() == built
    assert network.parameter_count() == sum(math.prod(shape) for shape in built.values())


@settings(max_examples=60)
@given(network=networks(st.one_of(mlps, experts)))
def test_a_description_survives_the_manifest(network: NetworkSpec) -> None:
    assert NetworkSpec.from_dict(json.loads(json.dumps(network.as_dict()))) == network


@settings(max_examples=60)
@given(network=networks(st.one_of(mlps, experts)))
def test_layers_of_a_site_read_one_input_and_fold_into_parameters_that_exist(
    network: NetworkSpec,
) -> None:
    shapes, linear = network.parameters(), network.linear_layers()
    assert len({layer.path for layer in linear}) == len(linear)
    by_path = {layer.path: layer for layer in linear}
    for layer in linear:
        first = by_path[layer.site]
        assert (layer.inputs, layer.fold, first.site) == (first.inputs, first.fold, first.path)
        assert shapes[layer.weight] == layer.shape
        if layer.fold is not None:
            elements = layer.inputs // layer.fold.repeats
            assert {shapes[name][-1] for name in layer.fold.parameters} == {elements}
            assert elements % layer.fold.run == 0


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check that two fp32 results differ by at most 1e-4 of their range.

    Values of these random networks reach 1,000, and there fp32 itself differs from fp64 by 1e-3.
    """
    worst = float((found - wanted).abs().max())
    assert worst <= 1e-4 * float(wanted.max() - wanted.min())


@torch.no_grad()
@settings(max_examples=20)
@given(network=networks(st.one_of(mlps, experts)), seed=st.integers(0, 99))
def test_every_described_network_runs_and_its_cache_is_exact(
    network: NetworkSpec, seed: int
) -> None:
    """A pass with cached keys and values must give the same rows as a pass over the whole canvas.

    The cached keys and values are the first rows of the pass over the whole canvas.
    """
    torch.manual_seed(seed)
    denoiser = Denoiser(network).eval()
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.3)
    ids, positions = torch.randint(0, 99, (1, 12)), torch.arange(12)[None]
    whole, present = denoiser.hidden(ids, positions)
    for (kv_heads, head_size), (keys, values) in zip(network.cache_shapes(), present, strict=True):
        assert keys.shape == values.shape == (1, kv_heads, 12, head_size)
    first = [(keys[:, :, :CACHED], values[:, :, :CACHED]) for keys, values in present]
    rest, _ = denoiser.hidden(ids[:, CACHED:], positions[:, CACHED:], first)
    assert_near(rest, whole[:, CACHED:])
    plain = Denoiser(network, is_plain=True).eval()
    plain.load_state_dict(denoiser.state_dict())
    assert_near(plain.hidden(ids, positions)[0], whole)
    assert_near(plain.project(whole), denoiser.project(whole))


def test_a_part_of_a_head_turns_and_the_rest_stays() -> None:
    x, positions = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
    turned = rotate(x, (angles.cos(), angles.sin(), positions), is_plain=True)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    by_hand = torch.view_as_complex(torch.stack((x[..., :2], x[..., 2:4]), -1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(turned[..., :4], torch.cat((by_hand.real, by_hand.imag), -1))


@pytest.mark.parametrize(("stored", "read"), [(1.0, None), (4.0, Linear(4.0))])
def test_a_factor_of_an_earlier_version_is_read(stored: float, read: Linear | None) -> None:
    values = make_network().as_dict()
    for layer in values["layers"]:
        layer["attention"]["rope"]["scaling"] = stored
    found = NetworkSpec.from_dict(values)
    assert [layer.attention.rope and layer.attention.rope.scaling for layer in found.layers] == [
        read
    ] * len(found.layers)


def test_position_scaling_divides_positions() -> None:
    layer = make_network().layers[0]
    scaled = replace(layer, attention=replace(layer.attention, rope=Rope(1e4, scaling=Linear(4.0))))
    plain, slow = Denoiser(make_network()), Denoiser(make_network(layers=(scaled,)))
    torch.testing.assert_close(slow.rotary[0].cos[::4], plain.rotary[0].cos[:64])


def test_a_feature_that_is_not_built_is_refused_by_its_layer() -> None:
    layer = make_network().layers[0]
    other = replace(layer, mlp=MlpSpec(8, "tanh"))
    with pytest.raises(UnbuiltNetworkError, match="layer 1 has activation tanh"):
        Denoiser(make_network(layers=(layer, other)))


def test_experts_are_described_and_counted() -> None:
    """Each token uses 8 of 64 experts.

    The work for a token is the work of 8 experts. A pass over few tokens only reads the weights of
    few experts. No recipe quantises the router.
    """
    layer = replace(make_network().layers[0], mlp=ExpertsSpec(64, 8, 16, shared_size=32))
    network = make_network(layers=(layer,))
    (router,) = [linear for linear in network.linear_layers() if linear.role in NEVER_QUANTISED]
    assert (router.path, router.inputs, router.outputs) == ("blocks.0.mlp.router", 32, 64)
    assert router.path not in RECIPES["int8"].formats(list(network.quantisable()))
    assert network.parameters()["blocks.0.mlp.experts.gate.weight"] == (64, 32, 16)
    dense = make_network(layers=(replace(layer, mlp=MlpSpec(8 * 16 + 32)),))
    one, same = (Costs(each, {}).work(1, 0, 1) for each in (network, dense))
    assert one.macs["layers.full"] == same.macs["layers.full"] + 32 * 64
    assert one.weight_bytes == same.weight_bytes + 4 * 32 * 64
    many = Costs(network, {}).work(1000, 0, 1).weight_bytes - 4 * 1000 * 32
    assert many + 4 * 99 * 32 == pytest.approx(4 * (network.parameter_count() - 32), rel=1e-3)
    chosen = estimate(network, 0, Limits(8, 8), all_experts=False)
    assert chosen.passes == estimate(dense, 0, Limits(8, 8)).passes


def test_mixtures_that_cannot_be_are_refused() -> None:
    for changes in (
        {"count": 1, "active": 1},
        {"active": 9},
        {"active": 0},
        {"count": 9, "router": RouterSpec(groups=2)},
    ):
        with pytest.raises(ValueError, match="experts"):
            ExpertsSpec(**{"count": 8, "active": 2, "size": 4} | changes)
    for told, wrong in (
        ("score linear", {"score": "linear"}),
        ("bias both", {"bias": "both"}),
        ("of 1 groups", {"active_groups": 2}),
    ):
        with pytest.raises(ValueError, match=told):
            RouterSpec(**wrong)


@torch.no_grad()
def test_the_bias_chooses_experts_within_the_best_groups_and_leaves_the_weights() -> None:
    """The router is defined as in DeepSeek-V3. The expected values were computed by hand.

    The score of a group of experts is the sum of its two highest biased scores. The router chooses
    the two best of three groups, and then the three best experts in these two groups.
    """
    spec = ExpertsSpec(
        6, 3, 4, router=RouterSpec("sigmoid", "choice", scale=2.5, groups=3, active_groups=2)
    )
    router = Router(spec, 1, 1e-6)
    products = torch.tensor([2.0, 1.0, -1.0, 0.0, 1.5, -3.0])
    router.weight.copy_(products[None])
    router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0, 0.0]))
    chosen, weights = router(torch.ones(1, 1, 1))
    # The groups have the scores 1.61, 2.77 and 0.86. The last group is not chosen, so its expert
    # with the high score 0.82 is not chosen either.
    scores = products.sigmoid()
    assert chosen.flatten().tolist() == [3, 0, 1]
    kept = scores[[3, 0, 1]]
    torch.testing.assert_close(weights.flatten(), 2.5 * kept / kept.sum())
