"""Tests of masked language models such as BERT.

The logits must equal the logits of transformers, and bundles must fill mask tokens in a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import tokenizer_files
import torch
from checkpoints import (
    bert_config,
    modern_bert_config,
    roberta_config,
    torch_encoder_config,
    write_checkpoint,
)
from click.testing import CliRunner
from denoisers import load
from safetensors.torch import load_file, save_file
from test_caches import UNJUDGED
from test_parity import RELATIVE
from tokenizers import Tokenizer

import dlm_runtime
from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints import tokenizer
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.text import samples
from dlm_runtime import DlmError, RequestError

transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

CONFIGS = {
    "BERT": bert_config(),
    "BERT, one head": bert_config(num_attention_heads=1, hidden_size=24, type_vocab_size=1),
    "RoBERTa": roberta_config(),
    "ModernBERT": modern_bert_config(),
    "ModernBERT with biases": modern_bert_config(
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
    ),
    "ModernBERT with kinds of layers": modern_bert_config(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
        decoder_bias=False,
    ),
    "TransformerEncoder": torch_encoder_config(),
    "TransformerEncoder with norms before attention": torch_encoder_config(
        norm_first=True, activation="gelu", layer_norm_eps=1e-3, num_layers=3, nhead=2
    ),
}


class TorchEncoder(torch.nn.Module):
    """The module that docs/guides/masked-models.md shows."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, vocab = config["d_model"], config["vocab_size"]
        named = ("d_model", "nhead", "dim_feedforward", "activation", "layer_norm_eps")
        chosen = {name: config[name] for name in (*named, "norm_first") if name in config}
        layer = torch.nn.TransformerEncoderLayer(batch_first=True, **chosen)
        norm = None
        if config.get("norm_first"):
            norm = torch.nn.LayerNorm(d, config["layer_norm_eps"])
        self.embed = torch.nn.Embedding(vocab, d)
        self.positions = torch.nn.Embedding(config["max_position_embeddings"], d)
        self.encoder = torch.nn.TransformerEncoder(
            layer, config["num_layers"], norm, enable_nested_tensor=False
        )
        self.head = torch.nn.Linear(d, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions.weight[: ids.shape[1]]
        logits: torch.Tensor = self.head(self.encoder(x))
        return logits


def expected(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the class of transformers or torch."""
    config = json.loads((checkpoint / "config.json").read_text())
    if "num_layers" in config:
        encoder = TorchEncoder(config).eval()
        encoder.load_state_dict(load_file(checkpoint / "model.safetensors"))
        with torch.no_grad():
            return torch.Tensor(encoder(ids))
    model = transformers.AutoModelForMaskedLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / (wanted.max() - wanted.min()))


def read(checkpoint: Path, **overrides: Any) -> Any:
    return families.read_network(Checkpoint(checkpoint), Overrides(**overrides))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_released_class(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path, CONFIGS[name], seed=3)
    ids = torch.randint(10, 150, (2, 50), generator=torch.Generator().manual_seed(1))
    ids[0, [3, 20, 21]] = ids[1, :4] = CONFIGS[name]["pad_token_id"]
    wanted = expected(checkpoint, ids)
    assert relative(load(checkpoint)(ids), wanted) < RELATIVE
    assert wanted.std() > 0.1


def test_old_names_are_read_and_other_heads_are_listed(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, bert_config())
    file, new = checkpoint / "model.safetensors", load(checkpoint)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for now, before in old.items():
        tensors = {name.replace(now, before): value for name, value in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(66)[None]
    save_file(tensors, file, {"format": "pt"})
    for mine, theirs in zip(load(checkpoint).parameters(), new.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    opened = Checkpoint(checkpoint)
    (note,) = families.check_tensors(opened, read(checkpoint)).checkpoint.notes
    assert note == (
        "4 tensors are left out, because the denoiser does not need them: bert.pooler.dense.bias, "
        "bert.pooler.dense.weight, cls.seq_relationship.bias, cls.seq_relationship.weight"
    )


def test_the_mask_token_is_found_in_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, bert_config(mask_token_id=None))
    (checkpoint / "vocab.txt").write_text("[PAD]\n[UNK]\n[MASK]\n[CLS]\n[SEP]\na\n")
    assert read(checkpoint).mask_token_id == 2
    (checkpoint / "tokenizer.json").write_text(tokenizer_files.made("BERT"))
    assert read(checkpoint).mask_token_id == 4


def test_a_canvas_beyond_the_learned_positions_is_refused(bundles: dict[str, Path]) -> None:
    checkpoint = bundles["roberta"] / "checkpoint"
    assert read(checkpoint).max_canvas_length == 64
    with pytest.raises(
        CheckpointError, match="65 is more than the 64 positions that the checkpoint"
    ):
        read(checkpoint, max_canvas_length=65)
    with dlm_runtime.open(bundles["roberta"] / "bundle") as bundle:
        tokens = [5] * 60 + [bundle.mask_token_id] * 4
        assert len(bundle.generate(tokens=tokens, max_new_tokens=0).tokens) == 64
        with pytest.raises(RequestError, match="longer than the denoiser's 64"):
            bundle.generate(tokens=[5] * 65, max_new_tokens=0)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of two encoders.

    "modern" has a WordPiece tokenizer. "roberta" has a byte-level tokenizer, whose mask token includes
    the space before it.
    """
    made = {}
    word_pieces = json.loads(tokenizer_files.made("BERT"))
    byte_level = json.loads(tokenizer_files.made("GPT-2"))
    (mask,) = [token for token in byte_level["added_tokens"] if token["content"] == "<pad>"]
    assert mask["lstrip"]
    configs = {
        "roberta": (roberta_config(mask_token_id=mask["id"], vocab_size=908), byte_level),
        "modern": (
            modern_bert_config(mask_token_id=4, vocab_size=900, num_hidden_layers=3),
            word_pieces,
        ),
    }
    for name, (config, text) in configs.items():
        folder = tmp_path_factory.mktemp(name)
        checkpoint = write_checkpoint(folder / "checkpoint", config)
        (checkpoint / "tokenizer.json").write_text(json.dumps(text))
        # The logits are compared with the released classes.
        report = build(checkpoint, folder / "bundle", BuildOptions(check_parity=False))
        attention = (
            {"CachedAttention": 1, "WindowCachedAttention": 2}
            if name == "modern"
            else {"CachedAttention": 2}
        )
        calls = attention | {"Fp32TiedHead": 1, "Candidates": 1}
        assert report.kernels == {"calls": calls, "plain": {}}
        made[name] = folder
    return made


@torch.no_grad()
@pytest.mark.parametrize("name", ["roberta", "modern"])
def test_a_bundle_has_the_logits_of_the_released_class(bundles: dict[str, Path], name: str) -> None:
    ids = torch.randint(10, 900, (1, 50), generator=torch.Generator().manual_seed(1))
    ids[0, [3, 20, 21]] = 1  # RoBERTa's padding token
    wanted = expected(bundles[name] / "checkpoint", ids)[0]
    with dlm_runtime.open(bundles[name] / "bundle") as bundle:
        assert relative(torch.from_numpy(bundle.logits(ids[0].tolist())), wanted) < RELATIVE


def test_masks_are_filled_in_one_pass_or_in_several(bundles: dict[str, Path]) -> None:
    text, one = "the fox of [MASK] is [MASK] day", {"steps": 1, "block_length": 0}
    with dlm_runtime.open(bundles["modern"] / "bundle") as bundle:
        done, many = bundle.infill(text, **one), bundle.infill(text)
        assert (done.generation.nfe, many.generation.nfe) == (1, 2)
        assert done.lengths == (1, 1)
        assert done.text == f"the fox of {done.holes[0]} is {done.holes[1]} day"
        encoded = bundle.tokenizer.encode(text, special_tokens=True)  # type: ignore[union-attr]
        assert len(done.generation.tokens) == len(encoded)
        kept = [(a, b) for a, b in zip(encoded, done.generation.tokens, strict=True) if a != 4]
        assert all(a == b for a, b in kept)
        best = bundle.logits(encoded, [at for at, token in enumerate(encoded) if token == 4])
        best[:, 4] = -1e9
        filled = [b for a, b in zip(encoded, done.generation.tokens, strict=True) if a == 4]
        assert filled == best.argmax(1).tolist()
    folder = bundles["modern"] / "bundle"
    flags = ["--infill", text, "--steps", "1", "--block-length", "0"]
    shown = CliRunner().invoke(main, ["run", str(folder), *flags])
    assert shown.stdout.strip() == done.text


def test_constraints_fill_masks_with_whole_words(bundles: dict[str, Path]) -> None:
    with dlm_runtime.open(bundles["modern"] / "bundle") as bundle:
        words = ["the", "fox", "of the", "."]
        for length in (1, 2):
            done = bundle.infill("[MASK] is", enum=words, lengths=length)
            assert done.holes[0] in words
        with pytest.raises(RequestError, match="has no end token, so the text must fill all masks"):
            bundle.infill("[MASK] is", enum=words, lengths=7)
        # Lengths that no text has are left out.
        done = bundle.infill("[MASK] is", enum=words, lengths=[[7, 1, 9]])
        assert done.lengths == (1,)
        with pytest.raises(RequestError, match="exactly 9 tokens"):
            bundle.infill("[MASK] is", enum=words, lengths=[[7, 9]])


def test_the_space_before_a_mask_belongs_to_it(bundles: dict[str, Path]) -> None:
    with dlm_runtime.open(bundles["roberta"] / "bundle") as bundle:
        done = bundle.infill("the fox <pad> jumps", steps=1, block_length=0)
        oracle = bundle.tokenizer
        assert oracle is not None
        encoded = oracle.encode("the fox <pad> jumps", special_tokens=True)
        assert len(done.generation.tokens) == len(encoded)
        assert done.text == f"the fox{done.holes[0]} jumps"
        assert oracle.decode(done.generation.tokens) == done.text
        with pytest.raises(RequestError, match="the text has no hole: write <mask>"):
            bundle.infill("the fox jumps")


def test_an_old_vocabulary_becomes_the_tokenizer_of_transformers(tmp_path: Path) -> None:
    vocab = json.loads(tokenizer_files.made("BERT"))["model"]["vocab"]
    names = sorted(vocab, key=lambda name: int(vocab[name]))
    checkpoint = write_checkpoint(tmp_path, bert_config(vocab_size=900, mask_token_id=4))
    (checkpoint / "vocab.txt").write_text("".join(f"{name}\n" for name in names))
    for settings in ({}, {"do_lower_case": False}, {"strip_accents": False}):
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
        text = tokenizer.read(Checkpoint(checkpoint), read(checkpoint)).tokenizer
        made = Tokenizer.from_str(str(text))
        theirs = transformers.BertTokenizer.from_pretrained(checkpoint)
        for line in samples.lines(100):
            assert made.encode(line).ids == theirs(line)["input_ids"], line
    (checkpoint / "vocab.txt").write_text("a\nb\n[MASK]\n")
    with pytest.raises(CheckpointError, match=r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\]"):
        tokenizer.read(Checkpoint(checkpoint), read(checkpoint))


def test_the_files_of_a_roberta_are_not_read_as_those_of_another_family(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, roberta_config())
    (checkpoint / "vocab.json").write_text("{}")
    (checkpoint / "merges.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json\. Write it with transformers"):
        tokenizer.read(Checkpoint(checkpoint), read(checkpoint))


def test_quantised_layers_without_a_silu_gate_are_computed_by_kernels(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    options = BuildOptions(precision="int8", quantise=UNJUDGED)
    report = build(bundles["modern"] / "checkpoint", tmp_path / "bundle", options)
    assert report.parity is not None
    kernels = report.kernels or {}
    assert kernels["calls"]["Int8Linear2"] == 3
    assert kernels["plain"].keys() == {f"blocks.{i}.mlp" for i in range(3)}


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_contains_no_relu(tmp_path: Path) -> None:
    """Graphs use Max instead of Relu. ONNX Runtime 1.31.1 wrongly removes a Relu before a
    QuantizeLinear to FP8.
    """
    checkpoint = write_checkpoint(tmp_path / "checkpoint", torch_encoder_config())
    report = build(checkpoint, tmp_path / "bundle", BuildOptions(check_parity=False))
    graph = onnx.load(report.output / "denoiser.onnx", load_external_data=False)
    operators = {node.op_type for node in graph.graph.node}
    assert "Max" in operators
    assert "Relu" not in operators
    ids = torch.randint(10, 150, (1, 50), generator=torch.Generator().manual_seed(1))
    with dlm_runtime.open(report.output) as bundle:
        found = torch.from_numpy(bundle.logits(ids[0].tolist()))
    assert relative(found, expected(checkpoint, ids)[0]) < RELATIVE


def test_a_window_has_no_cache_and_its_presets_use_none(bundles: dict[str, Path]) -> None:
    request: dict[str, Any] = {"max_new_tokens": 0, "block_length": 4}
    with dlm_runtime.open(bundles["modern"] / "bundle") as bundle:
        assert {bundle.policy(name).cache for name in bundle.manifest["loop"]["presets"]} == {
            "none"
        }
        request["tokens"] = [7] * 40 + [bundle.mask_token_id] * 8
        assert len(bundle.generate(preset="fast-dllm", **request).tokens) == 48
        with pytest.raises(DlmError, match="attention in a window, which cannot use a cache"):
            bundle.generate(cache="dual", **request)
