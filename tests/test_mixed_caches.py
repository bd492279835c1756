"""Tests of caches for networks whose layers have different numbers of heads and head sizes.

The test builds a small graph by hand. Decoding with a cache must give exactly the same canvas as
decoding without a cache. In the graph, the keys and values of a row depend only on the row's token
and position, so cached rows never become outdated. All numbers are small integers, so sums are
exact in any order. Each prediction depends on every cached number, and on the row and the head that
contain the number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import dlm_runtime
from dlm_runtime.abi import native as _native

VOCABULARY, MASK, LONGEST = 61, 60, 64
# For each layer: the number of key and value heads, and the head size.
LAYERS = ((3, 4), (1, 6), (3, 2), (2, 4))
LAYER = """
  key_tokens.L = Gather(key_table.L, ids)
  key_places.L = Gather(key_place.L, places)
  key_flat.L = Add(key_tokens.L, key_places.L)
  key_rows.L = Reshape(key_flat.L, split.L)
  new_keys.L = Transpose<perm = [0, 2, 1, 3]>(key_rows.L)
  value_tokens.L = Gather(value_table.L, ids)
  value_places.L = Gather(value_place.L, places)
  value_flat.L = Add(value_tokens.L, value_places.L)
  value_rows.L = Reshape(value_flat.L, split.L)
  new_values.L = Transpose<perm = [0, 2, 1, 3]>(value_rows.L)
  keys.L = Concat<axis = 2>(read_keys.L, new_keys.L)
  values.L = Concat<axis = 2>(read_values.L, new_values.L)
  products.L = Mul(keys.L, values.L)
  row_sums.L = ReduceSum<keepdims = 0>(products.L, last)
  row_marks.L = Mod<fmod = 1>(row_sums.L, thirteen)
  head_sums.L = ReduceSum<keepdims = 0>(row_marks.L, last)
  weighed.L = Mul(head_sums.L, head_weights.L)
  seen.L = ReduceSum(weighed.L, last)
"""
# For each number type of the cache, the nodes that read cached rows and store new rows. An int8 row
# stores copies of its first two codes instead of a scale. If the loop mixes up the scales of rows,
# the result is therefore wrong.
STORED = {
    "float32": """
  read_KIND.L = Identity(old_KIND.L)
  kept_KIND.L = Identity(new_KIND.L)
""",
    "float16": """
  read_KIND.L = Cast<to = 1>(old_KIND.L)
  kept_KIND.L = Cast<to = 10>(new_KIND.L)
""",
    "int8": """
  codes_KIND.L = Cast<to = 3>(new_KIND.L)
  marks_KIND.L = Slice(codes_KIND.L, none, two, last)
  kept_KIND.L = Concat<axis = -1>(codes_KIND.L, marks_KIND.L)
  wide_KIND.L = Cast<to = 1>(old_KIND.L)
  numbers_KIND.L = Slice(wide_KIND.L, none, but_two, last)
  firsts_KIND.L = Slice(wide_KIND.L, none, two, last)
  brought_KIND.L = Slice(wide_KIND.L, but_two, end, last)
  apart_KIND.L = Sub(firsts_KIND.L, brought_KIND.L)
  first_KIND.L = Slice(apart_KIND.L, none, single, last)
  second_KIND.L = Slice(apart_KIND.L, single, two, last)
  off_KIND.L = Add(first_KIND.L, second_KIND.L)
  read_KIND.L = Add(numbers_KIND.L, off_KIND.L)
