"""Compare how fast this project and other engines fill masked residues of antibodies.

    pip install --no-deps antiberty==0.1.3 sapiens==1.0.5
    python benchmarks/antibody_speed.py [--models antiberty,sapiens-heavy] [--rounds 40] [--json FILE]

A sequence of 120 residues with 18 masked residues is filled in one pass. The contestants are this
project with fp32 and int8, torch with the model class of transformers, and ONNX Runtime with the
graph that torch.onnx exports from that class, in fp32 and with onnxruntime's dynamic int8
quantisation. Each contestant runs in a separate process, with the same number of threads. The
contestants take turns. The script checks that all fp32 contestants choose the same residues.

The script prints medians with quartiles in milliseconds. The first run takes longer, because it
also builds the bundles and the ONNX files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from shapes import ROOT, machine
from timing import interleave, show

import dlm_runtime

OUTPUT = ROOT / "build" / "benchmarks" / "antibodies"
# The heavy chain of an antibody, from the README of Sapiens, with its first residues filled in.
HEAVY = (
    "QVQLVQSGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKNRVTLTTDSSTTTAYMELKSL"
    "QFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS"
)
MASKED = 18  # residues, 15%
REST_S = 0.1  # pause before each turn, until the previous contestant's threads are idle
SPAWN = multiprocessing.get_context("spawn")
ENGINES = (
    "dlm-export fp32",
    "dlm-export int8",
    "torch fp32",
    "ONNX Runtime fp32",
    "ONNX Runtime dynamic int8",
)


def prepare(name: str) -> dict[str, Path]:
    """Write the files of all contestants, unless they exist."""
    # Imported here, because each contestant's process imports this module.
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from residues import write_model
    from transformers import AutoModelForMaskedLM

    from dlm_export.build import BuildOptions, build

    folder = OUTPUT / f"speed-{name}"
    paths = {"checkpoint": folder / "checkpoint"}
    paths |= {precision: folder / precision for precision in ("fp32", "int8")}
    paths |= {"onnx": folder / "model.onnx", "onnx int8": folder / "int8.onnx"}
    if not paths["checkpoint"].is_dir():
        write_model(name, paths["checkpoint"])
    for precision in ("fp32", "int8"):
        if not paths[precision].is_dir():
            options = BuildOptions(precision=precision, check_parity=False)
            build(paths["checkpoint"], paths[precision], options)
    if not paths["onnx int8"].is_file():
        model = AutoModelForMaskedLM.from_pretrained(paths["checkpoint"]).eval()
        ids = torch.full((1, len(HEAVY) + 2), 5)
        torch.onnx.export(model, (ids,), paths["onnx"], dynamo=True, input_names=["input_ids"])
        quantize_dynamic(paths["onnx"], paths["onnx int8"], weight_type=QuantType.QInt8)
    return paths


def canvas_of(tokenizer: Any, mask_token_id: int) -> tuple[list[int], list[int]]:
    """Return the canvas with masked residues, and the masked positions."""
    canvas = tokenizer.encode(HEAVY)
    rows = [int(row) for row in np.linspace(1, len(canvas) - 2, MASKED)]
    for row in rows:
        canvas[row] = mask_token_id
    return canvas, rows


def contestant(engine: str, paths: dict[str, Path], threads: int) -> Callable[[], list[int]]:
    """Return a function that fills the canvas with an engine, and returns the filled tokens."""
    kind = engine.partition(" ")[2]
    precision = kind if engine.startswith("dlm-export") else "fp32"
    bundle = dlm_runtime.open(paths[precision], threads=threads)
    mask_token_id = bundle.mask_token_id
    canvas, rows = canvas_of(bundle.tokenizer, mask_token_id)
    if engine.startswith("dlm-export"):

        def fill() -> list[int]:
            out = bundle.generate(tokens=canvas, max_new_tokens=0, steps=1, block_length=0)
            assert out.nfe == 1
            return [out.tokens[row] for row in rows]

        return fill
    bundle.close()
    run: Callable[[], Any]
    if engine.startswith("torch"):
        import torch
        from transformers import AutoModelForMaskedLM

        torch.set_num_threads(threads)
        model = AutoModelForMaskedLM.from_pretrained(paths["checkpoint"]).eval()
        ids = torch.tensor([canvas])

        def run() -> Any:
            with torch.inference_mode():
                return model(ids).logits.numpy()

    else:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        file = paths["onnx int8" if kind.endswith("int8") else "onnx"]
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        array = np.array([canvas], np.int64)

        def run() -> Any:
            return session.run(None, {"input_ids": array})[0]

    def best() -> list[int]:
        logits = run()[0][rows].copy()
        logits[:, mask_token_id] = -np.inf
        return [int(token) for token in logits.argmax(1)]

    return best


def serve(pipe: Any, engine: str, paths: dict[str, Path], threads: int) -> None:
    """Answer each message with the filled tokens and the seconds. This runs in a new process."""
    run = contestant(engine, paths, threads)
    while pipe.recv():
        run()  # to warm up after the pause
        start = time.perf_counter()
        tokens = run()
        pipe.send((tokens, time.perf_counter() - start))


class Worker:
    """A contestant that runs in a separate process. If two libraries shared a process, the
    busy-waiting threads of one library would slow down the other library.
    """

    def __init__(self, engine: str, paths: dict[str, Path], threads: int) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, engine, paths, threads))
        self.process.start()
        theirs.close()
        self.tokens: tuple[int, ...] = ()

    def turn(self) -> float:
        """Wait, fill the canvas, and return the seconds."""
        time.sleep(REST_S)
        self.pipe.send(True)
        tokens, seconds = self.pipe.recv()
        self.tokens = tuple(tokens)
        return float(seconds)

    def stop(self) -> None:
        self.pipe.send(False)
        self.process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="antiberty,sapiens-heavy")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about: dict[str, Any] = {"machine": machine(), "threads": arguments.threads, "models": {}}
    for name in arguments.models.split(","):
        paths = prepare(name)
        workers = {engine: Worker(engine, paths, arguments.threads) for engine in ENGINES}
        try:
            runs = {engine: worker.turn for engine, worker in workers.items()}
            times = interleave(runs, arguments.rounds)
            filled = {
                worker.tokens for engine, worker in workers.items() if engine.endswith("fp32")
            }
            assert len(filled) == 1, filled
        finally:
            for worker in workers.values():
                worker.stop()
        show(f"{name}, {arguments.threads} threads", times, "torch fp32")
        about["models"][name] = times
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
