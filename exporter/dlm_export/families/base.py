"""What a family file provides, and the special ids that every family reads the same way."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.network.denoiser import NetworkSpec


class Parameters(Protocol):
    """A denoiser's parameters, one at a time."""

    def read(self, parameter: str, dtype: np.dtype) -> np.ndarray:
        """One parameter of ``Denoiser`` as a C-contiguous array. Raises CheckpointError."""


@dataclass(frozen=True)
class Source:
    """The released tensor behind a denoiser's parameter; ``transpose``: stored ``[out, in]``."""

    tensor: str
    transpose: bool = False


@dataclass(frozen=True)
class Layout:
    """What a release calls the denoiser's tensors, ``.weight`` and ``.bias`` left out; ``layer`` is formatted with ``i``."""

    embed: str
    layer: str
    attention_norm: str
    q: str
    k: str
    v: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    head: str

    def sources(self, c: NetworkSpec) -> dict[str, Source]:
        """Denoiser parameter -> released tensor. Released matrices are ``[out, in]``, the denoiser's ``[in, out]``."""
        linears = {
            "attention.q": self.q,
            "attention.k": self.k,
            "attention.v": self.v,
            "attention.out": self.out,
            "mlp.gate": self.gate,
            "mlp.up": self.up,
            "mlp.down": self.down,
        }
        sources = {"embed.weight": Source(f"{self.embed}.weight")}
        for i in range(c.layers):
            ours, theirs = f"blocks.{i}.", self.layer.format(i=i)
            sources[f"{ours}attention_norm.weight"] = Source(f"{theirs}{self.attention_norm}.weight")
            sources[f"{ours}mlp_norm.weight"] = Source(f"{theirs}{self.mlp_norm}.weight")
            for name, released in linears.items():
                sources[f"{ours}{name}.weight"] = Source(f"{theirs}{released}.weight", transpose=True)
                if c.qkv_bias and name in ("attention.q", "attention.k", "attention.v"):
                    sources[f"{ours}{name}.bias"] = Source(f"{theirs}{released}.bias")
        sources["final_norm.weight"] = Source(f"{self.final_norm}.weight")
        if not c.tied_head:
            sources["head.weight"] = Source(f"{self.head}.weight", transpose=True)
        return sources


@dataclass(frozen=True)
class Overrides:
    """What the user says instead of the checkpoint; None leaves it to the checkpoint."""

    mask_token_id: int | None = None
    max_canvas_length: int | None = None


@dataclass(frozen=True)
class Family:
    """A released layout: its architectures, how to read its config, what its tensors are called."""

    name: str
    architectures: tuple[str, ...]
    description: str
    default_preset: str
    network: Callable[[Checkpoint, Overrides], NetworkSpec]
    layout: Layout


@dataclass(frozen=True)
class SpecialTokens:
    """Ids read from config.json, generation_config.json and tokenizer_config.json."""

    mask: int
    eos: tuple[int, ...]
    pad: int | None


def special_tokens(checkpoint: Checkpoint, vocab_size: int, overrides: Overrides) -> SpecialTokens:
    """Find the special ids; never guess the mask token. Raises CheckpointError."""
    config = checkpoint.config.values
    mask = overrides.mask_token_id
    for found in (config.get("mask_token_id"), _tokenizer_id(checkpoint, "mask_token")):
        mask = found if mask is None else mask
    if mask is None:
        raise CheckpointError(
            f"{checkpoint.config.path}: no mask_token_id, nor a mask_token in tokenizer_config.json. Pass --mask-token-id."
        )
    eos: list[int] = []
    generation = checkpoint.optional_json("generation_config.json")
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in eos:
                eos.append(token)
    pad = config.get("pad_token_id")
    for name, token in [("mask_token_id", mask), ("pad_token_id", pad), *(("eos_token_id", token) for token in eos)]:
        if token is None and name == "pad_token_id":
            continue
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{checkpoint.config.path}: {name} {reprlib.repr(token)} is outside the vocabulary (0..{vocab_size - 1}). "
                "Pass --mask-token-id, or correct the file."
            )
    if mask in eos:
        raise CheckpointError(f"{checkpoint.config.path}: mask_token_id {mask} is also an eos_token_id")
    return SpecialTokens(mask, tuple(eos), pad)


def _tokenizer_id(checkpoint: Checkpoint, name: str) -> int | None:
    """The id of a special token that tokenizer_config.json names, by its table of added tokens."""
    config = checkpoint.optional_json("tokenizer_config.json")
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    added = config.get("added_tokens_decoder")
    for number, entry in added.items() if isinstance(added, dict) else []:
        if text is not None and isinstance(entry, dict) and entry.get("content") == text:
            # Ten digits are no token id, and thousands of them more than int() takes.
            return int(number) if number.isdecimal() and len(number) < 10 else None
    return None