""",
}
TYPES = {
    "float32": ("float", 4, 0),
    "float16": ("float16", 2, 0),
    "int8": ("int8", 1, 2),
}  # for each number type: (ONNX type, bytes per element, bytes of a row's scale)
HEAD = """
  all_seen = Sum(SEEN)
  whole = Cast<to = 7>(all_seen)
  row_ids = GatherElements<axis = 1>(ids, scored)
  row_places = GatherElements<axis = 1>(places, scored)
  weighed_places = Mul(row_places, seven)
  of_row = Add(row_ids, weighed_places)
  sum = Add(whole, of_row)
  token = Mod(sum, size)
  best = Cast<to = 1>(token)
  best_column = Unsqueeze(best, last)
  differences = Sub(vocabulary, best_column)
  distances = Abs(differences)
  remainder = Mod<fmod = 1>(best_column, thirteen)
  steepness = Add(remainder, one)
  steep = Mul(distances, steepness)
  down = Neg(steep)
  raw = Mul(down, tenth)
  masked = Add(raw, mask_bias)
  every = Softmax<axis = -1>(masked)
  probs, ids_of_best = TopK(every, two)
  rest = Sub(one, probs)
  odds = Div(probs, rest)
  log_odds = Log(odds)
  candidates = Cast<to = 6>(ids_of_best)
  shifted = Add(every, tiny)
  logs = Log(shifted)
  parts = Mul(every, logs)
  spread = ReduceSum<keepdims = 0>(parts, last)
