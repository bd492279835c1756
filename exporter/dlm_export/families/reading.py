"""What families of every layout read the same way from a config: special ids and rotary positions.

Values that change what the network computes are read in every spelling that releases use, or
refused; none is guessed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Overrides
from dlm_export.network.spec import Rope


def read_rope(config: Config) -> Rope:
    """Rotary positions, in the spelling of transformers 4 or of 5. Raises CheckpointError for a
    missing or unknown one.

    4.x writes ``rope_theta``, ``rope_scaling`` (``type`` or ``rope_type``) and
    ``partial_rotary_factor`` beside each other; 5.x puts all into ``rope_parameters``, which may be
    an object of objects, one a layer type
    (https://huggingface.co/docs/transformers/internal/rope_utils).
    """
    said: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := config.get(key)) is not None:
            said[key] = value
    for key in ("rope_scaling", "rope_parameters"):
        values = config.get(key)
        if values is None or values is False:  # RND1 is released with rope_scaling false
            continue
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{config.path}: {key} must be an object, found {reprlib.repr(values)}"
            )
        if values and all(isinstance(value, dict) for value in values.values()):
            if values.keys() != {"full_attention"}:
                kinds = ", ".join(map(reprlib.repr, values))
                raise CheckpointError(
                    f"{config.path}: {key} is by layer type, {kinds}; only full_attention is supported"
                )
            values = values["full_attention"]
        for name, value in values.items():
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if name in said and said[name] != value:
                both = f"{reprlib.repr(said[name])} and, in {key}, {reprlib.repr(value)}"
                raise CheckpointError(
                    f"{config.path}: {name} is {both}: leave the one that was trained with"
                )
            said[name] = value
    kind = said.pop("rope_type", "default")
    if kind not in ("default", "linear"):
        raise CheckpointError(
            f"{config.path}: rope_type {reprlib.repr(kind)} is not supported, only default and linear"
        )
    scaling = (
        config.positive("the factor of rope_scaling", said.pop("factor", None))
        if kind == "linear"
        else 1.0
    )
    rope = Rope(
        config.positive("rope_theta", said.pop("rope_theta", None)),
        config.positive("partial_rotary_factor", said.pop("partial_rotary_factor", 1.0)),
        scaling,
    )
    if said:
        unknown = ", ".join(map(reprlib.repr, said))
        raise CheckpointError(
            f"{config.path}: {unknown} of rope_scaling or rope_parameters is not known"
        )
    if rope.fraction > 1:
        raise CheckpointError(
            f"{config.path}: partial_rotary_factor {rope.fraction} is more than the whole head"
        )
    return rope


@dataclass(frozen=True)
class SpecialTokens:
    """Ids read from config.json, generation_config.json and tokenizer_config.json."""

    mask: int
    eos: tuple[int, ...]
    pad: int | None


def special_tokens(
    checkpoint: Checkpoint, vocab_size: int, overrides: Overrides, mask_text: str | None = None
) -> SpecialTokens:
    """Find the special ids; never guess the mask token. ``mask_text``: the mask token of releases
    that give it no name.

    Raises CheckpointError.
    """
    config = checkpoint.config
    mask = overrides.mask_token_id
    for found in (
        config.get("mask_token_id"),
        _named_id(checkpoint, "mask_token"),
        _id_of(checkpoint, mask_text),
    ):
        mask = found if mask is None else mask
    if mask is None:
        other = "" if mask_text is None else f", nor {mask_text} among the added tokens"
        raise CheckpointError(
            f"{checkpoint.config.path}: no mask_token_id, nor a mask_token in tokenizer_config.json{other}. "
            "Pass --mask-token-id."
        )
    eos: list[int] = []
    generation = checkpoint.optional_json("generation_config.json")
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in eos:
                eos.append(token)
    pad = config.get("pad_token_id")
    for name, token in [
        ("mask_token_id", mask),
        ("pad_token_id", pad),
        *(("eos_token_id", token) for token in eos),
    ]:
        if token is None and name == "pad_token_id":
            continue
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{checkpoint.config.path}: {name} {reprlib.repr(token)} is outside the vocabulary (0..{vocab_size - 1}). "
                "Pass --mask-token-id, or correct the file."
            )
    if mask in eos:
        raise CheckpointError(
            f"{checkpoint.config.path}: mask_token_id {mask} is also an eos_token_id"
        )
    return SpecialTokens(mask, tuple(eos), pad)


def new_tokens(checkpoint: Checkpoint, longest: int) -> int | None:
    """The length of an answer, as generation_config.json has it in max_new_tokens; None where it
    says none, or one that leaves a canvas of the ``longest`` length no room for a prompt.

    Raises CheckpointError for what is no number of tokens.
    """
    found = checkpoint.optional_json("generation_config.json").get("max_new_tokens")
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CheckpointError(
            f"{checkpoint.path / 'generation_config.json'}: max_new_tokens {reprlib.repr(found)} is no number of tokens, 1 or "
            "more: correct it, or leave it out"
        )
    return found if found < longest else None


def text_option(checkpoint: Checkpoint, key: str, known: Collection[str]) -> str | None:
    """A name that generation_config.json gives under ``key``, such as the layout of JSON text; None
    if it has none.

    Raises CheckpointError for a name that is not ``known``.
    """
    found = checkpoint.optional_json("generation_config.json").get(key)
    if found is None:
        return None
    if not isinstance(found, str) or found not in known:
        raise CheckpointError(
            f"{checkpoint.path / 'generation_config.json'}: {key} {reprlib.repr(found)} is not one of {', '.join(known)}"
        )
    return found


def block_length(checkpoint: Checkpoint, key: str, overrides: Overrides) -> int:
    """The tokens of a block that sees itself and those before it: as the user says, else as
    config.json has it under ``key``.

    Raises CheckpointError where neither says it, and for a length below 1.
    """
    config = checkpoint.config
    found = config.get(key)
    if overrides.attention_block is None and found is None:
        raise CheckpointError(
            f"{config.path}: {key} is missing, and a guess would change what the network computes. Pass --attention-block with "
            "the length of the blocks that it was trained by."
        )
    return (
        overrides.attention_block if overrides.attention_block is not None else config.integer(key)
    )


def _named_id(checkpoint: Checkpoint, name: str) -> int | None:
    """The id of a special token that tokenizer_config.json names."""
    token = checkpoint.optional_json("tokenizer_config.json").get(name)
    return _id_of(checkpoint, token.get("content") if isinstance(token, dict) else token)


def _id_of(checkpoint: Checkpoint, text: object) -> int | None:
    """The id of an added token, by the table in tokenizer_config.json or by added_tokens.json."""
    if not isinstance(text, str):
        return None
    added = checkpoint.optional_json("tokenizer_config.json").get("added_tokens_decoder")
    for number, entry in added.items() if isinstance(added, dict) else []:
        if isinstance(entry, dict) and entry.get("content") == text:
            # Ten digits are no token id, and thousands of them more than int() takes.
            return int(number) if number.isdecimal() and len(number) < 10 else None
    found = checkpoint.optional_json("added_tokens.json").get(text)
    return found if isinstance(found, int) else None
