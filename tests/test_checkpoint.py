"""Tests of reading checkpoints in the released file layouts: the weights, the ids of special tokens
and the tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
import torch
from checkpoints import (
    dream_config,
    llada_config,
    llada_moe_config,
    write_checkpoint,
)
from denoisers import load
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

import dlm_runtime
from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints import tokenizer
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Origin, Overrides, Piece
from dlm_export.families.reading import new_tokens, text_option
from dlm_export.network import reference
from dlm_export.network.rope_scaling import Linear
from dlm_export.network.spec import NetworkSpec, Rope
from dlm_export.sources import open_source
from dlm_runtime.constraints.layout import LAYOUTS
from dlm_runtime.presets import PRESETS
from dlm_runtime.tools import FORMATS


def _network(path: Path, overrides: Overrides | None = None) -> Any:
    return families.read_network(Checkpoint(path), overrides or Overrides())


# ---- Files and element types ----


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
def test_stored_weights_are_read_without_a_change_of_value(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = write_checkpoint(tmp_path, llada_config(), seed=6, dtype=dtype)
    checkpoint = Checkpoint(path)
    weights = families.open_weights(checkpoint, _network(path))
    stored = load_file(path / "model.safetensors")
    assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    for parameter, origin in weights.origins.items():
        array = weights.read(parameter, np.dtype(np.float32))
        assert array.flags.c_contiguous
        expected = stored[origin.whole].float().numpy()
        assert np.array_equal(array, expected.T if origin.transpose else expected), parameter


# ---- Special ids and lengths ----


def _special(tmp_path: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    path = write_checkpoint(tmp_path / "checkpoint", config)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


ADDED = {
    "149": {"content": "<other>"},
    "148": {"content": "<|mask|>", "special": True},
    "147": {"content": "<end>"},
}


@pytest.mark.parametrize(
    "mask_token", ["<|mask|>", {"content": "<|mask|>", "lstrip": False}], ids=["text", "object"]
)
def test_config_json_goes_before_the_tokenizer_and_an_override_before_both(
    tmp_path: Path, mask_token: Any
) -> None:
    said = {"mask_token": mask_token, "added_tokens_decoder": ADDED}
    path = _special(tmp_path, llada_config(mask_token_id=None), tokenizer_config=said)
    assert _network(path).mask_token_id == 148
    (path / "config.json").write_text(json.dumps(llada_config()))
    assert _network(path).mask_token_id == 150
    assert _network(path, Overrides(mask_token_id=0)).mask_token_id == 0


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (151, 152, (151, 152)),
        (151, [152, 151, 153], (151, 152, 153)),
        (None, [152], (152,)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_those_of_config_then_of_generation_config(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    path = _special(
        tmp_path,
        llada_config(eos_token_id=in_config),
        generation_config={"eos_token_id": in_generation},
    )
    assert _network(path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("said", "expected"), [(64, 64), (None, None), (511, 511), (1 << 40, None)]
)
def test_the_length_of_an_answer_is_that_of_generation_config(
    tmp_path: Path, said: Any, expected: int | None
) -> None:
    path = _special(tmp_path, llada_config(), generation_config={"max_new_tokens": said})
    assert new_tokens(Checkpoint(path), 512) == expected
    (path / "generation_config.json").unlink()
    assert new_tokens(Checkpoint(path), 512) is None
    for wrong in (0, 2.5, True, "64"):
        (path / "generation_config.json").write_text(json.dumps({"max_new_tokens": wrong}))
        with pytest.raises(
            CheckpointError,
            match=r"generation_config\.json: max_new_tokens .* must be at least 1",
        ):
            new_tokens(Checkpoint(path), 512)


def test_the_layout_and_the_call_format_are_those_of_generation_config(tmp_path: Path) -> None:
    path = _special(
        tmp_path, llada_config(), generation_config={"json_layout": "spaced", "call_format": "list"}
    )
    assert text_option(Checkpoint(path), "json_layout", LAYOUTS) == "spaced"
    assert text_option(Checkpoint(path), "call_format", FORMATS) == "list"
    for wrong in ("wide", 5, ["lines"], True):
        (path / "generation_config.json").write_text(json.dumps({"json_layout": wrong}))
        with pytest.raises(
            CheckpointError,
            match=r"generation_config\.json: json_layout .* is not one of compact, spaced",
        ):
            text_option(Checkpoint(path), "json_layout", LAYOUTS)
    (path / "generation_config.json").unlink()
    assert text_option(Checkpoint(path), "json_layout", LAYOUTS) is None


@pytest.mark.parametrize(
    ("said", "pad", "ends"),
    [(None, None, ()), (-1, None, ()), ([], None, ()), ([-1], None, ()), ([7], 7, (7,))],
)
def test_a_checkpoint_has_the_padding_and_end_tokens_that_it_names(
    tmp_path: Path, said: Any, pad: int | None, ends: tuple[int, ...]
) -> None:
    network = _network(_special(tmp_path, llada_config(pad_token_id=said, eos_token_id=said)))
    assert (network.pad_token_id, network.eos_token_ids) == (pad, ends)


@pytest.mark.parametrize(
    ("key", "said"), [("pad", 160), ("pad", [1, 2]), ("eos", -2), ("eos", True), ("mask", 160)]
)
def test_the_advice_on_a_wrong_token_fits_the_token(tmp_path: Path, key: str, said: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key}_token_id .* is outside") as caught:
        _network(_special(tmp_path, llada_config(**{f"{key}_token_id": said})))
    assert ("Pass --mask-token-id" in str(caught.value)) == (key == "mask")


@pytest.mark.parametrize(
    ("positions", "expected"), [(131072, 2048), (2048, 2048), (256, 256), (None, 2048)]
)
def test_dreams_canvas_is_as_long_as_it_was_trained_for(
    tmp_path: Path, positions: int | None, expected: int
) -> None:
    path = _special(tmp_path, dream_config(max_position_embeddings=positions))
    assert _network(path).max_canvas_length == expected
    assert _network(path, Overrides(max_canvas_length=77)).max_canvas_length == 77


# ---- Tokenizers ----

TEXTS = [
    "turn(on) the(kitchen) the(lights)",
    "what's 12345 + 6?",
    "  two\n\nlines\t ",
    "Grüße, 世界! 😀",
    "<|mask|> in<|end|> text",
    "",
]
SPECIALS = [
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<|mask|>", special=True, normalized=False),
]


@pytest.fixture(scope="module")
def byte_level_bpe() -> tokenizers.Tokenizer:
    """A small tokenizer like the tokenizer of Qwen2.

    The exporter must make an equal tokenizer from the vocab.json and merges.txt of the returned
    one.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(tokenizer.QWEN2_SPLIT), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_tokens(SPECIALS)
    return made


