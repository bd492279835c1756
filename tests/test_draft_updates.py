"""The LoRA adapter of Nemotron-Labs-Diffusion, which only the draft passes of self-speculation use.

The reference for draft rows is transformers' Ministral 3 with the adapter in its weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import (
    ADAPTED,
    adapter_config,
    adapter_tensors,
    llada_config,
    nemotron_config,
    write_adapter,
    write_checkpoint,
    write_quantised,
)
from denoisers import load
from safetensors.torch import load_file
from slow_cases import slow_except
from test_families import invoke
from test_nemotron import ministral, random_config, random_prompts

import dlm_runtime
from dlm_calibration.precision_rounding import FP32
from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Overrides
from dlm_export.graph import trace, updates
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec
from dlm_export.planning.roofline import Costs
from dlm_export.quantising.quantisation import Folded, by_site
from dlm_export.sources import open_source
from dlm_runtime import Bundle
from dlm_runtime.abi import native as _native
from dlm_runtime.presets import PRESETS

transformers = pytest.importorskip("transformers")

Weights = dict[str, torch.Tensor]


def merged(weights: Weights, tensors: Weights, scale: float) -> Weights:
    """Add an adapter to the weights of a checkpoint: W + scale * B A."""
    found = dict(weights)
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            update = scale * tensors[name.replace("lora_A", "lora_B")] @ a
            found[f"{module}.weight"] = found[f"{module}.weight"] + update
    return found


def drafts_of(
    folder: Path, config: dict[str, Any], ids: torch.Tensor, adapted: torch.nn.Module
) -> torch.Tensor:
    """Return Ministral's logits of a draft pass over the last 30 tokens.

    The first 100 tokens are cached by the network without an adapter.
    """
    cached = ministral(folder, config)(ids[:, :100], use_cache=True).past_key_values
    nothing_hidden = torch.zeros(len(ids), 1, 30, 130)
    logits: torch.Tensor = adapted(
        ids[:, 100:],
        past_key_values=cached,
        attention_mask=nothing_hidden,
        cache_position=torch.arange(100, 130),
        position_ids=torch.arange(100, 130).expand(len(ids), -1),
    ).logits
    return logits


def passes(ours: Denoiser, ids: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a causal pass, and of a pass over the last 30 tokens.

    The longest canvas is added ``times`` times to the positions of the second pass.
    """
    positions = torch.arange(130).expand_as(ids)
    causal, presents = ours.hidden(ids, positions)
    past = [(keys[:, :, :100], values[:, :, :100]) for keys, values in presents]
    at = positions[:, 100:] + times * ours.network.max_canvas_length
    return ours.project(causal), ours.project(ours.hidden(ids[:, 100:], at, past)[0])


@pytest.mark.parametrize("seed", slow_except(range(3), range(6)))
@torch.no_grad()
def test_only_updated_rows_differ_from_the_network_without_an_adapter(
    tmp_path: Path, seed: int
) -> None:
    config = random_config(seed)
    path = write_checkpoint(tmp_path, config, seed=seed)
    plain = load(path)
    changes: dict[str, Any] = {
        "target_modules": [ADAPTED[3:4], ADAPTED, ADAPTED[:2]][seed % 3],
        "use_rslora": seed % 2 == 1,
        "r": 1 + 3 * seed,
        # Larger updates amplify the rounding errors of both networks.
        "lora_alpha": 4,
    }
    tensors = adapter_tensors(config, adapter_config(**changes))
    write_adapter(path, config, tensors, **changes)
    ours, theirs = load(path), ministral(path, config)
    scale = 4 / (changes["r"] ** 0.5 if changes["use_rslora"] else changes["r"])
    weights = merged(load_file(path / "model.safetensors"), tensors, scale)
    renamed = {"encoder.": "model.", "diffusion_head.": "lm_head."}
    theirs.load_state_dict(
        {
            new + name.removeprefix(old): tensor
            for name, tensor in weights.items()
            for old, new in renamed.items()
            if name.startswith(old)
        },
        strict=not config["tie_word_embeddings"],
    )
    ids = torch.randint(0, 150, (2, 130), generator=torch.Generator().manual_seed(seed))
    causal, updated = passes(ours, ids, 2)
    wanted = drafts_of(path, config, ids, theirs)
    assert (updated - wanted).abs().max() <= 2e-4 * (wanted.max() - wanted.min())
    causal_before, drafted_before = passes(plain, ids, 1)
    assert torch.equal(causal, causal_before)
    assert torch.equal(passes(ours, ids, 1)[1], drafted_before)
    assert not torch.allclose(updated, drafted_before, atol=0.01)


