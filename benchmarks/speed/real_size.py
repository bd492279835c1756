"""Measure the time and memory of each step from an 8 B checkpoint to generated tokens.

The script also runs ``inspect`` and ``plan`` for a checkpoint of 100 B parameters.

    python -m benchmarks.speed.real_size [--layers 32] [--precisions int8,int4,nvfp4] [--keep] [--json
        FILE] [-- BUILD OPTIONS]
    python -m benchmarks.speed.real_size --layers 4 --precisions int8 -- --no-verify

The checkpoint has the released shape of LLaDA-8B (arXiv:2502.09992; hidden size 4096, 32 heads, MLP
size 12288, vocabulary 126464, bf16, shards with an index) and random weights. Arguments after
``--``, such as ``--judged``, ``--calib-samples`` and ``--no-verify``, are passed to every
``dlm-export build``.

Each step runs in a new process. For each step, the script reports the seconds in total and of each
stage, the highest anonymous memory, and the highest mapped memory. It also reports how many bytes
the step read from the disk and wrote to the disk, and the bytes of its read and write calls. Before
each step, the script drops the files from the system's cache. The script also measures how fast
this machine reads, writes and computes. The checkpoint of 100 B parameters contains only headers
and no weights. At the end, the script removes all files. With --keep, it does not remove them, and
the next run uses them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import DLM_EXPORT, ROOT, machine
from benchmarks.speed.watching import watched

# The import of shapes adds the tests' folder to the path.
from checkpoints import llada_config, llada_shapes  # isort: skip

IDS = {
    "vocab_size": 126_464,
    "embedding_size": 126_464,
    "mask_token_id": 126_336,
    "eos_token_id": 126_081,
    "pad_token_id": 126_081,
}
REAL = {
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12_288,
    "max_sequence_length": 4096,
}
LARGE = {
    "d_model": 10_240,
    "n_heads": 80,
    "n_kv_heads": 80,
    "mlp_hidden_size": 28_672,
    "max_sequence_length": 4096,
}
LARGE_LAYERS = 76  # 100 B parameters
SHARD_BYTES = 4 << 30
POOL = 1 << 24  # all tensors are slices of this many random values
PROBE_BYTES = 2 << 30  # size of the file for measuring the disk's speed

Shapes = Mapping[str, tuple[int, ...]]


def shards(shapes: Shapes) -> list[list[str]]:
    """Split the names of tensors into files of about ``SHARD_BYTES``, keeping their order."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if files[-1] and held + size > SHARD_BYTES:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def header(shapes: Shapes) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and the number of bytes that must follow it."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset


