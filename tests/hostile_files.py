"""Hostile files of every kind that this project reads.

Commands must report an error when they read a hostile file, or when the use of the file exceeds a
limit.
"""

from __future__ import annotations

import json
from typing import Any

WORDS = {f"w{i}": i for i in range(160)} | {"<mask>": 150, "<end>": 151, "e": 152, "ee": 153}
for taken in range(150, 154):
    del WORDS[f"w{taken}"]
PROMPT = "w1 w2 eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee"
DEEP = "[" * 10**6
HUGE = (-1, 2**32, 2**63, 2**64, 10**400, 1e400, "7", None, [], {})


EXPRESSIONS = [
    "'x' * 10**10",
    "[0] * 10**9",
    "(0,) * 10**9",
    "range(10**9)",
    "9 ** (9**9)",
    "2 ** (10**10)",
    "10 ** (10**6)",
    "'x'.ljust(10**10)",
    "'%010000000000d' | format(1)",
    "'{:>10000000000}'.format(1)",
    "'{0.__class__.__mro__}'.format(1)",
    "''.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__",
    "('x' * 10**8) | replace('x', 'x' * 10**3)",
    "('x' * 10**8) | list",
    "('x' * 10**8) | tojson",
    r"('x\n' * 10**8) | indent(999)",
    "lipsum(n=10**6)",
    "(range(99999) | list) * 10**5",
    "1 / 0",
    "none.x.y",
    "messages.append(1)",
    "messages[0].update(x=1)",
    "messages.pop()",
    "messages | nofilter",
    "raise_exception('no')",
    r"raise_exception('\x00\x1b[2J')",
    "raise_exception('x' * 10**6)",
    "'x'.encode('utf-99')",
    "'a' ~ 1 + 2",
    "{{}}",
    "messages |",
    "(",
]


def _added(content: Any, number: Any, **flags: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content} | plain | flags


def _word_level(vocab: Any = WORDS, **changes: Any) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"} | changes


