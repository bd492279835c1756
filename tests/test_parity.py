"""Tests of parity: the ONNX graph equals torch, and the native loop equals the reference loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import dream_config, llada_config, write_checkpoint
from denoisers import load, under_native_loop
from loops import loops

import dlm_runtime
from dlm_calibration.states import MASK_RATIOS, mask_independently, random_tokens
from dlm_export import graph
from dlm_export.build import BuildOptions, build
from dlm_export.judging.parity import against_torch
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.sources import open_source
from dlm_runtime import PRESETS, Bundle, Event

# Limit for the difference of logits, relative to the range of the logits. torch and ONNX Runtime
# add fp32 numbers in another order.
RELATIVE = 2e-4

# The policies cover different rules. The thresholds are low, so that denoisers with random weights
# commit several tokens per pass.
LOOPS = loops("""
llada: preset=llada block_length=8
llada in few steps: preset=llada block_length=16 steps=8
llada, random order: preset=llada block_length=8 steps=12 score=random seed=7
threshold, no cache: preset=fast-dllm block_length=8 threshold=0.3 cache=none
threshold, prefix cache: preset=fast-dllm block_length=8 threshold=0.3 cache=prefix
threshold, dual cache: preset=fast-dllm block_length=8 threshold=0.3
threshold, dual cache, odd blocks: preset=fast-dllm block_length=7 threshold=0.5 compare=>
factor, dual cache: preset=fast-dllm block_length=12 commit=factor factor=2.0
dynamic, prefix cache: preset=fast-dllm commit=dynamic threshold=0.3 steps=6 cache=prefix
sequential: preset=llada block_length=8 steps=12 commit=sequential
dream, entropy: preset=dream steps=10
dream, margin: preset=dream steps=10 score=margin
dream, maskgit_plus: preset=dream steps=10 score=maskgit_plus
dream without draws: preset=dream steps=10 temperature=0.0
llada, drawn, random order: preset=llada block_length=8 temperature=0.7 score=random top_k=9
threshold, dual cache, drawn: preset=fast-dllm block_length=8 threshold=0.2 temperature=0.6 seed=1
prefix cache, few: preset=fast-dllm block_length=8 threshold=0.2 cache=prefix temperature=1.5 top_p=0.4 top_k=30 score_of=draw
guided: preset=llada block_length=8 steps=12 cfg_scale=1.5
guided, threshold, dual cache: preset=fast-dllm block_length=8 threshold=0.3 cfg_scale=0.7
guided, drawn, prefix cache: preset=fast-dllm threshold=0.2 cache=prefix cfg_scale=2.0 temperature=0.8
guided entropies: preset=llada commit=entropy_bound entropy_bound=2.0 cfg_scale=1.0
entropies of draws: preset=llada commit=entropy_bound entropy_bound=2.0 temperature=0.9 top_k=40
rnd1: preset=rnd1 steps_per_block=7
dream-block: preset=dream-block block_length=8 threshold=0.3
dream-block, prefix cache: preset=dream-block block_length=8 threshold=0.3 cache=prefix
dual cache, refresh of one block: preset=fast-dllm block_length=8 threshold=0.3 refresh=1
dual cache, refresh of more: preset=fast-dllm block_length=4 threshold=0.3 refresh=10
prefix cache, refresh: preset=fast-dllm block_length=5 threshold=0.3 cache=prefix refresh=6
dream-block, refresh: preset=dream-block block_length=8 threshold=0.3 refresh=8
entropy bound: preset=llada commit=entropy_bound entropy_bound=2.0 cache=dual block_length=8
""")
NEW_TOKENS = 24


@dataclass(frozen=True)
class Pair:
    """One checkpoint, as a torch denoiser and as a bundle."""

    denoiser: Denoiser
    bundle: Bundle


@pytest.fixture(scope="session")
def pairs(
    llada_checkpoint: Path, llada_bundle: Path, dream_checkpoint: Path, dream_bundle: Path
) -> dict[str, Pair]:
    return {
        "llada": Pair(load(llada_checkpoint), dlm_runtime.open(llada_bundle, threads=1)),
        "dream": Pair(load(dream_checkpoint), dlm_runtime.open(dream_bundle, threads=1)),
    }


def prompts(denoiser: Denoiser, count: int, length: int = 9) -> list[list[int]]:
    c, rng = denoiser.network, np.random.default_rng(3)
    return [
        random_tokens(length, c.vocab_size, (c.mask_token_id, *c.eos_token_ids), rng).tolist()
        for _ in range(count)
    ]


def expected(
    denoiser: Denoiser, bundle: Bundle, tokens: list[int], loop: dict[str, Any]
) -> reference.Reference:
    fields = {name: value for name, value in loop.items() if name not in ("preset", "steps")}
    policy = PRESETS[loop["preset"]].with_fields(fields)
    return reference.generate(denoiser, tokens, policy, NEW_TOKENS, loop.get("steps", 0))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_whole_canvases_and_nfe_equal_the_reference(
    pairs: dict[str, Pair], family: str, loop: dict[str, Any]
) -> None:
    pair = pairs[family]
    for tokens in prompts(pair.denoiser, 1):
        wanted = expected(pair.denoiser, pair.bundle, tokens, loop)
        out = pair.bundle.generate(tokens=tokens, max_new_tokens=NEW_TOKENS, **loop)
        assert out.tokens == wanted.tokens
        assert out.nfe == wanted.nfe


# One loop of each kind: the requests of a batch share passes, whatever the rule is.
BATCHED = (
    "llada, random order",
    "threshold, dual cache, odd blocks",
    "dynamic, prefix cache",
    "dream, entropy",
    "prefix cache, few",
    "guided, drawn, prefix cache",
    "entropies of draws",
    "dream-block",
    "dual cache, refresh of more",
    "entropy bound",
)


@pytest.mark.parametrize(("name", "family"), [*zip(BATCHED, itertools.cycle(("llada", "dream")))])
def test_a_batch_equals_the_reference_request_by_request(
    pairs: dict[str, Pair], family: str, name: str
) -> None:
    """The batch runs in ONNX Runtime and in torch.

    Two requests contain given tokens inside their blocks, so that the blocks need different numbers
    of passes.
    """
    pair, loop = pairs[family], LOOPS[name]
    mask = pair.denoiser.network.mask_token_id
    policy = PRESETS[loop["preset"]].with_fields(
        {k: v for k, v in loop.items() if k not in ("preset", "steps")}
    )
    tokens = [given + [mask] * NEW_TOKENS for given in prompts(pair.denoiser, 4)]
    for at, given in enumerate(prompts(pair.denoiser, 2, NEW_TOKENS)):
        tokens[at][-NEW_TOKENS:] = [
            mask if i % (3 + at) == 0 else token for i, token in enumerate(given)
        ]
    steps = loop.get("steps", 0)
    wanted = [reference.generate(pair.denoiser, one, policy, 0, steps) for one in tokens]
    assert len({one.nfe for one in wanted}) > 1 or policy.commit in (
        "timestep",
        "sequential",
        "static",
    )
    with under_native_loop(pair.denoiser) as torch_bundle:
        for bundle in (pair.bundle, torch_bundle):
            out = bundle.generate_batch(
                tokens=tokens, max_new_tokens=0, steps=steps, **policy.as_dict()
            )
            assert [(one.tokens, one.nfe) for one in out] == [
                (one.tokens, one.nfe) for one in wanted
            ]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("family", "refresh"), [("llada", 0), ("dream", 6)])
def test_infilling_equals_the_reference_whatever_the_cache_starts_from(
    pairs: dict[str, Pair], family: str, refresh: int, cache: str
) -> None:
    """The given tokens are at the start, in the middle and at the end of blocks.

    All tokens of one block are given. The last block is shorter than the other blocks.
    """
    pair = pairs[family]
    mask = pair.denoiser.network.mask_token_id
    policy = PRESETS["llada"].with_fields(
        {"cache": cache, "refresh": refresh, "block_length": 5, "stop": "none"}
    )
    for given in prompts(pair.denoiser, 2, 34):
        tokens = [
            mask if i >= 4 and not 9 <= i < 15 and i % 5 not in (0, 3) else token
            for i, token in enumerate(given)
        ]
        wanted = reference.generate(pair.denoiser, tokens, policy, 9, steps=0)
        out = pair.bundle.generate(tokens=tokens, max_new_tokens=9, **policy.as_dict())
        assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_logits_equal_torch_at_every_mask_ratio(pairs: dict[str, Pair], family: str) -> None:
    pair = pairs[family]
    c, rng = pair.denoiser.network, np.random.default_rng(0)
    for ratio, length in itertools.product(MASK_RATIOS, (1, 6, 40)):
        canvas = mask_independently(
            random_tokens(length, c.vocab_size, (c.mask_token_id,), rng),
            ratio,
            c.mask_token_id,
            rng,
        )
        ours = pair.bundle.logits(canvas.tolist())
        with torch.no_grad():
            theirs = pair.denoiser(torch.from_numpy(canvas)[None])[0].numpy()
        assert ours.dtype == np.float32
        assert ours.shape == (length, c.vocab_size)
        worst = np.abs(ours - theirs).max()
        assert worst <= RELATIVE * (theirs.max() - theirs.min())
        best_two = np.sort(theirs, axis=-1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] > 2 * worst
        assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all()


@pytest.mark.parametrize("tie_error", [4, 1e12])
def test_another_canvas_is_a_miss_unless_rounding_explains_it(
    tie_error: float,
    llada_checkpoint: Path,
    llada_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bundle decides another token in its first pass, and makes one pass more than torch.

    Rounding does not explain such a token. If the limit for rounding is absurdly large, the same
    canvas is a tie.
    """
    stream = Bundle.stream

    def changed(bundle: Bundle, **fields: Any) -> Iterator[Event]:
        start: list[int] = fields["tokens"]
        for event in stream(bundle, **fields):
            at = len(start) + event.undecided[len(start) :].index(False)
            canvas = [*event.canvas[:at], (event.canvas[at] + 1) % 50, *event.canvas[at + 1 :]]
            result = event.result and replace(event.result, tokens=canvas, nfe=event.nfe + 1)
            yield replace(event, canvas=canvas, result=result)

    monkeypatch.setattr(Bundle, "stream", changed)
    monkeypatch.setattr(against_torch, "TIE_ERROR", tie_error)
    source = open_source(llada_checkpoint)
    policy = PRESETS["llada"].with_fields({"block_length": 4})
    parity = against_torch.check_parity(
        *(llada_bundle, source, {"llada": policy}, "fp32"),
        cache_dtype="float32",
        prompts=[[1, 2, 3]],
        max_new_tokens=4,
    )
    (row,) = parity.loop
    is_tie = tie_error > 4
    assert (row.canvases_equal, row.canvases_tied, row.nfe_equal) == (is_tie, is_tie, is_tie)
    assert [miss.partition(",")[0] for miss in parity.misses] == (
        [] if is_tie else ["1 of 1 canvases differ", "llada: NFE differs from the reference"]
    )


