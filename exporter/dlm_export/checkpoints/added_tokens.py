"""Finds the tokens that a checkpoint's other files add to its tokenizer.

transformers adds tokens from tokenizer_config.json, special_tokens_map.json and added_tokens.json
to those of tokenizer.json. This module finds the same tokens in the same order, because the order
decides their ids: the id in a file only orders the tokens. special_tokens_map.json and
added_tokens.json are not read if tokenizer_config.json has ``added_tokens_decoder``. The reference
is ``TokenizersBackend`` in transformers 5.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_runtime.files import parse_json

CONFIG, SPECIAL_MAP, LEGACY = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MOST_ID_DIGITS = 9

Token = dict[str, Any]
"""An added token: its ``content``, and a bool for each of ``FLAGS``, as in tokenizer.json."""


@dataclass(frozen=True)
class AddedTokens:
    """The tokens that the files add.

    - ``tokens``: the tokens in the order in which the tokenizer must add them. Some may be in
      tokenizer.json, with the same flags or with others. The last flags count.
    - ``named``: the texts of the special tokens. The keys are the names that templates use.
    - ``listed``: the ids that the files give to added tokens. The keys are texts.
    """

    tokens: list[Token]
    named: dict[str, str]
    listed: dict[str, int]


def read_added(checkpoint: Checkpoint, own: Sequence[Mapping[str, Any]]) -> AddedTokens:
    """Find the added tokens. ``own`` are those in tokenizer.json. Raises CheckpointError."""
    config = checkpoint.optional_json(CONFIG)
    decoder = _decoder(checkpoint)
    special_map = checkpoint.optional_json(SPECIAL_MAP) if decoder is None else {}
    named, extra, plain = _special(checkpoint, config, special_map)
    if decoder is None:
        # An object in tokenizer_config.json does not make a token of added_tokens.json special.
        given = {**config, **special_map}
        special = {token["content"] for token in extra} | {
            named[name]["content"]
            for name in NAMED
            if name in named and (name in special_map or isinstance(given[name], str))
        }
        decoder = _legacy(checkpoint, special)
        listed = {token["content"]: number for number, token in decoder.items()}
        by_text = {token["content"]: token for token in [*decoder.values(), *map(dict, own)]}
        for name in NAMED:
            if name in named:
                named[name] = by_text.get(named[name]["content"], named[name])
        decoder |= {each["id"]: dict(each) for each in own}
    else:
        listed = {token["content"]: number for number, token in decoder.items()}
    found = [token for _, token in sorted(decoder.items())]
    known = {token["content"] for token in [*own, *found]}
    found += [token for token in [*named.values(), *extra, *plain] if token["content"] not in known]
    texts = {name: token["content"] for name, token in named.items()}
    tokens = [
        _with_flags({**token, "special": True} if token["content"] in texts.values() else token)
        for token in found
    ]
    present = [_with_flags(each) for each in own]
    is_new = any(token not in present for token in tokens)
    return AddedTokens(tokens if is_new else [], texts, listed)


def _special(
    checkpoint: Checkpoint, config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> tuple[dict[str, Token], list[Token], list[Token]]:
    """Return the special tokens that have a name, and two lists of all other special tokens.

    The tokens in the second list do not make a token of added_tokens.json special.
    """
    extra = config.get("extra_special_tokens")
    extra = extra or config.get("additional_special_tokens", extra)
    more = special_map.get("extra_special_tokens")
    plain = special_map.get("additional_special_tokens")
    if isinstance(extra, list) or isinstance(more, list):
        plain = None
    if isinstance(more, dict):
        extra = extra if isinstance(extra, dict) else None
    given = {**config, **special_map}
    others = {
        name: value
        for name, value in given.items()
        if name.endswith("_token") and name not in NAMED and isinstance(value, (str, dict))
    }
    # For other names, transformers prefers the texts in tokenizer_config.json.
    texts = {name: config[name] for name in others if isinstance(config.get(name), str)}
    for name in texts.keys() - special_map.keys():
        del others[name]
    found = {name: given[name] for name in NAMED if given.get(name) is not None} | others | texts
    lists: list[list[Any]] = []
    for parts in ((extra, more), (plain,)):
        lists.append([])
        for part in parts:
            if isinstance(part, dict):
                found |= part
            elif part is not None:
                lists[-1] += part if isinstance(part, list) else [part]
    special, others_special = (
        [_token(checkpoint, "extra_special_tokens", value, True) for value in values]
        for values in lists
    )
    return (
        {name: _token(checkpoint, name, each, name in special_map) for name, each in found.items()},
        special,
        others_special,
    )


def _decoder(checkpoint: Checkpoint) -> dict[int, Token] | None:
    """Read ``added_tokens_decoder`` in tokenizer_config.json. Returns ``None`` if it is missing."""
    decoder = checkpoint.optional_json(CONFIG).get("added_tokens_decoder")
    if decoder is None:
        return None
    where = f"{checkpoint.path / CONFIG}: added_tokens_decoder"
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{where} is not an object ({reprlib.repr(decoder)})")
    found = {}
    for number, entry in decoder.items():
        # int() raises an error for thousands of digits.
        is_id = number.isascii() and number.isdecimal() and len(number) <= MOST_ID_DIGITS
        if not is_id or not isinstance(entry, dict):
            raise CheckpointError(
                f"{where}: {reprlib.repr(number)} should be an id, with an object that contains content"
            )
        found[int(number)] = _token(checkpoint, f"added_tokens_decoder: {number}", entry, False)
    return found


def _legacy(checkpoint: Checkpoint, special: set[str]) -> dict[int, Token]:
    """Read added_tokens.json. The tokens in ``special`` are special."""
    found: dict[int, Token] = {}
    for text, number in checkpoint.optional_json(LEGACY).items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise CheckpointError(
                f"{checkpoint.path / LEGACY}: {reprlib.repr(text)} should have an id, not {reprlib.repr(number)}"
            )
        is_special = text in special
        found[number] = {"content": text, "normalized": not is_special, "special": is_special}
    return found


def _token(checkpoint: Checkpoint, name: str, value: Any, is_special: bool) -> Token:
    """Read a token that a file gives as a text or as an object.

    A text is always a special token. An object is one if it says so, or if ``is_special`` is true.
    Raises CheckpointError.
    """
    entry = value if isinstance(value, dict) else {"content": value, "special": True}
    if is_special:
        entry = entry | {"special": True}
    flags = [entry[flag] for flag in FLAGS if flag in entry]
    if not isinstance(entry.get("content"), str) or not all(isinstance(f, bool) for f in flags):
        raise CheckpointError(
            f"{checkpoint.path}: {name} is not a token with content and flags ({reprlib.repr(value)})"
        )
    return {name: entry[name] for name in ("content", *FLAGS) if name in entry}


def _with_flags(entry: Mapping[str, Any]) -> Token:
    """Return the content and all flags of a token. Special tokens are not normalised by default."""
    token = dict.fromkeys(FLAGS, False) | {"normalized": not entry.get("special", False)}
    return {name: entry.get(name, token.get(name)) for name in ("content", *FLAGS)}


def own_tokens(data: bytes) -> list[dict[str, Any]]:
    """Return the added tokens in a tokenizer.json.

    Returns ``[]`` for a damaged file, which the tokenizers library rejects with a reason.
    """
    try:
        found = parse_json(data.decode("utf-8"))["added_tokens"]
        return [
            {"id": int(entry["id"]), "content": str(entry["content"])} | entry for entry in found
        ]
    except (ValueError, TypeError, LookupError):
        return []