def _bpe(**changes: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": WORDS, "merges": [], "unk_token": "w0"} | changes


def _unigram(**changes: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "vocab": [[word, -float(i)] for word, i in WORDS.items()],
        "unk_id": 0,
    } | changes


def _word_piece(**changes: Any) -> dict[str, Any]:
    pieces = {"unk_token": "w0", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"type": "WordPiece", "vocab": WORDS} | pieces | changes


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _sequence(kind: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def _template(single: list[Any], special: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": special,
    }


def harmless() -> dict[str, Any]:
    """Return a valid tokenizer.json for a denoiser with 160 token ids.

    The hostile tokenizers are changed copies of this tokenizer.
    """
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    added = [_added("<mask>", 150, special=True), _added("<end>", 151, special=True)]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": _word_level(),
    } | empty


def _changed(changes: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    return {name: json.dumps(harmless() | change).encode() for name, change in changes.items()}


def tokenizers() -> dict[str, bytes]:
    """Return contents of tokenizer.json that cannot be loaded, or that do not match a denoiser
    with 160 token ids.
    """
    parts = [name for name in harmless() if name not in ("version", "truncation", "padding")]
    patterns = ("(", "[", "*", "(?<", "\\", "(" * 10**5)
    maps = ("AAAA", "////", "!", 7)
    made = _changed(
        {
            **{
                f"{name} is {value!r}": {name: value}
                for name in parts
                for value in (7, "x", [7], {"type": "Python"})
            },
            **{
                f"an id of {value!r:.20}": {"model": _word_level(WORDS | {"x": value})}
                for value in HUGE
            },
            **{
                f"an added id of {value!r:.20}": {"added_tokens": [_added("x", value)]}
                for value in HUGE
            },
            **{
                f"BPE's {k} is {v!r}": {"model": _bpe(**{k: v})}
                for k in ("vocab", "merges")
                for v in (7, "x", [7], {"w1": -1})
            },
            **{
                f"Unigram's unk_id is {v!r}": {"model": _unigram(unk_id=v)}
                for v in (-1, 10**6, 2**64, "x", 1.5)
            },
            **{
                f"Unigram's vocab is {v!r}": {"model": _unigram(vocab=v)}
                for v in (7, [], [7], [["w", "x"]], {"w": 1})
            },
            **{
                f"a pattern of {regex!r:.20}": {"pre_tokenizer": _split(regex)}
                for regex in patterns
            },
            **{
                f"a map of {v!r}": {
                    "normalizer": {"type": "Precompiled", "precompiled_charsmap": v}
                }
                for v in maps
            },
            **{
                f"truncation to {v!r}": {"truncation": {"max_length": v, "stride": 0}}
                for v in (-1, 2**64, "x")
            },
            **{
                f"padding by {v!r}": {"padding": {"strategy": {"Fixed": v}}}
                for v in (-1, 2**64, "x")
            },
            "merges of unknown tokens": {"model": _bpe(merges=[["x", "y"]])},
            "merges into an unknown token": {"model": _bpe(merges=[["w1", "w2"]])},
            "BPE's dropout of 7": {"model": _bpe(dropout=7.0)},
            "no vocabulary": {"model": _word_level({})},
            "ids that no denoiser has": {
                "model": _word_level(
                    {"w0": 0} | {f"x{i}": 10**6 + i for i in range(99)}, unk_token="x7"
                )
            },
            "more added tokens than ids": {
                "added_tokens": [_added("e" * (i + 1), 160 + i) for i in range(1000)]
            },
        }
    )
    raw = (
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe{}",
        b"\0" * 99,
        DEEP.encode(),
        b'{"model":' * 999,
        b'{"version": "9.0"}',
    )
    return (
        made | {f"it is {text[:12]!r}": text for text in raw} | {"cut": made["no vocabulary"][:-1]}
    )


def tokenizers_in_use() -> dict[str, bytes]:
    """Return contents of tokenizer.json that can be loaded, but that fail or exceed a limit when
    ``PROMPT`` is encoded.
    """
    piece = {"SpecialToken": {"id": "x", "type_id": 0}}
    prepend = {"type": "Prepend", "prepend": "w1 " * 10**5}
    return _changed(
        {
            "BPE's unknown token is unknown": {
                "model": _bpe(unk_token="nowhere"),
                "pre_tokenizer": None,
            },
            "WordPiece's unknown token is unknown": {
                "model": _word_piece(unk_token="nowhere"),
                "pre_tokenizer": None,
            },
            "WordLevel's unknown token is unknown": {
                "model": _word_level(unk_token="nowhere"),
                "pre_tokenizer": None,
            },
            "a text doubled sixty times": {
                "normalizer": _sequence("normalizers", [_replace("e", "ee")] * 60)
            },
            "a letter that becomes a million": {
                "normalizer": _sequence("normalizers", [_replace("e", "e" * 10**5)] * 3)
            },
            "a million words in front": {"normalizer": _sequence("normalizers", [prepend] * 99)},
            "a text doubled by a pattern": {
                "normalizer": _sequence("normalizers", [_replace(".", "ee", "Regex")] * 60)
            },
            "an answer doubled sixty times": {
                "decoder": _sequence("decoders", [_replace("w", "ww")] * 60)
            },
            "a pattern that tries everything": {"pre_tokenizer": _split("(?:e|ee|eee)+[xyz]")},
            "a template of unknown tokens": {"post_processor": _template([piece], {})},
            "a template that is longer than a canvas": {
                "post_processor": _template(
                    [piece] * 999, {"x": {"id": "x", "ids": [1] * 9**5, "tokens": ["w1"] * 9**5}}
                )
            },
        }
    )


def templates() -> dict[str, str]:
    """Return chat templates that fail or exceed a limit for any message."""
    forever = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    doubling = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    return {
        "loops for ever": forever,
        "loops for ever and writes": forever.replace("{% endfor %}", "{{ i }}{% endfor %}", 1),
        "a macro for ever": "{% macro m(n) %}{% for i in range(9) %}{{ m(n + 1) }}{% endfor %}{% endmacro %}{{ m(0) }}",
        "a macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "a text that doubles": doubling,
        "a list that doubles": doubling.replace("'ab'", "[1]").replace("n.x ~ n.x", "n.x + n.x"),
        "a number that squares": doubling.replace("'ab'", "7").replace("n.x ~ n.x", "n.x * n.x"),
        "a deep list": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "a recursive loop": "{% for m in [[[1]]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
        **{expression: f"{{{{ {expression} }}}}" for expression in EXPRESSIONS},
        "an unknown tag": "{% python %}",
        "a tag that does not end": "{% for",
        "a block that does not end": "{% if true %}",
        "a file": "{% include '/etc/passwd' %}",
        "a parent": "{% extends '/etc/passwd' %}",
        "a module": "{% import 'os' as os %}{{ os.system('true') }}",
        "parentheses": "{{ " + "(" * 10**5 + ")" * 10**5 + " }}",
        "lists in lists": "{{ " + "[" * 10**5 + "]" * 10**5 + " }}",
        "blocks in blocks": "{% if true %}" * 10**4 + "{% endif %}" * 10**4,
        "a sum of a million": "{{ 1" + "+1" * 10**5 + " }}",
        "a word of a million": "{{ " + "x" * 10**6 + " }}{{ 1 / 0 }}",
    }


def configs() -> dict[str, dict[str, Any]]:
    """Return changes that each make the config.json of a LLaDA checkpoint invalid."""
    keys = (
        "d_model",
        "n_layers",
        "n_heads",
        "mlp_hidden_size",
        "vocab_size",
        "embedding_size",
        "rope_theta",
        "rms_norm_eps",
    )
    values = (
        -1,
        0,
        1 << 24,
        10**400,
        1e400,
        float("nan"),
        "x" * 10**5,
        [0] * 10**5,
        {"a": {"b": 1}},
        True,
    )
    single = {f"{key} is {value!r:.20}": {key: value} for key in keys for value in values}
    # A config with embedding_size does not need a valid vocab_size.
    for key in ("rms_norm_eps", "rope_theta", "vocab_size"):
        del single[f"{key} is {1 << 24}"]
    return single | {
        "an architecture that clears the screen": {"architectures": ["\x1b[2J\0\u202e"]},
        "half a character": {"model_type": "\ud800"},
        "an eos id of 400 digits": {"eos_token_id": [10**400]},
        "a mask id of 400 digits": {"mask_token_id": 10**400},
        "a rope_scaling of 400 digits": {"rope_scaling": {"type": "linear", "factor": 10**400}},
        "rope in itself": {
            "rope_parameters": {"full_attention": {"full_attention": {"rope_theta": 1}}}
        },
        "quantised by a stranger": {"quantization_config": {"quant_method": "x" * 10**5}},
        "quantised by a list": {"quantization_config": [[[]]]},
    }


def indexes() -> dict[str, bytes]:
    """Return invalid contents of model.safetensors.index.json. The folder also contains
    model.safetensors.
    """
    names = (
        "..",
        "/etc/passwd",
        "../x",
        "x" * 5000,
        "é" * 200,
        "a\0b",
        "\x1b[2J",
        "\ud800",
        "",
        ".",
        "config.json",
        "/dev/zero",
    )
    maps = {f"a shard called {name!r:.20}": {"weight_map": {"x": name}} for name in names}
    maps |= {
        f"weight_map is {value!r}": {"weight_map": value}
        for value in (7, None, [], "x", {"x": 7}, {"x": None}, {"x": []})
    }
    maps |= {"a tensor that is not there": {"weight_map": {"x" * 10**5: "model.safetensors"}}}
    maps |= {"many shards": {"weight_map": {f"t{i}": f"s{i}" for i in range(10**5)}}}
    raw = {"it is deep": DEEP.encode(), "it is empty": b"", "it is a list": b"[]"}
    return {name: json.dumps(value).encode() for name, value in maps.items()} | raw


def data_files() -> dict[str, bytes]:
    """Return files of invalid calibration data in the format JSONL."""
    lines: dict[str, Any] = {
        **{
            f"text is {value!r:.20}": {"text": value}
            for value in (7, None, [], {}, "", "\ud800", 10**400)
        },
        **{
            f"messages is {value!r}": {"messages": value}
            for value in (7, [], [7], [{}], [{"role": 7, "content": "x"}])
        },
        "half a prompt": {"prompt": "\udcff", "completion": "w1"},
        "an empty completion": {"prompt": "w1", "completion": " "},
        "a prompt that is a list": {"prompt": ["w1"], "completion": "w2"},
        "a text that is too long": {"text": "w1 " * 10**5},
    }
    raw = {
        "deep": DEEP.encode(),
        "a number": b"9" * 10**5,
        "not UTF-8": b'{"text": "\xff"}',
        "NULs": b"\0" * 10**5,
    }
    raw |= {
        "a line without an end": b"x" * (3 << 20),
        "nothing": b"",
        "line ends": b"\n" * 10**5,
        "a BOM": b"\xef\xbb\xbf\xef\xbb\xbf{}",
    }
    return {name: json.dumps(line).encode() for name, line in lines.items()} | raw


def recipes() -> dict[str, bytes]:
    """Return invalid recipes for quantising, in TOML."""
    raw = {
        "a number of 400 digits": b"smoothing = 1" + b"0" * 400,
        "a number of 5000 digits": b"smoothing = 1" + b"0" * 5000,
        "an infinite smoothing": b'smoothing = inf\n[layers]\n"*" = "int8-dynamic"',
        "a smoothing that is none": b'smoothing = nan\n[layers]\n"*" = "int8-dynamic"',
        "a key of a million parts": b"a" + b".a" * 400_000 + b" = 1",
        "deep lists": b"x = " + b"[" * 10**5,
        "deep tables": b"x = " + b"{a = " * 10**5,
        "not UTF-8": b'name = "\xff"',
        "NULs": b"\0" * 1000,
        "too large": b"#" * (2 << 20),
        "a format that clears the screen": b'[layers]\n"*" = "\\u001b[2J\\u0000"',
        "a pattern that clears the screen": b'[layers]\n"\\u001b[2J\\u0000" = "int8-dynamic"',
        "a pattern that tries everything": b'[layers]\n"' + b"*a" * 60 + b'" = "int8-dynamic"',
        "many patterns": b"[layers]\n"
        + b"".join(b'"x%d" = "int8-dynamic"\n' % i for i in range(40_000)),
        "a name of a million": b'name = "' + b"x" * 10**6 + b'"\n[layers]\n"x" = "int8-dynamic"',
        "a date": b"name = 1979-05-27",
    }
    return raw | {
        "nothing": b"",
        "a list of layers": b"layers = [1]",
        "an unknown observer": b'observer = "x"\n[layers]\n"*" = "int8-dynamic"',
    }


def measurements(measured: dict[str, Any]) -> dict[str, bytes]:
    """Return damaged variants of the JSON that ``bench --json`` prints."""

    def changed(*path: Any, value: Any) -> bytes:
        made: Any = json.loads(json.dumps(measured))
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return json.dumps(made).encode()

    places: tuple[tuple[Any, ...], ...] = (
        *(
            ("bundle", "parameters"),
            ("machine", "memory_bytes"),
            ("passes", 0, "ms"),
            ("passes", 0, "tokens"),
        ),
        *(("generation", "tokens_per_s"), ("roofline", "read_bytes_per_s")),
    )
    values = (10**400, -1, 1e400, "x", None, [])
    made = {
        f"{'.'.join(map(str, p))} is {v!r:.20}": changed(*p, value=v)
        for p in places
        for v in values
    }
    made["half a character"] = changed("bundle", "precision", value="\ud800")
    raw = {
        "deep": DEEP.encode(),
        "nothing": b"",
        "a number": b"9" * 5000,
        "a list": b"[]",
        "too large": b" " * (2 << 20),
    }
    return made | raw | {"no passes": changed("passes", value=[])}
