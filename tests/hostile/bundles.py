"""Hostile bundles. Each hostile bundle is a valid bundle with one change.

A row of ``CASES`` contains a name, the change, some words of the expected error message, the reader
that must reject the bundle, and the file that the message must name. A change to a file also
updates its size and hash in the manifest, unless the row tests a wrong size or hash. Otherwise, the
bundle would be rejected because of its hash, and not for the reason that the row names.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]
GRAPH, DATA, MANIFEST, TEXT = "denoiser.onnx", "denoiser.onnx.data", "manifest.json", "text.bin"
GONE = object()


@dataclass(frozen=True)
class Case:
    """A hostile bundle.

    ``engine`` is the engine with which the native library rejects the bundle. If ``engine`` is
    None, only Python reads the damaged part.
    """

    name: str
    change: Change
    says: str
    file: str = MANIFEST
    engine: str | None = "none"


def replace(path: Path, content: bytes) -> None:
    """Write a file of the copied bundle.

    The old file is removed first, because it may be a link to a file of the valid bundle.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(content)


# ---- Changes ----


def text(change: Callable[[str], str | bytes]) -> Change:
    """Change the text of the manifest."""

    def made(bundle: Path) -> None:
        found = change((bundle / MANIFEST).read_text())
        replace(bundle / MANIFEST, found.encode() if isinstance(found, str) else found)

    return made


def put(*path: Any) -> Change:
    """Set a value of the manifest.

    The last item of ``path`` is the new value. GONE removes the value.
    """
    *parents, key, value = path

    def made(found: str) -> str:
        manifest = json.loads(found)
        node = manifest
        for parent in parents:
            node = node[parent]
        if value is GONE:
            del node[key]
        else:
            node[key] = value
        return json.dumps(manifest)

    return text(made)


def spelled(old: str, new: str) -> Change:
    """Replace a piece of the manifest's text that occurs exactly once."""

    def made(found: str) -> str:
        assert found.count(old) == 1, old
        return found.replace(old, new)

    return text(made)


