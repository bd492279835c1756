"""Made-up results of a quantised bundle.

The made-up results contain every section that report.py can print.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlm_calibration.metrics import Run, summarise_runs
from dlm_calibration.samples import Sample

RATIOS = [0.05 + i / 10 for i in range(10)]
HOSTILE = (
    "</pre><script>alert('x')</script><img src=x onerror=alert(1)>&\x00\u202e\ud800 {{ 7 * 7 }} $x$"
)
ROLES = (
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.out",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
)


def made_up_effort() -> dict[str, Any]:
    points = [
        {"changes": {"threshold": 0.5 + i / 10}, "quality": 0.6 + i / 20, "nfe": 4.0 + i * i}
        for i in range(5)
    ]
    levels = dict(
        zip(
            ("instant", "low", "medium", "high"),
            (points[0], points[1], points[2], points[4]),
            strict=True,
        )
    )
    return {
        "preset": "fast-dllm",
        "quality": "task",
        "samples": 11,
        "curve": points,
        "levels": levels,
    }


def made_up_manifest() -> dict[str, Any]:
    layers = {
        f"blocks.{i}.{role}": "fp8" if "attention" in role else "nvfp4"
        for i in range(64)
        for role in ROLES
    }
    layers["blocks.11.mlp.down"] = "high"
    layers["blocks.12.mlp.experts.0.down_projection_with_a_long_name"] = "int8-dynamic"
    return {
        "producer": {"name": "dlm-export", "version": "0.1.0"},
        "loop": {"vocab_size": 32000, "max_canvas_length": 256, "graph": {"simulated": True}},
        "network": {
            "family": "llada",
            "architecture": "LLaDAModelLM",
            "layers": 12,
            "hidden_size": 768,
            "parameters": 134_000_000,
        },
        "targets": ["cpu"],
        "precision": {
            "name": "mixed",
            "recipe": {
                "default": "nvfp4",
                "formats": {"attention": {"format": "fp8", "observer": "mse"}},
                "keep": ["lm_head"],
            },
            "layers": layers,
            "high_precision": ["lm_head", "embedding", *(f"blocks.{i}.norm_1" for i in range(12))],
            "calibration": None,
            "threshold": None,
        },
        "effort": made_up_effort(),
        "files": {"denoiser.onnx": {"bytes": 1_200_000, "sha256": "a1" * 32}},
    }


def right_answers(theirs: list[int], ours: list[int]) -> dict[str, Any]:
    """Return the section of right answers for given answers, as a build writes it."""
    answers = {"right": Run([1], "yes", 1), "wrong": Run([2], "no", 1)}
    runs = [[answers["right" if right else "wrong"] for right in side] for side in (theirs, ours)]
    samples = [Sample(np.array([0, 1]), 1, "yes", "a prompt")] * len(theirs)
    found: dict[str, Any] = summarise_runs(samples, ["p"] * len(theirs), *runs, seed=0)[
        "right_answers"
    ]
    return found


def made_up_accuracy() -> dict[str, Any]:
    buckets = [
        {
            "mask_ratio": round(ratio, 2),
            "positions": 1000 + 400 * i,
            "reference_ce": 0.4 + 3 * ratio**1.5,
            "candidate_ce": (0.4 + 3 * ratio**1.5) * (1.003 + 0.012 * ratio),
            "ce_increase": 0.003 + 0.012 * ratio,
            "ce_increase_interval": [-0.001 + 0.009 * ratio, 0.006 + 0.016 * ratio],
            "top1": 0.995 - 0.03 * ratio,
            "top1_interval": [0.99 - 0.03 * ratio, 0.998 - 0.03 * ratio],
            "top5": 0.999 - 0.01 * ratio,
            "kl_mean": 0.002 + 0.01 * ratio,
            "kl_p95": 0.01 + 0.05 * ratio,
        }
        for i, ratio in enumerate(RATIOS)
    ]
    overall = {key: value for key, value in buckets[6].items() if key != "mask_ratio"}
    names = [f"blocks.{i}.{role}" for i in range(12) for role in ROLES]
    same = {
        "prompt": "turn the lights on",
        "answer": None,
        "reference": '{"call": 1}',
        "candidate": '{"call": 1}',
    }
    differing = {
        "prompt": HOSTILE,
        "answer": '{"call": "set_light", "room": "bedroom", "percent": 40}',
        "reference": '{"call": "set_light", "room": "bedroom", "percent": 40}',
        "candidate": '{"call": "set_light", "room": "bathroom", "percent": 40}',
    }
    curve = [
        {"threshold": t / 100, "quality": 0.5 + 0.3 * (t / 100) ** 0.5, "nfe": 8 + 12 * t / 100}
        for t in range(50, 100, 7)
    ]
    return {
        "judgement": {
            "reference": "checkpoints/of/one/long/path/LLaDA-8B-Instruct, fp32",
            "candidate": "demo mixed",
            "data": {"samples": 200, "sha256": "c3" * 32, "seed": 1},
            "effort": "full",
            "policy": {"commit": "threshold", "threshold": 0.9, "block_length": 32},
            "buckets": buckets,
            "overall": {
                **overall,
                "reference_bits_per_byte": 1.2345,
                "candidate_bits_per_byte": 1.2411,
            },
            "frontier": {
                "buckets": [
                    {
                        "mask_ratio": round(r, 2),
                        "states": 90 + i,
                        "jaccard": 0.99 - r / 9,
                        "committed": 400 if i else 0,
                        "flips": i,
                    }
                    for i, r in enumerate(RATIOS)
                ],
                "jaccard": 0.941,
                "committed": 3600,
                "flips": 45,
                "flip_rate": 0.0125,
                "flip_rate_interval": [0.009, 0.017],
                "kl_mean": 0.0123,
            },
            "free_running": {
                "prompts": 64,
                "exact_match": 0.8125,
                "exact_match_interval": [0.7, 0.89],
                "token_agreement": 0.961,
                "first_divergence_median": 17.0,
                "reference_nfe": [6 + i * 7 % 11 for i in range(64)],
                "candidate_nfe": [6 + i * 7 % 13 for i in range(64)],
                "nfe_ratio": 1.031,
                "nfe_ratio_interval": [0.99, 1.07],
                "right_answers": right_answers([1] * 51 + [0] * 13, [1] * 50 + [0] * 14),
                "samples": [
                    {**differing, "reference_nfe": 9, "candidate_nfe": 11},
                    {**same, "reference_nfe": 4, "candidate_nfe": 4},
                ],
            },
            "noise_floor": {"ce_increase": 0.0004, "top1": 0.9991, "kl_mean": 0.0001},
            "layers": [
                {
                    "layer": n,
                    "format": "nvfp4",
                    "kl": 0.001 / (i + 1),
                    "frontier_kl": 0.004 / (i + 1),
                }
                for i, n in enumerate(names)
            ],
            "layers_method": "fisher",
            "threshold": {
                "preset": "fast-dllm",
                "original": {"threshold": 0.9, "quality": 0.781, "nfe": 18.8},
                "reference": {"threshold": 0.9, "quality": 0.79, "nfe": 18.0},
                "refitted": {"threshold": 0.92, "quality": 0.79, "nfe": 19.0},
                "reached": True,
                "quality": "task",
                "curve": curve,
                "verdict": "raised",
                "samples": 32,
                "difference": 0.0,
                "interval": [-0.02, 0.02],
            },
            "budgets": [
                {"name": "max_ce_increase", "limit": 0.01, "value": 0.0108, "passed": False}
                | {"interval": [0.009, 0.0126], "is_clear": False},
                {"name": "min_top1", "limit": 0.97, "value": 0.9755, "passed": True}
                | {"interval": [0.9705, 0.9785], "is_clear": True},
            ],
            "passed": False,
        },
        "calibration": {
            "samples": 128,
            "states": 1024,
            "sources": {"masked": 512, "trajectory": 410, "clean": 102},
            "data": {"name": "commands.jsonl", "sha256": "d4" * 32, "samples": 128},
            "states_sha256": "e5" * 32,
            "seed": 0,
            "observer": "mse",
            "layers": [
                {
                    "layer": name,
                    "amax": 12.5 + i,
                    "p999": 8.25,
                    "p9999": 11.0,
                    "kurtosis": 31.0 + i,
                    "drift": 1 + 40 / (i + 3),
                    "masked_amax": 12.5,
                    "committed_amax": 9.0,
                    "clean_amax": 7.0,
                    "by_bucket": [
                        None if i == 2 and b == 3 else 3 * (1 + 40 / (i + 3)) ** (b / 9)
                        for b in range(10)
                    ],
                }
                for i, name in enumerate(names)
            ],
        },
        "parity": None,
    }


FILES = {
    "denoiser.onnx": 1_200_000,
    "denoiser.onnx.data": 92_000_000,
    "tokenizer.json": 1_400_000,
    "manifest.json": 9_000,
}
