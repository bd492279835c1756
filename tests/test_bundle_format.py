"""Tests of the bundle's format. manifest.schema.json and the native library's reader of manifests
must agree, and damaged bundles must be rejected.

The native reader checks the manifest's members ``loop`` and ``files``. Before Python code reads
other members, it checks them with the schema. The native library runs in the process of the tests,
so a crash of the library ends the test run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.bundle.folder import write_manifest
from dlm_export.bundle.manifest import network_of, read_manifest
from dlm_export.cli import main
from dlm_export.judging.tuning.effort_levels import LEVELS
from dlm_export.outputs import OutputError
from dlm_export.tensorrt import bundled
from dlm_runtime import BundleError, DlmError, EngineError, Policy, RequestError
from dlm_runtime.constraints.layout import LAYOUTS
from dlm_runtime.manifest import check_manifest, schema, validator
from dlm_runtime.tools import FORMATS as CALL_FORMATS

SCHEMA = schema()
VALIDATOR = validator()
# The members that the native reader reads. Of all other members, the native reader only checks the
# names.
NATIVE = (
    "schema_version",
    "loop",
    "files",
)
READ = (*NATIVE, "text")  # a manifest may lack "text"
NATIVE_VALIDATOR = VALIDATOR.evolve(
    schema=SCHEMA
    | {
        "required": NATIVE,
        "properties": {
            key: rule if key in READ else {} for key, rule in SCHEMA["properties"].items()
        },
    }
)
DATA_FILE = "denoiser.onnx.data"


def examples(count: int) -> settings:
    """Settings of a property test that writes files."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def bundle(llada_bundle: Path, tmp_path: Path) -> Path:
    """A copy of a built bundle, which tests may damage."""
    return Path(shutil.copytree(llada_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def shared_bundle(llada_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a built bundle. Each example of a property test writes the manifest of the copy
    again.
    """
    copied = Path(shutil.copytree(llada_bundle, tmp_path_factory.mktemp("format") / "bundle"))
    assert _opens(copied), "every damage would be refused, whatever it is"
    return copied


def _read(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))


def _write(bundle: Path, manifest: Any) -> None:
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _change(bundle: Path, *path: str, value: Any) -> None:
    manifest = _read(bundle)
    node = manifest
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    _write(bundle, manifest)


def _relist(bundle: Path, name: str) -> None:
    """Write the current size and hash of a file into the manifest."""
    content = (bundle / name).read_bytes()
    _change(
        bundle,
        "files",
        name,
        value={"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
    )


def _seal(entry: dict[str, Any]) -> None:
    """Seal an engine's entry, as a build does in its last step: add the hash of the entry to the
    entry.
    """
    bare = {key: value for key, value in entry.items() if key != "seal"}
    entry["seal"] = hashlib.sha256(
        json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _add_engine(manifest: dict[str, Any], target: str = "rtx5090") -> dict[str, Any]:
    """Add a valid entry of a fake engine to a manifest and return the entry.

    The caller writes the engine's file.
    """
    name, content = f"engines/{target}.engine", b"engine"
    files = manifest["files"]
    files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["loop"]["graph"]["device_file"] = "denoiser.onnx"
    profile = {"tokens": [1, 16, 32], "cached": [0, 0, 64], "rows": [1, 8, 32]}
    entry = {
        "file": name,
        "builder": "tensorrt_rtx",
        "version": "1.7.1.116",
        "sm": [120],
        "built_from": {
            "judged": files["denoiser.onnx"]["sha256"],
            "device": files["denoiser.onnx"]["sha256"],
            "weights": files[DATA_FILE]["sha256"],
        },
        "profiles": {"prefill": profile, "block": json.loads(json.dumps(profile))},
    }
    _seal(entry)
    manifest["loop"].setdefault("engines", {})[target] = entry
    manifest.setdefault("audits", {})[target] = {
        "method": "network",
        "layers": {"blocks.0.mlp.up": "fp8"},
        "fallbacks": {'blocks.0."quoted"\\': {"asked": "nvfp4", "held": "fp16"}},
        "device_bytes": 1 << 30,
    }
    return entry


def _add_effort(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add made-up effort levels to a manifest.

    Returns the levels in the form that the manifest's member ``loop`` stores.
    """
    point = {"changes": {"threshold": 0.5}, "quality": 0.5, "nfe": 3.5, "ms": 7.5}
    held = {"samples": 2, "quality": 0.5, "interval": [0.1, 0.9], "nfe": 3.5, "careful": 1.0}
    fitted = {
        "quality": "task",
        "samples": 3,
        "held_out": held,
        "by": "passes",
        "curve": [point],
        "levels": dict.fromkeys(LEVELS, point),
    }
    manifest["effort"] = {"preset": "llada", **fitted}
    levels = {level: dict(manifest["loop"]["presets"]["llada"]) for level in LEVELS}
    manifest["loop"]["effort"] = {"preset": "llada", "levels": levels}
    return manifest["loop"]["effort"]


def _write_with_engine(
    bundle: Path, change: Callable[[dict[str, Any]], object] = lambda entry: None
) -> None:
    """Add an engine to the bundle on disk.

    ``change`` is called with the engine's entry before the entry is sealed.
    """
    manifest = _read(bundle)
    entry = _add_engine(manifest)
    change(entry)
    _seal(entry)
    (bundle / "engines").mkdir(exist_ok=True)
    (bundle / "engines" / "rtx5090.engine").write_bytes(b"engine")
    _write(bundle, manifest)


def _opens(bundle: Path, check_hashes: bool = False, engine: str = "auto") -> bool:
    """Return True if the bundle opens. Any error other than DlmError is a defect and propagates."""
    try:
        dlm_runtime.open(bundle, engine=engine, threads=1, check_hashes=check_hashes).close()
    except DlmError as err:
        sentence = str(err)
    else:
        return True
    assert sentence, "an error without a sentence"
    assert "\n" not in sentence
    return False


def _is_described(manifest: dict[str, Any], bundle: Path) -> bool:
    """Return whether Python's check accepts a manifest.

    Any error other than a BundleError with a one-line message is a defect and is raised.
    """
    try:
        check_manifest(manifest, bundle)
    except BundleError as err:
        sentence = str(err)
    else:
        return True
    assert sentence.startswith(f"{bundle / 'manifest.json'}: "), "the message does not say where"
    assert "\n" not in sentence
    assert len(sentence) < len(str(bundle)) + 700, "a sentence, not the input"
    return False


def _refusal(
    bundle: Path,
    kind: type[DlmError] = BundleError,
    check_hashes: bool = False,
    engine: str = "auto",
) -> str:
    with pytest.raises(kind) as caught:
        dlm_runtime.open(bundle, engine=engine, threads=1, check_hashes=check_hashes)
    assert str(bundle) in str(caught.value), "the message does not say where"
    return str(caught.value)


# ---- What a build writes ----


def test_a_built_manifest_is_valid_under_the_schema(llada_bundle: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    manifest = _read(llada_bundle)
    assert manifest == read_manifest(llada_bundle)
    assert [
        f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(manifest)
    ] == []
    on_disk = {
        p.relative_to(llada_bundle).as_posix() for p in llada_bundle.rglob("*") if p.is_file()
    }
    assert set(manifest["files"]) == on_disk - {"manifest.json"}


@pytest.mark.parametrize(
    "style",
    [{"indent": 7}, {"ensure_ascii": True}],
)
def test_the_way_a_manifest_is_laid_out_does_not_matter(
    bundle: Path, style: dict[str, Any]
) -> None:
    manifest = _read(bundle)
    presets = manifest["loop"]["presets"]
    presets["übermäßig 😀"] = presets["llada"]
    (bundle / "manifest.json").write_text(
        json.dumps(manifest, **({"ensure_ascii": False} | style)), encoding="utf-8"
    )
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert opened.manifest == manifest
        assert opened.policy("übermäßig 😀") == opened.policy("llada")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("json_layout", "json_layout: 'wide' is not one of compact, spaced"),
        ("call_format", "call_format: 'wide' is not one of object"),
    ],
)
def test_a_layout_that_is_not_known_is_refused_by_its_name(
    llada_bundle: Path, llada_checkpoint: Path, tmp_path: Path, key: str, sentence: str
) -> None:
    shutil.copytree(llada_bundle, tmp_path / "bundle")
    manifest = _read(tmp_path / "bundle")
    known = {"json_layout": "indented", "call_format": "lines"}
    write_manifest(tmp_path / "bundle", manifest | known, manifest["files"])
    assert {name: read_manifest(tmp_path / "bundle")[name] for name in known} == known
    with dlm_runtime.open(tmp_path / "bundle") as opened:
        assert (opened.json_layout, opened.call_format) == ("indented", "lines")
    write_manifest(tmp_path / "bundle", manifest | {key: "wide"}, manifest["files"])
    with pytest.raises(BundleError, match=sentence):
        dlm_runtime.open(tmp_path / "bundle")
    with pytest.raises(BundleError, match=key):
        read_manifest(tmp_path / "bundle")
    options: dict[Any, Any] = {option.name: option.type for option in main.commands["build"].params}
    assert list(options["json_layout"].choices) == list(LAYOUTS), "as the command's help has them"
    assert list(options["call_format"].choices) == list(CALL_FORMATS)


def test_a_build_says_the_layout_and_a_bundle_keeps_it(
    llada_checkpoint: Path, tmp_path: Path
) -> None:
    asked = ["--no-verify", "--json-layout", "spaced", "--call-format", "tool_call"]
    made = CliRunner().invoke(
        main, ["build", str(llada_checkpoint), "-o", str(tmp_path / "made"), *asked]
    )
    assert made.exit_code == 0, made.output
    again = CliRunner().invoke(
        main,
        [
            "build",
            str(tmp_path / "made"),
            "-o",
            str(tmp_path / "again"),
            "--no-verify",
            "--json-layout",
            "lines",
        ],
    )
    assert again.exit_code == 0, again.output
    for name, layout in (("made", "spaced"), ("again", "lines")):
        manifest = _read(tmp_path / name)
        assert (manifest["json_layout"], manifest["call_format"]) == (layout, "tool_call")


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Strategy for all policies that a manifest may contain."""
    properties = SCHEMA["$defs"]["preset"]["properties"]

    def value(rule: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "enum" in rule:
            return st.sampled_from(rule["enum"])
        numbers = st.integers if rule["type"] == "integer" else st.floats
        return numbers(rule["minimum"], rule["maximum"])

    fields = {name: draw(value(rule)) for name, rule in properties.items()}
    if fields["commit"] in ("threshold", "dynamic", "factor") and fields["score"] == "entropy":
        fields["score"] = "margin"
    if fields["cache"] not in ("prefix", "dual"):
        fields["refresh"] = 0
    if fields["refresh"] == 0:
        fields["reuse_prompt"] = 0
    if fields["cache"] != "block":
        fields["store"] = "pass"
    if fields["commit"] == "verify":
        needed = ("score", "remask", "store", "reserve", "cfg_scale", "sub_block_length")
        needed += ("steps_per_block", "temperature", "refresh", "reuse_prompt")
        fields |= {name: properties[name]["default"] for name in needed} | {"cache": "block"}
    if fields["remask"] == "noise":
        needed = ("cache", "store", "reserve", "cfg_scale", "sub_block_length", "refresh")
        needed += ("reuse_prompt", "next_block", "finish_threshold")
        fields |= {name: properties[name]["default"] for name in needed}
        fields |= {"commit": "entropy_bound", "score": "entropy"}
        fields["temperature_drop"] = min(fields["temperature_drop"], fields["temperature"])
    else:
        fields |= {"temperature_drop": 0, "stable_entropy": 0}
    if fields["remask"] == "rewrite":
        needed = (
            "cache",
            "store",
            "reserve",
            "sub_block_length",
            "refresh",
            "reuse_prompt",
            "score",
            "finish_threshold",
        )
        fields |= {name: properties[name]["default"] for name in needed} | {"commit": "dynamic"}
    if fields["commit"] not in ("threshold", "entropy_threshold"):
        fields["next_block"] = 1
    if fields["next_block"] < 1:
        fields |= {"remask": "none", "store": "pass", "refresh": 0, "reuse_prompt": 0}
        fields["sub_block_length"] = 0
        fields["cache"] = "none" if fields["cache"] == "none" else "prefix"
    if fields["next_block"] == 1 or fields["cache"] == "none":
        fields |= {"cache_delay": 0, "refresh_interval": 0}
    fields["select"] = "sample" if fields["temperature"] else "argmax"
    return Policy(**fields)


@examples(20)
@given(policy=policies())
def test_every_policy_of_the_schema_survives_the_round_trip(
    shared_bundle: Path, llada_bundle: Path, policy: Policy
) -> None:
    manifest = _read(llada_bundle)
    manifest["loop"]["presets"]["drawn"] = policy.as_dict()
    assert VALIDATOR.is_valid(manifest)
    _write(shared_bundle, manifest)
    with dlm_runtime.open(shared_bundle, threads=1, check_hashes=False) as opened:
        assert opened.policy("drawn") == policy


def test_a_preset_without_a_field_takes_the_default_of_the_schema(bundle: Path) -> None:
    _change(bundle, "loop", "presets", "bare", value={})
    with dlm_runtime.open(bundle, threads=1, check_hashes=False) as opened:
        properties = SCHEMA["$defs"]["preset"]["properties"]
        assert opened.policy("bare").as_dict() == {
            name: rule["default"] for name, rule in properties.items()
        }


@pytest.mark.parametrize("said", [None, 1, 24])
def test_a_request_that_does_not_say_fills_as_many_tokens_as_the_bundle_says(
    bundle: Path, said: int | None
) -> None:
    if said is not None:
        _change(bundle, "loop", "max_new_tokens", value=said)
    with dlm_runtime.open(bundle, threads=1, check_hashes=False) as opened:
        wanted = 128 if said is None else said
        assert opened.max_new_tokens == wanted
        assert len(opened.generate(tokens=[1, 2]).tokens) == 2 + wanted
        assert len(opened.generate(tokens=[1, 2], max_new_tokens=3).tokens) == 5
        assert len(opened.generate_batch(tokens=[[1, 2]])[0].tokens) == 2 + wanted


# ---- Damage to the manifest ----


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else []
    )
    for key, value in items:
        found += _paths(value, (*path, key))
    return found


LARGE = [(1 << limit) + more for limit in (24, 31, 32, 63, 64) for more in (0, 1)]
EDGES = st.sampled_from([-1, 0, 1, 2, 64, 65, 160, *LARGE, 10**300, 0.5, 1.0, -0.0, 1e-9, 1e300])
NAMES = ["full", "entropy", "threshold", "manifest.json", "denoiser.onnx", "..", "a/../b"]
TEXTS = st.sampled_from(["", *NAMES, "\0", "ä" * 300])
SCALARS = (
    st.none()
    | st.booleans()
    | EDGES
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def _retyped(value: Any) -> Any:
    """Return a similar value of another JSON type."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (dict, list)):
        return (
            list(value.items())
            if isinstance(value, dict)
            else {str(i): item for i, item in enumerate(value)}
        )
    return str(value)


def _damage(data: st.DataObject, manifest: dict[str, Any]) -> Any:
    # The object that contains the change is chosen first. If all values were equally likely, most
    # examples would change the presets, which contain the most values.
    top = data.draw(st.sampled_from([(), *((key,) for key in manifest)]), label="part")
    path = data.draw(
        st.sampled_from([p for p in _paths(manifest) if p[: len(top)] == top]), label="path"
    )
    kind = data.draw(st.sampled_from(["replace", "delete", "retype", "add"]), label="damage")
    if not path:
        return data.draw(VALUES)
    *parents, key = path
    node: Any = manifest
    for parent in parents:
        node = node[parent]
    if kind == "replace":
        node[key] = data.draw(VALUES, label="value")
    elif kind == "delete":
        del node[key]
    elif kind == "retype":
        node[key] = _retyped(node[key])
    elif isinstance(node, dict):
        node[data.draw(st.text(), label="key")] = data.draw(VALUES, label="value")
    else:
        node.insert(key, data.draw(VALUES, label="value"))
    return manifest


@examples(80)
@given(data=st.data())
def test_a_damaged_value_is_refused_where_the_schema_refuses_and_never_crashes(
    shared_bundle: Path, llada_bundle: Path, data: st.DataObject
) -> None:
    damaged = _damage(data, _read(llada_bundle))
    _write(shared_bundle, damaged)
    opened = _opens(shared_bundle)
    # The native reader may reject more than the schema (see the schema's description), but never
    # less.
    faults = [
        f"{error.json_path}: {error.message}" for error in NATIVE_VALIDATOR.iter_errors(damaged)
    ]
    assert not (opened and faults), faults


@examples(60)
@given(data=st.data())
def test_a_damaged_description_raises_where_it_is_read_and_never_crashes(
    shared_bundle: Path, llada_bundle: Path, data: st.DataObject
) -> None:
    manifest = _read(llada_bundle)
    manifest["precision"] |= copy.deepcopy(QUANTISED)
    _add_engine(manifest)
    described = _damage(data, {key: value for key, value in manifest.items() if key not in NATIVE})
    damaged = (described if isinstance(described, dict) else {}) | {
        key: manifest[key] for key in NATIVE
    }
    _write(shared_bundle, damaged)
    if not _opens(shared_bundle, engine="onnxruntime"):
        return  # the reader rejects a new member, or a wrong name of a text file
    with dlm_runtime.open(shared_bundle, engine="none", check_hashes=False) as opened:
        is_described = _is_described(opened.manifest, shared_bundle)
    assert is_described == VALIDATOR.is_valid(damaged)
    if is_described:
        with contextlib.suppress(BundleError):  # the sizes may contradict each other
            network_of(damaged)


@examples(25)
@given(data=st.data())
def test_flipped_bytes_in_the_manifest_raise_or_open_and_never_crash(
    shared_bundle: Path, llada_bundle: Path, data: st.DataObject
) -> None:
    text = bytearray((llada_bundle / "manifest.json").read_bytes())
    flips = st.lists(
        st.tuples(st.integers(0, len(text) - 1), st.integers(1, 255)), min_size=1, max_size=3
    )
    for position, bits in data.draw(flips):
        text[position] ^= bits
    (shared_bundle / "manifest.json").write_bytes(text)
    _opens(shared_bundle)


_POINT = {"threshold": 0.9, "quality": 0.5, "nfe": 3.5}
QUANTISED: dict[str, Any] = {
    "name": "mine",
    "recipe": {
        "name": "mine",
        "layers": {"blocks.*": "fp8"},
        "observer": "mse",
        "solver": "nearest",
        "smoothing": 0.5,
        "rotate_down": True,
        "embedding": "int8",
    },
    "layers": {"blocks.0.mlp.up": "fp8"},
    "calibration": {
        "samples": 3,
        "states": 24,
        "sources": {"masked": 24},
        "data": {"name": "a.jsonl", "samples": 3, "sha256": "00"},
        "states_sha256": "00",
        "seed": 0,
        "preset": "fast-dllm",
        "calibrator": "own",
    },
    "threshold": {
        "preset": "fast-dllm",
        "original": _POINT,
        "reference": _POINT,
        "refitted": _POINT,
        "reached": True,
        "quality": "task",
        "curve": [_POINT],
        "verdict": "kept",
        "samples": 3,
        "difference": -0.5,
        "interval": [-1.0, 0.25],
    },
    "tuning": {
        "processor": "any",
        "rows": 32,
        "ms": {"high": 2.5},
        "ms_by_shape": {"8x8": {"high": 2.5}},
    },
}
"""What the manifest of a quantised bundle has besides its name."""


def _edges(rule: dict[str, Any]) -> list[Any]:
    """Values just outside the range that a rule of the schema allows, and some values of another
    type.
    """
    if "enum" in rule or "const" in rule:
        return ["", "FULL", 7, None]
    if rule["type"] == "boolean":
        return [1, "true", None]
    largest = max((abs(rule[key]) for key in ("minimum", "maximum") if key in rule), default=0)
    step = 1 if "integer" in rule["type"] else 1e-6 * max(1, largest)
    outside = [7] if rule["type"] == "string" else []
    outside += [
        rule[key] + step * way
        for key, way in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0))
        if key in rule
    ]
    return [*outside, True, []] + ([] if "null" in rule["type"] else [None])


