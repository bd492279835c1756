"""Trains the demo's tokenizer, a byte-level BPE.

The tokenizer splits a word into the same tokens in a command and inside JSON quotes.

In a command, a word follows a space. In JSON, it follows a quote. An ordinary byte-level BPE would
split the same word differently after a space and after a quote. The denoiser would then have to
learn how words are spelled before it could copy a word. Here, BPE is trained on words without the
space before them. After that, the most common first pieces of words are merged with the space
before them. BPE applies merges in order, so these last merges only affect the first token: the
tokens of `` garage`` and ``garage`` differ only in the first token.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

EOS, MASK, USER, ASSISTANT = SPECIAL_TOKENS = ("<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% if messages | length > 1 or messages[0]['role'] != 'user' %}"
    "{{ raise_exception('this denoiser was trained on single commands: give one message, of the role user') }}{% endif %}"
    "<|user|>{{ messages[0]['content'] }}<|assistant|>"
)
SPACE = "Ġ"
"""The letter for the byte 0x20 in the alphabet of byte-level BPE."""
# A text is split into these parts: the two fixed parts of a call, words, single digits, sequences
# of JSON punctuation characters, other single characters, and single white space characters.
_SPLIT = r"""\{"name":"|","arguments":\{"| ?[A-Za-z_']+|[0-9]|[{}\[\]":,]+|[^\sA-Za-z_'0-9{}\[\]":,]|\s"""


def train_tokenizer(texts: Sequence[str], vocab_size: int, spaced_pieces: int) -> Tokenizer:
    """Train a tokenizer with exactly ``vocab_size`` tokens.

    ``spaced_pieces`` is the number of tokens that consist of a space and the first piece of a word.

    Raises ValueError if ``texts`` contain too few different pieces for ``vocab_size`` and
    ``spaced_pieces``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - spaced_pieces,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    spaceless = [word for text in texts for word in text.split()]
    tokenizer.train_from_iterator(spaceless, trainer)

    state = json.loads(tokenizer.to_str())
    initial = Counter(
        e.tokens[0] for e in tokenizer.encode_batch(spaceless) if re.match(r"[A-Za-z]", e.tokens[0])
    )
    pieces = [piece for piece, _ in sorted(initial.items(), key=lambda item: (-item[1], item[0]))][
        :spaced_pieces
    ]
    vocab = state["model"]["vocab"]
    for piece in pieces:
        vocab[SPACE + piece] = len(vocab)
        state["model"]["merges"].append([SPACE, piece])
    if len(vocab) != vocab_size:
        raise ValueError(
            f"{len(vocab)} different tokens for a vocabulary of {vocab_size}: lower --vocab-size."
        )
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{USER} $A {ASSISTANT}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (USER, ASSISTANT)],
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