SHAPES = {
    "llada, grouped queries, two shards": (
        llada_config(n_kv_heads=2, n_layers=3, d_model=96, n_heads=6),
        {"shards": 2},
    ),
    "llada, one kv head, qkv bias": (llada_config(n_kv_heads=1, include_qkv_bias=True), {}),
    "llada, tied head, fp16 weights": (llada_config(weight_tying=True), {"dtype": torch.float16}),
    "dream, head size 32, one layer": (
        dream_config(hidden_size=128, num_hidden_layers=1),
        {"dtype": torch.bfloat16},
    ),
    "dream, tied head, full heads": (
        dream_config(tie_word_embeddings=True, num_key_value_heads=4),
        {"shards": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_build_proves_parity_for_other_shapes(name: str, tmp_path: Path) -> None:
    config, options = SHAPES[name]
    report = build(
        write_checkpoint(tmp_path / "checkpoint", config, seed=5, **options), tmp_path / "bundle"
    )
    assert report.parity is not None
    assert report.parity.misses == []
    assert max(row.relative for row in report.parity.graph) <= RELATIVE
    assert all(row.canvases == row.canvases_equal and row.nfe_equal for row in report.parity.loop)


def test_fp16_graph_stays_close_to_torch(llada_checkpoint: Path, tmp_path: Path) -> None:
    report = build(llada_checkpoint, tmp_path / "bundle", BuildOptions(precision="fp16"))
    assert report.parity is not None
    # Rounding to fp16 changes a number by up to 0.05%. The errors of a few layers add up.
    assert 0 < max(row.relative for row in report.parity.graph) < 5e-3
    assert report.files_bytes["denoiser.onnx.data"] < 300_000
    with dlm_runtime.open(tmp_path / "bundle") as bundle:
        out = bundle.generate(
            tokens=[1, 2, 3], max_new_tokens=16, preset="fast-dllm", block_length=8, threshold=0.3
        )
        assert out.nfe <= 16
        assert bundle.mask_token_id not in out.tokens


def test_the_graph_is_checked_named_and_projects_scored_rows_only(llada_bundle: Path) -> None:
    path = llada_bundle / graph.GRAPH_FILE
    onnx.checker.check_model(str(path), full_check=False)
    model = onnx.load(str(path), load_external_data=False)
    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [23]
    axes = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in model.graph.input
    }
    assert axes["input_ids"] == ["B", "T"]
    assert axes["score_rows"] == ["B", "R"]
    assert axes["past_key.1"] == ["B", 4, "S", 16]
    layers = {
        p.value: node.op_type
        for node in model.graph.node
        for p in node.metadata_props
        if p.key == graph.LAYER_KEY
    }
    assert layers["blocks.1.mlp.down"] == "MatMul"
    assert layers["head"] == "MatMul"
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("CachedAttention") == 2
    assert (kinds.count("RMSNormalization"), kinds.count("AddNorm")) == (1, 4)
    weights = {initializer.name: initializer for initializer in model.graph.initializer}
    assert weights["blocks.1.mlp.down.weight"].data_location == onnx.TensorProto.EXTERNAL
    by_output = {name: node for node in model.graph.node for name in node.output}
    head = next(node for node in model.graph.node if "head.weight" in node.input)
    assert by_output[head.input[0]].op_type == "GatherElements"
