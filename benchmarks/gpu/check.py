"""Check on a GPU that bundles for the target ``cuda`` give the same results as on the CPU.

    python -m benchmarks.gpu.check --json check.json
    python -m benchmarks.gpu.check --provider cpu --json rehearsal.json      # no GPU: the same steps on a CPU

The script builds small networks with random weights, one for each family and precision, and the
demo. Then it compares the execution provider with the CPU provider. Both run the same device graph.

- "range": the largest difference of the logits of a pass, relative to the range of the logits.
- "tokens": the share of equal tokens, for each kind of request. Random networks decide between
  nearly equal logits, so some tokens may differ in fp16 and bf16. "scheduler alone" compares the
  provider's scheduler with the provider's requests one by one.
- "parity": whether ``dlm-export verify`` succeeds. For bundles without quantised weights, this
  command compares the logits with PyTorch on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import DEMO

FAMILIES = (
    "llada",
    "dream",
    "a2d_qwen3",
    "fast_dllm_v2",
    "sdar",
    "llada2",
    "llada_moe",
    "nemotron",
    "stable_diffcoder",
    "wedlm",
    "bert",
    "roberta",
    "modern_bert",
    "sdar_moe",
    "rnd1",
)
MIXTURES: dict[str, dict[str, Any]] = {
    "sdar_moe": {"architecture": "SDARMoeForCausalLM", "block_size": 4},
    "rnd1": {"architecture": "RND1LM"},
}
PRECISIONS = ("fp16", "bf16", "int8", "int4")
NEW = 32
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"type": "integer"}},
    "required": ["on", "level"],
    "additionalProperties": False,
}


def build(work: Path, family: str, precision: str) -> tuple[Path, Path, str]:
    """Build a bundle. Returns the checkpoint, the bundle and the last line of an error."""
    bundle = work / f"{family}-{precision}"
    checkpoint = DEMO if family == "demo" else work / family
    if (bundle / "manifest.json").is_file():
        return checkpoint, bundle, ""
    command = [sys.executable, "-m", "dlm_export.cli", "build", str(checkpoint)]
    command += ["--target", "cuda", "--precision", precision, "-o", str(bundle), "--no-verify"]
    if family in ("fast_dllm_v2", "stable_diffcoder"):
        command += ["--mask-token-id", "90"]
    if precision.startswith("int4"):
        command += ["--solver", "nearest"]
    done = subprocess.run(command, capture_output=True, text=True)
    told = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return checkpoint, bundle, told if done.returncode else ""


def requests(bundle: Any, is_text: bool) -> dict[str, list[int]]:
    """Return the tokens of each kind of request. An error is returned as text."""
    given = [5 + 7 * i % 41 for i in range(21)]
    made: dict[str, Any] = {
        "default": lambda: bundle.generate(tokens=given, new_tokens=NEW, stop="none").tokens,
        "block": lambda: (
            bundle.generate(
                tokens=given,
                new_tokens=NEW,
                stop="none",
                block_length=8,
                commit="static",
                steps_per_block=4,
            ).tokens
        ),
        "guided": lambda: (
            bundle.generate(tokens=given, new_tokens=NEW, stop="none", cfg_scale=0.5).tokens
        ),
        "batch": lambda: [
            token
            for done in bundle.generate_batch(
                tokens=[given, [*given[:-1], 9], given[:13]], new_tokens=NEW, stop="none"
            )
            for token in done.tokens
        ],
    }
    for cache in ("none", "prefix", "dual"):
        made[cache] = lambda cache=cache: (
            bundle.generate(
                tokens=given, new_tokens=NEW, stop="none", cache=cache, block_length=8
            ).tokens
        )

    def scheduled() -> list[int]:
        with bundle.scheduler() as scheduler:
            jobs = [
                scheduler.submit(tokens=given[: 9 + 3 * i], new_tokens=NEW, stop="none")
                for i in range(4)
            ]
            return [token for job in jobs for token in job.result(60).tokens]

    made["scheduler"] = scheduled
    made["one by one"] = lambda: [
        token
        for i in range(4)
        for token in bundle.generate(tokens=given[: 9 + 3 * i], new_tokens=NEW, stop="none").tokens
    ]
    if is_text:
        made["schema"] = lambda: (
            bundle.generate(prompt="dim the lamp to 30", new_tokens=NEW, schema=SCHEMA).tokens
        )
        made["infill"] = lambda: bundle.infill("turn <mask> the lamp", lengths=4).tokens
    found: dict[str, Any] = {}
    for name, ask in made.items():
        try:
            found[name] = list(ask())
        except Exception as err:
            found[name] = f"{type(err).__name__}: {err}"
    return found


def compare(bundle: Path, provider: str, is_text: bool) -> dict[str, Any]:
    """Compare the provider with the CPU provider."""
    import dlm_runtime

    canvas = [5 + 3 * i % 89 for i in range(48)]
    with dlm_runtime.open(bundle, engine="onnxruntime", provider="cpu") as one:
        wanted, expected = one.logits(canvas), requests(one, is_text)
    with dlm_runtime.open(bundle, engine="onnxruntime", provider=provider) as other:
        got, found = other.logits(canvas), requests(other, is_text)
        told: dict[str, Any] = {"engine": other.engine}
    told["range"] = float(np.abs(got - wanted).max() / np.ptp(wanted))
    told["top1"] = float((got.argmax(-1) == wanted.argmax(-1)).mean())
    told["tokens"] = {}
    pairs = {name: (tokens, found[name]) for name, tokens in expected.items()}
    pairs["scheduler alone"] = (found["one by one"], found["scheduler"])
    for name, (tokens, others) in pairs.items():
        if isinstance(tokens, str) or isinstance(others, str):
            told["tokens"][name] = (
                "same error" if tokens == others else f"{tokens} | {others}"[:400]
            )
        else:
            same = [a == b for a, b in zip(tokens, others, strict=False)]
            told["tokens"][name] = round(sum(same) / max(len(tokens), len(others)), 3)
    return told


def verify(checkpoint: Path, bundle: Path, provider: str) -> str:
    command = [sys.executable, "-m", "dlm_export.cli", "verify", str(bundle)]
    command += ["--checkpoint", str(checkpoint), "--provider", provider]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return (
        "ok" if done.returncode == 0 else f"exit {done.returncode}: {' / '.join(lines[-3:])[-400:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--families", default=",".join((*FAMILIES, "demo")))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--jobs", type=int, default=8, help="builds that run at the same time")
    parser.add_argument("--work", type=Path, help="folder that keeps checkpoints and bundles")
    parser.add_argument("--build-only", action="store_true", help="build the bundles and stop")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import checkpoints

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        cases = [
            (family, precision)
            for family in options.families.split(",")
            for precision in options.precisions.split(",")
        ]
        for family in {family for family, _ in cases} - {"demo"}:
            if (work / family).exists():
                continue
            config = (
                checkpoints.qwen3_moe_config(**MIXTURES[family])
                if family in MIXTURES
                else getattr(checkpoints, f"{family}_config")()
            )
            checkpoints.write_checkpoint(work / family, config)
        began = time.monotonic()
        with ThreadPoolExecutor(options.jobs) as pool:
            built = dict(zip(cases, pool.map(lambda case: build(work, *case), cases), strict=True))
        print(f"built {len(cases)} bundles in {time.monotonic() - began:.0f} s", flush=True)
        if options.build_only:
            return 0
        for family, precision in cases:
            checkpoint, bundle, error = built[family, precision]
            row: dict[str, Any] = {"family": family, "precision": precision}
            if error:
                row["failed"] = error
            else:
                try:
                    row |= compare(bundle, options.provider, family == "demo")
                    if precision in ("fp16", "bf16"):
                        row["parity"] = verify(checkpoint, bundle, options.provider)
                except Exception as err:
                    row["failed"] = f"{type(err).__name__}: {err}"
                    traceback.print_exc()
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
