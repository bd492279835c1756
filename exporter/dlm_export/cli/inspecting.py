"""Defines the command ``inspect``, which describes a checkpoint or a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_export.checkpoints.hub import HubName, Located
from dlm_export.checkpoints.local import local
from dlm_export.cli.options import SOURCE, command, group, json_option, options, source_group
from dlm_export.cli.printing import (
    default_words,
    format_bytes,
    one_line,
    print_caches,
    print_effort,
    print_json,
    print_kernels,
    print_table,
)
from dlm_export.cli.values import overrides

if TYPE_CHECKING:
    from dlm_export.families.base import Overrides
    from dlm_export.network.spec import LayerSpec, NetworkSpec


@command()
@click.argument("checkpoint", type=SOURCE)
@options(group("Common options", json_option), source_group)
def inspect(checkpoint: Path | HubName, as_json: bool, **values: Any) -> None:
    """Describe a checkpoint or a bundle.

    CHECKPOINT is the folder of a checkpoint or bundle, or hf:ORG/NAME[@REVISION]. For a checkpoint,
    the command prints the family, the network and the memory. For a bundle, the command prints the
    files, engines and presets. If the checkpoint is on the hub, the command downloads the headers
    of the weight files, but not the weights.

    Example: dlm-export inspect examples/demo-denoiser
    """
    with local(checkpoint, headers_only=True) as found:
        if (found.path / "manifest.json").is_file():
            _inspect_bundle(found.path, as_json)
        else:
            _inspect_checkpoint(found, str(checkpoint), overrides(values), as_json)


def _inspect_bundle(folder: Path, as_json: bool) -> None:
    from dlm_export.bundle.manifest import read_manifest
    from dlm_export.bundle.prompt_reuse import prompt_reuse_of

    manifest = read_manifest(folder)
    if as_json:
        print_json(manifest | {"prompt_reuse": asdict(prompt_reuse_of(manifest))})
    else:
        print_bundle(folder, manifest)


def _inspect_checkpoint(found: Located, name: str, changed: Overrides, as_json: bool) -> None:
    from dlm_export import families
    from dlm_export.checkpoints import tokenizer
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.families.base import table_type
    from dlm_export.graph import PRECISIONS
    from dlm_export.planning.roofline import cache_bytes_by_type

    opened = Checkpoint(found.path)
    network = families.read_network(opened, changed)
    # This call raises an error if a tensor is missing or unexpected, or has a wrong shape.
    tensors = families.check_tensors(opened, network)
    text = tokenizer.read(opened, network)
    kinds = {
        "tokenizer": text.tokenizer is not None,
        "chat_template": text.chat_template is not None and text.chat_failure is None,
    }
    table = table_type(network, tensors.stored_type)
    memory = {
        name: _memory(network, element_bytes, min(table.itemsize, element_bytes))
        for name, element_bytes in PRECISIONS.items()
    }
    accepted = changed.accept_unknown or ()
    unread = [key for key in opened.config.unread() if key not in accepted]
    if as_json:
        print_json(
            {
                "checkpoint": name,
                "revision": None if found.hub is None else found.hub.revision,
                "parameters": network.parameter_count(),
                "stored_bytes": opened.weight_bytes,
                "quantisation": None
                if opened.quantisation is None
                else opened.quantisation.as_dict(),
                "notes": opened.notes,
                "unread_config_keys": unread,
                "network": network.as_dict(),
                "memory": memory,
                "cache_bytes_per_token": cache_bytes_by_type(network),
                **kinds,
            }
        )
        return
    dtypes = ", ".join(sorted({info.dtype for info in opened.tensors.values()}))
    click.echo(
        one_line(f"{name}: {network.family} ({families.FAMILIES[network.family].description})")
    )
    if found.hub is not None:
        click.echo(f"revision {found.hub.revision}; only the headers of the weights were read")
    active = network.active_parameter_count()
    met = "" if active == network.parameter_count() else f", {active:,} of them per token,"
    click.echo(
        f"{network.parameter_count():,} parameters{met} in {len(opened.tensors)} tensors of {dtypes}"
    )
    if opened.quantisation is not None:
        click.echo(
            f"quantised: {opened.quantisation}; --precision stored keeps its codes and scales"
        )
    for note in opened.notes:
        click.echo(f"Note: {one_line(note)}", err=True)
    if unread:
        told = f"config.json has keys that dlm-export does not know. `build` stops unless you accept them: {', '.join(unread)}"
        click.echo(f"Note: {one_line(told)}", err=True)
    click.echo(
        ", ".join(
            f"{name.replace('_', ' ')}: {'yes' if there else 'no'}" for name, there in kinds.items()
        )
    )
    print_network(network)
    rows = [
        [
            n,
            format_bytes(m["weights_bytes"]),
            format_bytes(m["cache_bytes_per_token"]),
            format_bytes(m["cache_bytes"]),
        ]
        for n, m in memory.items()
    ]
    print_table(
        "Memory",
        ["precision", "weights", "keys and values a token", "for the longest canvas"],
        rows,
    )
    print_caches("Keys and values", cache_bytes_by_type(network))
    if (words := _window_words(network)) is not None:
        click.echo(words)
    block = None if network.blocks_after_prompt else network.visible_block
    if block is not None and block > 1:
        click.echo(
            f"Only finished blocks are kept: (ceil(T / {block}) - 1) * {block} of T tokens on the "
            f"canvas, at most {_kept(network):,}"
        )


def _window_words(c: NetworkSpec) -> str | None:
    """Say which layers keep only some of the keys and values of a long canvas."""
    if c.cache_window is None:
        return None
    windowed = sum(window is not None for window in c.cache_windows())
    further = format_bytes(c.cache_bytes_of(1, 0, 4))
    return (
        f"{windowed} of {len(c.layers)} layers have a window, and store at most {c.window_tokens:,} tokens of a "
        f"canvas: {c.cache_window:,} in the window, and those of one pass. In fp32, each further token takes {further}. "
        "On GPUs, these layers store all tokens"
    )


def _kept(c: NetworkSpec) -> int:
    """Return how many tokens of the longest canvas are cached: all, or all blocks but the last."""
    block = 1 if c.blocks_after_prompt else c.visible_block
    return c.max_canvas_length if block is None else (-(-c.max_canvas_length // block) - 1) * block


def _memory(c: NetworkSpec, element_bytes: int, table_bytes: int) -> dict[str, int]:
    """Compute the bytes of weights and cache. A table may have wider elements than the rest."""
    from dlm_export.planning.roofline import Costs

    per_token = c.cache_bytes(element_bytes)
    return {
        "weights_bytes": Costs(c, {}, element_bytes, table_bytes).weight_bytes,
        "cache_bytes_per_token": per_token,
        "cache_bytes": c.canvas_bytes(_kept(c), element_bytes),
    }


def print_network(network: NetworkSpec) -> None:
    """Print the description of a network. Consecutive equal layers share one table row."""
    fields = (
        "architecture",
        "vocab_size",
        "hidden_size",
        "tied_head",
        "max_canvas_length",
        "shift",
    )
    ids = {
        "mask": network.mask_token_id,
        "end": network.eos_token_ids,
        "padding": network.pad_token_id,
    }
    rows = [[name.replace("_", " "), str(getattr(network, name))] for name in fields]
    rows.append(["token ids", ", ".join(f"{name} {value}" for name, value in ids.items())])
    e, h = network.embedding, network.head
    embedding = {
        f"{e.positions} learned positions": e.positions,
        f"from row {e.first_position}": e.first_position,
        f"{e.token_types} token types": e.token_types,
        f"{network.norm_kind} norm": e.norm,
    }
    head = {
        f"{network.norm_kind} norm": h.final_norm,
        f"transform with {h.transform}{' and a bias' * h.transform_bias}": h.transform,
        "bias": h.bias,
    }
    for name, extras in (("embedding", embedding), ("head", head)):
        words = ", ".join(words for words, there in extras.items() if there)
        rows.append([name, words or "no additions"])
    print_table("Network", ["", ""], rows)
    runs: list[list[Any]] = []
    for i, layer in enumerate(network.layers):
        if runs and runs[-1][2] == layer:
            runs[-1][1] = i
        else:
            runs.append([i, i, layer])
    rows = [
        [f"{first}..{last}" if last > first else str(first), *_layer_words(layer)]
        for first, last, layer in runs
    ]
    print_table("Layers", ["", "attention", "positions", "MLP", "norms"], rows)


def _layer_words(layer: LayerSpec) -> tuple[str, str, str, str]:
    from dlm_export.network.spec import MlpSpec

    a, mlp, rope = layer.attention, layer.mlp, layer.attention.rope
    visible = a.visibility if a.block_length is None else f"{a.visibility} of {a.block_length}"
    if a.has_causal_drafts:
        visible = f"causal, drafts of {a.block_length}"
    extras = {
        f"window {a.window}": a.window is not None,
        "q/k norm": a.qk_norm,
        "q/k/v bias": a.qkv_bias,
        "bias": a.out_bias,
    }
    heads = f"{a.heads} heads of {a.head_size}" + (f", {a.kv_heads} of keys" if a.group > 1 else "")
    attention = ", ".join([visible, heads, *(name for name, there in extras.items() if there)])
    positions = "none" if rope is None else f"theta {rope.theta:g}"
    if rope is not None:
        positions += f", {rope.fraction:g} of a head" * (rope.fraction < 1)
        if rope.scaling is not None:
            positions += f", {rope.scaling.kind} scaling, factor {rope.scaling.factor:g}"
    if isinstance(mlp, MlpSpec):
        inside = f"{mlp.size}, {mlp.activation}" + ", no gate" * (not mlp.is_gated)
        inside += ", bias" * mlp.bias
    else:
        r = mlp.router
        inside = f"{mlp.active} of {mlp.count} experts of {mlp.size}, {mlp.activation}"
        inside += "" if r.block_experts is None else f", {r.block_experts} in a block"
        inside += f", one of {mlp.shared_size} for all" * (mlp.shared_size > 0)
        inside += f"; by {r.score}" + f" in {r.active_groups} of {r.groups} groups" * (r.groups > 1)
        inside += "" if r.bias is None else f" and a bias of the {r.bias}"
        inside += ", renormalised" * r.renormalise + f", times {r.scale:g}" * (r.scale != 1)
    norms = f"{layer.norm_kind}: {', '.join(layer.norms)}; eps {layer.norm_eps:g}"
    return attention, positions, inside, norms


def print_bundle(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Print the network, precision, default loop, files and engines of a bundle."""
    from dlm_export.bundle.manifest import network_of
    from dlm_export.targets import sm_text
    from dlm_export.tensorrt.engine import joins_experts
    from dlm_runtime.cache_dtypes import CACHE_ROWS

    loop, audits = manifest["loop"], manifest.get("audits", {})
    network, cache = manifest["network"], loop["graph"]["cache_dtype"]
    per_token = format_bytes(network_of(manifest).cache_bytes(*CACHE_ROWS[cache]))
    for line in (
        f"{folder}: a bundle of {network['architecture']}, {network['parameters']:,} parameters",
        f"precision {manifest['precision']['name']}, for {', '.join(manifest['targets'])}; {cache} cache, {per_token} a token",
        f"presets: {', '.join(loop['presets'])}",
        default_words(manifest),
        *_verified_words(manifest),
        _reuse_words(manifest),
    ):
        click.echo(one_line(line))
    click.echo(_embedding_words(manifest))
    if manifest["targets"] == ["cuda"] and "layers" in manifest["precision"]:
        click.echo(_cuda_words(network_of(manifest), manifest["precision"]["layers"]))
    if (words := _window_words(network_of(manifest))) is not None:
        click.echo(words)
    if "device_file" in loop["graph"] and network_of(manifest).mixtures():
        computed = "all experts" if joins_experts(folder, manifest) else "the chosen experts"
        click.echo(f"On GPUs, a pass computes {computed} of a layer for every token")
    print_network(network_of(manifest))
    print_table(
        "Files",
        ["", "size"],
        [[name, format_bytes(entry["bytes"])] for name, entry in manifest["files"].items()],
    )
    if "kernels" in manifest:
        print_kernels(manifest["kernels"])
    if "effort" in manifest:
        print_effort(manifest["effort"])
    rows = [
        [
            name,
            ", ".join(sm_text(sm) for sm in entry["sm"]),
            f"{entry['builder']} {entry['version']}",
            *_audited(audits.get(name)),
        ]
        for name, entry in loop.get("engines", {}).items()
    ]
    if rows:
        print_table(
            "Engines",
            ["target", "SM", "builder", "layers held in", "fallbacks", "on the device"],
            rows,
        )


