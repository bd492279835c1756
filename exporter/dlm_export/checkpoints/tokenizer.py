"""A checkpoint's tokenizer and chat template, carried into the bundle as tokenizer.json and a Jinja file.

Some releases ship vocab.json and merges.txt with a Python class instead of tokenizer.json (Dream does): that class is not
run; the same tokenizer is put together from its data, as Qwen2's byte-level BPE.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, read_json
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.errors import DlmError
from dlm_runtime.tokenizer import TEMPLATE_LIMIT_BYTES

# How Qwen2 splits text before BPE, from its published tokenizer (Apache-2.0): contractions, words, single digits,
# punctuation, line breaks, spaces.
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Released vocabularies are padded so that matrices divide well: LLaDA by 115 of 126,464 ids, Dream by 397 of 152,064.
PADDING_SHARE = 0.01


@dataclass(frozen=True)
class TokenizerFiles:
    """What goes into the bundle: the text of tokenizer.json, a template, and the special tokens it may name."""

    tokenizer: str | None
    chat_template: str | None
    special_tokens: dict[str, str]


def read(checkpoint: Checkpoint, network: NetworkSpec) -> TokenizerFiles:
    """The checkpoint's tokenizer, checked against the vocabulary; all empty where it has none. Raises CheckpointError."""
    tokenizer = _load(checkpoint)
    if tokenizer is None:
        return TokenizerFiles(None, None, {})
    _check_size(checkpoint, tokenizer, network)
    # Saved by a training script, these would cut prompts, or fill them up, in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = checkpoint.optional_json("tokenizer_config.json")
    special = {name: text for name in ("bos_token", "eos_token", "pad_token") if (text := _text(config.get(name)))}
    template = _chat_template(checkpoint, config)
    for name, text in {"chat_template": template or "", **special}.items():
        _check_text(checkpoint, name, text)
    return TokenizerFiles(tokenizer.to_str(), template, special)


def _load(checkpoint: Checkpoint) -> tokenizers.Tokenizer | None:
    path = checkpoint.path / "tokenizer.json"
    try:
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        if (checkpoint.path / "vocab.json").is_file() and (checkpoint.path / "merges.txt").is_file():
            path = checkpoint.path / "vocab.json"
            return _byte_level_bpe(checkpoint)
    except DlmError:
        raise
    except Exception as err:  # the library raises plain Exception
        raise CheckpointError(f"{path}: not a tokenizer that the tokenizers library reads ({err})") from err
    return None


def _byte_level_bpe(checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    model = models.BPE.from_file(str(checkpoint.path / "vocab.json"), str(checkpoint.path / "merges.txt"))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = checkpoint.optional_json("tokenizer_config.json").get("added_tokens_decoder")
    entries = sorted(added.items(), key=lambda item: int(item[0])) if isinstance(added, dict) else []
    for number, entry in entries:
        tokenizer.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special")), normalized=False)])
        if tokenizer.token_to_id(entry["content"]) != int(number):
            raise CheckpointError(
                f"{checkpoint.path / 'tokenizer_config.json'}: added token {entry['content']!r} should have id {number}, "
                f"but follows the vocabulary at {tokenizer.token_to_id(entry['content'])}"
            )
    return tokenizer


def _check_size(checkpoint: Checkpoint, tokenizer: tokenizers.Tokenizer, network: NetworkSpec) -> None:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    vocab_size = network.vocab_size
    if size > vocab_size:
        raise CheckpointError(f"{checkpoint.path}: the tokenizer has {size} ids, the denoiser's vocabulary only {vocab_size}")
    specials = [("mask_token_id", network.mask_token_id)]
    specials += [("eos_token_id", token) for token in network.eos_token_ids]
    for name, token in specials:
        if tokenizer.id_to_token(token) is None:
            raise CheckpointError(f"{checkpoint.path}: the tokenizer has {size} ids and none for {name} {token}")
    if vocab_size - size > PADDING_SHARE * vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {size} ids, smaller than the denoiser's vocabulary of {vocab_size} by "
            f"more than padding explains: it belongs to another checkpoint"
        )


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _check_text(checkpoint: Checkpoint, name: str, text: str) -> None:
    """Refuse what the bundle's files, and its reader, cannot hold: JSON may escape more than UTF-8 can write."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as err:
        raise CheckpointError(f"{checkpoint.path}: {name} is no Unicode text ({err.reason})") from err
    if size > TEMPLATE_LIMIT_BYTES or "\0" in text:
        raise CheckpointError(
            f"{checkpoint.path}: {name} has {size} bytes; a bundle takes {TEMPLATE_LIMIT_BYTES}, none of them NUL"
        )


def _chat_template(checkpoint: Checkpoint, config: dict[str, Any]) -> str | None:
    path = checkpoint.path / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise CheckpointError(f"{path}: not readable as UTF-8 text ({err})") from err
    template: Any = config.get("chat_template")
    if template is None and (checkpoint.path / "chat_template.json").is_file():
        template = read_json(checkpoint.path / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{checkpoint.path}: chat_template is not text ({json.dumps(template)[:60]})")
    return template
