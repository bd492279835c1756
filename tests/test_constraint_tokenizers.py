"""Tests of constraints with tokenizers that are not byte-level.

A text that an automaton over tokens accepts is decoded with the library ``tokenizers``. The
constraint must allow the decoded text. Also, the automaton must accept the tokens to which the
tokenizer encodes an allowed text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizer_files
import tokenizers
from checkpoints import llada_config, write_checkpoint
from constrained_reference import by_tokens
from constraints import Automaton, byte_automaton, drawn_texts, schema_content
from tokenizers import decoders, models, normalizers, pre_tokenizers

import dlm_runtime
from dlm_export.build import BuildOptions, build
from dlm_export.text import samples
from dlm_runtime import Bundle, RequestError
from dlm_runtime.constraints.compiled import Content, compile_content
from dlm_runtime.constraints.vocabulary import NAMED, Vocabulary, read_vocabulary
from dlm_runtime.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"enum": ["é", "€ 5"]},
    },
    "required": ["name", "n", "x"],
}
CONTENTS = {
    "words": Content("regex", "(?:the|a) [a-z]+(?: [a-z]+)*\\."),
    "spaces": Content("regex", " {0,3}[a-c]{1,3}(?: +[a-c]|\\n)*"),
    "characters": Content("regex", "(?:é|€|😀|\\t|x)+"),
    "listed": Content("enum", json.dumps([" a", "a", "  b", "##ing", "it's", ". x", "é €"])),
    "schema": schema_content(SCHEMA),
}


def unigram(prepend: str) -> tokenizers.Tokenizer:
    """Make a Unigram tokenizer of single characters and short words, as in T5."""
    letter = tokenizer_files.LETTER
    spelled = dict.fromkeys(
        [
            *"".join(samples.lines(200, seed=3)).replace(" ", letter),
            *'{}":,0123456789\n\t',
            letter * 2,
        ]
        + [f"{letter}the", f"{letter}a", "ing", '{"', '":', f"{letter}{letter}b"]
        + [chr(point) for point in range(0x21, 0x7F)]
    )
    made = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((text, -float(9 - len(text))) for text in spelled)], 0)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.decoder = decoders.Metaspace(prepend_scheme=prepend)
    made.add_special_tokens(["<unk>"])
    return made


def whole_words() -> tokenizers.Tokenizer:
    """Make a tokenizer without a decoder. A space is between its tokens."""
    words = ["[UNK]", "the", "a", "fox", "dog", "x", ".", "it's", "é", "b c"]
    made = tokenizers.Tokenizer(
        models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


MADE = {
    **{name: (lambda name=name: tokenizer_files.made(name)) for name in tokenizer_files.MADE},
    "Unigram": lambda: unigram("always").to_str(),
    "Unigram, no space": lambda: unigram("never").to_str(),
    "words": lambda: whole_words().to_str(),
}
WITHOUT_TEXT = {
    *(("residues", content) for content in CONTENTS),
    ("BERT", "schema"),
    ("cased BERT", "schema"),
    ("words", "words"),
    ("words", "schema"),
}
"""The tokenizers whose tokens make no text that the constraint allows."""
BUILT = ("Gemma", "Llama 2", "cased BERT")
"""Tokenizers that also have a bundle, whose vocabulary the native library reads itself."""


@pytest.fixture(scope="module")
def read() -> Iterator[dict[str, tuple[Tokenizer, Vocabulary]]]:
    found = {}
    for name, make in MADE.items():
        tokenizer = Tokenizer(make().encode(), None, {})
        found[name] = tokenizer, read_vocabulary(tokenizer)
    yield found
    for tokenizer, _ in found.values():
        tokenizer.close()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bundle]]:
    found = {}
    for name in BUILT:
        folder = tmp_path_factory.mktemp("tokenizer")
        made = tokenizers.Tokenizer.from_str(tokenizer_files.made(name))
        made.add_special_tokens(["<mask>", "<eos>"])
        size = made.get_vocab_size()
        ids = {f"{kind}_token_id": made.token_to_id("<eos>") for kind in ("eos", "pad")}
        config = llada_config(vocab_size=size, embedding_size=size, mask_token_id=size - 2, **ids)
        checkpoint = write_checkpoint(folder / "checkpoint", config)
        (checkpoint / "tokenizer.json").write_text(made.to_str())
        build(checkpoint, folder / "bundle", BuildOptions(check_parity=False))
        found[name] = dlm_runtime.open(folder / "bundle")
    yield found
    for bundle in found.values():
        bundle.close()


def walk(automaton: Automaton, source: random.Random, room: int) -> list[int]:
    """Return the tokens of a random text, without the end tokens behind it."""
    table = by_tokens(automaton).following
    end = int(table[-1].argmax())  # the last state is the one after an end token
    distances, state, found = automaton.distances, 0, list[int]()
    for left in range(room - 1, -1, -1):
        legal = np.flatnonzero((table[state] >= 0) & (distances[table[state]] <= left))
        states = np.unique(table[state, legal])
        if source.random() < 0.5:  # so that rare states are reached, too
            legal = legal[table[state, legal] == states[source.randrange(len(states))]]
        token = int(legal[source.randrange(len(legal))])
        if table[state, token] == automaton.states - 1 or token == end:
            return found
        found.append(token)
        state = int(table[state, token])
    return found


def accepts(automaton: Automaton, tokens: list[int]) -> bool:
    table, state = by_tokens(automaton).following, 0
    for token in tokens:
        state = int(table[state, token])
        if state < 0:
            return False
    return bool(automaton.distances[state] == 0)


def check(automaton: Automaton, tokenizer: Tokenizer, content: Content, seed: int) -> None:
    source, texts = random.Random(seed), byte_automaton(content)
    walks = [
        walk(automaton, source, automaton.shortest + source.choice((0, 1, 4, 12)))
        for _ in range(60)
    ]
    for tokens, text in zip(walks, tokenizer.decode_each(walks), strict=True):
        assert texts.matches(text), (tokens, text)


def is_added(vocabulary: Vocabulary, token: int) -> bool:
    text = vocabulary.tokens[token]
    return text is None or text.startswith(NAMED)


def check_encoded(
    automaton: Automaton, vocabulary: Vocabulary, tokenizer: Tokenizer, content: Content
) -> None:
    """Check that allowed texts are accepted as the tokenizer encodes them.

    Texts that the tokenizer changes are left out, and so are texts that need added tokens.
    """
    texts = sorted(drawn_texts(byte_automaton(content), random.Random(4), 60))
    encoded = [ids or [] for ids in tokenizer.encode_each(texts)]
    for text, ids, decoded in zip(texts, encoded, tokenizer.decode_each(encoded), strict=True):
        if decoded == text and ids and not any(is_added(vocabulary, token) for token in ids):
            assert accepts(automaton, ids), (text, ids)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", MADE)
def test_decoded_texts_are_allowed(
    read: dict[str, tuple[Tokenizer, Vocabulary]], name: str, content: str
) -> None:
    tokenizer, vocabulary = read[name]
    wanted, size = CONTENTS[content], len(vocabulary.tokens)
    # Without first tokens, the automaton accepts every way to write a text.
    every = Vocabulary(vocabulary.tokens, None, vocabulary.starts)
    if (name, content) in WITHOUT_TEXT:
        with pytest.raises(RequestError, match="no tokens of this vocabulary make a text"):
            compile_content(wanted, vocabulary=every, vocab_size=size + 1, ends=(size,))
        return
    for known in (vocabulary, every):
        made = compile_content(wanted, vocabulary=known, vocab_size=size + 1, ends=(size,))
        automaton = Automaton.from_bytes(made.data)
        check(automaton, tokenizer, wanted, 7)
    check_encoded(automaton, vocabulary, tokenizer, wanted)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", BUILT)
def test_bundles_read_the_same_vocabularies(
    bundles: dict[str, Bundle],
    read: dict[str, tuple[Tokenizer, Vocabulary]],
    name: str,
    content: str,
) -> None:
    bundle, (tokenizer, _) = bundles[name], read[name]
    wanted = CONTENTS[content]
    given = {wanted.kind: json.loads(wanted.text) if wanted.kind != "regex" else wanted.text}
    if (name, content) in WITHOUT_TEXT:
        with pytest.raises(RequestError, match="no tokens of this vocabulary make a text"):
            bundle.constraint(**given)
        return
    automaton = Automaton.from_bytes(bundle.constraint(**given).data)
    check(automaton, tokenizer, wanted, 8)
    out = bundle.generate(prompt="the fox", max_new_tokens=automaton.shortest + 6, **given)
    assert byte_automaton(wanted).matches(out.text)


def test_tokenizers_whose_tokens_depend_on_later_tokens_are_refused() -> None:
    made = tokenizers.Tokenizer(models.BPE({"a</w>": 0, "b": 1}, [], end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder("</w>")
    tokenizer = Tokenizer(made.to_str().encode(), None, {})
    with pytest.raises(RequestError, match="it decodes by BPEDecoder, so the text of a token may"):
        read_vocabulary(tokenizer)
    tokenizer.close()