"""


def _graph(cache_dtype: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "last": np.array([-1]),
        "two": np.array([2]),
        "none": np.array([0]),
        "single": np.array([1]),
        "but_two": np.array([-2]),
        "end": np.array([1 << 20]),
        "seven": np.array(7),
        "size": np.array(VOCABULARY),
        "thirteen": np.float32(13),
        "one": np.float32(1),
        "tenth": np.float32(0.1),
        "tiny": np.float32(1e-10),
        "vocabulary": np.arange(VOCABULARY, dtype=np.float32),
        "mask_bias": np.where(np.arange(VOCABULARY) == MASK, -np.inf, 0).astype(np.float32),
    }
    inputs = ["int64[B,T] ids", "int64[B,T] places", "int64[B,R] scored"]
    outputs = [
        "int32[B,R,2] candidates",
        "float[B,R,2] probs",
        "float[B,R,2] log_odds",
        "float[B,R] spread",
        f"float[B,R,{VOCABULARY}] raw",
    ]
    body = ""
    element, _, scale = TYPES[cache_dtype]
    for i, (heads, size) in enumerate(LAYERS):
        rows = "".join(STORED[cache_dtype].replace("KIND", kind) for kind in ("keys", "values"))
        # ``made`` computes new keys and values. ``attended`` uses them and the cached rows.
        made, attended = LAYER.split("  keys.L =")
        body += f"{made}{rows}  keys.L ={attended}".replace(".L", f"_{i}")
        constants[f"split_{i}"] = np.array([0, 0, heads, size])
        constants[f"head_weights_{i}"] = np.arange(1, heads + 1, dtype=np.float32) * (i + 1)
        for kind in ("key", "value"):
            inputs.append(f"{element}[B,{heads},S,{size + scale}] old_{kind}s_{i}")
            outputs.append(f"{element}[B,{heads},T,{size + scale}] kept_{kind}s_{i}")
            for name, rows in (("table", VOCABULARY), ("place", LONGEST)):
                constants[f"{kind}_{name}_{i}"] = rng.integers(0, 10, (rows, heads * size)).astype(
                    np.float32
                )
    body += HEAD.replace("SEEN", ", ".join(f"seen_{i}" for i in range(len(LAYERS))))
    text = f'<ir_version: 10, opset_import: ["": 21]> mixed ({", ".join(inputs)}) => ({", ".join(outputs)}) {{{body}}}'
    model = parser.parse_model(text)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()
    )
    onnx.checker.check_model(model)
    return model


@pytest.fixture(scope="module", params=TYPES)
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dlm_runtime.Bundle]:
    folder = tmp_path_factory.mktemp("mixed")
    content = _graph(request.param).SerializeToString()
    (folder / "graph.onnx").write_bytes(content)
    ports: dict[str, Any] = {"input_ids": "ids", "position_ids": "places", "score_rows": "scored"}
    ports |= {"top_token": "candidates", "top_prob": "probs", "top_log_odds": "log_odds"}
    ports |= {"entropy": "spread", "logits": "raw"}
    ports["layers"] = [
        {
            "kv_heads": heads,
            "head_size": size,
            "past_key": f"old_keys_{i}",
            "past_value": f"old_values_{i}",
            "present_key": f"kept_keys_{i}",
            "present_value": f"kept_values_{i}",
        }
        for i, (heads, size) in enumerate(LAYERS)
    ]
    graph = {
        "file": "graph.onnx",
        "simulated": False,
        "top_k": 2,
        "cache_dtype": request.param,
        "ports": ports,
    }
    loop = {
        "vocab_size": VOCABULARY,
        "mask_token_id": MASK,
        "eos_token_ids": [],
        "max_canvas_length": LONGEST,
        "shift": 0,
    }
    loop |= {"graph": graph, "presets": {"plain": {"block_length": 8}}, "default_preset": "plain"}
    files = {"graph.onnx": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (folder / "manifest.json").write_text(
        json.dumps({"schema_version": 2, "loop": loop, "files": files})
    )
    with dlm_runtime.open(folder, threads=1) as opened:
        yield opened


CACHES: list[dict[str, Any]] = [
    {"cache": cache, "refresh": refresh}
    for cache in ("prefix", "dual")
    for refresh in (0, 1, 9, 20)
]
REQUESTS: list[dict[str, Any]] = [
    {"tokens": [5, 7, 11], "max_new_tokens": 40},
    {"tokens": [5, MASK, 11, 4, MASK, MASK, 3, 9], "max_new_tokens": 27},
    {"tokens": [], "max_new_tokens": 64, "block_length": 16},
    {
        "tokens": [2] * 30,
        "max_new_tokens": 20,
        "block_length": 5,
        "commit": "threshold",
        "threshold": 0.5,
    },
    {
        "tokens": [1, 2],
        "max_new_tokens": 30,
        "commit": "entropy_bound",
        "score": "entropy",
        "entropy_bound": 2.0,
    },
]


@pytest.mark.parametrize("fields", CACHES, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_every_cache_gives_what_no_cache_gives(
    bundle: dlm_runtime.Bundle, number: int, fields: dict[str, Any]
) -> None:
    plain = bundle.generate(**REQUESTS[number])
    cached = bundle.generate(**REQUESTS[number], **fields)
    assert (cached.tokens, cached.nfe) == (plain.tokens, plain.nfe)
    _, element, scale = TYPES[bundle.manifest["loop"]["graph"]["cache_dtype"]]
    row_bytes = 2 * sum(heads * (size * element + scale) for heads, size in LAYERS)
    assert (cached.cache_bytes, plain.cache_bytes) == (row_bytes * len(plain.tokens), 0)


@pytest.mark.parametrize("fields", CACHES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_requests_of_a_batch_keep_their_own_rows(
    bundle: dlm_runtime.Bundle, fields: dict[str, Any]
) -> None:
    prompts = [[i, 3 * i + 1, 50 - i] for i in range(5)]
    alone = [bundle.generate(tokens=tokens, max_new_tokens=40).tokens for tokens in prompts]
    together = bundle.generate_batch(tokens=prompts, max_new_tokens=40, **fields)
    assert [one.tokens for one in together] == alone


def test_what_a_row_predicts_depends_on_every_other_token(bundle: dlm_runtime.Bundle) -> None:
    canvas = np.full(32, MASK)
    base = bundle.logits(canvas, [0]).argmax()
    moved = [
        bundle.logits([*canvas[:i], token, *canvas[i + 1 :]], [0]).argmax() != base
        for i in range(1, 32)
        for token in (3, 9)
    ]
    assert np.mean(moved) > 0.8, "the graph would hide rows that are out of place"


def test_sizes_that_layers_do_not_share_are_0_in_c(bundle: dlm_runtime.Bundle) -> None:
    info = _native.library().dlm_bundle_describe(bundle._handle.pointer).contents.denoiser.contents
    element = TYPES[bundle.manifest["loop"]["graph"]["cache_dtype"]][1]
    assert (info.layers, info.kv_heads, info.head_size, info.kv_element_bytes) == (
        len(LAYERS),
        0,
        0,
        element,
    )
