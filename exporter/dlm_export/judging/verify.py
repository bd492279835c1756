"""Parity of a bundle with PyTorch: logits a mask-ratio bucket, whole canvases token by token.

What torch says is computed first and kept small (sampled rows, finished canvases), so that the torch denoiser can go
before the bundle's engine comes: the peak is one model, not two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dlm_runtime
from dlm_calibration.states import MASK_RATIOS, mask_independently, random_tokens
from dlm_export import targets
from dlm_export.bundle import network_of
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec
from dlm_export.progress import Progress, Silent
from dlm_runtime import Bundle, Policy
from dlm_runtime.errors import DlmError, RequestError

PROMPT_COUNT, NEW_TOKENS = 2, 16  # of the check at the end of a build
PROMPT_LENGTH = 12  # tokens of a random prompt
ROWS_PER_CANVAS = 16  # logits rows compared a canvas; 126,464 fp32 logits a row are 0.5 MB


class ParityError(DlmError):
    """The bundle does not compute what PyTorch computes."""

    exit_code = 3


@dataclass(frozen=True)
class Tolerance:
    """``relative``: worst logit difference over the logits' range. ``agreement``: share of canvases equal in every token."""

    relative: float
    agreement: float


# fp32: sums of a few thousand terms in another order. fp16: 11-bit significands through every layer; ties may flip tokens.
# quantised, against torch on the same quantised values: an input at a rounding boundary takes the neighbouring code there,
# and where predictions are near-ties, as on random prompts, a token follows it.
# bf16: 8-bit significands, eight times as coarse as fp16's; torch's side stays fp32. Four-bit activations rounded from them
# move between codes in every layer (0.22 of the range was seen), and on random prompts, near-ties all, canvases follow: a wrong
# scale or a lost layer still shows, and judging tells what the format costs.
TOLERANCES = {
    "fp32": Tolerance(2e-4, 1.0),
    "fp16": Tolerance(2e-2, 0.8),
    "bf16": Tolerance(1.6e-1, 0.5),
    "quantised": Tolerance(5e-2, 0.5),
    "quantised, bf16": Tolerance(1.6e-1, 0.25),
    "four-bit activations, bf16": Tolerance(4e-1, 0.0),
}


@dataclass(frozen=True)
class Case:
    """One loop to compare: a prompt under a policy."""

    name: str
    tokens: list[int]
    policy: Policy
    max_new_tokens: int
    steps: int = 0


@dataclass(frozen=True)
class Expected:
    """What torch computed: per canvas its sampled rows and their logits, per case its finished canvas."""

    ratios: list[float]
    canvases: list[np.ndarray]
    rows: list[np.ndarray]
    logits: list[np.ndarray]
    cases: list[Case]
    finished: list[reference.Reference]


@dataclass(frozen=True)
class GraphRow:
    """Parity of one mask-ratio bucket. ``argmax_ties``: rows whose best two are closer than the worst difference."""

    mask_ratio: float
    rows: int
    worst_difference: float
    logit_range: float
    relative: float
    argmax_equal: int
    argmax_ties: int


@dataclass(frozen=True)
class LoopRow:
    """Parity of one policy over its prompts."""

    name: str
    canvases: int
    canvases_equal: int
    nfe: int
    nfe_equal: bool
    first_difference: str | None


