"""Reads special tokens and options from the files of a checkpoint of any family.

Different releases store the same setting in different forms. This module reads all known forms. It
rejects unknown forms and never guesses missing settings, because a wrong setting could change the
network's results.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.checkpoints.tokenizer import mask_token_id
from dlm_export.families.base import Overrides
from dlm_export.network.spec import NetworkSpec


@dataclass(frozen=True)
class SpecialTokens:
    """The IDs of special tokens.

    The IDs come from config.json, generation_config.json and the tokenizer's files.
    """

    mask: int
    eos: tuple[int, ...]
    pad: int | None


def special_tokens(
    checkpoint: Checkpoint, vocab_size: int, overrides: Overrides, mask_text: str | None = None
) -> SpecialTokens:
    """Find the IDs of the special tokens. The function never guesses the mask token.

    ``mask_text`` is the mask token's text, for releases whose files do not record which token is
    the mask token. Raises CheckpointError.
    """
    mask = _mask_token(checkpoint, overrides, mask_text)
    eos, pad = end_and_pad_tokens(checkpoint, checkpoint.config, vocab_size)
    check_token(checkpoint, "mask_token_id", mask, vocab_size)
    if mask in eos:
        raise CheckpointError(
            f"{checkpoint.config.path}: mask_token_id {mask} is also an eos_token_id"
        )
    return SpecialTokens(mask, eos, pad)


def unmasked_tokens(
    checkpoint: Checkpoint, config: Config, vocab_size: int, overrides: Overrides
) -> SpecialTokens:
    """Find the IDs of the special tokens of a network without a mask token.

    The ID of the mask token is then ``vocab_size``, which is not a token. ``config`` is config.json,
    or the part of config.json that describes the network. Raises CheckpointError.
    """
    if overrides.mask_token_id is not None:
        raise CheckpointError(
            f"{checkpoint.config.path}: --mask-token-id: this network has no mask token, because it starts from random "
            "tokens. Omit the option."
        )
    eos, pad = end_and_pad_tokens(checkpoint, config, vocab_size)
    return SpecialTokens(vocab_size, eos, pad)


def _mask_token(checkpoint: Checkpoint, overrides: Overrides, mask_text: str | None) -> int:
    mask: int | None = overrides.mask_token_id
    if mask is None:
        mask = _single(checkpoint.config.get("mask_token_id"))
    if mask is None:
        mask = mask_token_id(checkpoint, mask_text)
    if mask is None:
        other = "" if mask_text is None else f", nor {mask_text} among the added tokens"
        raise CheckpointError(
            f"{checkpoint.config.path}: no mask_token_id, nor a mask_token in the tokenizer's files{other}. "
            "Pass --mask-token-id."
        )
    return mask


def end_and_pad_tokens(
    checkpoint: Checkpoint, config: Config, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """Find the IDs of the end tokens and of the padding token. Raises CheckpointError.

    ``config`` is config.json, or the part of config.json that describes the network.
    """
    eos: list[int] = []
    generation = checkpoint.optional_json("generation_config.json")
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in (-1, *eos):
                eos.append(token)
    for token in eos:
        check_token(checkpoint, "eos_token_id", token, vocab_size)
    return tuple(eos), padding_token(checkpoint, config, vocab_size)


def padding_token(checkpoint: Checkpoint, config: Config, vocab_size: int) -> int | None:
    """Find the ID of the padding token. Raises CheckpointError."""
    pad: int | None = _single(config.get("pad_token_id"))
    if pad is not None:
        check_token(checkpoint, "pad_token_id", pad, vocab_size)
    return pad


def _single(token: Any) -> Any:
    """Return a token ID, which some files write as a list of one. -1 and ``[]`` mean no token."""
    if isinstance(token, list) and len(token) < 2:
        token = next(iter(token), None)
    return None if token == -1 else token


def check_token(checkpoint: Checkpoint, name: str, token: object, vocab_size: int) -> None:
    """Raise CheckpointError if the value of a key is not a token of the vocabulary."""
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{checkpoint.config.path}: {name} {reprlib.repr(token)} is outside the vocabulary (0..{vocab_size - 1}). "
            f"{'Pass --mask-token-id, or correct' if name == 'mask_token_id' else 'Correct'} the file."
        )


def with_tokens(checkpoint: Checkpoint, network: NetworkSpec, **tokens: Any) -> NetworkSpec:
    """Set tokens that the decoding loop interprets, such as ``delete_token_id``.

    Raises CheckpointError if one of them is not a token, or if two of them, or one and the mask
    token, are equal.
    """
    for key, token in tokens.items():
        check_token(checkpoint, key, token, network.vocab_size)
    every = tokens | {"mask_token_id": network.mask_token_id}
    if len(set(every.values())) < len(every):
        said = ", ".join(f"{key} {token}" for key, token in every.items())
        raise CheckpointError(
            f"{checkpoint.config.path}: {said} must be different tokens. Correct the file."
        )
    return replace(network, **tokens)


def new_tokens(checkpoint: Checkpoint, longest: int) -> int | None:
    """Return max_new_tokens from generation_config.json, the length of answers in training.

    Returns ``None`` if max_new_tokens is missing, or if an answer of this length would leave no
    room for a prompt on a canvas of ``longest`` tokens. Raises CheckpointError if max_new_tokens is
    not a valid number.
    """
    found = checkpoint.optional_json("generation_config.json").get("max_new_tokens")
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise CheckpointError(
            f"{checkpoint.path / 'generation_config.json'}: max_new_tokens {reprlib.repr(found)} must be at least 1: "
            "correct or remove it"
        )
    return found if found < longest else None


def text_option(checkpoint: Checkpoint, key: str, known: Collection[str]) -> str | None:
    """Return the name under ``key`` in generation_config.json, such as the name of a JSON layout.

    If the key is missing, returns ``None``. Raises CheckpointError if ``known`` does not contain
    the name.
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
    """Return the block length of block-causal attention.

    The result is the value of the option ``--attention-block``. If the user did not pass this
    option, the result is the value of ``key`` in config.json.

    Raises CheckpointError if the option and ``key`` are both missing, or if the block length is
    less than 1.
    """
    config = checkpoint.config
    found = config.get(key)
    if overrides.attention_block is None and found is None:
        raise CheckpointError(
            f"{config.path}: {key} is missing, and a guess would change what the network computes. Pass --attention-block with "
            "the block length used in training."
        )
    return config.integer(key, instead=overrides.attention_block)