def listed(name: str, content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def content(name: str, made: bytes | Callable[[bytes], bytes]) -> Change:
    """Change the content of a file, and update its size and hash in the manifest."""

    def change(bundle: Path) -> None:
        path = bundle / name
        data = (
            made if isinstance(made, bytes) else made(path.read_bytes() if path.exists() else b"")
        )
        replace(path, data)
        put("files", name, listed(name, data))(bundle)

    return change


def lies(name: str, made: bytes | Callable[[bytes], bytes]) -> Change:
    """Change the content of a file without updating the manifest."""

    def change(bundle: Path) -> None:
        replace(
            bundle / name, made if isinstance(made, bytes) else made((bundle / name).read_bytes())
        )

    return change


def stands(name: str, make: Callable[[Path], object]) -> Change:
    """Replace a file by something else, such as a folder or a pipe."""

    def change(bundle: Path) -> None:
        (bundle / name).unlink()
        make(bundle / name)

    return change


def outside(name: str) -> Change:
    """Add a file outside the bundle to the manifest, with its right size and hash."""
    return put("files", name, listed(name, b"outside"))


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        # The path of the socket may be too long, so the name is relative to the folder.
        here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def graph(change: Callable[[Any], object]) -> Change:
    """Change the ONNX graph."""

    def made(data: bytes) -> bytes:
        import onnx

        model = onnx.load_model_from_string(data)
        change(model)
        return bytes(model.SerializeToString())

    return content(GRAPH, made)


def external(key: str, value: str) -> Change:
    """Change an entry that says where the graph's weights are stored."""

    def change(model: Any) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        entry = next(entry for entry in tensor.external_data if entry.key == key)
        entry.value = value

    return graph(change)


def dimension(value: int) -> Change:
    def change(model: Any) -> None:
        next(tensor for tensor in model.graph.initializer if tensor.external_data).dims[0] = value

    return graph(change)


def node(**changes: str) -> Change:
    def change(model: Any) -> None:
        for name, value in changes.items():
            setattr(model.graph.node[0], name, value)

    return graph(change)


# ---- Compiled text ----

SIZES = (
    *(
        "vocab",
        "token_bytes",
        "chars",
        "merges",
        "added",
        "raw_added",
        "added_bytes",
        "classes",
        "class_pages",
        "splits",
        "states",
    ),
    *(
        "nfc_pages",
        "decomposed",
        "decomposition_points",
        "compositions",
        "prefix",
        "suffix",
        "flags",
        "roles",
        "literals",
    ),
    *("empties", "strings", "string_bytes"),
)
PAGES = 0x110000 // 256


def text_file(
    numbers: dict[str, list[int]] | None = None, tail: bytes = b"", version: int = 1, **sizes: int
) -> bytes:
    """A minimal compiled text file with the single token "a".

    The arguments change parts of the file.
    """
    of = dict.fromkeys(SIZES, 0) | {"vocab": 1, "token_bytes": 1, "strings": 1} | sizes
    arrays = {
        "token_starts": [0, 1],
        "byte_ids": [0] * 256,
        "added_starts": [0],
        "class_pages": [],
        "split_starts": [0],
        "split_tables": [],
        "prefix": [],
        "roles": [],
        "string_starts": [0, 0],
    } | (numbers or {})
    flat = [number for array in arrays.values() for number in array]
    head = b"DLMTEXT" + bytes([version]) + struct.pack("<23i", *(of[name] for name in SIZES))
    return head + struct.pack(f"<{len(flat)}i", *flat) + (tail or b"\0a")


def with_text(made: bytes) -> Change:
    def change(bundle: Path) -> None:
        content(TEXT, made)(bundle)
        put("text", {"file": TEXT})(bundle)

    return change


def splits(count: int, table: list[int]) -> bytes:
    """Return a file with ``count`` split rules. Each rule has one class, of all characters."""
    arrays = {
        "class_pages": [0] * PAGES,
        "split_starts": [*range(count + 1)],
        "split_tables": table * count,
    }
    return text_file(
        arrays, bytes(1) + bytes(256) + b"a", classes=1, class_pages=1, splits=count, states=count
    )


# ---- Engines ----


def engine(**changes: Any) -> Change:
    """An entry for a GPU engine.

    The entry of the engine is correct except for ``changes``, but the file is not an engine.
    """

    def change(bundle: Path) -> None:
        manifest = json.loads((bundle / MANIFEST).read_text())
        name = f"engines/{changes.get('target', 'rtx5090')}.engine"
        (bundle / "engines").mkdir()
        (bundle / "engines" / "rtx5090.engine").write_bytes(b"engine")
        manifest["files"][name] = listed(name, b"engine")
        manifest["loop"]["graph"]["device_file"] = GRAPH
        profile = {"tokens": [1, 16, 32], "cached": [0, 0, 64], "rows": [1, 8, 32]}
        hashes = {"judged": GRAPH, "device": GRAPH, "weights": DATA}
        entry = {"file": name, "builder": "tensorrt_rtx", "version": "1.7.1.116", "sm": [120]}
        entry |= {
            "built_from": {key: manifest["files"][file]["sha256"] for key, file in hashes.items()}
        }
        entry |= {"profiles": {"prefill": profile, "block": profile}, "seal": 64 * "0"}
        entry |= {key: value for key, value in changes.items() if key != "target"}
        manifest["loop"]["engines"] = {changes.get("target", "rtx5090"): entry}
        replace(bundle / MANIFEST, json.dumps(manifest).encode())

    return change


PORTS = ("loop", "graph", "ports")


def each(*changes: Change) -> Change:
    """Make several changes, one after another."""

    def change(bundle: Path) -> None:
        for one in changes:
            one(bundle)

    return change


def windows(first: int, second: int | None, *ports: tuple[str, Any]) -> Change:
    """Make a denoiser with draft passes and windows in its two layers, and set some of its ports."""
    return each(
        put("loop", "visible_block", 1),
        put("loop", "draft_block", 8),
        put(*PORTS, "layers", 0, "window", first),
        *([] if second is None else [put(*PORTS, "layers", 1, "window", second)]),
        *(put(*PORTS, *port) for port in ports),
    )


LOOP: list[Case] = [
    Case("nothing", text(lambda _: ""), "expected a value, found the end of the text"),
    Case("a byte order mark", text(lambda found: "\ufeff" + found), "expected a value"),
    Case("cut off", text(lambda found: found[: len(found) // 2]), "line "),
    Case(
        "not UTF-8",
        text(
            lambda found: found.replace("llada", "ll\udcff", 1).encode("utf-8", "surrogateescape")
        ),
        "invalid UTF-8",
    ),
    Case("deep nesting", text(lambda _: "[" * 10**6), "nested deeper than 64 levels"),
    Case("NaN", spelled('"schema_version": 2', '"schema_version": NaN'), "expected a value"),
    Case(
        "a number of 5000 digits",
        spelled('"schema_version": 2', '"schema_version": 2' + "0" * 5000),
        "out of range for a double",
    ),
    Case(
        "a key that is there twice",
        spelled('"schema_version": 2', '"schema_version": 1, "schema_version": 1'),
        "occurs twice",
    ),
    Case(
        "something behind the end", text(lambda found: found + "{}"), "expected the end of the text"
    ),
    Case("half a character", spelled('"schema_version": 2', '"\\ud800": 3'), "unpaired surrogate"),
    Case("a text that is not closed", text(lambda _: '{"' + "x" * 10**6), "a string is not closed"),
    Case("too large", text(lambda found: found + " " * (4 << 20)), "is too large for a manifest"),
    Case(
        "two million values",
        text(lambda _: "[" + "0," * ((2 << 20) - 2) + "0]"),
        "expected an object",
    ),
    Case(
        "a million keys",
        text(lambda _: "{" + ",".join(f'"{i}":0' for i in range(300_000)) + "}"),
        "schema_version",
    ),
    Case(
        "another schema",
        put("schema_version", 1),
        "schema_version 1: this runtime reads version 2 only",
    ),
    Case("no loop", put("loop", GONE), 'the key "loop" is missing'),
    Case("an unknown key", put("autorun", "sh"), "autorun: unknown key"),
    Case(
        "an unknown key of the loop",
        put("loop", "library", "/tmp/x.so"),
        "loop.library: unknown key",
    ),
    Case(
        "a mask outside the vocabulary",
        put("loop", "mask_token_id", 160),
        "loop.mask_token_id: expected an integer in 0..159",
    ),
    Case(
        "an end that is the mask",
        put("loop", "eos_token_ids", [150]),
        "an end token is the mask token",
    ),
    Case(
        "draft passes without causal attention",
        put("loop", "draft_block", 8),
        "loop.draft_block: needs visible_block 1",
    ),
    Case(
        "updates for draft passes without draft passes",
        put("loop", "draft_updates", True),
        "loop.draft_updates: needs draft_block",
    ),
    Case(
        "shifted drafts without draft passes",
        put("loop", "shifted_drafts", True),
        "loop.shifted_drafts: needs draft_block, shift 1 and a mask token",
    ),
    Case(
        "no shifted drafts",
        put("loop", "shifted_drafts", False),
        "loop.shifted_drafts: must be true if it is there",
    ),
    Case(
        "blocks after the prompt without blocks",
        put("loop", "blocks_after_prompt", True),
        "loop.blocks_after_prompt: needs visible_block, and no draft_block",
    ),
    Case(
        "no blocks after the prompt",
        put("loop", "blocks_after_prompt", False),
        "loop.blocks_after_prompt: must be true if it is there",
    ),
    Case(
        "no updates for draft passes",
        put("loop", "draft_updates", False),
        "loop.draft_updates: must be true if it is there",
    ),
    Case("a mask token that is no token", put("loop", "unused_tokens", [[149, 152]]), "mask token"),
    Case(
        "three ends of a range",
        put("loop", "unused_tokens", [[3, 4, 5]]),
        "must be two ids, the first id and the id after the last",
    ),
    Case("unused ids past the vocabulary", put("loop", "unused_tokens", [[3, 161]]), "in 4..160"),
    Case(
        "random tokens beside a mask token",
        put("loop", "noise", "uniform"),
        "loop.mask_token_id: expected an integer",
    ),
    Case(
        "self-conditioning with mask tokens",
        put("loop", "conditioning_size", 8),
        'loop.conditioning_size: needs noise "uniform"',
    ),
    Case(
        "a port for self-conditioning that is missing",
        put("loop", "graph", "ports", "conditioning", "conditioning"),
        "loop.graph.ports.conditioning: needs conditioning_size above 0",
    ),
    Case(
        "a window without draft passes",
        put(*PORTS, "layers", 0, "window", 8),
        "layers[0].window: needs draft_block",
    ),
    *(
        Case(
            f"a window of {window!r}",
            put(*PORTS, "layers", 0, "window", window),
            "layers[0].window: expected an integer",
        )
        for window in (0, (1 << 24) + 1)
    ),
    Case(
        "two different windows",
        windows(8, 9),
        "layers[1].window: differs from the window of an earlier layer, 8",
    ),
    Case(
        "a window in each layer",
        windows(8, 8),
        "loop.graph.ports.layers: at least one layer must have no window",
    ),
    Case(
        "a window without segments for its layer",
        windows(8, None, ("segments", "segments")),
        "loop.graph.ports: a graph with segments and a layer with a window needs window_segments",
    ),
    Case(
        "window_segments without segments",
        windows(8, None, ("segments", GONE), ("window_segments", "window_segments")),
        "loop.graph.ports.window_segments: needs segments and a layer with a window",
    ),
    Case(
        "segments of layers that do not exist",
        put(*PORTS, "window_segments", "window_segments"),
        "loop.graph.ports.window_segments: needs segments and a layer with a window",
    ),
    Case("ten thousand layers", put(*PORTS, "layers", [{}] * 10_000), "expected 1 to 1024 layers"),
    Case(
        "a port that clears the screen",
        put(*PORTS, "logits", "\x1b[2J"),
        "logits: expected a port's name",
    ),
    Case(
        "two ports of one name",
        put(*PORTS, "logits", "entropy"),
        'another port has the name "entropy" too',
    ),
    Case("an unknown port", put(*PORTS, "shell", "x"), "ports.shell: unknown key"),
    Case(
        "a default preset that is not there",
        put("loop", "default_preset", "warp"),
        "default_preset: is not one of presets",
    ),
    Case(
        "a threshold beyond doubles",
        spelled('"default_preset"', '"x": 1e999, "default_preset"'),
        "out of range for a double",
    ),
    Case(
        "effort without levels",
        put("loop", "effort", {"preset": "llada"}),
        'the key "levels" is missing',
    ),
    Case(
        "a precision that nobody knows",
        put("precision", "layers", {"blocks.0.mlp.up": "int3"}),
        "'int3' is not one of",
        engine=None,
    ),
    Case(
        "a scaling of positions that nobody knows",
        put("network", "layers", 0, "attention", "rope", "scaling", {"kind": "spiral"}),
        "network: scaling 'spiral' is not one of linear",
        engine=None,
    ),
    Case(
        "a scaling of positions without numbers",
        put("network", "layers", 0, "attention", "rope", "scaling", {"kind": "yarn"}),
        "network: scaling yarn has the fields kind, factor",
        engine=None,
    ),
    Case(
        "a tokenizer that is not listed",
        put("tokenizer", "../tokenizer.json"),
        "tokenizer: '../tokenizer.json' does not match",
        engine=None,
    ),
    Case(
        "a template that is not listed",
        put("chat_template", {"file": "/etc/passwd", "special_tokens": {}}),
        "chat_template.file: '/etc/passwd' does not match",
        engine=None,
    ),
]
NAMES = [
    Case(f"a file called {name[:20]!r}", outside(name), "not a plain file name inside the bundle")
    for name in (
        "../outside",
        "/etc/passwd",
        "a/../../outside",
        "./x",
        "a//b",
        "..",
        "",
        "a\\b",
        "x" * 300,
        "a\n",
        "ä",
    )
]
FILES: list[Case] = [
    Case(
        "a file of 2^64 bytes", put("files", DATA, "bytes", 1 << 64), "bytes: expected an integer"
    ),
    Case(
        "a hash that is short",
        put("files", DATA, "sha256", "ab"),
        "expected 64 lower-case hexadecimal digits",
    ),
    Case(
        "another hash",
        put("files", DATA, "sha256", 64 * "0"),
        "its SHA-256 differs from the manifest's",
        DATA,
    ),
    Case("no files", put("files", {}), "names a file that is not listed in files"),
    Case(
        "a graph that is not listed",
        put("loop", "graph", "file", "../x.onnx"),
        "names a file that is not listed in files",
    ),
    Case(
        "a graph that is missing", lambda bundle: (bundle / GRAPH).unlink(), "No such file", GRAPH
    ),
    Case("weights of no length", lies(DATA, b""), "0 bytes, but the manifest says", DATA),
    Case(
        "weights that are cut off",
        lies(DATA, lambda data: data[:-1]),
        "bytes, but the manifest says",
        DATA,
    ),
    Case(
        "a flipped bit",
        lies(DATA, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        "its SHA-256 differs from the manifest's",
        DATA,
    ),
    Case(
        "a link out of the folder",
        stands(DATA, lambda path: path.symlink_to("/etc/passwd")),
        "a symbolic link",
        DATA,
    ),
    Case(
        "a link to a device",
        stands(DATA, lambda path: path.symlink_to("/dev/zero")),
        "a symbolic link",
        DATA,
    ),
    Case(
        "a link to itself",
        stands(GRAPH, lambda path: path.symlink_to(path.name)),
        "a symbolic link",
        GRAPH,
    ),
    Case(
        "a manifest that is a link",
        stands(MANIFEST, lambda path: path.symlink_to("/dev/zero")),
        "a symbolic link",
    ),
    Case("a pipe", stands(DATA, os.mkfifo), "not a plain file", DATA),
    Case("a manifest that is a pipe", stands(MANIFEST, os.mkfifo), "not a plain file"),
    Case("a folder", stands(GRAPH, Path.mkdir), "not a plain file", GRAPH),
    Case("a manifest that is a folder", stands(MANIFEST, Path.mkdir), "not a plain file"),
    Case("a socket", stands(DATA, a_socket), "not a plain file", DATA),
]
GRAPHS = [
    Case(name, change, says, GRAPH, "onnxruntime")
    for name, change, says in (
        ("a graph of no length", content(GRAPH, b""), ""),
        ("a graph that is a picture", content(GRAPH, b"\x89PNG\r\n\x1a\n" + bytes(99)), ""),
        ("a graph that is cut off", content(GRAPH, lambda data: data[: len(data) // 2]), ""),
        ("weights above the folder", external("location", "../outside"), ""),
        ("weights of the system", external("location", "/etc/passwd"), ""),
        ("weights of another name", external("location", "other.data"), ""),
        ("weights that start behind the file", external("offset", str(1 << 40)), ""),
        ("weights that start before the file", external("offset", "-4096"), ""),
        ("weights that start at no number", external("offset", "first"), ""),
        ("weights that are longer than the file", external("length", str((1 << 63) - 1)), ""),
        ("weights of -1 bytes", external("length", "-1"), ""),
        ("a tensor of 2^40 rows", dimension(1 << 40), ""),
        ("a tensor of -1 rows", dimension(-1), ""),
        ("an unknown operator", node(op_type="Shell"), ""),
        ("an operator of somebody else", node(domain="com.example"), ""),
        (
            "a node that wants what is nowhere",
            graph(lambda model: model.graph.node[0].input.__setitem__(0, "nowhere")),
            "",
        ),
        (
            "an input too many",
            graph(lambda model: model.graph.input.add(name="x").CopyFrom(model.graph.input[0])),
            "",
        ),
        ("no outputs", graph(lambda model: model.graph.ClearField("output")), ""),
        (
            "a cache of another type",
            put("loop", "graph", "cache_dtype", "float16"),
            "but the manifest makes it float16",
        ),
        (
            "heads that the graph has not",
            put(*PORTS, "layers", 1, "kv_heads", 2),
            'the input "past_key.1"',
        ),
        (
            "a vocabulary that the graph has not",
            put("loop", "vocab_size", 161),
            "but the manifest makes it",
        ),
        (
            "a port that the graph has not",
            put(*PORTS, "entropy", "surprise"),
            'the output "surprise" is missing',
        ),
    )
]
ENGINES: list[Case] = [
    Case("an engine of no version", engine(version="latest"), "expected a version"),
    Case("an engine for no device", engine(sm=[]), "names no compute capability"),
    Case(
        "an engine that is elsewhere",
        engine(file="engines/../../x.engine"),
        "names a file that is not listed in files",
    ),
    Case(
        "an engine without a device graph",
        each(engine(), put("loop", "graph", "device_file", GONE)),
        "device_file",
    ),
    Case(
        "an engine whose sizes fall",
        each(engine(), put("loop", "engines", "rtx5090", "profiles", "block", "rows", [1, 9, 8])),
        "expected an integer in 9..",
    ),
    Case(
        "an engine of a target that is a path",
        engine(target="../x"),
        "not a plain file name|is not a target's name",
    ),
]
TEXTS = [
    Case(name, with_text(made), says, TEXT)
    for name, made, says in (
        ("a text file of no length", b"", "not a compiled text file, or truncated"),
        ("a text file of another kind", b"\x7fELF" + bytes(200), "not a compiled text file"),
        ("a text file of a later version", text_file(version=9), "it has version 9"),
        ("a text file that is cut off", text_file()[:-1], "are more than its bytes"),
        ("a text file that goes on", text_file() + b"\0", "are fewer than its bytes"),
        ("a vocabulary of 2^31 - 1", text_file(vocab=(1 << 31) - 1), "vocab_size is outside"),
        ("sizes below 0", text_file(merges=-1), "are negative"),
        ("two thousand million merges", text_file(merges=(1 << 31) - 1), "are more than its bytes"),
        (
            "a byte of no token",
            text_file({"byte_ids": [0] * 255 + [1]}),
            "byte_ids holds 1, outside -1..0",
        ),
        ("tokens that go backwards", text_file({"token_starts": [1, 0]}), "token_starts"),
        (
            "a token of a million bytes",
            text_file({"token_starts": [0, 10**6]}, bytes(1) + b"a" * 10**6, token_bytes=10**6),
            "tokens contain a token of more than",
        ),
        ("a prefix of no token", text_file({"prefix": [7]}, prefix=1), "prefix holds 7"),
        (
            "a prefix of a million tokens",
            text_file({"prefix": [0] * 10**6}, prefix=10**6),
            "are too large for a tokenizer",
        ),
        ("a split that leads out", splits(1, [9, 0]), "point outside their split"),
        (
            "a hundred thousand splits",
            splits(100_000, [2, 1]),
            "are too large for a tokenizer",
        ),
        ("splits without classes", text_file(splits=1), "have no classes of characters"),
        ("an added text of no length", text_file({"added_starts": [0, 0, 0, 0]}, added=1), "added"),
        ("chats of a hundred roles", text_file(roles=100), "are too large for a tokenizer"),
        (
            "a chat of texts that are not there",
            text_file({"roles": [5, 0, 0, 0, 0, 0, 0, 0]}, roles=1),
            "roles holds 5",
        ),
    )
]
CASES = [*LOOP, *NAMES, *FILES, *GRAPHS, *ENGINES, *TEXTS]
