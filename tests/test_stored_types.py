"""Builds every family from checkpoints in every number type, tied and untied, in every precision."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from engine_bundles import SMALL
from safetensors.torch import load_file, save_file

import dlm_runtime
from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Overrides
from dlm_export.network.spec import HEAD
from dlm_export.sources import open_source
from dlm_export.targets import AUTO, STORED, TARGETS

MASK = 150
FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    "llada": checkpoints.llada_config,
    "llada-moe": checkpoints.llada_moe_config,
    "llada2": checkpoints.llada2_config,
    "dream": checkpoints.dream_config,
    "a2d-qwen2": lambda **more: checkpoints.a2d_config("Qwen2", **more),
    "a2d-qwen3": checkpoints.a2d_qwen3_config,
    "a2d-llama": lambda **more: checkpoints.a2d_config("Llama", **more),
    "sdar": checkpoints.sdar_config,
    "sdar-moe": lambda **more: checkpoints.qwen3_moe_config(
        "SDARMoeForCausalLM", block_size=4, **more
    ),
    "fast-dllm-v2": lambda **more: checkpoints.fast_dllm_v2_config(mask_token_id=MASK, **more),
    "rnd1": lambda **more: checkpoints.qwen3_moe_config("RND1LM", **more),
    "coda": checkpoints.coda_config,
    "stable-diffcoder": lambda **more: checkpoints.stable_diffcoder_config(
        mask_token_id=MASK, **more
    ),
    "wedlm": checkpoints.wedlm_config,
    "nemotron-labs-diffusion": checkpoints.nemotron_config,
    "diffusion-gemma": lambda **more: checkpoints.diffusion_gemma_config(
        moe_intermediate_size=48, **more
    ),
    "bert": checkpoints.bert_config,
    "roberta": checkpoints.roberta_config,
    "modern-bert": checkpoints.modern_bert_config,
    "torch-encoder": checkpoints.torch_encoder_config,
}
TIED = {
    name: ("weight_tying" if name == "llada" else "tie_word_embeddings")
    for name in FAMILIES
    if name not in ("diffusion-gemma", "bert", "roberta", "modern-bert", "torch-encoder")
}
"""The keys of config.json that tie the head, for the families whose heads may be tied or not."""
LIKE_OTHERS = ("a2d-qwen2", "a2d-llama", "sdar", "rnd1", "coda", "stable-diffcoder", "roberta")
"""Families whose layers and tensors are read and built as those of another family."""
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = [name for name in TARGETS["cpu"].precisions if name not in (AUTO, STORED)]
# Layers of experts, a tied head, draft passes and biases, in formats of all kinds. Other tests trace
# the same networks. The families' own tests build the other families in fp32.
QUICK = [
    ("llada2", False, "bf16", "int8-static"),
    ("sdar", True, "bf16", "int4-awq"),
    ("nemotron-labs-diffusion", False, "fp16", "nvfp4"),
    ("dream", False, "fp16", "int4-g128"),
]


@pytest.mark.parametrize(("family", "tied", "stored", "precision"), QUICK)
def test_a_checkpoint_of_another_type_is_built(
    family: str, tied: bool, stored: str, precision: str, tmp_path: Path
) -> None:
    check_build(family, tied, stored, precision, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built_in_every_precision(family: str, tmp_path: Path) -> None:
    """Types and tied heads alternate, because all combinations would take hours."""
    stored = itertools.cycle(TYPES)
    tied = itertools.cycle((False, False, True, True) if family in TIED else (False,))
    for precision in PRECISIONS:
        check_build(family, next(tied), next(stored), precision, tmp_path / precision)
        shutil.rmtree(tmp_path / precision)


# Random weights lose more to rounding than trained ones. A wrong scale or a transposed matrix gives
# a correlation near 0.
LEAST_CORRELATION = {"fp32": 1 - 1e-8, "fp16": 0.9999}


@torch.no_grad()
def check_build(family: str, tied: bool, stored: str, precision: str, folder: Path) -> None:
    """Build a checkpoint for CPUs, and compare the bundle's logits with torch."""
    config = FAMILIES[family](**({TIED[family]: tied} if family in TIED else {}))
    source, output = folder / "source", folder / "bundle"
    write_checkpoint(source, config, dtype=TYPES[stored])
    build(source, output, BuildOptions(precision=precision, check_parity=False, quantise=SMALL))
    network = open_source(source).network
    with dlm_runtime.open(output, threads=1) as bundle:
        ids = [5, 17, 9, 40, *[MASK] * 4]
        found = bundle.logits(ids)
        assert len(bundle.generate(tokens=ids[:4], max_new_tokens=8, stop="none").tokens) == 12
        layers = bundle.manifest["precision"].get("layers", {})
        held = bundle.manifest["precision"].get("embedding_dtype")
    wanted = families.load(open_source(source).parameters, network)(torch.tensor([ids]))[0].numpy()
    correlation = np.corrcoef(found.ravel(), wanted.ravel())[0, 1]
    assert correlation > LEAST_CORRELATION.get(precision, 0.8), (stored, precision)
    if precision != "fp16" and not (network.tied_head and HEAD in layers):
        of = "fp32" if network.conditioning is not None else stored
        assert held == str(TYPES[of]).removeprefix("torch.")


@torch.no_grad()
@pytest.mark.parametrize(
    "family", [name for name in (*TIED, "bert", "modern-bert") if name not in LIKE_OTHERS]
)
def test_a_stored_head_is_tied_only_if_it_equals_the_table(family: str, tmp_path: Path) -> None:
    key = {TIED.get(family, "tie_word_embeddings"): True}
    checkpoint = write_checkpoint(tmp_path, FAMILIES[family](**key))
    file, ids = tmp_path / "model.safetensors", torch.arange(3, 20)[None]
    tensors, opened = load_file(file), Checkpoint(checkpoint)
    network = families.read_network(opened, Overrides())
    head, table = families.head_and_table(opened, families.find(opened, Overrides()), network)

    def read(**more: torch.Tensor) -> tuple[bool, list[str], torch.Tensor]:
        save_file({name: tensor.clone() for name, tensor in (tensors | more).items()}, file)
        opened = Checkpoint(checkpoint)
        network = families.read_network(opened, Overrides())
        weights = families.open_weights(opened, network)
        return network.tied_head, opened.notes, families.load(weights, network)(ids)

    is_tied, notes, wanted = read()
    assert is_tied
    is_tied, notes, logits = read(**{head: tensors[table]})
    assert is_tied
    assert torch.equal(logits, wanted)
    is_tied, notes, logits = read(**{head: 2 * tensors[table]})
    assert not is_tied
    assert f"{head} and {table} differ" in notes[0]
    assert not torch.equal(logits, wanted)
    tensors[head] = tensors.pop(table)
    assert torch.equal(read()[2], wanted)
