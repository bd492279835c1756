"""Reads a tokenizer.json as tables.

WordPiece (``word_pieces``) and two kinds of BPE are supported. The first kind is BPE over bytes, as
in GPT-2. The second kind is BPE over characters with byte fallback, which encodes characters
outside the vocabulary as bytes. All other tokenizers are rejected with an error that names the
unsupported part. SentencePiece vocabularies contain U+2581 instead of spaces. This module replaces
U+2581 by a space, because SentencePiece tokenizers treat U+2581 and a space alike.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlm_export.text.composition import composition
from dlm_export.text.layout import (
    BYTE,
    BYTE_FALLBACK,
    SPACE_LETTER,
    SPECIAL,
    STARTS_WITH_SPACE,
    STRIPS_LEFT,
    STRIPS_RIGHT,
    STRIPS_SPACE,
    WHOLE,
    Added,
    TextTables,
)
from dlm_export.text.refusal import NotCompiled
from dlm_export.text.splits import DIGIT_RUNS, DIGITS, Split, compile_splits
from dlm_export.text.word_pieces import Parts, of_word_pieces
from dlm_runtime.constraints.vocabulary import BYTES

_LETTER = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The split pattern of the pre-tokenizer ByteLevel, from the published code of GPT-2.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

Part = Mapping[str, Any]


def read_tables(found: Part, spelled: Sequence[str | None]) -> TextTables:
    """Make the tables of a tokenizer.json, without the chat template. Raises NotCompiled.

    ``spelled`` contains the text of each token id, as the tokenizers library returns it.
    """
    model = found["model"]
    if model["type"] not in ("BPE", "WordPiece"):
        raise NotCompiled(f"its model is {model['type']}; only BPE and WordPiece are compiled")
    splitters = _parts(found["pre_tokenizer"], "pretokenizers")
    is_bytes = any(part["type"] == "ByteLevel" for part in splitters)
    vocab: dict[str, int] = model["vocab"]
    added = [token for token in found["added_tokens"] if token["content"]]
    names = {token: name for token, name in enumerate(spelled) if name is not None}
    special = {token["content"] for token in added if token["special"]}
    token_flags = np.zeros(len(spelled), np.uint8)
    for token, name in names.items():
        token_flags[token] |= SPECIAL if name in special else 0
    if model["type"] == "WordPiece":
        parts = Parts(
            _parts(found["normalizer"], "normalizers"),
            splitters,
            _parts(found["decoder"], "decoders"),
        )
        if any(token["normalized"] for token in added):
            raise NotCompiled("it has added tokens that are matched after normalisation")
        texts = [_added(token, str) for token in added]
        around = _around(found["post_processor"])
        return of_word_pieces(model, parts, names, texts, token_flags, _splits, around)
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise NotCompiled(f"its model has {name} {model[name]!r}")
    tables = _of_bytes if is_bytes else _of_characters
    return tables(found, vocab, names, added, splitters, token_flags)


def _of_bytes(
    found: Part,
    vocab: dict[str, int],
    names: Mapping[int, str],
    added: Sequence[Part],
    splitters: Sequence[Part],
    token_flags: np.ndarray,
) -> TextTables:
    model = found["model"]
    kinds = [part["type"] for part in _parts(found["normalizer"], "normalizers")]
    if kinds not in ([], ["NFC"]):
        raise NotCompiled(
            f"it normalises by {', '.join(kinds)}; for byte-level tokenizers only NFC is compiled"
        )
    if [part["type"] for part in _parts(found["decoder"], "decoders")] != ["ByteLevel"]:
        raise NotCompiled("it splits text into bytes but does not decode by ByteLevel alone")
    splits = [split for part in splitters for split in _splits(part)]
    if splitters[-1]["type"] != "ByteLevel":
        raise NotCompiled(f"its pre-tokenizer {splitters[-1]['type']} comes after ByteLevel")
    byte_ids = np.full(256, -1, np.int32)
    for letter, byte in BYTES.items():
        byte_ids[byte] = vocab.get(letter, -1)
    if (byte_ids < 0).any() and model.get("unk_token"):
        raise NotCompiled(
            f"its vocabulary lacks the byte {int(np.argmin(byte_ids))} and uses {model['unk_token']!r} for it"
        )
    tokens = [b""] * len(token_flags)
    for token, name in names.items():
        tokens[token] = _bytes_of(name)
    if model.get("ignore_merges"):
        for name, token in vocab.items():
            token_flags[token] |= WHOLE if _is_spelled(name) else 0
    normalise = _composed if kinds else (lambda text: text)
    return TextTables(
        tokens=tokens,
        token_flags=token_flags,
        byte_ids=byte_ids,
        chars={},
        merges=_merges(model),
        added=[_added(token, normalise) for token in added],
        flags=0,
        splits=compile_splits(splits) if splits else None,
        composition=composition() if kinds else None,
        **_around(found["post_processor"]),
    )


def _of_characters(
    found: Part,
    vocab: dict[str, int],
    names: Mapping[int, str],
    added: Sequence[Part],
    splitters: Sequence[Part],
    token_flags: np.ndarray,
) -> TextTables:
    model, flags = found["model"], SPACE_LETTER | BYTE_FALLBACK
    to_letter = {"type": "Replace", "pattern": {"String": " "}, "content": _LETTER}
    normalisers = _parts(found["normalizer"], "normalizers")
    if normalisers == [{"type": "Prepend", "prepend": _LETTER}, to_letter]:
        flags |= STARTS_WITH_SPACE
    elif normalisers != [to_letter]:
        raise NotCompiled(
            f"it normalises by {_named(normalisers)}; without ByteLevel, only U+2581 for spaces is compiled"
        )
    # Ignore a split at spaces, because the text contains no spaces at this point.
    if any(
        part
        != {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": part.get("behavior"),
            "invert": False,
        }
        for part in splitters
    ):
        raise NotCompiled(f"it splits text by {_named(splitters)}")
    decoders = _parts(found["decoder"], "decoders")
    usual: list[Part] = [
        {"type": "Replace", "pattern": {"String": _LETTER}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if decoders == [*usual, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        flags |= STRIPS_SPACE
    elif decoders != usual:
        raise NotCompiled(f"it decodes by {_named(decoders)}")
    byte_ids = np.array([vocab.get(f"<0x{byte:02X}>", -1) for byte in range(256)], np.int32)
    if not model.get("byte_fallback") or (byte_ids < 0).any():
        raise NotCompiled("it has no tokens for the bytes of characters that its vocabulary lacks")
    if model.get("ignore_merges"):
        raise NotCompiled("its model has ignore_merges, and no bytes for letters")
    tokens = [b""] * len(token_flags)
    for token, name in names.items():
        tokens[token] = name.replace(_LETTER, " ").encode()
        if match := _BYTE_TOKEN.fullmatch(name):
            tokens[token] = bytes([int(match[1], 16)])
            token_flags[token] |= BYTE
    chars = {
        ord(name.replace(_LETTER, " ")): token
        for name, token in vocab.items()
        if len(name) == 1 and name != " "
    }
    start = " " if flags & STARTS_WITH_SPACE else ""
    return TextTables(
        tokens=tokens,
        token_flags=token_flags,
        byte_ids=byte_ids,
        chars=chars,
        merges=_merges(model),
        added=[_added(token, lambda text: start + text.replace(_LETTER, " ")) for token in added],
        flags=flags,
        splits=None,
        composition=None,
        **_around(found["post_processor"]),
    )


def _parts(part: Part | None, members: str) -> list[Part]:
    """Return the members of a "Sequence", or a list of the part. ``None`` gives an empty list."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [each for member in part[members] for each in _parts(member, members)]