@dataclass(frozen=True)
class Parity:
    """The verdict, with what it rests on."""

    precision: str
    tolerance: Tolerance
    graph: list[GraphRow]
    loop: list[LoopRow]

    @property
    def misses(self) -> list[str]:
        """One sentence for everything outside the tolerance; empty when parity holds."""
        found = []
        for row in self.graph:
            if not row.relative <= self.tolerance.relative:
                found.append(
                    f"mask ratio {row.mask_ratio}: logits differ by {row.relative:.2e} of their range, "
                    f"more than {self.tolerance.relative:.1e}"
                )
            if self.precision == "fp32" and row.argmax_equal + row.argmax_ties < row.rows:
                found.append(f"mask ratio {row.mask_ratio}: argmax differs in {row.rows - row.argmax_equal} of {row.rows} rows")
        total = sum(row.canvases for row in self.loop)
        equal = sum(row.canvases_equal for row in self.loop)
        if total and equal < self.tolerance.agreement * total:
            first = next(row.first_difference for row in self.loop if row.first_difference)
            found.append(f"{total - equal} of {total} canvases differ, first {first}")
        if self.tolerance.agreement == 1.0:
            found += [f"{row.name}: NFE differs from the reference" for row in self.loop if not row.nfe_equal]
        return found

    @property
    def summary(self) -> str:
        """The first misses and how many more there are."""
        more = len(self.misses) - 2
        return "; ".join(self.misses[:2]) + (f"; and {more} more" if more > 0 else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as accuracy.json and ``--json`` show them."""
        return asdict(self) | {"passed": not self.misses, "misses": self.misses}


def check_parity(
    folder: Path,
    network: NetworkSpec,
    load: Callable[[], Denoiser],
    presets: dict[str, Policy],
    precision: str,
    *,
    prompts: list[list[int]] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    threads: int = 0,
    engine: str = "onnxruntime",
    progress: Progress | None = None,
) -> Parity:
    """Compare a bundle with a denoiser in torch; random prompts where none are given. ``precision``: of ``TOLERANCES``.

    ``load`` gives the denoiser: torch is done before the bundle is opened, so that only one of them holds weights.
    ``progress`` advances ``parity_units`` times. Raises DlmError.
    """
    progress = progress or Silent()
    if prompts is None:
        prompts = random_prompts(network, PROMPT_COUNT, seed)
        max_new_tokens = max(1, min(max_new_tokens, network.max_canvas_length - len(prompts[0])))
    longest = max(len(prompt) for prompt in prompts)
    room = network.max_canvas_length - longest
    if max_new_tokens > room:
        raise RequestError(
            f"a prompt of {longest} tokens leaves room for {room} on the canvas of {network.max_canvas_length}, "
            f"not for {max_new_tokens}"
        )
    denoiser = load()
    cases = make_cases(presets, prompts, max_new_tokens)
    expected = expect(denoiser, prompts, cases, seed, progress.advance)
    del denoiser
    with dlm_runtime.open(folder, engine=engine, threads=threads, check_hashes=False) as opened:
        return compare(opened, expected, precision, progress.advance)


def parity_units(presets: dict[str, Policy], prompts: int = PROMPT_COUNT) -> int:
    """How often ``check_parity`` advances its progress."""
    return 2 * (len(MASK_RATIOS) + len(make_cases(presets, [[0]] * prompts, 1)))


def require_parity(parity: Parity, where: str) -> None:
    """Raises ParityError with what is outside the tolerance."""
    if parity.misses:
        raise ParityError(f"{where}: {parity.summary}")


def check_host_memory(parameters: int) -> None:
    """DlmError if this machine cannot hold a denoiser in fp32, as the comparison does."""
    available = targets.available_memory_bytes()
    needed = 4 * parameters
    if available is not None and needed > available:
        raise DlmError(
            f"the parity check holds the denoiser in fp32, {needed:,} bytes, and {available:,} are available. "
            "Pass --no-verify, and run `dlm-export verify` on a larger machine."
        )


def check_same_denoiser(folder: Path, manifest: dict[str, Any], network: NetworkSpec) -> None:
    """DlmError if a bundle's manifest describes another denoiser than a checkpoint's."""
    theirs = network_of(manifest)
    for name in network.__dataclass_fields__:
        ours, found = getattr(network, name), getattr(theirs, name)
        if name == "layers" and len(ours) == len(found) and ours != found:
            i = next(i for i, pair in enumerate(zip(ours, found, strict=True)) if pair[0] != pair[1])
            name, ours, found = f"layer {i}", ours[i], found[i]
        elif name == "layers":
            name, ours, found = "number of layers", len(ours), len(found)
        if ours != found:
            raise DlmError(f"{folder}: built from another checkpoint: its {name} is {found}, the checkpoint's is {ours}")


def make_cases(bundle_presets: dict[str, Policy], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Case]:
    """Every preset, and fast-dllm's loop with each cache, over every prompt; blocks of half the generation."""
    policies = dict(bundle_presets)
    if "fast-dllm" in policies:
        policies["fast-dllm, no cache"] = policies["fast-dllm"].with_fields({"cache": "none"})
        policies["fast-dllm, prefix cache"] = policies["fast-dllm"].with_fields({"cache": "prefix"})
        policies["fast-dllm, factor"] = policies["fast-dllm"].with_fields({"commit": "factor"})
    cases = []
    for name, policy in policies.items():
        block_length = min(policy.block_length, max(1, max_new_tokens // 2))
        shortened = policy.with_fields({"block_length": block_length})
        cases += [Case(name, list(prompt), shortened, max_new_tokens) for prompt in prompts]
    return cases


def random_prompts(network: NetworkSpec, count: int, seed: int) -> list[list[int]]:
    """Seeded prompts of random ids without special ones, at most ``PROMPT_LENGTH`` and half a canvas long."""
    c, rng = network, np.random.default_rng(seed)
    length = max(1, min(PROMPT_LENGTH, c.max_canvas_length // 2))
    return [random_tokens(length, c.vocab_size, (c.mask_token_id, *c.eos_token_ids), rng).tolist() for _ in range(count)]


@torch.no_grad()
def expect(
    denoiser: Denoiser, prompts: Sequence[Sequence[int]], cases: list[Case], seed: int, on_done: Callable[[], None]
) -> Expected:
    """Run torch: logits of every prompt, followed by random ids, at every mask ratio; the reference loop on every case.

    ``on_done`` is called ``len(MASK_RATIOS) + len(cases)`` times.
    """
    c = denoiser.network
    rng = np.random.default_rng(seed)
    expected = Expected([], [], [], [], cases, [])
    for ratio in MASK_RATIOS:
        for prompt in prompts:
            tail = random_tokens(max(1, min(48, c.max_canvas_length - len(prompt))), c.vocab_size, (c.mask_token_id,), rng)
            canvas = np.array([*prompt, *tail])[: c.max_canvas_length]
            canvas = mask_independently(canvas, ratio, c.mask_token_id, rng, protected=min(len(prompt), len(canvas) - 1))
            rows = np.sort(rng.choice(len(canvas), size=min(ROWS_PER_CANVAS, len(canvas)), replace=False))
            ids = torch.from_numpy(canvas).unsqueeze(0)
            features, _ = denoiser.hidden(ids, torch.arange(len(canvas)).unsqueeze(0))
            expected.ratios.append(ratio)
            expected.canvases.append(canvas)
            expected.rows.append(rows)
            expected.logits.append(denoiser.project(features[0, torch.from_numpy(rows)]).float().numpy())
        on_done()
    for case in cases:
        expected.finished.append(reference.generate(denoiser, case.tokens, case.policy, case.max_new_tokens, case.steps))
        on_done()
    return expected


def compare(bundle: Bundle, expected: Expected, precision: str, on_done: Callable[[], None]) -> Parity:
    """Run the bundle on the same canvases and cases. ``on_done`` is called as often as by ``expect``."""
    graph = []
    for ratio in dict.fromkeys(expected.ratios):
        parts = [
            (bundle.logits(canvas.tolist())[rows], logits)
            for r, canvas, rows, logits in zip(expected.ratios, expected.canvases, expected.rows, expected.logits, strict=True)
            if r == ratio
        ]
        graph.append(_graph_row(ratio, np.concatenate([ours for ours, _ in parts]), np.concatenate([t for _, t in parts])))
        on_done()
    loop: dict[str, LoopRow] = {}
    for case, wanted in zip(expected.cases, expected.finished, strict=True):
        fields = case.policy.as_dict()
        out = bundle.generate(tokens=case.tokens, max_new_tokens=case.max_new_tokens, steps=case.steps, **fields)
        difference = _first_difference(case, wanted, out.tokens, out.nfe)
        row = loop.get(case.name, LoopRow(case.name, 0, 0, 0, True, None))
        loop[case.name] = LoopRow(
            case.name,
            row.canvases + 1,
            row.canvases_equal + (out.tokens == wanted.tokens),
            row.nfe + out.nfe,
            row.nfe_equal and out.nfe == wanted.nfe,
            row.first_difference or difference,
        )
        on_done()
    return Parity(precision, TOLERANCES[precision], graph, list(loop.values()))


def _graph_row(ratio: float, ours: np.ndarray, theirs: np.ndarray) -> GraphRow:
    worst = float(np.abs(ours - theirs).max()) if np.isfinite(ours).all() else float("inf")
    span = float(theirs.max() - theirs.min())
    best_two = np.partition(theirs, -2, axis=-1)[:, -2:]
    is_equal = ours.argmax(-1) == theirs.argmax(-1)
    is_tie = ~is_equal & (best_two[:, 1] - best_two[:, 0] <= 2 * worst)
    return GraphRow(ratio, len(theirs), worst, span, worst / max(span, 1e-30), int(is_equal.sum()), int(is_tie.sum()))


def _first_difference(case: Case, wanted: reference.Reference, tokens: list[int], nfe: int) -> str | None:
    for position, (theirs, ours) in enumerate(zip(wanted.tokens, tokens, strict=True)):
        if theirs != ours:
            return f"{case.name}: position {position} is {ours}, the reference has {theirs}"
    return None if nfe == wanted.nfe else f"{case.name}: {nfe} passes, the reference took {wanted.nfe}"
