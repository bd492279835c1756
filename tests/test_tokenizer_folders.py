"""Tests of tokenizer folders like those of public models, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
from checkpoints import llada_config, write_checkpoint
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as splits

from dlm_export import families
from dlm_export.checkpoints import tokenizer
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families import Overrides
from dlm_export.text import samples
from dlm_runtime.text import _chat_template_worker

transformers = pytest.importorskip("transformers", "5")

ADDED = [
    "<s>",
    "</s>",
    "<mask>",
    "<|user|>",
    "<|end|>",
    "<pad>",
    "<sep>",
    "<tool>",
    "[MASK]",
    "<x>",
]
TEXTS = [
    *samples.lines(48, ["the", " a", "##ing", tokenizer_files.LETTER], ADDED, seed=21),
    "",
    " ",
    "  a  ",
    "\n\n a\t\r\n",
    "<s>",
    " <mask> a<mask>b <mask>",
    "a<x>b <x> c<x>",
    "Ünïcode ﬁ ① e\u0301a ǅ İ",
    "1234567 12 3,4.5",
    "日本語テキスト 한국어",
    "👩\u200d🚀\ufe0f \U0001f1e9",
    "a \u00a0b\u3000c\u200bd",
    "don't I'LL we've , . ! ?",
    "\u0000\u0001\ufffd",
    "x" * 300,
]
NFKC, NFD, LOWER = normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase()


@dataclass
class Folder:
    """The files of a tokenizer: tokenizer.json, and the other files by their names."""

    make: Callable[[], Tokenizer] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        if self.make is not None:
            self.make().save(str(path / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, value in {"tokenizer_config.json": kind | self.config, **self.files}.items():
            value = value() if callable(value) else value
            text = value if isinstance(value, str) else json.dumps(value)
            (path / name).write_text(text)


def base(name: str, **changes: Any) -> Callable[[], Tokenizer]:
    """Return a function that makes a tokenizer of tokenizer_files, with other parts."""

    def make() -> Tokenizer:
        made = Tokenizer.from_str(tokenizer_files.made(name))
        for part, value in changes.items():
            setattr(made, part, value)
        return made

    return make


def trained(model: Any, suffix: str = "", **parts: Any) -> Callable[[], Tokenizer]:
    """Return a function that trains a model with words or with byte pair encoding."""

    def make() -> Tokenizer:
        made = Tokenizer(model)
        for part, value in parts.items():
            setattr(made, part, value)
        kind, how = trainers.WordLevelTrainer, {}
        if isinstance(model, models.BPE):
            kind, how = trainers.BpeTrainer, {"end_of_word_suffix": suffix} if suffix else {}
        special = ["<unk>", "<s>", "</s>"]
        trainer = kind(vocab_size=500, special_tokens=special, show_progress=False, **how)
        made.train_from_iterator(samples.lines(200, seed=3), trainer)
        return made

    return make


def vocabulary(name: str) -> dict[str, int]:
    """Return the vocabulary of a tokenizer of tokenizer_files, without added tokens."""
    found: dict[str, int] = json.loads(tokenizer_files.made(name))["model"]["vocab"]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def decoder(name: str) -> dict[str, Any]:
    """Return the added tokens of a tokenizer in the form of tokenizer_config.json."""
    return {
        str(each.pop("id")): each for each in json.loads(tokenizer_files.made(name))["added_tokens"]
    }


def merges() -> str:
    found = json.loads(tokenizer_files.made("Qwen"))["model"]["merges"]
    return "".join(" ".join(merge) + "\n" for merge in found)


def padded() -> Tokenizer:
    made = base("GPT-2")()
    made.enable_truncation(5)
    made.enable_padding(length=64, pad_token="<pad>")
    return made


def metaspace(scheme: str) -> dict[str, Any]:
    return {
        "pre_tokenizer": splits.Metaspace(prepend_scheme=scheme),
        "decoder": decoders.Metaspace(prepend_scheme=scheme),
    }


def unigram(**parts: Any) -> Callable[[], Tokenizer]:
    """Return a function that makes a tokenizer with a probability for each piece of a text."""

    def make() -> Tokenizer:
        known = vocabulary("Llama 2")
        model = models.Unigram(
            [(piece, -at / 50) for at, piece in enumerate(known)], known["<unk>"], True
        )
        return base("Llama 2", model=model, **parts)()

    return make


ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TURNS = {"bos_token": "<|user|>", "eos_token": "<|end|>"}
MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False}
BERT = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}
FLAGGED = [
    {"content": "<x>", "single_word": True, "special": True},
    {"content": "<mask>", "lstrip": True, "rstrip": True},
    {"content": "É", "normalized": True, "special": True},
    {"content": " b", "normalized": False},
]
OFFSETS = processors.ByteLevel(trim_offsets=False)
LEVEL = splits.ByteLevel(add_prefix_space=True)
FOLDERS = {
    "GPT-2": Folder(base("GPT-2"), TURNS),
    "Qwen": Folder(base("Qwen"), {"pad_token": "<pad>"}, {"chat_template.jinja": "{{ messages }}"}),
    "Llama 3": Folder(base("Llama 3"), TURNS | {"chat_template": "{{ bos_token }}"}),
    "digits first": Folder(base("digits first")),
    "BERT": Folder(base("BERT"), {"mask_token": "[MASK]", "unk_token": "[UNK]"}),
    "cased BERT": Folder(base("cased BERT"), {"mask_token": "[MASK]"}),
    "residues": Folder(base("residues"), {"mask_token": "[MASK]"}),
    "Gemma": Folder(base("Gemma"), TURNS),
    "Llama 2": Folder(base("Llama 2"), TURNS | {"add_bos_token": True, "add_eos_token": False}),
    "RoBERTa": Folder(
        base(
            "GPT-2",
            pre_tokenizer=LEVEL,
            post_processor=processors.RobertaProcessing(("<|end|>", 900), ("<|user|>", 901)),
        ),
        {"mask_token": MASK, "bos_token": "<|user|>", "eos_token": "<|end|>"},
    ),
    # transformers ignores these settings if there is a tokenizer.json.
    "added tokens without a template": Folder(
        base("Qwen", post_processor=None), TURNS | {"add_bos_token": True, "add_eos_token": True}
    ),
    "a template without added tokens": Folder(
        base("Llama 3"), TURNS | {"add_bos_token": False, "add_eos_token": False}
    ),
    "Unigram": Folder(unigram(normalizer=NFKC, **metaspace("always")), TURNS),
    "Unigram of ALBERT": Folder(
        unigram(
            normalizer=normalizers.Sequence(
                [NFKC, LOWER, normalizers.Replace(Regex(" {2,}"), " ")]
            ),
            **metaspace("first"),
        ),
        {"mask_token": MASK},
    ),
    "words": Folder(
        trained(models.WordLevel(unk_token="<unk>"), pre_tokenizer=splits.Whitespace()), ENDS
    ),
    "words without accents": Folder(
        trained(
            models.WordLevel(unk_token="<unk>"),
            normalizer=normalizers.Sequence([NFD, normalizers.StripAccents(), LOWER]),
            pre_tokenizer=splits.Sequence([splits.WhitespaceSplit(), splits.Punctuation()]),
        ),
        ENDS,
    ),
    "SentencePiece without a first space": Folder(
        trained(models.BPE(unk_token="<unk>"), **metaspace("never")), ENDS
    ),
    "word ends": Folder(
        trained(
            models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
            "</w>",
            pre_tokenizer=splits.BertPreTokenizer(),
            decoder=decoders.BPEDecoder(),
        ),
        ENDS,
    ),
    "flags of added tokens": Folder(
        base("GPT-2"),
        TURNS | {"added_tokens_decoder": {str(920 + at): each for at, each in enumerate(FLAGGED)}},
    ),
    "more special tokens": Folder(
        base("Qwen"),
        {"extra_special_tokens": {"image_token": "<x>"}},
        {"special_tokens_map.json": {"mask_token": MASK, "sep_token": "<sep>"}},
    ),
    "added_tokens.json": Folder(
        base("Gemma"),
        {"mask_token": "<mask>"},
        {
            "added_tokens.json": {"<x>": 507, "<mask>": 508},
            "special_tokens_map.json": {"additional_special_tokens": ["<x>"]},
        },
    ),
    "truncation and padding": Folder(padded, {"pad_token": "<pad>"}),
    "a first space in the configuration": Folder(base("GPT-2"), {"add_prefix_space": True}),
    # Classes of the families that dlm-export supports. transformers builds these tokenizers by the
    # rules of the class, from the vocabulary in tokenizer.json.
    "class of Qwen2": Folder(
        base("Qwen", post_processor=OFFSETS),
        files={
            "tokenizer_config.json": lambda: (
                TURNS
                | {
                    "tokenizer_class": "Qwen2TokenizerFast",
                    "pad_token": "<|end|>",
                    "unk_token": None,
                }
                | {"add_bos_token": False, "added_tokens_decoder": decoder("Qwen")}
            )
        },
    ),
    "class of GPT-2": Folder(
        base("GPT-2", post_processor=OFFSETS),
        TURNS | {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|end|>", "add_bos_token": True},
    ),
    "class of BERT": Folder(base("BERT"), BERT | {"tokenizer_class": "BertTokenizerFast"}),
    "class of RoBERTa": Folder(
        base(
            "GPT-2",
            post_processor=processors.RobertaProcessing(
                ("<|end|>", 900), ("<|user|>", 901), add_prefix_space=False
            ),
        ),
        TURNS
        | {
            "sep_token": "<|end|>",
            "cls_token": "<|user|>",
            "pad_token": MASK | {"content": "<pad>"},
        }
        | {"tokenizer_class": "RobertaTokenizer", "unk_token": "<|end|>", "mask_token": MASK},
    ),
    "class of Gemma": Folder(
        base("Gemma"),
        TURNS
        | {"tokenizer_class": "GemmaTokenizerFast", "unk_token": "<unk>", "mask_token": "<mask>"}
        | {"pad_token": MASK | {"content": "<pad>"}},
    ),
    "vocab.txt": Folder(
        None,
        BERT | {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"vocab.txt": lambda: "".join(f"{word}\n" for word in vocabulary("cased BERT"))},
    ),
    "merges.txt": Folder(
        None,
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "add_bos_token": False}
        | {"unk_token": "<|end|>", "pad_token": "<pad>"},
        {"vocab.json": lambda: vocabulary("Qwen"), "merges.txt": merges},
    ),
}


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("denoiser") / "tiny", llada_config())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(
    denoiser: Path, tmp_path: Path, name: str
) -> None:
    """The program of the separate process runs in this process: to start one takes long."""
    path = Path(shutil.copytree(denoiser, tmp_path / "checkpoint"))
    FOLDERS[name].write(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    checkpoint = Checkpoint(path)
    network = families.read_network(checkpoint, Overrides())
    network = replace(network, vocab_size=len(theirs), mask_token_id=0, eos_token_ids=())
    files = tokenizer.read(checkpoint, network)
    assert files.special_tokens == theirs.special_tokens_map
    assert files.chat_template == theirs.chat_template
    assert files.tokenizer is not None
    ours = _chat_template_worker.Text()
    ours.load(files.tokenizer.encode(), None, {}, [])
    made = theirs(TEXTS, padding=False, truncation=False).input_ids
    assert [ours.encode(text, True, True) for text in TEXTS] == made
    more = {"add_special_tokens": False, "padding": False, "truncation": False}
    assert ours.encode_each(TEXTS, True) == theirs(TEXTS, **more).input_ids
    plain = theirs(TEXTS, split_special_tokens=True, **more).input_ids
    for found, expected in zip(ours.encode_each(TEXTS, False), plain, strict=True):
        assert found in (expected, None)
    assert ours.decode_each(made) == theirs.batch_decode(made, skip_special_tokens=True)
    assert len({*map(tuple, made)}) > 30


@pytest.mark.parametrize("name", ["add_bos_token", "add_eos_token"])
def test_added_tokens_without_a_tokenizer_json_are_refused(
    denoiser: Path, tmp_path: Path, name: str
) -> None:
    """transformers would add them to each text."""
    path = Path(shutil.copytree(denoiser, tmp_path / "checkpoint"))
    folder = FOLDERS["merges.txt"]
    ends = {"bos_token": "<|user|>", name: True}
    replace(folder, config=folder.config | ends).write(path)
    assert len(transformers.AutoTokenizer.from_pretrained(path)("a").input_ids) == 2
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        tokenizer.mask_token_id(Checkpoint(path), None)