def _named(parts: Sequence[Part]) -> str:
    return ", ".join(reprlib.repr(dict(part)) for part in parts) or "nothing"


def _splits(part: Part) -> list[Split]:
    kind = part["type"]
    if kind == "ByteLevel":
        if part["add_prefix_space"]:
            raise NotCompiled("its ByteLevel puts a space before text (add_prefix_space)")
        return [Split(GPT2_SPLIT)] if part.get("use_regex", True) else []
    if kind == "Digits":
        return [DIGITS if part["individual_digits"] else DIGIT_RUNS]
    if kind != "Split" or part["behavior"] != "Isolated":
        raise NotCompiled(f"it splits text by {_named([part])}")
    pattern = part["pattern"]
    return [
        Split(pattern["Regex"]) if "Regex" in pattern else Split(pattern["String"], is_literal=True)
    ]


def _is_spelled(name: str) -> bool:
    return all(letter in BYTES for letter in name)


def _bytes_of(name: str) -> bytes:
    """Return a token's bytes: those of its letters, or UTF-8 if a letter stands for no byte."""
    return bytes(BYTES[letter] for letter in name) if _is_spelled(name) else name.encode()


def _merges(model: Part) -> np.ndarray:
    vocab, ranks = model["vocab"], dict[tuple[int, int], tuple[int, int]]()
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        # If a pair of tokens is listed twice, the pair's last rank is used.
        ranks[vocab[left], vocab[right]] = (rank, vocab[left + right])
    ordered = sorted((rank, left, right, made) for (left, right), (rank, made) in ranks.items())
    return np.array([row[1:] for row in ordered], np.int32).reshape(-1, 3)


def _composed(text: str) -> str:
    from tokenizers import normalizers

    return str(normalizers.NFC().normalize_str(text))


def _added(token: Part, normalise: Any) -> Added:
    if token["single_word"]:
        raise NotCompiled(
            f"its added token {token['content']!r} is matched only as a whole word (single_word)"
        )
    is_raw = not token["normalized"]
    text = token["content"] if is_raw else normalise(token["content"])
    flags = (STRIPS_LEFT if token["lstrip"] else 0) | (STRIPS_RIGHT if token["rstrip"] else 0)
    return Added(text.encode(), token["id"], flags, is_raw)


def _around(processor: Part | None) -> dict[str, Any]:
    """Return the tokens that the tokenizer puts before and after a prompt."""
    around: dict[str, Any] = {"prefix": [], "suffix": []}
    for part in _parts(processor, "processors"):
        if part["type"] == "ByteLevel":
            continue  # ignore this setting, which changes offsets but no tokens
        if any(around.values()):
            raise NotCompiled(f"it puts tokens around text by {part['type']}")
        if part["type"] in ("BertProcessing", "RobertaProcessing"):
            around = {"prefix": [part["cls"][1]], "suffix": [part["sep"][1]]}
            continue
        if part["type"] != "TemplateProcessing":
            raise NotCompiled(f"it puts tokens around text by {part['type']}")
        sequences = [piece for piece in part["single"] if "Sequence" in piece]
        if len(sequences) != 1:
            raise NotCompiled("its post-processor does not insert the text exactly once")
        side = "prefix"
        for piece in part["single"]:
            if "Sequence" in piece:
                side = "suffix"
            else:
                around[side] += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return around