@torch.no_grad()
def test_updated_rows_equal_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = nemotron_config()
    path = write_checkpoint(tmp_path, config)
    tensors = adapter_tensors(config, adapter_config(target_modules=ADAPTED))
    # transformers' Ministral has the layers under ``model``, and PEFT needs the names of the module.
    tensors = {name.replace(".encoder.", ".model."): tensor for name, tensor in tensors.items()}
    folder = write_adapter(path, config, tensors, target_modules=ADAPTED)
    adapted = peft.PeftModel.from_pretrained(ministral(path, config), folder).eval()
    ids = torch.randint(0, 150, (2, 130), generator=torch.Generator().manual_seed(3))
    wanted = drafts_of(path, config, ids, adapted)
    updated = passes(load(path), ids, 2)[1]
    assert (updated - wanted).abs().max() <= 2e-4 * (wanted.max() - wanted.min())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints with the same weights, without and with a random adapter of all modules."""
    config, found = nemotron_config(), []
    for name in ("plain", "adapted"):
        found.append(write_checkpoint(tmp_path_factory.mktemp("checkpoints") / name, config))
    write_adapter(found[1], config, target_modules=ADAPTED)
    return found[0], found[1]


@pytest.fixture(scope="module")
def denoiser(folders: tuple[Path, Path]) -> Denoiser:
    return load(folders[1])


@pytest.fixture(scope="module")
def built(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The bundles of both checkpoints. The second build compares texts with the reference loop."""
    made = tmp_path_factory.mktemp("bundles")
    build(folders[0], made / "plain", BuildOptions(check_parity=False))
    report = build(folders[1], made / "adapted")
    assert report.parity is not None
    assert report.parity.misses == []
    return made / "plain", made / "adapted"


@pytest.fixture(scope="module")
def bundles(built: tuple[Path, Path]) -> Iterator[tuple[Bundle, Bundle]]:
    with (
        dlm_runtime.open(built[0], threads=1) as plain,
        dlm_runtime.open(built[1], threads=1) as adapted,
    ):
        yield plain, adapted


@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "definitions"])
def test_rows_of_all_kinds_share_a_pass(
    built: tuple[Path, Path], denoiser: Denoiser, has_kernels: bool
) -> None:
    """The update changes only the rows of the third of three requests.

    The other rows equal those of the bundle without an adapter. The kernel for updates of an MLP
    also computes silu, which ONNX Runtime rounds differently.
    """
    network = denoiser.network
    longest, tokens = network.max_canvas_length, 12
    numbers = np.random.default_rng(4)
    ids = numbers.integers(0, 150, (3, tokens))
    positions = np.arange(tokens) + longest * np.arange(3)[:, None]
    feeds: dict[str, np.ndarray] = {
        "input_ids": ids,
        "position_ids": positions,
        "score_rows": np.tile(np.arange(tokens), (3, 1)),
    }
    for i, (heads, size) in enumerate(network.cache_shapes()):
        for kind in ("key", "value"):
            feeds[f"past_{kind}.{i}"] = np.zeros((3, heads, 0, size), np.float32)
    found = []
    for folder in built:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if has_kernels:
            options.register_custom_ops_library(_native.library()._name)
        session = onnxruntime.InferenceSession(
            folder / "denoiser.onnx", options, providers=["CPUExecutionProvider"]
        )
        found.append(session.run(["logits"], feeds)[0])
    plain, adapted = found
    assert np.abs(plain[:2] - adapted[:2]).max() <= (1e-5 if has_kernels else 0)
    with torch.no_grad():
        features, _ = denoiser.hidden(torch.from_numpy(ids), torch.from_numpy(positions))
        wanted = denoiser.project(features).numpy()
    assert np.abs(adapted - wanted).max() <= 2e-4 * (wanted.max() - wanted.min())
    assert np.abs(adapted[2] - plain[2]).max() > 0.01


