"""The denoisers that the benchmarks use: the demo, and checkpoints with random bf16 weights.

The random checkpoints have the layouts of LLaDA and SDAR. They are written once, under build/.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "benchmarks"
DEMO = ROOT / "examples" / "demo-denoiser"
sys.path.insert(0, str(ROOT / "tests"))

DLM_EXPORT = [sys.executable, "-m", "dlm_export.cli"]

SHAPES: dict[str, dict[str, Any]] = {
    "134M": {
        "d_model": 768,
        "n_layers": 12,
        "n_heads": 12,
        "n_kv_heads": 12,
        "mlp_hidden_size": 2048,
        "vocab": 32_000,
    },
    "1B": {
        "d_model": 2048,
        "n_layers": 16,
        "n_heads": 16,
        "n_kv_heads": 16,
        "mlp_hidden_size": 5632,
        "vocab": 50_304,
    },
}

TIED: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
    },
    "1.7B": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
    },
    "4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
}
"""The shapes of Qwen3 with a tied embedding, which SDAR uses: 8 key and value heads of size 128,
and a vocabulary of 151,936 tokens.
"""


def quickly(precision: str) -> tuple[str, ...]:
    """Return build options for random weights.

    Calibration can be short, because its results do not change the time of a pass.
    """
    few = ("--calib-samples", "4", "--calib-states", "4")
    return ("--no-verify", *(() if precision in ("fp32", "fp16", "bf16") else few))


def random_checkpoint(name: str, config: dict[str, Any], shards: int = 1) -> Path:
    """Return the folder of a random checkpoint in bf16. The checkpoint is written once.

    ``config`` comes from tests/checkpoints.py.
    """
    path = FOLDER / f"checkpoint-{name}"
    if not path.is_dir():
        import torch
        from checkpoints import write_checkpoint

        partial = path.with_suffix(".partial")
        write_checkpoint(partial, config, dtype=torch.bfloat16, shards=shards)
        partial.rename(path)
    return path


def build_command(source: Path, output: Path, *arguments: str) -> list[str]:
    return [*DLM_EXPORT, "build", str(source), "-o", str(output), *arguments]


def built(source: Path, name: str, *arguments: str) -> Path:
    """Return the bundle of a checkpoint. The bundle is built once."""
    path = FOLDER / f"bundle-{name}"
    if not path.is_dir():
        command = build_command(source, path, *arguments)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def checkpoint(name: str, layers: int | None = None) -> Path:
    """Return the folder of the demo, or of a random checkpoint.

    ``name`` is "demo", or a key of ``SHAPES`` or ``TIED``. For keys of ``SHAPES``, ``layers`` may
    change the number of layers.
    """
    if name == "demo":
        return DEMO
    from checkpoints import llada_config, sdar_config

    if name in TIED:
        heads = {"num_key_value_heads": 8, "head_dim": 128}
        ids = {
            "vocab_size": 151_936,
            "mask_token_id": 151_669,
            "eos_token_id": 151_645,
            "pad_token_id": 151_643,
        }
        tied = {"tie_word_embeddings": True, "max_position_embeddings": 4096}
        return random_checkpoint(name, sdar_config(**TIED[name], **heads, **ids, **tied), shards=4)
    shape = dict(SHAPES[name])
    shape["n_layers"] = layers or shape["n_layers"]
    vocab = shape.pop("vocab")
    ids = {
        "vocab_size": vocab,
        "embedding_size": vocab,
        "mask_token_id": vocab - 1,
        "eos_token_id": vocab - 2,
    }
    config = llada_config(**shape, **ids, pad_token_id=vocab - 2, max_sequence_length=4096)
    return random_checkpoint(name if layers is None else f"{name}-{layers}", config, shards=4)


def bundle_of(size: str, precision: str) -> Path:
    """Return the bundle of the denoiser ``size``. The bundle is built once."""
    options = ("--no-verify",) if size == "demo" else quickly(precision)
    return built(checkpoint(size), f"{size}-{precision}", "--precision", precision, *options)


def text_bundle(layers: int | None = None) -> Path:
    """Return a bundle with the layers of the 134 M denoiser and the tokenizer of the demo. The
    weights are random, in INT8. ``layers`` may change the number of layers. The bundle is built
    once.
    """
    from checkpoints import llada_config

    shape = {name: value for name, value in SHAPES["134M"].items() if name != "vocab"}
    demo = json.loads((DEMO / "config.json").read_text())
    kinds = ("vocab_size", "embedding_size", "mask_token_id", "eos_token_id", "pad_token_id")
    ids = {kind: demo[kind] for kind in kinds}
    shape["n_layers"] = layers or shape["n_layers"]
    name = "text" if layers is None else f"text-{layers}"
    source = random_checkpoint(name, llada_config(**shape, **ids, max_sequence_length=512))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, source)
    return built(source, f"{name}-int8", "--precision", "int8", *quickly("int8"))


def machine() -> dict[str, Any]:
    """Return this machine's hardware, and the versions of the installed software."""
    import platform
    from importlib import metadata

    from dlm_export.machine import this_machine

    packages = {
        name: metadata.version(name) for name in ("torch", "onnxruntime", "onnx", "dlm-export")
    }
    return this_machine() | packages | {"python": platform.python_version()}