def _verified_words(manifest: Mapping[str, Any]) -> list[str]:
    """Say which presets have no effort levels, because the text does not depend on their settings."""
    presets = manifest["loop"]["presets"]
    named = [name for name, policy in presets.items() if policy["commit"] == "verify"]
    if not named:
        return []
    return [
        f"no effort levels for {', '.join(named)}: the text does not depend on the passes; `effort` fits their block length"
    ]


def _reuse_words(manifest: Mapping[str, Any]) -> str:
    """Say whether requests can reuse prompts, and how many reusable tokens fit into 1 GiB."""
    from dlm_export.bundle.prompt_reuse import prompt_reuse_of

    reuse = prompt_reuse_of(manifest)
    if reuse.refusal is not None:
        return f"prompts cannot be reused: {reuse.refusal}"
    where = "" if manifest["targets"] == ["cuda"] else " on a CPU"
    return (
        f"prompts can be reused{where}, in pages of {reuse.page_tokens} tokens; "
        f"{reuse.tokens_per_gib:,} tokens fit into 1 GiB"
    )


def _embedding_words(manifest: Mapping[str, Any]) -> str:
    """Describe the embedding table's type, and whether the network's head uses the same table."""
    from dlm_export.network.spec import HEAD

    precision, tied = manifest["precision"], manifest["network"]["tied_head"]
    stored = precision.get("embedding_dtype") or precision.get("recipe", {}).get("embedding")
    if stored is None and tied:
        stored = precision.get("layers", {}).get(HEAD)
    told = f"embedding table in {stored or 'the type of the activations'}"
    return f"{told}, stored once: the head multiplies by it" if tied else told


def _cuda_words(network: NetworkSpec, formats: Mapping[str, str]) -> str:
    """Say how many quantised layers have fast kernels in ONNX Runtime's CUDA provider."""
    from dlm_runtime.precision import FORMATS

    fast = []
    for path, layer in network.quantisable().items():
        chosen = FORMATS[formats[path]]
        if chosen.weights is not None:
            is_fast = network.slow_on_cuda(layer, chosen) is None
            size = layer.count * chosen.weight_bytes(layer.inputs, layer.outputs)
            fast.append((is_fast, size))
    share = sum(size for is_fast, size in fast if is_fast) / max(1, sum(size for _, size in fast))
    count = sum(is_fast for is_fast, _ in fast)
    return (
        f"fast kernels on CUDA: {count} of {len(fast)} quantised layers, {share:.1%} of their bytes"
    )


def _audited(audit: Mapping[str, Any] | None) -> list[str]:
    """Return an engine's table cells: formats of its layers, number of fallbacks, and memory."""
    if audit is None:
        return ["-"] * 3
    held = ", ".join(f"{count} {held}" for held, count in Counter(audit["layers"].values()).items())
    return [held, str(len(audit["fallbacks"])), format_bytes(audit["device_bytes"])]