@pytest.mark.parametrize("count", slow_except([24], [24, 200]))
def test_a_wrong_adapter_changes_the_passes_and_not_the_text(
    bundles: tuple[Bundle, Bundle], denoiser: Denoiser, count: int
) -> None:
    """The text is that of greedy decoding, and for 8 prompts it is that of the reference."""
    plain, adapted = bundles
    has_other_passes = []
    for number, tokens in enumerate(random_prompts(count)):
        options: dict[str, Any] = {"block_length": (0, 3, 8, 30)[number % 4], "max_new_tokens": 24}
        out, other = (each.generate(tokens=tokens, **options) for each in (adapted, plain))
        wanted = plain.generate(tokens=tokens, preset="autoregressive", max_new_tokens=24).tokens
        assert out.tokens == other.tokens == wanted
        has_other_passes.append(out.nfe != other.nfe)
        if number < 8:
            changes = {"block_length": options["block_length"]}
            policy = PRESETS["self-speculation"].with_fields(changes)
            made = reference.generate(denoiser, tokens, policy, 24)
            assert (made.tokens, made.nfe) == (wanted, out.nfe)
    assert any(has_other_passes)


@pytest.mark.parametrize("preset", ["autoregressive", "nemotron-diffusion"])
def test_other_presets_do_not_use_the_adapter(bundles: tuple[Bundle, Bundle], preset: str) -> None:
    for tokens in random_prompts(12):
        one, other = (
            each.generate(tokens=tokens, preset=preset, max_new_tokens=20) for each in bundles
        )
        assert (one.tokens, one.nfe) == (other.tokens, other.nfe)


def stored(bundle: Path) -> dict[str, np.ndarray]:
    """Return the unquantised parameters of a bundle, by name."""
    model = ir.load(bundle / "denoiser.onnx")
    return {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and name.startswith("blocks.")
    }


@pytest.mark.parametrize(
    ("precision", "kind"),
    slow_except(
        [("fp32", "float32")], [("fp32", "float32"), ("int8", "float32"), ("fp16", "float16")]
    ),
)
def test_updates_are_stored_in_the_type_of_activations(
    folders: tuple[Path, Path],
    built: tuple[Path, Path],
    tmp_path: Path,
    precision: str,
    kind: str,
) -> None:
    bundle = built[1]
    if precision != "fp32":
        bundle = tmp_path / "bundle"
        build(folders[1], bundle, BuildOptions(precision=precision, check_parity=False))
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["loop"]["draft_updates"] is True
    # An adapted layer is fused as without an adapter.
    assert not any(path.endswith(".out") for path in manifest["kernels"]["plain"])
    found, config = stored(bundle), nemotron_config()
    tensors = adapter_tensors(config, adapter_config(target_modules=ADAPTED))
    for layer in range(config["num_hidden_layers"]):
        module = f"base_model.model.encoder.layers.{layer}.self_attn.o_proj"
        a, b = (tensors[f"{module}.lora_{part}.weight"].T.numpy() for part in "AB")
        update = f"blocks.{layer}.attention.draft_updates.out"
        for name, wanted in (("a", a), ("b", b * np.float32(16 / 4))):
            array = found[f"{update}.{name}"]
            assert array.dtype.name == kind
            assert np.array_equal(array, wanted.astype(array.dtype))


