"""Writes the first inputs of the fuzz targets.

``python runtime/native/fuzz/seeds.py FOLDER`` writes files FOLDER/TARGET/NAME. The files are small
inputs of every kind that a target reads. The code that makes them is also used in builds. The
comment at the top of each target describes the form of its inputs.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tests"))

from constraints import PIECES, Longest, compiled, made_up_vocabulary  # noqa: E402
from tokenizers import Tokenizer as Learner  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402

from dlm_export.checkpoints.tokenizer import QWEN2_SPLIT  # noqa: E402
from dlm_export.text.compiled import compile_text  # noqa: E402
from dlm_runtime.presets import PRESETS  # noqa: E402
from dlm_runtime.text.tokenizer import Tokenizer  # noqa: E402

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = "turn on the light\u0301s \u2581x"
HASH = 64 * "a"  # fuzz_bundle.cc replaces this hash with the right one


def _learned(split: bool, is_composed: bool) -> str:
    """Return a tokenizer.json of byte pair encoding with few merges."""
    from tokenizers import Regex, normalizers

    made = Learner(models.BPE())
    if is_composed:
        made.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = [pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), level]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts) if split else level
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=level.alphabet(), show_progress=False
    )
    made.train_from_iterator(["turn on the lights", "turn off the kitchen light"], trainer)
    made.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    return made.to_str()


def _of_characters() -> str:
    model = {
        "type": "BPE",
        "vocab": {f"<0x{byte:02X}>": byte for byte in range(256)},
        "merges": [],
        "byte_fallback": True,
    }
    words = ["<unk>", "\u2581", "t", "u", "tu", "n", "tun"]
    model["vocab"] |= {word: 256 + i for i, word in enumerate(words)}  # type: ignore[operator]
    model |= {"merges": [["t", "u"], ["tu", "n"]], "unk_token": "<unk>", "fuse_unk": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    empty: dict[str, Any] = dict.fromkeys(
        ("truncation", "padding", "pre_tokenizer", "post_processor")
    )
    return json.dumps(
        empty
        | {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": replace,
            "decoder": decoder,
            "model": model,
        }
    )


def texts() -> dict[str, bytes]:
    """Return compiled text files of several tokenizers.

    Only some of the tokenizers split the text or compose characters. Some tokenizers work on bytes,
    and some on characters.
    """
    found = {}
    for name, file in {
        "plain": _learned(False, False),
        "whole": _learned(True, True),
        "characters": _of_characters(),
    }.items():
        tokenizer = Tokenizer(file.encode(), CHAT, {})
        data = compile_text(tokenizer, CHAT).data
        tokenizer.close()
        assert data is not None, name
        found[name] = data
    return found


def manifest(text_bytes: int) -> dict[str, Any]:
    """Return a manifest with every part that a manifest may contain.

    ``fuzz_bundle.cc`` creates the files of the bundle.
    """
    files = ("denoiser.onnx", "denoiser.onnx.data", "text.bin", "engines/orin.engine")
    layer = {"kv_heads": 2, "head_size": 4}
    ports = {name: name for name in ("input_ids", "position_ids", "score_rows", "segments")}
    ports |= {name: name for name in ("top_token", "top_prob", "top_log_odds", "entropy", "logits")}
    kept = ("past_key", "past_value", "present_key", "present_value")
    profile = {"tokens": [1, 8, 16], "cached": [0, 0, 16], "rows": [1, 8, 16]}
    presets = {name: preset.as_dict() for name, preset in PRESETS.items()}
    first = next(iter(presets))
    engine = {
        "file": "engines/orin.engine",
        "builder": "tensorrt",
        "version": "10.14.1.48",
        "sm": [87],
        "built_from": {"judged": HASH, "device": HASH, "weights": HASH},
        "profiles": {"prefill": profile, "block": profile},
        "seal": HASH,
    }
    return {
        "schema_version": 2,
        "loop": {
            "vocab_size": 300,
            "mask_token_id": 299,
            "eos_token_ids": [1],
            "max_canvas_length": 64,
            "shift": 0,
            "graph": {
                "file": "denoiser.onnx",
                "device_file": "denoiser.onnx",
                "simulated": False,
                "top_k": 2,
                "cache_dtype": "float32",
                "ports": ports
                | {"layers": [layer | {name: f"{name}.{i}" for name in kept} for i in range(2)]},
            },
            "presets": presets,
            "default_preset": first,
            "effort": {
                "preset": first,
                "levels": dict.fromkeys(("instant", "low", "medium", "high"), presets[first]),
            },
            "engines": {"orin": engine},
        },
        "text": {"file": "text.bin"},
        "files": {name: {"bytes": text_bytes, "sha256": HASH} for name in files},
    }


def automata() -> dict[str, bytes]:
    """Return inputs with automata that were compiled for a small vocabulary.

    An input consists of bytes that select a request, followed by an automaton file without the
    file's SHA-256.
    """
    vocabulary = made_up_vocabulary(128, (126, 127), Longest)
    expressions = ("[ab]*", '\\{"a":(12|true)\\}', "(ab|ba){2,3}", "a")
    choices = ((0, 0, 5, 0), (13, 1, 48, 0), (31, 2, 17, 3), (4, 3, 9, 6))
    return {
        f"{number}": bytes(choice)
        + compiled(expression, vocabulary, 128, (126,)).constraint.data[:-32]
        for number, (expression, choice) in enumerate(zip(expressions, choices, strict=True))
    }


# Each entry has the options of fuzz_compile.cc, the source of a constraint, the fixed text before
# the generated text, and the fixed text after it.
CONTENTS: tuple[tuple[tuple[int, ...], str, str, str], ...] = (
    ((0, 0, 0, 0, 0, 0), r"(a|b){2,5}[^\s\pL]?\d+(?i:x)$", "", ""),
    ((0, 0, 0, 2, 2, 3), r"\{\"a\":(12|true)\}", '{"a', "}"),
    ((2, 0, 0, 1, 1, 0), '["on","off","one"]', "", ""),
    ((3, 17, 2, 0, 1, 0), "", "", ""),
    (
        (4, 0, 3, 2, 0, 0),
        '{"sequence":[{"text":"a"},{"either":[{"regex":"b+"},{"schema":{"const":1},"level":1}]},'
        '{"repeat":{"json_object":true,"level":0},"low":0,"high":2}]}',
        "",
        "",
    ),
    (
        (5, 0, 3, 0, 0, 0),
        'root ::= "a" [0-9]{1,3} (", " item)* \nitem ::= root | "(" item ")"',
        "",
        "",
    ),
    ((6, 0, 0, 0, 0, 0), '{"parts":["a: ",["on","one","off"],", b: ",["x","y"]]}', "", ""),
    ((6, 0, 0, 1, 1, 0), '{"parts":["{",["true","false"]],"is_open":true}', "", ""),
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": ["integer", "null"], "minimum": -3, "exclusiveMaximum": 12, "multipleOf": 2},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2e1, "not": {"const": 1.5}},
    {"type": "string", "minLength": 1, "maxLength": 4, "pattern": "^a|\\d$", "format": "date"},
    {
        "type": "array",
        "prefixItems": [{"const": 1}, True],
        "items": {"enum": [1, "a", [1.0], {"b": None}]},
        "contains": {"type": "string"},
        "minContains": 0,
        "maxContains": 2,
        "minItems": 1,
        "maxItems": 3,
    },
    {"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "unevaluatedItems": False},
    {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"$ref": "#"}},
        "patternProperties": {"^x": {"type": "boolean"}},
        "additionalProperties": False,
        "propertyNames": {"maxLength": 3},
        "required": ["a"],
        "minProperties": 1,
        "maxProperties": 3,
        "dependentRequired": {"b": ["a"]},
        "dependentSchemas": {"a": {"maxProperties": 2}},
    },
    {
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"not": {"additionalProperties": False}},
        "properties": {"a": {}, "b": {}},
        "unevaluatedProperties": False,
    },
    {
        "oneOf": [{"type": "integer"}, {"minimum": 2}, {"$ref": "#/$defs/x"}],
        "anyOf": [{"enum": [1, 2, "a"]}, {"$ref": "#y"}],
        "allOf": [{"$dynamicRef": "#z"}],
        "$defs": {"x": {"type": "string"}, "y": {"$anchor": "y"}, "z": {"$dynamicAnchor": "z"}},
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [{"type": "string"}],
        "additionalItems": {"$ref": "#/definitions/x"},
        "definitions": {"x": {"dependencies": {"a": ["b"], "b": {"required": ["a"]}}}},
    },
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
        "id": "http://a/b",
    },
)


def compiled_contents() -> dict[str, bytes]:
    """Return constraints of every kind and keyword, in the form of fuzz_compile.cc."""
    contents = list(CONTENTS)
    for number, schema in enumerate(SCHEMAS):
        chosen = (1, (0, 1, 16, 64)[number % 4], number % 5, number % 3, number % 2, 0)
        contents.append((chosen, json.dumps(schema), "", ""))
    return {
        f"{number}": bytes(chosen)
        + b"\0".join(text.encode() for text in (content, before, behind, *PIECES))
        for number, (chosen, content, before, behind) in enumerate(contents)
    }


def seeds() -> dict[str, dict[str, bytes]]:
    """Return the inputs of each target. The keys are the names of the targets."""
    text = texts()
    spelled = TEXT.encode()
    plain = text["plain"]
    described = manifest(len(plain))
    whole = json.dumps(described).encode()
    small = {key: described[key] for key in ("schema_version", "loop", "files")}
    small["loop"] = {
        key: value for key, value in described["loop"].items() if key not in ("effort", "engines")
    }
    draw = random.Random(1)
    return {
        "json": {
            "manifest": whole,
            "values": b'[0, -1.5e3, "\\ud83d\\ude00\\n", {"a": null, "b": [true, false]}]',
        },
        "bundle": {
            "whole": whole + b"\0" + plain,
            "small": json.dumps(small).encode() + b"\0" + plain,
        },
        "text": {name: bytes([len(spelled)]) + spelled + data for name, data in text.items()},
        "automaton": automata(),
        "compile": compiled_contents(),
        "calls": {f"{number}": draw.randbytes(200 + 15 * number) for number in range(64)},
    }


def words() -> str:
    """Return libFuzzer's dictionary: the names in manifests and schemas."""
    described = json.dumps([manifest(1), *SCHEMAS])
    names = sorted(set(re.findall(r'"[\w.>=/#$-]+"', described)))
    return "".join(f"{json.dumps(name)}\n" for name in names)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for target, inputs in seeds().items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (folder / target / name).write_bytes(data)
    (folder / "words.dict").write_text(words())
