"""Reads a checkpoint's tokenizer and chat template.

A bundle stores the tokenizer as tokenizer.json, and the chat template as a Jinja file. Some
checkpoints, such as Dream, contain vocab.json, merges.txt and a Python class instead of
tokenizer.json. The Python class is never run. Instead, dlm-export builds the same tokenizer, the
byte-level BPE of Qwen2, from vocab.json and merges.txt. Old checkpoints of BERT contain
vocab.txt, from which dlm-export builds BERT's tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlm_export.checkpoints.added_tokens import Token, own_tokens, read_added
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, read_json
from dlm_export.network.spec import NetworkSpec
from dlm_export.text.supported import chat_failure, takes_tools
from dlm_runtime.errors import BundleError, RequestError
from dlm_runtime.files import read_bytes, read_text
from dlm_runtime.text.tokenizer import TEMPLATE_LIMIT_BYTES, TOKENIZER_LIMIT_BYTES, Tokenizer

# The pattern with which Qwen2 splits text before BPE, from its published tokenizer (Apache-2.0).
# The pattern matches contractions, words, single digits, punctuation, line breaks and spaces.
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of BERT's vocab.txt."""
# A larger share of unused ids in a vocabulary is unusual. Released vocabularies are padded to sizes
# that are efficient for matrices. LLaDA has 126,464 ids, of which 115 are padding. Dream has
# 152,064 ids, of which 397 are padding.
PADDING_SHARE = 0.01
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
EMPTY = b'{"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}, "added_tokens": []}'
"""A tokenizer.json without tokens, for a process that only renders chats."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The text of tokenizer.json, the chat template, and the template's special tokens.

    ``unused_tokens`` are the ids of the denoiser's vocabulary that are no tokens (see
    ``NetworkSpec``). ``chat_failure`` says why the template renders no conversation, and is
    ``None`` if it renders one.
    """

    tokenizer: str | None
    chat_template: str | None
    special_tokens: dict[str, str]
    unused_tokens: tuple[tuple[int, int], ...] = ()
    chat_failure: str | None = None


def read(checkpoint: Checkpoint, network: NetworkSpec) -> TokenizerFiles:
    """Read the tokenizer, and check it against the network's vocabulary. Raises CheckpointError."""
    found = _find(checkpoint)
    if found is None:
        return TokenizerFiles(None, None, {})
    added = read_added(checkpoint, found.added)
    with contextlib.ExitStack() as stack:
        tokenizer, ids = stack.enter_context(_opened(found, added.tokens))
        # transformers adds these tokens too, but the denoiser has no embeddings for their ids.
        beyond = {
            token["content"]
            for token in added.tokens
            if ids.get(token["content"], 0) >= network.vocab_size
        }
        if beyond:
            kept = [token for token in added.tokens if token["content"] not in beyond]
            tokenizer, ids = stack.enter_context(_opened(found, kept))
            checkpoint.note(
                f"{', '.join(sorted(beyond))[:300]} in the tokenizer's files: left out, because the denoiser's vocabulary of "
                f"{network.vocab_size} has no ids for added tokens"
            )
        _check_ids(checkpoint, found, ids, added.listed)
        unused = _unused_tokens(checkpoint, tokenizer, network)
        # Serialise the tokenizer again, without its settings for truncation and padding in
        # training. With these settings, the tokenizer would silently cut or pad prompts.
        text = _with_special(tokenizer.as_json(), (network.mask_token_id, *network.eos_token_ids))
    config = checkpoint.optional_json("tokenizer_config.json")
    template = _chat_template(checkpoint, config)
    for name, each in {"chat_template": template or "", **added.named}.items():
        _check_text(checkpoint, name, each)
    failure = None
    if template is None and config.get("chat_template") is not None:
        checkpoint.note("no chat template is named default or tool_use, so the bundle has none")
    elif template is not None:
        with contextlib.closing(Tokenizer(EMPTY, template, added.named)) as tokenizer:
            failure = chat_failure(tokenizer)
            if failure is not None:
                checkpoint.note(f"the chat template {failure}")
            elif not takes_tools(tokenizer):
                checkpoint.note("the chat template ignores tools: the prompt does not list them")
    return TokenizerFiles(text, template, added.named, unused, failure)