def _resolved(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule with the keywords of the definition that it refers to, such as a range of numbers."""
    kind = rule.get("$ref", "").rpartition("/")[2]
    return rule if kind not in SHARED else SCHEMA["$defs"][kind]


SHARED = ("count", "count_or_zero", "head_count", "expert_count", "positive", "share", "sha256")


def _rules(
    rule: dict[str, Any], path: tuple[Any, ...]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    rule = _resolved(rule)
    if "properties" not in rule:
        return (
            [(path, rule)]
            if rule.get("type") not in ("object", "array") and {"type", "const"} & rule.keys()
            else []
        )
    return [
        found for key, value in rule["properties"].items() for found in _rules(value, (*path, key))
    ]


def test_every_range_and_choice_of_the_schema_is_its_readers(
    shared_bundle: Path, llada_bundle: Path
) -> None:
    properties = SCHEMA["properties"]
    loop = properties["loop"]["properties"]
    rules = _rules(SCHEMA, ())
    rules += _rules(SCHEMA["$defs"]["preset"], ("loop", "presets", "llada"))
    rules += _rules(properties["files"]["additionalProperties"], ("files", DATA_FILE))
    rules.append((("loop", "eos_token_ids", 0), loop["eos_token_ids"]["items"]))
    layers = loop["graph"]["properties"]["ports"]["properties"]["layers"]
    rules += _rules(layers["items"], ("loop", "graph", "ports", "layers", 1))
    rules.append((("targets", 0), properties["targets"]["items"]))
    entry = ("loop", "engines", "rtx5090")
    rules += _rules(SCHEMA["$defs"]["engine"], entry)
    rules.append(((*entry, "sm", 0), SCHEMA["$defs"]["engine"]["properties"]["sm"]["items"]))
    size = _resolved(SCHEMA["$defs"]["sizes"]["items"])
    sizes = SCHEMA["$defs"]["profile"]["properties"]
    rules += [((*entry, "profiles", "block", name, 2), size) for name in sizes]
    rules += _rules(SCHEMA["$defs"]["audit"], ("audits", "rtx5090"))
    rules += _rules(SCHEMA["$defs"]["effort_point"], ("effort", "curve", 0))
    rules += _rules(SCHEMA["$defs"]["layer"], ("network", "layers", 1))
    rules += _rules(SCHEMA["$defs"]["linear_layer"], ("network", "linear_layers", 1))
    rules.append((("precision", "layers", "blocks.0.mlp.up"), SCHEMA["$defs"]["format"]))
    rules.append((("precision", "recipe", "layers", "blocks.*"), SCHEMA["$defs"]["format"]))
    assert len(rules) > 60
    missed = []
    quantised = _read(llada_bundle)
    quantised["precision"] |= QUANTISED
    quantised["source"]["hub"] = {
        "repository": "org/name",
        "revision": 40 * "a",
        "files": {"config.json": 64 * "b"},
    }
    _add_engine(quantised)
    _add_effort(quantised)
    assert [
        f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(quantised)
    ] == []
    _write(shared_bundle, quantised)
    (shared_bundle / "engines").mkdir(exist_ok=True)
    (shared_bundle / "engines" / "rtx5090.engine").write_bytes(b"engine")
    assert _opens(shared_bundle, engine="none")
    written = json.dumps(quantised)
    for path, rule in rules:
        for number, value in enumerate(_edges(rule)):
            manifest = json.loads(written)
            node = manifest
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            assert not VALIDATOR.evolve(schema=rule).is_valid(value), (path, value)
            if path[-1] != "seal" and "engines" in path:
                # Without a new seal, the reader would report the wrong seal, and not the damage
                # that the test made.
                _seal(manifest["loop"]["engines"]["rtx5090"])
            is_native = path[0] in NATIVE
            if is_native or number == 0:
                _write(shared_bundle, manifest)
                is_opened = _opens(shared_bundle, engine="none")
                assert is_native or is_opened, f"{path} is nothing for the native reader to refuse"
            if is_opened if is_native else _is_described(manifest, shared_bundle):
                missed.append((path, value))
    assert missed == []


@pytest.mark.parametrize("version", [1, 3])
def test_a_bundle_of_another_schema_is_refused_with_the_command_that_builds_it_again(
    bundle: Path, version: int
) -> None:
    # A manifest of another version may also have other fields. The error must still name the
    # version.
    old: dict[str, Any] = {key: {} for key in ("denoiser", "tokens", "graph", "files")}
    _write(bundle, {"schema_version": version, "family": "llada", **old})
    message = _refusal(bundle)
    assert f"schema_version {version}: this runtime reads version 2 only" in message
    assert "update dlm-export" in message
    assert f"`dlm-export build CHECKPOINT -o {bundle} --force`" in message


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("loop", "graph", "top_k"), 65, "loop.graph.top_k"),
        (("loop", "graph", "device_file"), "other.onnx", "not listed in files"),
        (("tokenizer",), "other.json", "tokenizer: names a file that is not listed in files"),
        (("tokenizer",), "../manifest.json", "not listed in files"),
        (
            ("chat_template",),
            {"file": "/etc/passwd", "special_tokens": {}},
            "chat_template.file: names a file that is not",
        ),
        (
            ("chat_template",),
            {"file": "denoiser.onnx", "special_tokens": {"bos_token": 1}},
            "chat_template: expected",
        ),
        (("text",), {"file": "text.bin"}, "text.file: names a file that is not listed in files"),
        (("text",), {"refused": 1}, "text.refused: expected a string"),
        (("text",), {"file": "denoiser.onnx", "refused": "no"}, "text.refused: unknown key"),
        (
            ("loop", "graph", "ports", "layers", 0, "head_size"),
            8,
            'the input "past_key.0" is float [any, 4, any, 16], but',
        ),
        (
            ("loop", "graph", "cache_dtype"),
            "int8",
            "float [any, 4, any, 16], but the manifest makes it int8 [any, 4, any, 18]",
        ),
        (
            ("loop", "graph", "cache_dtype"),
            "int4",
            'expected "float32", "float16", "bfloat16" or "int8"',
        ),
        (
            ("loop", "presets", "llada", "temperature"),
            0.7,
            'temperature = 0.7 needs select = "sample"',
        ),
        (("loop", "effort", "preset"), "nowhere", "loop.effort.preset: is not one of presets"),
        (("loop", "effort", "levels"), {}, 'loop.effort.levels: the key "instant" is missing'),
        (("loop", "effort", "levels", "low", "threshold"), 7, "threshold = 7"),
        (("loop", "effort", "levels", "low"), [], "loop.effort.levels.low: expected an object"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_values_that_contradict_each_other_are_refused(
    bundle: Path, path: tuple[str, ...], value: Any, sentence: str
) -> None:
    manifest = _read(bundle)
    _add_effort(manifest)
    _write(bundle, manifest)
    _change(bundle, *path, value=value)
    assert sentence in _refusal(bundle)


def test_a_bundle_with_effort_levels_opens_and_says_them(bundle: Path) -> None:
    manifest = _read(bundle)
    _add_effort(manifest)["levels"]["low"]["threshold"] = 0.25
    _write(bundle, manifest)
    assert read_manifest(bundle) == manifest
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert opened.policy(effort="low") == replace(opened.policy("llada"), threshold=0.25)


# ---- Ports ----


def test_ports_are_found_by_the_names_that_the_manifest_gives_them(bundle: Path) -> None:
    """The graph's inputs and outputs are put into another order, and each is renamed to the old
    name of another input or output.
    """
    import onnx

    with dlm_runtime.open(bundle, threads=1) as opened:
        expected = [
            opened.generate(tokens=[1, 2, 3], max_new_tokens=24, cache=cache).tokens
            for cache in ("none", "dual")
        ]
    manifest = _read(bundle)
    ports = manifest["loop"]["graph"]["ports"]
    path = bundle / "denoiser.onnx"
    model = onnx.load(path, load_external_data=False)
    old = [value.name for value in (*model.graph.input, *model.graph.output)]
    called = dict(zip(old, reversed(old), strict=True))
    for values in (model.graph.input, model.graph.output):
        for value in values:
            value.name = called[value.name]
        backwards = list(reversed(values))
        del values[:]
        values.extend(backwards)
    # An input that a pass may leave out has an initialiser with its default value.
    for tensor in model.graph.initializer:
        tensor.name = called.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [called.get(name, name) for name in names]
    onnx.save(model, path)
    for port in (ports, *ports["layers"]):
        port |= {key: called[name] for key, name in port.items() if isinstance(name, str)}
    _write(bundle, manifest)
    _relist(bundle, "denoiser.onnx")
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert [
            opened.generate(tokens=[1, 2, 3], max_new_tokens=24, cache=cache).tokens
            for cache in ("none", "dual")
        ] == expected


# ---- Members that describe a bundle ----


def test_a_bundle_runs_without_what_describes_it(bundle: Path) -> None:
    with dlm_runtime.open(bundle, threads=1) as opened:
        expected = opened.generate(tokens=[1, 2, 3], max_new_tokens=8).tokens
    _write(bundle, {key: value for key, value in _read(bundle).items() if key in NATIVE})
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert opened.generate(tokens=[1, 2, 3], max_new_tokens=8).tokens == expected
    with pytest.raises(
        BundleError, match=r"manifest\.json: the manifest: 'producer' is a required property"
    ):
        read_manifest(bundle)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (
            ("producer", "sparkle"),
            1,
            "producer: Additional properties are not allowed ('sparkle' was unexpected)",
        ),
        (("targets",), [], "targets: [] should be non-empty"),
        (("network",), [], "network: [] is not of type 'object'"),
        (("network", "parameters"), 3.0, "network.parameters: 3.0 is not of type 'integer'"),
        (("network", "architecture"), ["x" * 10**6], "network.architecture: ['"),
        (("precision", "layers"), {"a b\n": 1}, 'precision.layers["a b\\n"]: 1 is not of type'),
        (
            ("precision", "layers"),
            {"blocks.0.mlp.up": "int3"},
            "precision.layers[\"blocks.0.mlp.up\"]: 'int3' is not one of",
        ),
        (
            ("kernels", "calls"),
            {"Candidates": 0},
            "kernels.calls.Candidates: 0 is less than the minimum of 1",
        ),
        (("audits",), {"../x": {}}, "audits: '../x' "),
        (("audits",), {"thor": {"method": "hearsay"}}, "audits.thor"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_wrong_description_is_named_with_its_place_by_every_reader_but_the_runtime(
    bundle: Path, path: tuple[Any, ...], value: Any, sentence: str
) -> None:
    _change(bundle, *path, value=value)
    assert _opens(bundle)
    with pytest.raises(BundleError) as caught:
        read_manifest(bundle)
    assert str(caught.value).startswith(f"{bundle / 'manifest.json'}: {sentence}")
    assert not _is_described(_read(bundle), bundle)
    done = CliRunner().invoke(main, ["inspect", str(bundle)])
    assert (done.exit_code, done.output) == (2, f"Error: {caught.value}\n")


# ---- Engines ----


def test_a_bundle_with_an_engine_is_valid_and_opens_without_it(bundle: Path) -> None:
    _write_with_engine(bundle)
    assert VALIDATOR.is_valid(_read(bundle))
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert opened.engine == "none"
        assert opened.manifest == _read(bundle)
        with pytest.raises(RequestError, match='opened with engine "none"'):
            opened.generate(tokens=[1], max_new_tokens=1)
    with dlm_runtime.open(bundle, engine="onnxruntime", threads=1) as opened:
        assert opened.engine.startswith("onnxruntime")


FOREIGN = "was built from a graph other than this bundle's "


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("version",), "1.7.1.117", ": was edited after it was written"),
        (("profiles", "block", "rows"), [1, 8, 64], ": was edited after it was written"),
        (("seal",), "0" * 64, ": was edited after it was written"),
        (("built_from", "judged"), "0" * 64, f".built_from.judged: {FOREIGN}denoiser.onnx"),
        (("built_from", "device"), "0" * 64, f".built_from.device: {FOREIGN}denoiser.onnx"),
        (("built_from", "weights"), "0" * 64, f".built_from.weights: {FOREIGN}{DATA_FILE}"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_an_engine_of_an_edited_entry_or_another_graph_is_refused(
    bundle: Path, path: tuple[str, ...], value: Any, sentence: str
) -> None:
    if path[0] == "built_from":
        _write_with_engine(bundle, lambda entry: entry["built_from"].update({path[1]: value}))
    else:
        _write_with_engine(bundle)
        assert _opens(bundle, engine="none")
        _change(bundle, "loop", "engines", "rtx5090", *path, value=value)
        # The bundle can still be opened without its engine, to build the engine again.
        assert _opens(bundle, engine="none")
    assert VALIDATOR.is_valid(_read(bundle))
    message = _refusal(bundle, engine="tensorrt")
    assert f"loop.engines.rtx5090{sentence}" in message
    assert f"dlm-export engine {bundle} --target rtx5090 --force" in message


@pytest.mark.parametrize(("sizes", "wrong"), [([9, 8, 64], 1), ([1, 65, 64], 2)])
def test_the_sizes_of_an_engines_profile_ascend(bundle: Path, sizes: list[int], wrong: int) -> None:
    """JSON Schema cannot express this rule, so only the native reader checks it."""
    _write_with_engine(bundle, lambda entry: entry["profiles"]["block"].update(rows=sizes))
    place = f"loop.engines.rtx5090.profiles.block.rows[{wrong}]: "
    assert place in _refusal(bundle, engine="none")


@examples(40)
@given(data=st.data())
def test_a_damaged_engine_is_refused_where_the_schema_refuses_and_never_crashes(
    shared_bundle: Path, llada_bundle: Path, data: st.DataObject
) -> None:
    manifest = _read(llada_bundle)
    _add_engine(manifest)
    (shared_bundle / "engines").mkdir(exist_ok=True)
    (shared_bundle / "engines" / "rtx5090.engine").write_bytes(b"engine")
    engines = manifest["loop"]["engines"]
    entry = engines["rtx5090"] = _damage(data, engines["rtx5090"])
    if isinstance(entry, dict) and data.draw(st.booleans(), label="sealed again"):
        _seal(entry)
    _write(shared_bundle, manifest)
    opened = _opens(shared_bundle, engine="none")
    if not VALIDATOR.is_valid(manifest):
        assert not opened, [
            f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(manifest)
        ]


def test_auto_takes_onnxruntime_where_there_are_no_engines_and_tensorrt_where_there_are(
    bundle: Path,
) -> None:
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert opened.engine.startswith("onnxruntime")
    _write_with_engine(bundle)
    with pytest.raises(
        DlmError, match=r"TensorRT|CUDA"
    ):  # expected if the library lacks this engine, or the machine lacks the device
        dlm_runtime.open(bundle)


# ---- Names of files ----


def test_a_file_below_the_bundles_folder_is_accepted(bundle: Path) -> None:
    (bundle / "a").mkdir()
    (bundle / "a" / "..b").write_bytes(b"inside")
    _relist(bundle, "a/..b")
    assert VALIDATOR.is_valid(_read(bundle))
    assert _opens(bundle, check_hashes=True)


@pytest.mark.parametrize(
    ("name", "at"), [("denoiser.onnx", 0), ("deep/inside/file", 0), ("deep/inside/file", -1)]
)
def test_a_link_inside_a_bundle_is_refused_wherever_it_leads(
    bundle: Path, tmp_path: Path, name: str, at: int
) -> None:
    """Links inside a bundle are rejected even if they lead to a file with the right bytes.

    In the test, the link replaces a file of the bundle, or a folder that contains the file.
    """
    if not (bundle / name).exists():
        (bundle / name).parent.mkdir(parents=True)
        (bundle / name).write_bytes(b"inside")
        _relist(bundle, name)
    assert _opens(bundle, check_hashes=True)
    link = bundle / [name.split("/")[0], name][at]
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    message = _refusal(bundle, check_hashes=True)
    assert (
        f"{link}: not a plain file but a symbolic link, which may point outside the bundle"
        in message
    )
    assert "cp -rL" in message
    assert f"{link}: not a plain file" in _refusal(bundle, check_hashes=False)


def test_writing_into_a_bundle_follows_no_link_out_of_it(bundle: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "letter").write_text("dear")
    (bundle / "manifest.json.new").symlink_to(outside / "letter")
    manifest = _read(bundle)
    files = manifest.pop("files")
    write_manifest(bundle, manifest, files)
    assert _opens(bundle)
    (bundle / "engines").symlink_to(outside)
    with (
        pytest.raises(OutputError, match="engines: is a symbolic link"),
        bundled._changing(bundle / "engines/a.engine", _read(bundle)),
    ):
        pytest.fail("it would be written")
    assert (outside / "letter").read_text() == "dear"
    assert os.listdir(outside) == ["letter"]


# ---- Damage to the files ----


def _other_graph(path: Path, inputs: list[tuple[str, int, list[Any]]]) -> None:
    import onnx
    from onnx import helper

    out = helper.make_tensor_value_info("out", inputs[0][1], None)
    values = [helper.make_tensor_value_info(*entry) for entry in inputs]
    graph = helper.make_graph(
        [helper.make_node("Identity", [inputs[0][0]], ["out"])], "other", values, [out]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, path)


INT64, FLOAT = 7, 1
PORTS = [(name, INT64, ["B", "T"]) for name in ("input_ids", "position_ids", "score_rows")]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([("pixels", INT64, ["B", 3])], 'the input "pixels" is not known to this runtime'),
        (
            [("input_ids", INT64, ["B", 8])],
            'the input "input_ids" is int64 [any, 8], but the manifest makes it',
        ),
        (PORTS, 'the input "past_key.0" is missing'),
    ],
    ids=["unknown", "fixed length", "missing"],
)
def test_another_graph_in_the_denoisers_place_is_refused_by_its_inputs(
    bundle: Path, inputs: list[tuple[str, int, list[Any]]], sentence: str
) -> None:
    _other_graph(bundle / "denoiser.onnx", inputs)
    _relist(bundle, "denoiser.onnx")
    assert sentence in _refusal(bundle, check_hashes=True)


def test_a_nan_weight_ends_generation_with_an_engine_error(bundle: Path) -> None:
    import onnx

    model = onnx.load(bundle / "denoiser.onnx", load_external_data=False)
    tensor = next(
        tensor for tensor in model.graph.initializer if tensor.name == "blocks.0.mlp.down.weight"
    )
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    with (bundle / DATA_FILE).open("r+b") as data:
        data.seek(offset)
        data.write(np.float32(np.nan).tobytes())
    with dlm_runtime.open(bundle, threads=1, check_hashes=False) as opened:
        with pytest.raises(EngineError, match="not finite"):
            opened.generate(tokens=[1, 2, 3], max_new_tokens=4)
        with pytest.raises(EngineError, match="not finite"):
            list(opened.stream(tokens=[1, 2, 3], max_new_tokens=4))


# ---- Tokenizer and chat template ----


def _with_template(bundle: Path, template: bytes, tokenizer: bytes | None = None) -> None:
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    (bundle / "tokenizer.json").write_bytes(
        words.to_str().encode() if tokenizer is None else tokenizer
    )
    (bundle / "chat.jinja").write_bytes(template)
    _relist(bundle, "tokenizer.json")
    _relist(bundle, "chat.jinja")
    _change(bundle, "tokenizer", value="tokenizer.json")
    _change(bundle, "chat_template", value={"file": "chat.jinja", "special_tokens": {}})
    assert VALIDATOR.is_valid(_read(bundle))


def test_a_damaged_tokenizer_or_a_template_too_large_is_refused_at_open(bundle: Path) -> None:
    _with_template(bundle, b"{{ messages }}", tokenizer=b'{"version": "1.0"}')
    assert "tokenizer.json: not a tokenizer" in _refusal(bundle, check_hashes=True)
    _with_template(bundle, b"x" * ((1 << 20) + 1))
    assert "chat.jinja: 1048577 bytes is too large" in _refusal(bundle, check_hashes=True)


@pytest.mark.parametrize(
    "template",
    [
        b"{% for",
        b"{{ ''.__class__.__mro__[1].__subclasses__() }}",
        b"{{ 'x' * 10000000000000 }}",
    ],
)
def test_a_hostile_chat_template_ends_in_an_error_of_ours(bundle: Path, template: bytes) -> None:
    _with_template(bundle, template)
    with dlm_runtime.open(bundle, threads=1) as opened, pytest.raises(DlmError, match="template"):
        opened.generate(chat=[{"role": "user", "content": "a"}], max_new_tokens=1)
