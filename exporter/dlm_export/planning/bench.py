"""Measures the speed and memory of a bundle on this machine, for ``dlm-export bench``.

All measurements run in the native runtime, in one process, in this order:

1. Generations of a single request. After step 1, the benchmark records the process's peak memory,
   which is the amount of memory that a service needs.
2. Generations of several requests at once.
3. Requests that start with the same tokens, with and without the reuse of these tokens.
4. Single passes of the requested sizes.
5. The machine's memory bandwidth and arithmetic rates. ``roofline`` needs them to compute the
   shortest possible time of each pass.

Measuring the machine's rates needs onnx. All other measurements need only the base install.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dlm_calibration.precisions import FORMATS
from dlm_calibration.samples import read_samples
from dlm_export.bundle.default_loop import default_loop
from dlm_export.bundle.manifest import network_of, table_bytes_of
from dlm_export.graph import PRECISIONS
from dlm_export.machine import this_machine
from dlm_export.memory import peak_rss_bytes
from dlm_export.opening import Opening
from dlm_export.planning import roofline
from dlm_export.planning.cost import check_telling, cost_of
from dlm_export.planning.energy import Meter, meter_of
from dlm_export.planning.loads import measure_service
from dlm_export.planning.peer import compare_with_peer
from dlm_export.planning.prefix import (
    PrefixLoad,
    check_prefix,
    measure_prefix,
    random_prompts,
)
from dlm_export.progress import Progress, Silent
from dlm_runtime import Bundle, Generation, RequestError, providers
from dlm_runtime.cache_dtypes import CACHE_ROWS
from dlm_runtime.manifest import check_manifest

CANVAS = 256  # default canvas length in tokens
# By default, passes over the last 4, 8 and 32 tokens of the canvas are measured.
BLOCKS = (4, 8, 32)
# The default canvas length and numbers of tokens per pass if ``BenchOptions.cost`` is true.
TELLING_CANVAS, TELLING_TOKENS = 1024, (8, 32, 128, 512)
PASSES_SYNTAX = "write tokens,cached,rows, several with semicolons: 32,224,32;256,0,256"
WARM_UP = 3  # number of untimed passes of each size; engines capture a CUDA graph in the third pass
# A generation takes long, so it is repeated only a fifth as often as a single pass.
GENERATION_SHARE = 5


@dataclass(frozen=True)
class PassSize:
    """The size of a pass: computed tokens, cached tokens, and computed rows of logits."""

    tokens: int
    cached: int
    rows: int


@dataclass(frozen=True)
class BenchOptions:
    """Options that select the measurements. An option that is ``None`` has its default value.

    By default, the canvas length is 256 tokens. The benchmark measures passes over the last 4, 8
    and 32 tokens of the canvas, and a pass over the whole canvas. By default, a generation starts
    with 128 prompt tokens and adds 128 new tokens.
    """

    opening: Opening = field(default_factory=Opening)
    passes: tuple[PassSize, ...] | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    preset: str | None = None
    # Changes to the preset's fields. The field ``stop`` cannot be changed.
    policy: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 15
    # Each element is a number of requests that run together. The benchmark always measures a single
    # request too.
    batches: tuple[int, ...] = (1,)
    # If true, fit a linear model to the times of passes. This option also changes the default
    # passes to the passes that the fit needs.
    cost: bool = False
    # A file that contains prompts in the format of calibration data. Each prompt is measured as one
    # request.
    data: Path | None = None
    samples: int = 64  # maximum number of prompts from ``data``
    # If ``prefix`` is set, also measure requests whose prompts start with the same ``prefix``
    # tokens. Each prompt then continues with ``prompt_tokens`` tokens of its own.
    prefix: int | None = None
    prefix_requests: int = 16  # number of these requests that are submitted at once
    # The time per token of an autoregressive model on this machine. If it is set, the benchmark
    # compares the bundle with this model.
    peer_token_ms: float | None = None


def parse_passes(text: str) -> tuple[PassSize, ...]:
    """Parse sizes of passes such as ``32,224,32;256,0,256``.

    Raises RequestError, which explains the syntax.
    """
    sizes = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        if not re.fullmatch(r"\d{1,7}\s*,\s*\d{1,7}\s*,\s*\d{1,7}", part):
            raise RequestError(f"pass {part!r}: {PASSES_SYNTAX}")
        sizes.append(PassSize(*map(int, part.split(","))))
    if not sizes:
        raise RequestError(f"no pass is given: {PASSES_SYNTAX}")
    return tuple(sizes)


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse counts of requests such as ``1,4,8``.

    Raises RequestError, which explains the syntax.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,3}", part) for part in parts):
        raise RequestError(
            f"batch {text!r}: write numbers of requests with commas, 1 to 4096 each: 1,4,8"
        )
    return tuple(map(int, parts))


def bench(path: Path, options: BenchOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Measure a bundle. Returns the values that ``bench --json`` prints:

    - ``passes``: for each size of a pass, the median time ``ms`` and the quartiles of the time.
      ``limit_ms`` is the shortest possible time by the roofline model, and ``ratio`` is ``ms /
      limit_ms``. ``break_even_tokens`` is the number of tokens that the autoregressive model
      generates in the time ``ms``.
    - ``generation``: the generation of a single request. The request runs several times, and
      ``generation`` describes the run with the median duration. The times in ``parts`` add up to
      ``seconds``.
    - ``batches``: generations of several requests of equal length at once. ``speedup`` is the total
      tokens/s of the requests, divided by the tokens/s of a single request. ``joules_per_token`` is
      the energy of the device, divided by the new tokens.
    - ``energy_source``: the energy counter, NVML or RAPL, or ``None`` if there is no counter.
    - ``cost``: the coefficients of the linear model (the fields of a ``PassCost``), and the errors
      of the fit.
    - ``requests``: the results for the prompts of ``data``. The prompts run one at a time, and each
      generation ends at its end token. A latency is the time that a whole request takes. ``nfe``
      contains the number of passes of each prompt. ``overhead_ms``, ``loads`` and ``paces`` are
      the result of ``measure_service`` for the numbers of requests in ``batches``.
    - ``prefix``: the result of ``measure_prefix``.
    - ``peer``: the result of ``compare_with_peer``.

    Memory sizes are in bytes. If ``options`` does not request a measurement, the measurement's
    entry is ``None``.

    Args:
        path: The bundle's folder.
        options: Options that select the measurements.
        progress: An object that the function notifies when a stage starts and when a stage
            advances.

    Raises:
        CalibrationError: ``data`` cannot be read.
        RequestError: The bundle does not allow the size of a pass or the length of a generation.

    The errors of ``dlm_runtime.open`` are raised too.
    """
    progress = progress or Silent()
    if "stop" in options.policy:
        raise RequestError("bench computes every token that it counts: do not change stop")
    rounds = max(3, options.rounds // GENERATION_SHARE)
    batches = sorted({1, *options.batches})
    with options.opening.open(path) as bundle:
        manifest, engine, is_on_cpu = bundle.manifest, bundle.engine, bundle.is_on_cpu
        check_manifest(manifest, path)
        preset = options.preset or manifest["loop"]["default_preset"]
        sizes = options.passes or (
            _telling_passes(bundle) if options.cost else _fitting_passes(bundle)
        )
        made = list(product(sizes, batches))
        # Ask the runtime to time 0 passes of each size. If a size is impossible, the runtime raises
        # an error now, before the long measurement starts.
        for size, batch in made:
            bundle.time_passes(size.tokens, size.cached, size.rows, 0, batch)
        if options.cost:
            check_telling([{"batch": batch} | asdict(size) for size, batch in made])
        prompts = (
            [] if options.data is None else _read_prompts(bundle, options.data, options.samples)
        )
        load = None
        if options.prefix is not None:
            lengths = options.prefix, *_lengths(bundle, options)
            load = PrefixLoad(*lengths, options.prefix_requests, preset, options.policy)
            check_prefix(bundle, load)
        progress.start("generate", rounds * len(batches))
        meter = meter_of(None if is_on_cpu else providers.parse(options.opening.provider)[1])
        generation = _generate(bundle, options, preset, 1, rounds, progress, meter)
        memory = _memory(manifest, generation, is_on_cpu)
        generations = [
            generation,
            *(
                _generate(bundle, options, preset, batch, rounds, progress, meter)
                for batch in batches[1:]
            ),
        ]
        requests = None
        if prompts:
            requests = _time_requests(bundle, options, preset, prompts, progress)
            how = {"preset": preset, **options.policy}
            how["max_new_tokens"] = requests["max_new_tokens"]
            requests |= measure_service(bundle, prompts, how, batches, progress)
        prefix = None if load is None else measure_prefix(bundle, load, rounds, progress)
        progress.start("passes", len(made))
        passes = []
        for size, batch in made:
            seconds = bundle.time_passes(
                size.tokens, size.cached, size.rows, WARM_UP + options.rounds, batch
            )[WARM_UP:]
            passes.append({"batch": batch} | asdict(size) | _milliseconds(seconds))
            progress.advance()
    progress.start("roofline", 1)
    machine, note = _machine(options.opening.threads, is_on_cpu)
    for row, (size, batch) in zip(passes, made, strict=True):
        row["limit_ms"] = row["ratio"] = row["break_even_tokens"] = None
        if options.peer_token_ms is not None:
            row["break_even_tokens"] = row["ms"] / options.peer_token_ms
        if machine is not None:
            limit_ms = roofline.limit_s(_work(manifest, size, batch), machine.rates()) * 1e3
            row |= {"limit_ms": limit_ms, "ratio": row["ms"] / limit_ms}
    made_up = generation.as_dict()
    return {
        "machine": this_machine(),
        "bundle": {
            "path": str(path),
            "precision": manifest["precision"]["name"],
            "parameters": manifest["network"]["parameters"],
            "engine": engine,
        },
        "threads": options.opening.threads,
        "roofline": None if machine is None else asdict(machine),
        "passes": passes,
        "cost": cost_of(passes) if options.cost else None,
        "generation": made_up,
        "batches": [one.as_batch(generation) for one in generations],
        "energy_source": None if meter is None else meter.source,
        "requests": requests,
        "prefix": prefix,
        "peer": None
        if options.peer_token_ms is None
        else compare_with_peer(options.peer_token_ms, made_up, requests),
        "memory": memory,
        "notes": [note] if note else [],
    }


def _fitting_passes(bundle: Bundle) -> tuple[PassSize, ...]:
    canvas = min(CANVAS, bundle.max_canvas_length)
    blocks = sorted({min(block, max(1, canvas // 2)) for block in BLOCKS})
    return (
        *(PassSize(block, canvas - block, block) for block in blocks),
        PassSize(canvas, 0, canvas),
    )


def _telling_passes(bundle: Bundle) -> tuple[PassSize, ...]:
    """Choose passes that differ in tokens, cached tokens and rows, to fit the cost of a pass."""
    canvas = min(TELLING_CANVAS, bundle.max_canvas_length)
    sizes = []
    for tokens in sorted({min(size, canvas) for size in TELLING_TOKENS}):
        sizes += [
            PassSize(tokens, 0, tokens),
            PassSize(tokens, 0, 1),
            PassSize(tokens, canvas - tokens, tokens),
        ]
    return tuple(dict.fromkeys(sizes))


def _milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    low, median, high = (value * 1e3 for value in statistics.quantiles(seconds, n=4))
    return {"ms": median, "quartiles_ms": [low, high]}


def _seconds(results: Sequence[Generation]) -> float:
    """Add up the times of requests that ran together. Each result has its share of the time."""
    return sum(result.timings["total"] for result in results)


@dataclass(frozen=True)
class _Generation:
    prompt_tokens: int
    new_tokens: int
    preset: str
    changes: Mapping[str, Any]  # changes to the preset's fields
    results: Sequence[Generation]  # one result per request, from the run with the median duration
    joules_per_token: float | None = None  # on average over all runs

    @property
    def seconds(self) -> float:
        return _seconds(self.results)

    @property
    def cache_bytes(self) -> int:
        return sum(result.cache_bytes for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        return len(self.results) * self.new_tokens / self.seconds

    def as_batch(self, alone: _Generation) -> dict[str, Any]:
        return {
            "batch": len(self.results),
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "speedup": self.tokens_per_s / alone.tokens_per_s,
            "joules_per_token": self.joules_per_token,
            "cache_bytes": self.cache_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the values for ``bench --json``. The generation must consist of a single request."""
        (result,) = self.results
        timings = result.timings
        parts = {
            "engine": timings["prefill"] + timings["passes"],
            "selection": timings["selection"],
            "cache": timings["cache"],
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "preset": self.preset,
            "changes": dict(self.changes),
            "nfe": result.nfe,
            "ms_per_pass": timings["total"] * 1e3 / max(1, result.nfe),
            "tokens_per_s": self.tokens_per_s,
            "seconds": timings["total"],
            "parts": parts | {"other": timings["total"] - sum(parts.values())},
        }


def _generate(
    bundle: Bundle,
    options: BenchOptions,
    preset: str,
    batch: int,
    rounds: int,
    progress: Progress,
    meter: Meter | None,
) -> _Generation:
    """Run ``batch`` requests together, several times. Returns the run with the median duration."""
    request = _request(bundle, options, preset, batch)
    results = []
    before = 0.0 if meter is None else meter.joules()
    for _ in range(rounds):
        results.append(bundle.generate_batch(**request))
        progress.advance()
    median = _median(request, options, preset, results)
    if meter is None:
        return median
    tokens = rounds * batch * request["new_tokens"]
    return replace(median, joules_per_token=(meter.joules() - before) / tokens)


def _lengths(bundle: Bundle, options: BenchOptions) -> tuple[int, int]:
    """Return the numbers of prompt tokens and new tokens of a random request."""
    half = max(1, min(CANVAS, bundle.max_canvas_length) // 2)
    return (
        half if options.prompt_tokens is None else options.prompt_tokens,
        half if options.new_tokens is None else options.new_tokens,
    )


def _request(bundle: Bundle, options: BenchOptions, preset: str, batch: int) -> dict[str, Any]:
    """Return the arguments of ``generate_batch`` for ``batch`` random prompts.

    The requests ignore end tokens, so that all requests generate the same number of tokens.
    """
    given, new = _lengths(bundle, options)
    return {
        **options.policy,
        "tokens": random_prompts(bundle, batch, given),
        "new_tokens": new,
        "preset": preset,
        "stop": "none",
        "max_batch": batch,
    }


def _read_prompts(bundle: Bundle, data: Path, count: int) -> list[list[int]]:
    """Read prompts from calibration data. Raises CalibrationError or RequestError."""
    samples = read_samples(
        data,
        bundle.tokenizer,
        eos_token_id=None,
        max_canvas_length=bundle.max_canvas_length,
        limit=count,
        prompts_only=True,
    )
    prompts = [
        sample.tokens[: sample.prompt_length].tolist() for sample in samples if sample.prompt_length
    ]
    if not prompts:
        raise RequestError(f"{data}: contains no prompt: give lines with prompt, or with messages")
    return prompts


def _time_requests(
    bundle: Bundle,
    options: BenchOptions,
    preset: str,
    prompts: Sequence[Sequence[int]],
    progress: Progress,
) -> dict[str, Any]:
    """Run each prompt as a request, one at a time. Returns the latencies, passes and speeds.

    The first prompt runs once before the measurement, to warm up.
    """
    new = bundle.max_new_tokens if options.new_tokens is None else options.new_tokens
    progress.start("requests", 1 + len(prompts))
    results = []
    for prompt in [prompts[0], *prompts]:
        results.append(
            bundle.generate(tokens=prompt, max_new_tokens=new, preset=preset, **options.policy)
        )
        progress.advance()
    results = results[1:]
    seconds = [result.timings["total"] for result in results]
    passes = max(1, sum(result.nfe for result in results))
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)) * 1e3
    return {
        "data": str(options.data),
        "count": len(prompts),
        "max_new_tokens": new,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "p99_ms": float(p99),
        "nfe": [result.nfe for result in results],
        "mean_nfe": statistics.mean(result.nfe for result in results),
        "ms_per_pass": sum(seconds) * 1e3 / passes,
        "tokens_per_pass": sum(result.completion_tokens for result in results) / passes,
        "tokens_per_s": sum(result.completion_tokens for result in results) / sum(seconds),
    }


def _median(
    request: Mapping[str, Any],
    options: BenchOptions,
    preset: str,
    rounds: Sequence[Sequence[Generation]],
) -> _Generation:
    median = sorted(rounds, key=_seconds)[len(rounds) // 2]
    return _Generation(
        len(request["tokens"][0]), request["new_tokens"], preset, options.policy, median
    )


def side_by_side(
    paths: Sequence[Path], options: BenchOptions, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Measure how fast several bundles of one denoiser generate text.

    Each round measures all bundles, so that load from other processes affects all bundles equally.
    All bundles are open at the same time. If ``options`` names no preset, all bundles run the
    default preset of the first bundle.

    Returns a dict for each bundle. The dict contains the values that ``bench`` returns as
    ``generation``, and also ``ms_per_pass`` with its quartiles. Raises the errors of ``bench``.
    """
    progress = progress or Silent()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(options.opening.open(path)) for path in paths]
        preset = options.preset
        if preset is None:
            preset, fitted = default_loop(opened[0].manifest)
            options = replace(options, policy={**fitted, **options.policy})
        requests = [_request(bundle, options, preset, 1) for bundle in opened]
        results: list[list[list[Generation]]] = [[] for _ in opened]
        progress.start("generate", (1 + options.rounds) * len(opened))
        for _ in range(1 + options.rounds):
            for bundle, request, found in zip(opened, requests, results, strict=True):
                found.append(bundle.generate_batch(**request))
                progress.advance()
        told = []
        for bundle, request, (_, *found) in zip(opened, requests, results, strict=True):
            milliseconds = _milliseconds(
                [result.timings["total"] / max(1, result.nfe) for (result,) in found]
            )
            passes = {
                "ms_per_pass": milliseconds["ms"],
                "quartiles_ms_per_pass": milliseconds["quartiles_ms"],
            }
            told.append(
                _median(request, options, preset, found).as_dict()
                | passes
                | {"engine": bundle.engine}
            )
    return told


def _memory(manifest: dict[str, Any], generation: _Generation, is_on_cpu: bool) -> dict[str, Any]:
    """Compare peak memory with weights and cache. On a GPU, the process contains neither."""
    graph = manifest["loop"]["graph"]["file"]
    weights = sum(
        entry["bytes"]
        for name, entry in manifest["files"].items()
        if name in (graph, f"{graph}.data")
    )
    peak, cache = peak_rss_bytes(), generation.cache_bytes
    return {
        "peak_rss_bytes": peak,
        "weights_bytes": weights,
        "cache_bytes": cache,
        "ratio": peak / (weights + cache) if is_on_cpu else None,
    }


def _machine(threads: int, is_on_cpu: bool) -> tuple[roofline.Machine | None, str | None]:
    """Measure the machine's rates. If the measurement is impossible, return the reason instead."""
    if not is_on_cpu:
        return (
            None,
            "no roofline: it is measured on the CPU, but the engine runs on a GPU (`dlm-export targets` has its figures)",
        )
    try:
        return roofline.measure(threads), None
    except ModuleNotFoundError as err:
        if err.name is None or err.name.split(".")[0] not in ("onnx", "onnxruntime"):
            raise
        return (
            None,
            f"no roofline: {err.name} is not installed; install the export extra: pip install 'dlm-export[export]'",
        )


def _work(manifest: dict[str, Any], size: PassSize, batch: int = 1) -> roofline.Work:
    """Count the work of a pass. Formats that a CPU cannot compute count as full precision."""
    layers = manifest["precision"].get("layers", {})
    real = {layer: name for layer, name in layers.items() if not FORMATS[name].is_simulated_on_cpu}
    cache_dtype, network = manifest["loop"]["graph"]["cache_dtype"], network_of(manifest)
    # In quantised bundles for CPUs, the unquantised parts are in fp32. In bundles for GPUs, the
    # unquantised parts have the same type as the cache.
    is_for_cpu = manifest["targets"] == ["cpu"]
    element_bytes = (
        PRECISIONS.get(manifest["precision"]["name"], 4)
        if is_for_cpu
        else CACHE_ROWS[cache_dtype][0]
    )
    costs = roofline.Costs(network, real, element_bytes, table_bytes_of(manifest))
    return costs.work(size.tokens, size.cached, size.rows, batch, cache_dtype=cache_dtype)
