"""Measure the time and memory of each step from a checkpoint of real size to generated tokens.

    python -m benchmarks.speed.real_size [--model llada-8b] [--layers 32] [--precisions int8,int4]
        [--tokenizer FOLDER] [--keep] [--json FILE] [-- BUILD OPTIONS]
    python -m benchmarks.speed.real_size --layers 4 --precisions int8 -- --no-verify

The checkpoint has the tensors, the widths, the type (bf16) and the shards of a released model, and
random weights. Arguments after ``--``, such as ``--judged``, ``--calib-samples`` and
``--no-verify``, are passed to every ``dlm-export build``.

Each step runs in a new process. For each step, the script reports the seconds in total and of each
stage, the highest anonymous memory, and the highest mapped memory. It also reports how many bytes
the step read from the disk and wrote to the disk, and the bytes of its read and write calls. Before
each step, the script drops the files from the system's cache. The script also measures how fast
this machine reads, writes and computes.

With ``--tokenizer``, the folder's tokenizer.json and tokenizer_config.json become part of the
checkpoint. The script then starts ``dlm-export serve`` for each bundle, and asks for an answer that
follows a JSON schema.

With the model llada-8b, the script also runs ``inspect`` and ``plan`` for a checkpoint of 100 B
parameters, which contains only headers and no weights. At the end, the script removes all files.
With --keep, it does not remove them, and the next run uses them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.expert_models import MODELS as MIXTURES
from benchmarks.shapes import DLM_EXPORT, ROOT, machine
from benchmarks.speed.watching import Watched, watched

# The import of shapes adds the tests' folder to the path.
from checkpoints import SHAPES, llada_config  # isort: skip

IDS = {
    "vocab_size": 126_464,
    "embedding_size": 126_464,
    "mask_token_id": 126_336,
    "eos_token_id": 126_081,
    "pad_token_id": 126_081,
}
LARGE = {
    "d_model": 10_240,
    "n_heads": 80,
    "n_kv_heads": 80,
    "mlp_hidden_size": 28_672,
    "max_sequence_length": 4096,
}
LARGE_LAYERS = 76  # 100 B parameters


def _llada(layers: int) -> dict[str, Any]:
    """LLaDA-8B (arXiv:2502.09992)."""
    return llada_config(
        **IDS,
        d_model=4096,
        n_layers=layers,
        n_heads=32,
        n_kv_heads=32,
        mlp_hidden_size=12_288,
        max_sequence_length=4096,
    )


@dataclass(frozen=True)
class Real:
    """A released model.

    ``passes`` are the passes to measure, in the form of ``bench --passes``. ``loop`` has the
    options of ``run`` and ``bench`` for the loop.
    """

    layers: int
    config: Callable[[int], dict[str, Any]]
    passes: str
    new_tokens: int = 32
    loop: tuple[str, ...] = ()


MODELS = {
    "llada-8b": Real(32, _llada, "32,224,32", loop=("--set", "steps_per_block=8")),
    "llada2-mini": Real(
        20,
        functools.partial(
            MIXTURES["LLaDA2-mini"].config,
            vocab_size=157_184,
            mask_token_id=156_895,
            eos_token_id=151_645,
            pad_token_id=151_643,
            first_k_dense_replace=1,
            intermediate_size=5120,
            max_position_embeddings=32_768,
        ),
        "32,224,32;256,256,1",
    ),
    "diffusion-gemma": Real(
        30,
        functools.partial(MIXTURES["DiffusionGemma"].config, vocab_size=262_144),
        "256,256,256;256,256,1;32,224,32",
        new_tokens=256,
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "temperature": {"type": "integer", "minimum": -90, "maximum": 60},
        "sky": {"enum": ["clear", "cloudy", "rain", "snow"]},
    },
    "required": ["city", "temperature", "sky"],
    "additionalProperties": False,
}
SHARD_BYTES = 4 << 30
POOL = 1 << 24  # all tensors are slices of this many random values
PORT = 8643
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


class Values:
    """Random weights in bf16, for which activations keep a magnitude of about 1.

    The scales are those of the random checkpoints of the tests.
    """

    def __init__(self, is_gemma: bool) -> None:
        self.is_gemma = is_gemma
        self.rng = np.random.default_rng(0)
        self.pool = self.rng.standard_normal(POOL, np.float32)
        self.scaled: dict[tuple[float, float], np.ndarray] = {}

    def moments(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return the mean and the deviation of the values of a tensor."""
        if len(shape) == 1:
            if self.is_gemma and name.endswith("k_norm.weight"):
                return 2 / math.sqrt(shape[0]), 0.2 / math.sqrt(shape[0])
            return (0.0 if name.endswith("bias") else 1.0), 0.1
        if self.is_gemma and name.endswith("embed_tokens.weight"):
            return 0.0, 3 / math.sqrt(shape[-1])
        is_table = name.endswith(("wte.weight", "word_embeddings.weight"))
        return 0.0, 1.0 if is_table else 1 / math.sqrt(shape[-1])

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Yield the values of a tensor in pieces, as the bits of bf16."""
        moments = self.moments(name, shape)
        if moments not in self.scaled:
            mean, deviation = np.float32(moments)
            drawn = (mean + deviation * self.pool).view(np.uint32) >> 16
            self.scaled[moments] = drawn.astype(np.uint16)
        bits, left = self.scaled[moments], math.prod(shape)
        while left:
            # Each piece starts at a new random place, so no two pieces are equal.
            start = int(self.rng.integers(POOL // 2))
            piece = bits[start : start + min(left, POOL // 2)]
            left -= piece.size
            yield piece


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint."""
    return SHAPES[config["architectures"][0]](config)


