"""Tests of the tokens that a checkpoint's other files add to tokenizer.json."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
import tokenizers
from checkpoints import llada_config, write_checkpoint

from dlm_export import families
from dlm_export.checkpoints import tokenizer
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families import Overrides
from dlm_export.sources import open_source
from dlm_runtime.errors import DlmError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
TEXTS = [f"<{name}>" for name in ("x", "y", "mask", "im_start", "é", "a b", " c")]


class Folder:
    """Writes random tokenizer files into a folder."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def write(self, path: Path) -> None:
        draw = self.draw
        base = tokenizers.Tokenizer.from_str(tokenizer_files.made(draw.choice(["GPT-2", "BERT"])))
        self.known = [token.content for token in base.get_added_tokens_decoder().values()]
        for text in draw.sample(TEXTS, draw.randrange(3)):
            base.add_tokens([tokenizers.AddedToken(text, **self._flags())])
        base.save(str(path / "tokenizer.json"))
        size = base.get_vocab_size()
        config: dict[str, Any] = self._named() if draw.random() < 0.8 else {}
        form = draw.choice(["decoder", "decoder", "legacy", "legacy", "map"])
        if form == "decoder":
            numbers = draw.sample(range(size - 3, size + 6), draw.randrange(1, 6))
            config["added_tokens_decoder"] = {
                str(number): {"content": draw.choice(TEXTS), **self._flags()} for number in numbers
            }
        if form != "decoder" or draw.random() < 0.3:
            (path / "special_tokens_map.json").write_text(json.dumps(self._named()))
        if form == "legacy" or draw.random() < 0.3:
            names = draw.sample(TEXTS, draw.randrange(1, 5))
            numbers = draw.sample(range(size - 2, size + 6), len(names))
            (path / "added_tokens.json").write_text(
                json.dumps(dict(zip(names, numbers, strict=True)))
            )
        if draw.random() < 0.9:
            (path / "tokenizer_config.json").write_text(json.dumps(config))

    def _flags(self) -> dict[str, bool]:
        names = self.draw.sample(FLAGS, self.draw.randrange(len(FLAGS) + 1))
        return {name: self.draw.random() < 0.4 for name in names}

    def _named(self) -> dict[str, Any]:
        draw = self.draw
        found: dict[str, Any] = {
            name: self._value()
            for name in draw.sample([*NAMED, "image_token", "boi_token"], draw.randrange(5))
        }
        if draw.random() < 0.4:
            extra = draw.sample(TEXTS, draw.randrange(4))
            found[draw.choice(["additional_special_tokens", "extra_special_tokens"])] = extra
        elif draw.random() < 0.2:
            found["extra_special_tokens"] = {"video_token": draw.choice(TEXTS)}
        return found

    def _value(self) -> Any:
        text = self.draw.choice([*TEXTS, *self.known])
        if self.draw.random() < 0.5:
            return text
        return {"__type": "AddedToken", "content": text, **self._flags()}


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("denoiser") / "tiny", llada_config())


@pytest.mark.parametrize("seed", range(20))
def test_added_tokens_are_those_of_transformers(denoiser: Path, tmp_path: Path, seed: int) -> None:
    transformers = pytest.importorskip("transformers", "5")
    path = Path(shutil.copytree(denoiser, tmp_path / "checkpoint"))
    folder = Folder(seed)
    folder.write(path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    checkpoint = Checkpoint(path)
    network = replace(families.read_network(checkpoint, Overrides()), vocab_size=len(theirs))
    files = tokenizer.read(checkpoint, replace(network, mask_token_id=0, eos_token_ids=()))
    assert files.tokenizer is not None
    assert files.special_tokens == theirs.special_tokens_map
    ours = tokenizers.Tokenizer.from_str(files.tokenizer)
    expected = theirs.added_tokens_decoder
    assert ours.get_added_tokens_decoder() == expected
    for _ in range(60):
        parts = folder.draw.choices([*TEXTS, " ", "x", "Á", "mask>"], k=6)
        text = "".join(parts)
        assert ours.encode(text).ids == theirs.encode(text), text


def test_a_mask_token_of_another_file_is_found_and_given_its_id(
    denoiser: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(denoiser, tmp_path / "checkpoint"))
    config = json.loads((path / "config.json").read_text()) | {"mask_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    base = tokenizers.Tokenizer.from_str(tokenizer_files.made("residues"))
    base.save(str(path / "tokenizer.json"))
    (path / "added_tokens.json").write_text(json.dumps({"<|mask|>": 158, "<|im_start|>": 26}))
    (path / "special_tokens_map.json").write_text(json.dumps({"mask_token": "<|mask|>"}))
    read = families.read_network(Checkpoint(path), Overrides())
    assert read.mask_token_id == base.get_vocab_size() + 1
    size = base.get_vocab_size() + 2
    checkpoint = Checkpoint(path)
    files = tokenizer.read(checkpoint, replace(read, vocab_size=size, eos_token_ids=()))
    assert files.unused_tokens == ()
    assert checkpoint.notes == [
        "tokens have other ids than their files say, as in transformers: '<|mask|>' 26 (not 158), '<|im_start|>' 25 (not 26)",
    ]
    files = tokenizer.read(Checkpoint(path), replace(read, vocab_size=size + 3, eos_token_ids=()))
    assert files.unused_tokens == ((size, size + 3),)
    checkpoint = Checkpoint(path)
    tokenizer.read(
        checkpoint, replace(read, vocab_size=size - 1, mask_token_id=0, eos_token_ids=())
    )
    assert checkpoint.notes[0].startswith("<|mask|> in the tokenizer's files: left out")


def test_a_mask_token_without_a_text_can_be_given_by_its_id(denoiser: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(denoiser, tmp_path / "checkpoint"))
    config = json.loads((path / "config.json").read_text()) | {"mask_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    made = tokenizers.Tokenizer.from_str(tokenizer_files.made("residues"))
    made.add_tokens([str(number) for number in range(159 - made.get_vocab_size())])
    made.save(str(path / "tokenizer.json"))
    with pytest.raises(DlmError, match="Pass --mask-token-id"):
        open_source(path)
    source = open_source(path, Overrides(mask_token_id=159))
    assert source.network.mask_token_id == 159
    assert source.network.unused_tokens == ()
    assert "the tokenizer has no text for the mask token 159" in source.notes