@torch.no_grad()
def test_folded_scales_leave_the_update_as_it_was(folders: tuple[Path, Path]) -> None:
    """The scales of every layer input are random, as if AWQ or smoothing had chosen them."""
    source = open_source(folders[1])
    network, random = source.network, np.random.default_rng(3)
    folded = Folded(source.parameters, network)
    for site, readers in by_site(network.linear_layers()).items():
        if readers[0].fold is not None:
            folded.fold(site, random.uniform(0.2, 5.0, readers[0].inputs).astype(np.float32))
    ids = torch.randint(0, 150, (2, 130), generator=torch.Generator().manual_seed(3))
    for times in (1, 2):
        before, after = (
            passes(families.load(parameters, network), ids, times)[1]
            for parameters in (source.parameters, folded)
        )
        assert (after - before).abs().max() <= 1e-5 * (before.max() - before.min())
    for path in network.draft_updates():
        changed = {
            part
            for part in "ab"
            if not np.array_equal(
                *(each.read(f"{path}.{part}", FP32) for each in (folded, source.parameters))
            )
        }
        assert changed == ({"a", "b"} if path.endswith((".v", ".up")) else {"a"})


def test_an_update_that_does_not_fit_fp16_is_refused(tmp_path: Path) -> None:
    config = nemotron_config()
    path = write_checkpoint(tmp_path, config)
    write_adapter(path, config, r=1, lora_alpha=1e6)
    opened = Checkpoint(path)
    weights = families.open_weights(opened, families.read_network(opened, Overrides()))
    with pytest.raises(
        CheckpointError, match=r"lora_B.weight: weights up to .* do not fit float16"
    ):
        weights.read("blocks.0.attention.draft_updates.out.b", np.dtype(np.float16))


@pytest.mark.slow
def test_a_plain_graph_selects_the_updated_rows(folders: tuple[Path, Path], tmp_path: Path) -> None:
    report = build(folders[1], tmp_path / "bundle", BuildOptions(plain_graph=True))
    assert report.parity is not None
    assert report.parity.misses == []
    assert "DraftUpdate" not in operators(tmp_path / "bundle" / "denoiser.onnx")


def operators(graph: Path) -> set[str]:
    return {node.op_type for node in ir.load(graph).graph}


@pytest.mark.slow
def test_a_build_for_gpus_contains_standard_operators_for_updates(tmp_path: Path) -> None:
    config = nemotron_config()
    path = write_checkpoint(tmp_path / "checkpoint", config)
    write_adapter(path, config)
    options = BuildOptions(targets=("h100",), precision="fp16", check_parity=False)
    build(path, tmp_path / "bundle", options)
    found = operators(tmp_path / "bundle" / "device.onnx")
    assert "Where" in found
    assert not found & {"DraftUpdate", "NonZero", "ScatterND"}


