"""What a checkpoint or a bundle is: ``inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_export.cli.options import CHECKPOINT, SOURCE_OPTIONS, json_option, options, overrides
from dlm_export.cli.printing import format_bytes, print_json, print_table

if TYPE_CHECKING:
    from dlm_export.families.base import Overrides
    from dlm_export.network.denoiser import NetworkSpec


@click.command()
@click.argument("checkpoint", type=CHECKPOINT)
@options(SOURCE_OPTIONS)
@json_option
def inspect(checkpoint: Path, as_json: bool, **values: Any) -> None:
    """Show what a checkpoint is: family, parameters, network, memory a precision; or a bundle: files, engines, presets.

    Example: dlm-export inspect examples/demo-denoiser
    """
    if (checkpoint / "manifest.json").is_file():
        _inspect_bundle(checkpoint, as_json)
    else:
        _inspect_checkpoint(checkpoint, overrides(values), as_json)


def _inspect_bundle(folder: Path, as_json: bool) -> None:
    import dlm_runtime

    with dlm_runtime.open(folder, engine="none") as bundle:
        manifest = bundle.manifest
    if as_json:
        print_json(manifest)
    else:
        print_bundle(folder, manifest)


def _inspect_checkpoint(path: Path, changed: Overrides, as_json: bool) -> None:
    from dlm_export import families
    from dlm_export.checkpoints import tokenizer
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.graph import PRECISIONS

    opened = Checkpoint(path)
    network = families.read_network(opened, changed)
    weights = families.Weights(opened, network)  # names what is missing, extra or wrongly shaped
    text = tokenizer.read(opened, network)
    kinds = {"tokenizer": text.tokenizer is not None, "chat_template": text.chat_template is not None}
    memory = {name: _memory(network, element_bytes) for name, element_bytes in PRECISIONS.items()}
    if as_json:
        print_json(
            {
                "checkpoint": str(path),
                "parameters": network.parameter_count(),
                "stored_bytes": opened.weight_bytes,
                "quantisation": None if opened.quantisation is None else opened.quantisation.as_dict(),
                "notes": weights.notes,
                "network": network.as_dict(),
                "memory": memory,
                **kinds,
            }
        )
        return
    dtypes = ", ".join(sorted({info.dtype for info in opened.tensors.values()}))
    click.echo(f"{path}: {network.family} ({families.FAMILIES[network.family].description})")
    click.echo(f"{network.parameter_count():,} parameters in {len(opened.tensors)} tensors of {dtypes}")
    if opened.quantisation is not None:
        click.echo(f"quantised: {opened.quantisation}; --precision stored keeps its codes and scales")
    for note in weights.notes:
        click.echo(f"Note: {note}", err=True)
    click.echo(", ".join(f"{name.replace('_', ' ')}: {'yes' if there else 'no'}" for name, there in kinds.items()))
    print_table("NetworkSpec", ["", ""], [[name, str(value)] for name, value in network.as_dict().items()])
    rows = [
        [n, format_bytes(m["weights_bytes"]), format_bytes(m["cache_bytes_per_token"]), format_bytes(m["cache_bytes"])]
        for n, m in memory.items()
    ]
    print_table("Memory", ["precision", "weights", "keys and values a token", "for the longest canvas"], rows)


def _memory(c: NetworkSpec, element_bytes: int) -> dict[str, int]:
    per_token = 2 * c.layers * c.kv_heads * c.head_size * element_bytes
    return {
        "weights_bytes": c.parameter_count() * element_bytes,
        "cache_bytes_per_token": per_token,
        "cache_bytes": per_token * c.max_canvas_length,
    }


def print_bundle(folder: Path, manifest: Mapping[str, Any]) -> None:
    """What a bundle is: denoiser, precision, files, engines."""
    from dlm_export.targets import sm_text

    click.echo(f"{folder}: a bundle of {manifest['architecture']}, {manifest['denoiser']['parameters']:,} parameters")
    cache = manifest["graph"]["cache_dtype"]
    click.echo(f"precision {manifest['precision']['name']}, for {', '.join(manifest['targets'])}; {cache} cache")
    click.echo(f"presets: {', '.join(manifest['presets'])}; default {manifest['default_preset']}")
    print_table("Files", ["", "size"], [[name, format_bytes(entry["bytes"])] for name, entry in manifest["files"].items()])
    rows = [
        [
            name,
            ", ".join(sm_text(sm) for sm in entry["sm"]),
            f"{entry['builder']} {entry['version']}",
            ", ".join(f"{count} {held}" for held, count in Counter(entry["audit"]["layers"].values()).items()),
            str(len(entry["audit"]["fallbacks"])),
            format_bytes(entry["device_bytes"]),
        ]
        for name, entry in manifest.get("engines", {}).items()
    ]
    if rows:
        print_table("Engines", ["target", "SM", "builder", "layers held in", "fallbacks", "on the device"], rows)