def _vocab_size(made: tokenizers.Tokenizer) -> int:
    return max(made.get_vocab(with_added_tokens=True).values()) + 1


def _dream_with_vocab(path: Path, made: tokenizers.Tokenizer, vocab_size: int) -> Path:
    """A Dream checkpoint with vocab.json and merges.txt instead of tokenizer.json, as in the
    release.
    """
    end, mask = (made.token_to_id(token.content) for token in SPECIALS)
    config = dream_config(
        vocab_size=vocab_size, mask_token_id=mask, eos_token_id=end, pad_token_id=end
    )
    write_checkpoint(path, config)
    made.model.save(str(path))
    added = {
        str(made.token_to_id(t.content)): {"content": t.content, "special": True} for t in SPECIALS
    }
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return path


def _converted(path: Path) -> tokenizer.TokenizerFiles:
    checkpoint = Checkpoint(path)
    return tokenizer.read(checkpoint, families.read_network(checkpoint, Overrides()))


def test_vocab_and_merges_become_the_tokenizer_that_they_came_from(
    tmp_path: Path, byte_level_bpe: tokenizers.Tokenizer
) -> None:
    path = _dream_with_vocab(tmp_path, byte_level_bpe, _vocab_size(byte_level_bpe))
    text = _converted(path).tokenizer
    assert text is not None
    ours = tokenizers.Tokenizer.from_str(text)
    for sample in TEXTS:
        ids = byte_level_bpe.encode(sample).ids
        assert ours.encode(sample).ids == ids, sample
        assert ours.decode(ids, skip_special_tokens=True) == byte_level_bpe.decode(
            ids, skip_special_tokens=True
        )
    assert ours.decode(ours.encode(TEXTS[3]).ids) == TEXTS[3]


