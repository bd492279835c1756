"""Tests of LoRA adapters that are merged into a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    adapter_config,
    diffusion_gemma_config,
    dream_config,
    llada2_config,
    llada_config,
    write_checkpoint,
    write_quantised,
)
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints.folder import CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.sources import open_source, open_source_of

PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]


def add_adapter(checkpoint: Path, modules: dict[str, int], name: str, **changes: Any) -> Tensors:
    """Write an adapter beside a checkpoint's weights. ``modules`` maps modules to ranks.

    Returns the product of the two matrices of each module.
    """
    (checkpoint / name).mkdir(exist_ok=True)
    generator, weights = torch.Generator().manual_seed(5), load_file(checkpoint / WEIGHTS)
    tensors, products = {}, {}
    for module, rank in modules.items():
        outputs, inputs = weights[f"{module}.weight"].shape
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) / rank**0.5
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b
        products[module] = b @ a
    save_file(tensors, checkpoint / name / "adapter_model.safetensors")
    (checkpoint / name / "adapter_config.json").write_text(json.dumps(adapter_config(**changes)))
    return products


WEIGHTS = "model.safetensors"
LAYER = "model.layers.0."
Q, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"
CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], dict[str, float]]] = {
    # The columns are config.json, the ranks, changes of adapter_config.json, and the scales.
    "files": (dream_config(), {Q: 4, DOWN: 4, "lm_head": 4}, {}, {}),
    "rslora": (dream_config(), {Q: 4}, {"use_rslora": True}, {Q: 8.0}),
    "ranks": (dream_config(), {Q: 2, DOWN: 4}, {"rank_pattern": {"q_proj": 2}}, {Q: 8.0}),
    "alphas": (
        dream_config(),
        {Q: 4, DOWN: 4},
        {"alpha_pattern": {"mlp.down_proj": 6}, "target_modules": "all-linear"},
        {DOWN: 1.5},
    ),
    "llada": (llada_config(), {"model.transformer.blocks.1.ff_proj": 4}, {}, {}),
    "fused rows and experts": (
        llada2_config(),
        {f"{LAYER}attention.query_key_value": 4, "model.layers.1.mlp.experts.3.up_proj": 4},
        {},
        {},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_merged_adapter_equals_merged_weights(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    config, ranks, changes, scales = CASES[case]
    path = write_checkpoint(tmp_path, config, dtype=dtype)
    name = "." if case == "files" else "style"
    products = add_adapter(path, ranks, name, **changes)

    def logits(**overrides: Any) -> torch.Tensor:
        source = open_source(path, Overrides(**overrides))
        return families.load(source.parameters, source.network)(torch.arange(3, 30)[None])

    plain, merged = logits(no_adapter=True), logits(adapter=name)
    assert not torch.equal(plain, merged)
    tensors = load_file(path / WEIGHTS)
    for module, product in products.items():
        weight = tensors[f"{module}.weight"]
        wide = weight.float() + scales.get(module, 4.0) * product  # 16 / 4
        tensors[f"{module}.weight"] = wide.to(dtype)
    save_file(tensors, path / WEIGHTS)
    assert torch.equal(logits(no_adapter=True), merged)


def test_an_adapter_is_not_dropped_in_silence(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, dream_config())
    for name, where in (("uno", "folder uno"), (".", "files")):
        add_adapter(path, {Q: 4}, name)
        found = CliRunner().invoke(main, ["inspect", str(path)])
        assert found.exit_code == 2
        assert f"LoRA adapter beside the weights ({where}). Pass --adapter {name}" in found.output
    found = CliRunner().invoke(main, ["inspect", str(path), "--no-adapter", "--json"])
    notes = json.loads(found.stdout)["notes"]
    assert notes == [f"the adapter {name} is left out" for name in (".", "uno")]


def test_a_bundle_remembers_its_adapter(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "source", dream_config())
    add_adapter(path, {Q: 4}, "style")
    report = build(path, tmp_path / "bundle", BuildOptions(), overrides=Overrides(adapter="style"))
    assert report.parity is not None
    assert report.warnings == ["the adapter style is merged into 1 matrices"]
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert open_source_of(tmp_path / "bundle", manifest, path).network.adapter == "style"


@torch.no_grad()
def test_an_adapter_may_be_outside_the_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "source", dream_config())
    add_adapter(path, {Q: 4}, "style")

    def logits(adapter: str) -> torch.Tensor:
        source = open_source(path, Overrides(adapter=adapter))
        assert source.network.adapter == "style"
        return families.load(source.parameters, source.network)(torch.arange(3, 30)[None])

    inside, elsewhere = logits("style"), str(tmp_path / "style")
    assert torch.equal(logits(str(path / "style")), inside)
    (path / "style").rename(elsewhere)
    assert torch.equal(logits(elsewhere), inside)
    build(path, tmp_path / "bundle", BuildOptions(), overrides=Overrides(adapter=elsewhere))
    arguments = ["verify", str(tmp_path / "bundle"), "--checkpoint", str(path), "--count", "1"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2
    assert "'style': there is no such adapter" in found.output
    found = CliRunner().invoke(main, [*arguments, "--adapter", elsewhere])
    assert found.exit_code == 0, found.output
    add_adapter(path, {Q: 4}, "style")
    with pytest.raises(CheckpointError, match="already has an adapter style"):
        open_source(path, Overrides(adapter=elsewhere))


def tensors_with(name: str) -> Any:
    """Return a change that adds a tensor to the adapter."""

    def change(path: Path) -> None:
        file = path / "style" / "adapter_model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {f"{PREFIX}{name}": torch.ones(4, 64)}, file)

    return change


def config_with(**changes: Any) -> Any:
    return lambda path: add_adapter(path, {Q: 4}, "style", **changes)


REFUSED = {
    "DoRA": (config_with(use_dora=True), "use_dora = true is not supported"),
    "modules": (config_with(modules_to_save=["lm_head"]), "modules_to_save = .* is not supported"),
    "a new setting": (config_with(use_new=True), "'use_new': not a setting of LoRA"),
    "a pattern": (config_with(alpha_pattern={"(a+)+": 3}), "alpha_pattern: only names of modules"),
    "an alpha": (config_with(alpha_pattern={"q_proj": "x"}), "lora_alpha must be a positive"),
    "rank": (
        lambda path: add_adapter(path, {Q: 4}, "style", r=8),
        "r is 8, but the rank of .* is 4",
    ),
    "no tensors": (lambda path: add_adapter(path, {}, "style"), "the adapter contains no tensors"),
    "half of a pair": (tensors_with(f"{DOWN}.lora_A.weight"), "cannot be merged"),
    "another module": (
        tensors_with("model.layers.9.mlp.up_proj.lora_A.weight"),
        "cannot be merged",
    ),
    "a missing file": (
        lambda path: (path / "style" / "adapter_model.safetensors").unlink(),
        "the file is missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_changes_more_is_refused(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path, dream_config())
    add_adapter(path, {Q: 4}, "style")
    change, sentence = REFUSED[name]
    change(path)
    with pytest.raises(CheckpointError, match=sentence):
        open_source(path, Overrides(adapter="style"))


def test_matrices_that_the_network_does_not_read_are_named(tmp_path: Path) -> None:
    unknown = write_checkpoint(tmp_path / "unknown", dream_config())
    with pytest.raises(CheckpointError, match="'style': there is no such adapter"):
        open_source(unknown, Overrides(adapter="style"))
    path = write_checkpoint(tmp_path / "gemma", diffusion_gemma_config())
    tensors = load_file(path / WEIGHTS)
    tower = {"model.encoder.vision_tower.q.weight": torch.ones(8, 8)}
    save_file(tensors | tower, path / WEIGHTS)
    add_adapter(path, {"model.encoder.vision_tower.q": 4}, "style")
    with pytest.raises(
        CheckpointError, match=r"changes model.encoder.vision_tower.q.weight, which"
    ):
        open_source(path, Overrides(adapter="style"))
    path = write_checkpoint(tmp_path / "quantised", llada_config())
    module = "model.transformer.blocks.0.q_proj"
    add_adapter(path, {module: 4}, "style")
    write_quantised(path, llada_config(), "FP8")
    with pytest.raises(CheckpointError, match=f"{module}.weight, which .* in full precision"):
        open_source(path, Overrides(adapter="style"))