def read_heads(
    config: Config,
    size_key: str = "hidden_size",
    heads_key: str = "num_attention_heads",
    kv_key: str | None = "num_key_value_heads",
    *,
    kv_heads: int | None = None,
    head_size_key: str | None = None,
) -> tuple[int, int, int]:
    """Return the numbers of heads and of key and value heads, and the number of features of a head.

    The arguments are keys of config.json. ``kv_heads`` is the default for ``kv_key``, and otherwise
    the default is the number of heads. If there is no ``kv_key``, each head has its own keys and
    values. If config.json has no value for ``head_size_key``, the heads divide the hidden size.
    Raises CheckpointError.
    """
    size, heads = config.integer(size_key), config.integer(heads_key, high=4096)
    own = None if head_size_key is None else config.get(head_size_key)
    if own is None and size % heads:
        raise CheckpointError(
            f"{config.path}: {size_key} {size} is not a multiple of {heads_key} {heads}"
        )
    default = kv_heads or heads
    shared = heads if kv_key is None else config.integer(kv_key, default=default, high=4096)
    if heads % shared:
        raise CheckpointError(
            f"{config.path}: {heads_key} {heads} is not a multiple of {kv_key} {shared}"
        )
    if own is None or head_size_key is None:
        return heads, shared, size // heads
    return heads, shared, config.integer(head_size_key, high=4096)