def test_an_added_token_that_would_get_another_id_is_refused(
    tmp_path: Path, byte_level_bpe: tokenizers.Tokenizer
) -> None:
    path = _dream_with_vocab(tmp_path, byte_level_bpe, _vocab_size(byte_level_bpe))
    added = {str(_vocab_size(byte_level_bpe) + 5): {"content": "<|far|>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError, match=r"<\|far\|>.*should have id"):
        _converted(path)


def test_tokenizer_json_is_carried_over_with_its_template_and_special_tokens(
    tmp_path: Path, byte_level_bpe: tokenizers.Tokenizer
) -> None:
    path = _dream_with_vocab(tmp_path, byte_level_bpe, _vocab_size(byte_level_bpe))
    for name in ("vocab.json", "merges.txt"):
        (path / name).unlink()
    byte_level_bpe.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|end|>"},
        "pad_token": None,
        "chat_template": "{{ messages }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    files = _converted(path)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert files.chat_template == "{{ messages }}"
    assert tokenizers.Tokenizer.from_str(files.tokenizer).to_str() == byte_level_bpe.to_str()
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert _converted(path).chat_template == "d"
    (path / "chat_template.jinja").write_text("from a file of its own", encoding="utf-8")
    assert _converted(path).chat_template == "from a file of its own"


@pytest.mark.parametrize(("padding", "is_noted"), [(0, False), (3, False), (5, True)])
def test_ids_that_are_no_tokens_are_found_and_many_are_noted(
    tmp_path: Path, byte_level_bpe: tokenizers.Tokenizer, padding: int, is_noted: bool
) -> None:
    """Padding is 0.09% of the ids of LLaDA 8B and 0.26% of those of Dream 7B."""
    size = _vocab_size(byte_level_bpe)
    path = _dream_with_vocab(tmp_path, byte_level_bpe, size + padding)
    source = open_source(path)
    assert source.network.unused_tokens == (((size, size + padding),) if padding else ())
    noted = f"{padding} of the {size + padding} ids in the denoiser's vocabulary are not in the"
    assert any(note.startswith(noted) for note in source.notes) == is_noted


UNUSED = ((100, 110), (140, 150), (152, 160))


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose network always prefers ids that are no tokens. Beside it is its source."""
    folder = tmp_path_factory.mktemp("padded")
    source = write_checkpoint(folder / "source", llada_config())
    file, head = source / "model.safetensors", "model.transformer.ff_out.weight"
    tensors = load_file(file)
    for first, last in UNUSED:
        tensors[head][first:last] *= 30
    save_file(tensors, file)
    used = set(range(160)).difference(*(range(*ids) for ids in UNUSED))
    words = tokenizers.Tokenizer(models.WordLevel({f"t{i}": i for i in used}, unk_token="t0"))
    words.add_special_tokens(["t150", "t151"])
    words.save(str(source / "tokenizer.json"))
    build(source, folder / "bundle", BuildOptions(check_parity=False))
    return folder / "bundle"


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"score": "margin", "cfg_scale": 0.5},
        {"select": "sample", "temperature": 5.0, "top_k": 30, "score_of": "draw"},
        {"commit": "threshold", "threshold": 0.3, "remask": "edit", "edit_threshold": 0.1},
    ],
    ids=str,
)
def test_ids_that_are_no_tokens_are_never_predicted(padded: Path, policy: dict[str, Any]) -> None:
    source = open_source(padded.parent / "source")
    assert source.network.unused_tokens == UNUSED
    denoiser = families.load(source.parameters, source.network)
    chosen = PRESETS["llada"].with_fields({"block_length": 8, "steps_per_block": 4} | policy)
    with dlm_runtime.open(padded, threads=1) as bundle:
        is_unused = np.isin(np.arange(160), np.concatenate([np.arange(*ids) for ids in UNUSED]))
        assert is_unused[bundle.logits([5, 150, 150]).argmax(-1)].all()
        for seed in range(3):
            policy_of = chosen.with_fields({"seed": seed})
            wanted = reference.generate(denoiser, [5, 17, 9 + seed], policy_of, 24)
            out = bundle.generate(
                tokens=[5, 17, 9 + seed], max_new_tokens=24, **policy_of.as_dict(), top_log_probs=8
            )
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
            assert not is_unused[out.tokens].any()


# ---- Settings that change results: every spelling is read or rejected ----


def _in_the_form_of_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    return {key: value for key, value in config.items() if key != "rope_theta"} | {
        "rope_parameters": rope
    }


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "flat": _in_the_form_of_transformers_5,
    "by layer type": lambda config: (
        config
        | {
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": config["rope_theta"]}
            },
        }
    ),
    "both": lambda config: (
        config | {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "form"),
    [*zip((llada_config, dream_config, dream_config), FORMS.values(), strict=True)],
    ids=FORMS,
)
def test_transformers_5s_form_gives_the_same_logits(tmp_path: Path, config: Any, form: Any) -> None:
    config = config(rope_theta=1234.5)
    older = load(write_checkpoint(tmp_path / "older", config, seed=4))
    newer = load(write_checkpoint(tmp_path / "newer", form(config), seed=4))
    other = load(write_checkpoint(tmp_path / "other", config | {"rope_theta": 10000.0}, seed=4))
    ids = torch.arange(40)[None] % 140
    assert torch.equal(older(ids), newer(ids))
    assert not torch.allclose(older(ids), other(ids), atol=1e-3), "theta would make no difference"


def test_scaled_and_partly_turned_positions_are_read(tmp_path: Path) -> None:
    said = {"rope_scaling": {"type": "linear", "factor": 4.0}, "partial_rotary_factor": 0.5}
    network = _network(write_checkpoint(tmp_path, dream_config(**said)))
    assert network.layers[0].attention.rope == Rope(1e6, 0.5, Linear(4.0))


@pytest.mark.parametrize("scaling", [False, {"rope_type": "default"}, {"type": "default"}])
def test_positions_that_are_not_scaled_are_read_in_every_spelling(
    tmp_path: Path, scaling: Any
) -> None:
    """Several values mean that positions are not scaled.

    For example, the released RND1 contains ``"rope_scaling": false``.
    """
    path = write_checkpoint(tmp_path, llada_moe_config(rope_scaling=scaling))
    assert _network(path).layers[0].attention.rope.scaling is None


def test_keys_that_nobody_read_are_remembered(tmp_path: Path) -> None:
    config = dream_config(
        attn_logit_softcapping=50.0, torch_dtype="bfloat16", some_flag=False, nothing=None
    )
    checkpoint = Checkpoint(write_checkpoint(tmp_path, config))
    families.read_network(checkpoint, Overrides())
    assert checkpoint.config.unread() == ["attn_logit_softcapping"]


# ---- Released tensors that contain several parameters, or parts of one parameter ----


@dataclass(frozen=True)
class Rearranged:
    """A made-up layout of a Dream checkpoint: one tensor contains q, k and v, and two tensors
    contain the gate matrix of the MLP.
    """

    path: Path
    network: NetworkSpec
    origins: dict[str, Origin]

    @staticmethod
    def of(checkpoint: Path, to: Path) -> Rearranged:
        shutil.copytree(checkpoint, to)
        opened = Checkpoint(checkpoint)
        network = families.read_network(opened, Overrides())
        tensors = {name: opened.tensor(name).clone() for name in opened.tensors}
        origins = families.FAMILIES["dream"].origins(network, opened)
        for i in range(len(network.layers)):
            ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
            for kind in ("weight", "bias"):
                parts, first = [], 0
                for name in "qkv":
                    parts.append(tensors.pop(f"{theirs}self_attn.{name}_proj.{kind}"))
                    rows = (first, first := first + len(parts[-1]))
                    piece = Piece(f"{theirs}self_attn.query_key_value.{kind}", rows)
                    origins[f"{ours}attention.{name}.{kind}"] = Origin(
                        (piece,), transpose=kind == "weight"
                    )
                tensors[piece.tensor] = torch.cat(parts)
            gate = tensors.pop(f"{theirs}mlp.gate_proj.weight")
            halves = (f"{theirs}mlp.gate_a", f"{theirs}mlp.gate_b")
            tensors |= dict(zip(halves, (gate[:40].clone(), gate[40:].clone()), strict=True))
            pieces = (Piece(halves[0], (0, 40)), Piece(halves[1], (0, len(gate) - 40)))
            origins[f"{ours}mlp.gate.weight"] = Origin(pieces, transpose=True)
        for old in to.glob("model*"):
            old.unlink()
        save_file(tensors, to / "model.safetensors")
        return Rearranged(to, network, origins)


def test_fused_and_parted_tensors_read_as_the_separate_ones(
    dream_checkpoint: Path, tmp_path: Path
) -> None:
    made = Rearranged.of(dream_checkpoint, tmp_path / "fused")
    plain = families.open_weights(Checkpoint(dream_checkpoint), made.network)
    fused = families.Weights(Checkpoint(made.path), made.network, made.origins)
    for parameter in made.network.parameters():
        for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
            assert np.array_equal(plain.read(parameter, dtype), fused.read(parameter, dtype)), (
                parameter
            )


def test_a_fused_tensor_of_the_wrong_height_is_named(
    dream_checkpoint: Path, tmp_path: Path
) -> None:
    made = Rearranged.of(dream_checkpoint, tmp_path / "fused")
    file = made.path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.query_key_value.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, file)
    with pytest.raises(CheckpointError, match=rf"{name} is \[127, 64\], expected \[128, 64\]"):
        families.Weights(Checkpoint(made.path), made.network, made.origins)


def test_stacked_tensors_become_one_parameter_and_back() -> None:
    """A checkpoint stores the experts of a layer as separate matrices ``[out, in]``, or as one
    tensor that contains all of them.

    Both must be read.
    """
    apart = Origin(
        tuple(Piece(f"experts.{i}.gate") for i in range(3)), transpose=True, is_stacked=True
    )
    assert apart.shapes((3, 8, 5)) == [(5, 8)] * 3
    assert Origin.of("experts.gate", transpose=True).shapes((3, 8, 5)) == [(3, 5, 8)]