def write_checkpoint(folder: Path, config: dict[str, Any], *, has_data: bool) -> int:
    """Write config.json, the index and its shards.

    Returns the bytes of the weights. If ``has_data`` is false, the function writes only the
    headers. The files then have the right sizes, but are sparse files without weights.
    """
    shapes = shapes_of(config)
    files = shards(shapes)
    values = Values("text_config" in config) if has_data else None
    shutil.rmtree(folder, ignore_errors=True)  # a run that ended early may have left files
    folder.mkdir(parents=True)
    weight_map, total = {}, 0
    for i, names in enumerate(files):
        file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        text, size = header({name: shapes[name] for name in names})
        with (folder / file).open("wb") as out:
            out.write(text)
            for name in names if values else ():
                for piece in values.pieces(name, shapes[name]):
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


def serve(bundle: Path) -> dict[str, Any]:
    """Ask a server of the bundle for an answer that follows ``SCHEMA``, twice, and print a row."""
    import jsonschema
    import openai

    forget(bundle)
    began = time.perf_counter()
    command = [*DLM_EXPORT, "serve", str(bundle), "--port", str(PORT), "--no-log"]
    with subprocess.Popen(command) as process:
        watching = Watched(process)
        try:
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", timeout=3600
            )
            while True:
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    if process.poll() is not None:
                        raise SystemExit(f"serve ended with {process.returncode}") from None
                    time.sleep(0.2)
            ready, answers = time.perf_counter() - began, []
            for _ in range(2):
                began = time.perf_counter()
                answer = client.chat.completions.create(
                    model=bundle.name,
                    messages=[{"role": "user", "content": "How is the weather in Rome?"}],
                    max_tokens=64,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
                    },
                )
                told = answer.choices[0].message.content
                jsonschema.validate(json.loads(told), SCHEMA)
                answers.append((time.perf_counter() - began, answer.usage.completion_tokens, told))
        finally:
            process.terminate()
    row = {"step": f"serve {bundle.name}", "ready_s": ready, "answers": answers, **watching.row()}
    for seconds, tokens, told in answers:
        print(f"    valid: {tokens} tokens in {seconds:.1f} s: {told!r}", flush=True)
    print(
        f"    ready in {ready:.1f} s, {row['peak_rss_bytes'] / 2**30:.2f} GiB resident", flush=True
    )
    return row | {"exit": 0}


def carry(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run inspect and plan, and then build, run, bench and serve for each precision."""
    checkpoint, real, keep = folder / "checkpoint", MODELS[arguments.model], arguments.keep
    layers, precisions = arguments.layers or real.layers, arguments.precisions.split(",")
    config = real.config(layers)
    parameters = sum(math.prod(shape) for shape in shapes_of(config).values())
    # The size of an int8 bundle, which is the largest of the usual bundles. It has one byte per
    # weight (including padding) and two more per value of the embedding table.
    text = config.get("text_config", config)
    hidden = text.get("hidden_size") or text["d_model"]
    bundle_bytes = 1.05 * parameters + 3 * text["vocab_size"] * hidden
    if all(precision.startswith(("int4", "nvfp4")) for precision in precisions):
        bundle_bytes = 0.62 * parameters + 3 * text["vocab_size"] * hidden
    kept = (checkpoint / "config.json").exists()
    if kept and json.loads((checkpoint / "config.json").read_text()) != config:
        raise SystemExit(
            f"{checkpoint} is not {arguments.model} with {layers} layers: remove {folder} first"
        )
    require_room(
        folder, 2 * parameters * (not kept) + bundle_bytes * (len(precisions) if keep else 1)
    )
    told = f"{arguments.model}, {layers} layers, {parameters / 1e9:.2f} B parameters"
    if kept:
        print(f"{told}, of a run before", flush=True)
    else:
        began = time.perf_counter()
        size = write_checkpoint(checkpoint, config, has_data=True)
        print(f"{told}, {size / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(arguments.tokenizer / name, checkpoint)
    rows = [
        step("inspect", ["inspect", str(checkpoint)], checkpoint),
        step("plan", ["plan", str(checkpoint), "--targets", "cpu,rtx5090,h100"], checkpoint),
    ]
    for precision in precisions:
        bundle = folder / f"bundle-{precision}"
        options = ["-o", str(bundle), "--precision", precision, *arguments.build_options]
        built = step(f"build {precision}", ["build", str(checkpoint), *options], checkpoint)
        rows.append(built)
        if built["exit"]:
            continue
        tokens = ",".join(str(token) for token in range(100, 132))
        length = ["--max-new-tokens", str(real.new_tokens)]
        run = ["run", str(bundle), "--tokens", tokens, *length, *real.loop]
        rows.append(step(f"run {precision}", run, bundle))
        length = ["--prompt-tokens", "32", "--new-tokens", str(real.new_tokens)]
        bench = ["bench", str(bundle), "--rounds", "3", "--passes", real.passes, *length]
        rows.append(step(f"bench {precision}", [*bench, *real.loop], bundle))
        if arguments.tokenizer:
            rows.append(serve(bundle))
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
    parser.add_argument("--model", choices=MODELS, default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the release has")
    parser.add_argument("--precisions", default="int8,int4,nvfp4")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json, to serve text")
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
        rows = carry_headers(folder) if arguments.model == "llada-8b" else []
        rows += carry(folder, arguments)
        if arguments.json:
            found = {
                "machine": machine(),
                "measured": measured,
                "model": arguments.model,
                "layers": arguments.layers or MODELS[arguments.model].layers,
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