def mask_token_id(checkpoint: Checkpoint, text: str | None) -> int | None:
    """Return the id of the special token ``mask_token``, or of the added token with this text.

    Returns ``None`` if the tokenizer has no such token. Raises CheckpointError.
    """
    found = _find(checkpoint)
    added = read_added(checkpoint, [] if found is None else found.added)
    texts = [each for each in (added.named.get("mask_token"), text) if each is not None]
    if not texts:
        return None
    ids = added.listed
    if found is not None:
        with _opened(found, added.tokens) as (_, ids):
            pass
    return next((ids[each] for each in texts if each in ids), None)


@dataclass(frozen=True)
class _Found:
    """A tokenizer.json, or one made from the other files: its path, data and added tokens."""

    path: Path
    data: bytes
    added: list[dict[str, Any]]


def _find(checkpoint: Checkpoint) -> _Found | None:
    path = checkpoint.path / "tokenizer.json"
    if path.exists():
        data = read_bytes(path, TOKENIZER_LIMIT_BYTES, CheckpointError)
        return _Found(path, data, own_tokens(data))
    path = checkpoint.path / "vocab.txt"
    if path.exists():
        made = _word_pieces(checkpoint)
        return _Found(path, json.dumps(made, ensure_ascii=False).encode(), made["added_tokens"])
    path = checkpoint.path / "vocab.json"
    if path.exists() and (checkpoint.path / "merges.txt").exists():
        config = checkpoint.optional_json("tokenizer_config.json")
        adds = config.get("add_bos_token") or config.get("add_eos_token")
        if adds or checkpoint.config.get("architectures") == ["RobertaForMaskedLM"]:
            raise CheckpointError(
                f"{checkpoint.path}: has vocab.json and merges.txt, but no tokenizer.json. Write it with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        return _Found(
            path, json.dumps(_byte_level_bpe(checkpoint), ensure_ascii=False).encode(), []
        )
    return None


@contextlib.contextmanager
def _opened(found: _Found, added: Sequence[Token]) -> Iterator[tuple[Tokenizer, dict[str, int]]]:
    """Yield the tokenizer with more tokens, and the ids of all added tokens. Raises CheckpointError."""
    try:
        with contextlib.closing(Tokenizer(found.data, None, {}, found.path, added)) as tokenizer:
            entries = json.loads(tokenizer.as_json())["added_tokens"]
            yield tokenizer, {entry["content"]: entry["id"] for entry in entries}
    except BundleError as err:
        raise CheckpointError(str(err)) from err
    except RequestError as err:
        raise CheckpointError(f"{found.path}: {err}") from err


def _with_special(text: str, tokens: Sequence[int]) -> str:
    """Mark added tokens as special, so that texts of requests are never encoded as them."""
    found = json.loads(text)
    plain = [
        added for added in found["added_tokens"] if added["id"] in tokens and not added["special"]
    ]
    for added in plain:
        added["special"] = True
    return json.dumps(found, ensure_ascii=False) if plain else text


def _byte_level_bpe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of tokenizer.json for vocab.json and merges.txt, without added tokens."""
    merges = read_text(
        checkpoint.path / "merges.txt", TOKENIZER_LIMIT_BYTES, CheckpointError
    ).split("\n")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": QWEN2_SPLIT},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": read_json(checkpoint.path / "vocab.json"),
            "merges": [line for line in merges if line and not line.startswith("#version")],
        },
    }


def _word_pieces(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of tokenizer.json for the vocab.txt of a BERT. Each line of vocab.txt is a token.

    tokenizer_config.json may change the settings of the normaliser. The defaults are the same as in
    transformers' BertTokenizer.
    """
    lines = read_text(checkpoint.path / "vocab.txt", TOKENIZER_LIMIT_BYTES, CheckpointError)
    vocab = {name: number for number, name in enumerate(lines.removesuffix("\n").split("\n"))}
    config = checkpoint.optional_json("tokenizer_config.json")
    lacking = [name for name in BERT_TOKENS if name not in vocab]
    if lacking:
        raise CheckpointError(f"{checkpoint.path / 'vocab.txt'}: lacks {', '.join(lacking)}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": name, **flags, "special": True}
        for name, number in vocab.items()
        if name in BERT_TOKENS
    ]
    sep, cls = (["[SEP]", vocab["[SEP]"]], ["[CLS]", vocab["[CLS]"]])
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
            "lowercase": config.get("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": sep, "cls": cls},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def _check_ids(
    checkpoint: Checkpoint, found: _Found, ids: Mapping[str, int], listed: Mapping[str, int]
) -> None:
    """Compare the ids of added tokens with the ids in the other files.

    With a tokenizer.json, its ids and the order of the other tokens count, as in transformers. A
    difference is noted. Without one, the ids in the files count, so a difference raises CheckpointError.
    """
    wrong = {name: number for name, number in listed.items() if ids.get(name, number) != number}
    if wrong and found.path.name != "tokenizer.json":
        name, number = next(iter(wrong.items()))
        raise CheckpointError(
            f"{found.path.parent}: added token {name!r} should have id {number}, but gets id {ids[name]} after the "
            f"tokens of {found.path.name}"
        )
    told = ", ".join(f"{name!r} {ids[name]} (not {number})" for name, number in wrong.items())
    if wrong:
        checkpoint.note(
            f"tokens have other ids than their files say, as in transformers: {told[:300]}"
        )