def test_an_adapter_can_be_left_out(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain, adapted = folders
    told = json.loads(invoke("inspect", adapted, "--no-adapter", "--json"))
    assert told["notes"] == ["the adapter linear_spec_lora is left out"]
    assert told["parameters"] == read(plain).parameter_count()
    opened = Checkpoint(adapted)
    assert families.read_network(opened, Overrides(no_adapter=True)) == read(plain)
    path = write_checkpoint(tmp_path / "checkpoint", nemotron_config())
    config_with(use_dora=True)(path, nemotron_config())
    assert json.loads(invoke("inspect", path, "--no-adapter", "--json"))["parameters"]


def test_a_quantised_checkpoint_says_nothing_about_the_precision_of_its_adapter(
    tmp_path: Path,
) -> None:
    config = nemotron_config()
    path = write_quantised(tmp_path, config, "FP8")
    write_adapter(path, config)
    opened = Checkpoint(path)
    network = families.read_network(opened, Overrides())
    notes = families.check_tensors(opened, network).checkpoint.notes
    assert not any("lora_" in note for note in notes)
    tensors_with(lambda t: t.pop(B))(path, config)
    with pytest.raises(CheckpointError, match="1 tensors missing: linear_spec_lora/"):
        families.check_tensors(Checkpoint(path), network)


def test_graphs_for_gpus_compute_all_rows_and_select_the_updated_ones(
    folders: tuple[Path, Path], denoiser: Denoiser, tmp_path: Path
) -> None:
    traced = trace.trace_pass(read(folders[1]), "fp32")
    updates.select_rows(traced.model)
    assert not traced.model.functions
    assert {node.domain for node in traced.model.graph} == {""}
    state = denoiser.state_dict()
    network = denoiser.network
    buffer = np.zeros(network.vocab_size, np.float32)
    buffer[network.mask_token_id] = -np.inf
    tables = {f"rotary.0.{name}": getattr(denoiser.rotary[0], name) for name in ("cos", "sin")}
    for name, value in traced.model.graph.initializers.items():
        if value.const_value is None:
            found = buffer if name == "mask_token_bias" else (state | tables)[name].numpy()
            value.const_value = ir.tensor(np.ascontiguousarray(found), name=name)
    ids = np.random.default_rng(4).integers(0, 150, (3, 12))
    positions = np.arange(12) + network.max_canvas_length * np.arange(3)[:, None]
    feeds = {"input_ids": ids, "position_ids": positions, "score_rows": np.zeros((3, 1), np.int64)}
    for i, (heads, size) in enumerate(network.cache_shapes()):
        for kind in ("key", "value"):
            feeds[f"past_{kind}.{i}"] = np.zeros((3, heads, 0, size), np.float32)
    session = onnxruntime.InferenceSession(
        ir.to_proto(traced.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (logits,) = session.run(["logits"], feeds)
    with torch.no_grad():
        features, _ = denoiser.hidden(torch.from_numpy(ids), torch.from_numpy(positions))
        wanted = denoiser.project(features[:, :1]).numpy()
    assert np.abs(logits - wanted).max() <= 2e-4 * (wanted.max() - wanted.min())


def test_sizes_include_the_adapter(folders: tuple[Path, Path]) -> None:
    plain, adapted = (read(folder) for folder in folders)
    matrices = 4 * 64, 64 + 32, 64 + 32, 64 + 64, 64 + 96, 64 + 96, 64 + 96
    elements = 2 * 4 * (64 + 64 + sum(matrices[1:]))
    assert adapted.parameter_count() == plain.parameter_count() + elements
    sizes = [Costs(each, {}, 2).weight_bytes for each in (plain, adapted)]
    assert sizes[1] - sizes[0] == 2 * elements
    told = [json.loads(invoke("inspect", folder, "--json")) for folder in folders]
    assert told[1]["stored_bytes"] - told[0]["stored_bytes"] == 4 * elements
    assert told[1]["memory"]["fp16"]["weights_bytes"] == sizes[1]
    (note,) = told[1]["notes"]
    assert note == (
        "the adapter linear_spec_lora (rank 4, trained for nvidia/Nemotron-Labs-Diffusion-3B) is used only for the "
        "drafts of self-speculation"
    )


def read(folder: Path) -> NetworkSpec:
    return families.read_network(Checkpoint(folder), Overrides())


def test_a_network_with_updates_survives_a_round_trip(folders: tuple[Path, Path]) -> None:
    network = read(folders[1])
    values = json.loads(json.dumps(network.as_dict()))
    assert NetworkSpec.from_dict(values) == network
    values["layers"][0]["draft_updates"][0]["role"] = "head"
    with pytest.raises(ValueError, match="updates for draft passes of head"):
        NetworkSpec.from_dict(values)


Change = Callable[[Path, dict[str, Any]], None]


def config_with(**changes: Any) -> Change:
    return with_text("adapter_config.json", json.dumps(adapter_config(**changes)))


def tensors_with(change: Callable[[Weights], object]) -> Change:
    def write(path: Path, config: dict[str, Any]) -> None:
        tensors = adapter_tensors(config, adapter_config())
        change(tensors)
        write_adapter(path, config, tensors)

    return write


def without(file: str) -> Change:
    return lambda path, config: (write_adapter(path, config) / file).unlink()


def with_text(file: str, text: str) -> Change:
    def write(path: Path, config: dict[str, Any]) -> None:
        (write_adapter(path, config) / file).write_text(text)

    return write


OF = "base_model.model.encoder.layers.1.self_attn.o_proj"
A, B = f"{OF}.lora_A.weight", f"{OF}.lora_B.weight"
OF_FIRST = A.replace("layers.1", "layers.0")
HOSTILE: dict[str, tuple[Change, str]] = {
    "no config": (without("adapter_config.json"), "adapter_config.json: the file is missing"),
    "no rank": (config_with(r=None), "r must be an integer in 1..16777216, found None"),
    "an endless alpha": (config_with(lora_alpha=1e39), "lora_alpha 1e+39 give the scale 2.5e+38"),
    "another method": (config_with(peft_type="LOHA"), 'peft_type = "LOHA" is not supported'),
    "alphas by layer": (config_with(alpha_pattern={"q": 2}), "alpha_pattern"),
    "a rank above the size": (
        config_with(r=65),
        "r is 65, but o_proj has 64 inputs and 64 outputs; r must not be above either number. To leave",
    ),
    "a pattern of layers": (
        config_with(layers_pattern="h"),
        'layers_pattern = "h" is not supported, only null. To leave the adapter out',
    ),
    "DoRA": (config_with(use_dora=True), "use_dora = true is not supported, only false"),
    "a pattern of modules": (
        config_with(target_modules="all-linear"),
        "target_modules must be a list of names of modules, found 'all-linear'",
    ),
    "the head": (
        config_with(target_modules=["diffusion_head"]),
        "target_modules contains 'diffusion_head', but only these modules can be adapted: q_proj",
    ),
    "another network": (
        tensors_with(lambda t: t.update({B: torch.zeros(128, 4)})),
        f"of the wrong shape: linear_spec_lora/{B} is [128, 4], expected [64, 4]",
    ),
    "another rank": (config_with(r=3), f"r is 3, but the rank of linear_spec_lora/{OF_FIRST} is 4"),
    "half a pair": (tensors_with(lambda t: t.pop(B)), f"1 tensors missing: linear_spec_lora/{B}"),
    "a layer too many": (
        tensors_with(lambda t: t.update({A.replace("s.1.", "s.2."): t[A].clone()})),
        f"1 tensors not known: linear_spec_lora/{A.replace('s.1.', 's.2.')}",
    ),
    "a module twice": (
        tensors_with(lambda t: t.update({f"other.{A}": t[A].clone()})),
        "belong to the same module",
    ),
    "NaN": (
        tensors_with(lambda t: t[A].fill_(float("nan"))),
        f"linear_spec_lora/{A} contains 256 NaN or infinite weights",
    ),
}


ALONE = ("NaN", "a module twice", "another rank")
"""The errors that do not suggest to leave the adapter out."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_adapter_is_refused(tmp_path: Path, name: str) -> None:
    change, sentence = HOSTILE[name]
    config = nemotron_config()
    path = write_checkpoint(tmp_path, config)
    change(path, config)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert sentence in str(caught.value)
    assert ("pass --no-adapter." in str(caught.value)) == (name not in ALONE)
    assert "\n" not in str(caught.value)


def test_other_families_do_not_apply_the_adapter(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, llada_config())
    write_adapter(path, nemotron_config())
    with pytest.raises(
        CheckpointError, match=r"\(folder linear_spec_lora\)\. Pass --adapter linear"
    ):
        read(path)