def values(
    name: str, shape: tuple[int, ...], pool: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield bf16 weights in pieces, as their bits.

    The weights are normally distributed, with a variance for which activations keep a magnitude of
    about 1. The weights of norms are near one.
    """
    is_norm = len(shape) == 1
    scale = 1.0 if name.endswith("wte.weight") else 1 / math.sqrt(shape[-1])
    scaled = (1 + 0.1 * pool if is_norm else pool * np.float32(scale)).view(np.uint32) >> 16
    bits, left = scaled.astype(np.uint16), math.prod(shape)
    while left:
        # Each piece starts at a new random place, so no two pieces are equal.
        start = int(rng.integers(POOL // 2))
        piece = bits[start : start + min(left, POOL // 2)]
        left -= piece.size
        yield piece


def write_checkpoint(folder: Path, config: dict[str, Any], *, has_data: bool) -> int:
    """Write config.json, the index and its shards.

    Returns the bytes of the weights. If ``has_data`` is false, the function writes only the
    headers. The files then have the right sizes, but are sparse files without weights.
    """
    shapes = llada_shapes(config)
    files = shards(shapes)
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(POOL, np.float32) if has_data else np.empty(0, np.float32)
    shutil.rmtree(folder, ignore_errors=True)  # a run that ended early may have left files
    folder.mkdir(parents=True)
    weight_map, total = {}, 0
    for i, names in enumerate(files):
        file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        text, size = header({name: shapes[name] for name in names})
        with (folder / file).open("wb") as out:
            out.write(text)
            for name in names if has_data else ():
                for piece in values(name, shapes[name], pool, rng):
                    out.write(piece.data)
            out.truncate(len(text) + size)
        weight_map |= dict.fromkeys(names, file)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # config.json is written last. If it exists, all other files are complete.
    (folder / "config.json").write_text(json.dumps(config))
    return total


# ---- Steps ----


def forget(folder: Path) -> None:
    """Ask the system to drop the files in ``folder`` from its cache.

    The next reader then reads them from the disk.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def step(name: str, arguments: list[str], reads: Path) -> dict[str, Any]:
    """Run a command of dlm-export in a separate process and print its row.

    Returns a row of the results, which contains the JSON that the command prints.
    """
    forget(reads)
    text, moved = watched([*DLM_EXPORT, *arguments, "--json"])
    row, seconds = {"step": name, **moved}, moved["seconds"]
    gib = {
        key: row[f"{key}_bytes"] / 2**30
        for key in ("peak_anonymous", "peak_mapped", "peak_rss", "disk_read", "disk_written")
    }
    told = f"{name:24} {seconds:8.1f} s  own {gib['peak_anonymous']:6.2f} GiB  mapped {gib['peak_mapped']:6.2f}  "
    told += f"both {gib['peak_rss']:6.2f}  read {gib['disk_read']:6.2f}  written {gib['disk_written']:6.2f}"
    if row["exit"]:
        print(f"{told}  exit {row['exit']}", flush=True)
        return row
    row["result"] = json.loads(text)
    stages = row["result"].get("stages_s", {}) if isinstance(row["result"], dict) else {}
    print(told + "".join(f"  {stage} {spent:.1f}" for stage, spent in stages.items()), flush=True)
    if arguments[0] == "bench":
        for one in row["result"]["passes"]:
            told = f"T = {one['tokens']}, S = {one['cached']}: {one['ms']:.0f} ms"
            print(
                f"    a pass, {told}, {one['ratio']:.2f} of the limit's {one['limit_ms']:.0f}",
                flush=True,
            )
        held = row["result"]["memory"]
        print(
            f"    {held['peak_rss_bytes'] / 2**30:.2f} GiB resident, {held['ratio']:.2f} of weights and cache",
            flush=True,
        )
    return row


# ---- The machine ----


def disk_rates(folder: Path) -> dict[str, float]:
    """Return how many bytes per second the disk writes and reads, measured with a large file.

    The time of writing includes the flush.
    """
    path, block = folder / "probe", np.random.default_rng(0).bytes(8 << 20)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        written = time.perf_counter()
        forget(folder)
        read = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
        return {
            "write": PROBE_BYTES / (written - began),
            "read": PROBE_BYTES / (time.perf_counter() - read),
        }
    finally:
        path.unlink(missing_ok=True)


def measure_machine(folder: Path) -> dict[str, Any]:
    """Return the rates of disk, memory and arithmetic.

    ``dlm-export bench`` measures memory and arithmetic.
    """
    from dlm_export.planning import roofline

    probe = folder / "disk"
    probe.mkdir(exist_ok=True)
    disk, rates = disk_rates(probe), asdict(roofline.measure(0))
    print(
        f"disk: {disk['write'] / 1e9:.2f} GB/s written, {disk['read'] / 1e9:.2f} read; memory "
        f"{rates['read_bytes_per_s'] / 1e9:.1f} GB/s; multiply-adds: int8 {rates['int8_macs_per_s'] / 1e9:.0f} G/s, "
        f"fp32 {rates['fp32_macs_per_s'] / 1e9:.0f} G/s",
        flush=True,
    )
    return {"disk_write_bytes_per_s": disk["write"], "disk_read_bytes_per_s": disk["read"], **rates}


def require_room(folder: Path, needed: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(
            f"{folder}: needs {needed / 1e9:.1f} GB of disk, only {free / 1e9:.1f} GB are free"
        )


def carry(
    folder: Path, layers: int, precisions: list[str], build_options: list[str], keep: bool
) -> list[dict[str, Any]]:
    """Run inspect and plan, and then build, run and bench for each precision."""
    checkpoint = folder / "checkpoint"
    config = llada_config(n_layers=layers, **REAL, **IDS)
    parameters = sum(math.prod(shape) for shape in llada_shapes(config).values())
    # The size of an int8 bundle, which is the largest of the usual bundles. It has one byte per
    # weight (including padding) and four bytes per value of the embedding table.
    bundle_bytes = 1.05 * parameters + 3 * IDS["vocab_size"] * REAL["d_model"]
    kept = (checkpoint / "config.json").exists()
    if kept and json.loads((checkpoint / "config.json").read_text()) != config:
        raise SystemExit(f"{checkpoint} is not of {layers} layers: remove {folder} first")
    require_room(
        folder, 2 * parameters * (not kept) + bundle_bytes * (len(precisions) if keep else 1)
    )
    told = f"{layers} layers, {parameters / 1e9:.2f} B parameters"
    if kept:
        print(f"{told}, of a run before", flush=True)
    else:
        began = time.perf_counter()
        size = write_checkpoint(checkpoint, config, has_data=True)
        print(f"{told}, {size / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s", flush=True)
    rows = [
        step("inspect", ["inspect", str(checkpoint)], checkpoint),
        step("plan", ["plan", str(checkpoint), "--targets", "cpu,rtx5090,h100"], checkpoint),
    ]
    for precision in precisions:
        bundle = folder / f"bundle-{precision}"
        built = step(
            f"build {precision}",
            ["build", str(checkpoint), "-o", str(bundle), "--precision", precision, *build_options],
            checkpoint,
        )
        rows.append(built)
        if built["exit"]:
            continue
        tokens = ",".join(str(token) for token in range(100, 132))
        run = ["run", str(bundle), "--tokens", tokens, "--max-new-tokens", "32", "--steps", "8"]
        rows.append(step(f"run {precision}", run, bundle))
        bench = [
            "bench",
            str(bundle),
            "--rounds",
            "3",
            "--prompt-tokens",
            "32",
            "--new-tokens",
            "32",
            "--set",
            "steps_per_block=8",
        ]
        rows.append(step(f"bench {precision}", bench, bundle))
        if not keep:
            shutil.rmtree(bundle)
    return rows


def carry_headers(folder: Path) -> list[dict[str, Any]]:
    """Run ``inspect`` and ``plan`` on a checkpoint of 100 B parameters without weights."""
    checkpoint = folder / "headers"
    size = write_checkpoint(
        checkpoint, llada_config(n_layers=LARGE_LAYERS, **LARGE, **IDS), has_data=False
    )
    print(f"headers of {size / 2e9:.0f} B parameters, {size / 1e9:.0f} GB of holes", flush=True)
    return [
        step("inspect 100B", ["inspect", str(checkpoint)], checkpoint),
        step("plan 100B", ["plan", str(checkpoint), "--targets", "cpu,h200,b200"], checkpoint),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=32, help="layers of LLaDA-8B's width; the release has 32"
    )
    parser.add_argument("--precisions", default="int8,int4,nvfp4")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave checkpoint and bundles in build/benchmarks/real-size",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("build_options", nargs="*", metavar="-- BUILD OPTIONS")
    arguments = parser.parse_args()
    folder = ROOT / "build" / "benchmarks" / "real-size"
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the files are removed
    try:
        require_room(folder, PROBE_BYTES)
        measured = measure_machine(folder)
        rows = carry_headers(folder)
        rows += carry(
            folder,
            arguments.layers,
            arguments.precisions.split(","),
            arguments.build_options,
            arguments.keep,
        )
        if arguments.json:
            found = {
                "machine": machine(),
                "measured": measured,
                "layers": arguments.layers,
                "rows": rows,
            }
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    if any(row["exit"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