def _unused_tokens(
    checkpoint: Checkpoint, tokenizer: Tokenizer, network: NetworkSpec
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of ids of the denoiser's vocabulary that the tokenizer does not know.

    The mask token is never among them. Raises CheckpointError if the tokenizer does not fit the
    vocabulary.
    """
    size, vocab_size = tokenizer.size, network.vocab_size
    if size > vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {size} ids, but the denoiser's vocabulary has only {vocab_size}"
        )
    names = tokenizer.names(range(vocab_size))
    for token in network.eos_token_ids:
        if names[token] is None:
            raise CheckpointError(
                f"{checkpoint.path}: the tokenizer has {size} ids, but eos_token_id {token} is not one of them"
            )
    is_unused = np.array([False, *(name is None for name in names), False])
    if network.has_mask_token and names[network.mask_token_id] is None:
        is_unused[network.mask_token_id + 1] = False
        checkpoint.note(f"the tokenizer has no text for the mask token {network.mask_token_id}")
    if is_unused.sum() > PADDING_SHARE * vocab_size:
        checkpoint.note(
            f"{is_unused.sum()} of the {vocab_size} ids in the denoiser's vocabulary are not in the tokenizer, and are never "
            "predicted. Check that the tokenizer belongs to this checkpoint"
        )
    ends = np.flatnonzero(is_unused[1:] != is_unused[:-1]).tolist()
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def _check_text(checkpoint: Checkpoint, name: str, text: str) -> None:
    """Raise CheckpointError if a text is too long for a bundle or contains a NUL character."""
    size = len(text.encode("utf-8"))
    if size > TEMPLATE_LIMIT_BYTES or "\0" in text:
        raise CheckpointError(
            f"{checkpoint.path}: {name} has {size} bytes; a bundle allows {TEMPLATE_LIMIT_BYTES}, without NUL"
        )


def _chat_template(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """Return the chat template.

    Files with templates go before tokenizer_config.json. As in transformers, a template named
    "tool_use" is for requests with tools, and the one named "default" for all others.
    """
    found: Any = {}
    for name, file in TEMPLATE_FILES.items():
        path = checkpoint.path / file
        if path.exists():
            found[name] = read_text(path, TEMPLATE_LIMIT_BYTES, CheckpointError)
    if not found:
        found = config.get("chat_template")
        if found is None:
            found = checkpoint.optional_json("chat_template.json").get("chat_template")
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if isinstance(found, str):
        found = {"default": found}
    templates = [] if found is None else [found]
    if isinstance(found, dict):
        templates = [found[name] for name in ("default", "tool_use") if name in found]
    for template in templates:
        if not isinstance(template, str):
            raise CheckpointError(
                f"{checkpoint.path}: chat_template is not text ({reprlib.repr(template)})"
            )
    if isinstance(found, dict) and "tool_use" in found:
        missing = "{{ raise_exception('the checkpoint has a chat template for tools only') }}"
        # The plus signs keep the line breaks and spaces at the start and the end of each template.
        texts = (found["tool_use"], found.get("default", missing))
        first, second = (re.sub(r"(\r\n|\r|\n)\Z", "", each) for each in texts)
        return f"{{% if tools is not none +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
    return templates[0] if templates else None
