"""Compares a bundle's logits and generated text with the results of dlm-export's torch denoiser.

First, the torch denoiser computes all expected results. The torch denoiser is then freed before the
bundle is opened, so that the two denoisers are never in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlm_calibration.precisions import Recipe
from dlm_calibration.states import MASK_RATIOS
from dlm_export import families
from dlm_export.graph import PLAIN_OPSET, experts, trace
from dlm_export.graph.taps import find_taps
from dlm_export.judging.parity import by_layer
from dlm_export.judging.parity.canvases import Canvas, make_canvases, random_prompts
from dlm_export.judging.parity.ties import Decided, find_divergence
from dlm_export.judging.parity.verdict import LoopRow, Parity, compare_logits, tolerance_of
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas as State
from dlm_export.network.loop_turns import start_canvas
from dlm_export.network.pass_plan import Span
from dlm_export.network.spec import NetworkSpec
from dlm_export.opening import ON_CPU, Opening
from dlm_export.progress import Progress, Silent
from dlm_export.quantising.quantisation import Folded, Quantisation
from dlm_export.sources import Source
from dlm_export.tensorrt.engine import joins_experts
from dlm_export.workplace import Workplace
from dlm_runtime import Bundle, Generation, Policy
from dlm_runtime.errors import RequestError

PROMPT_COUNT, NEW_TOKENS = 2, 16  # the default numbers of prompts, and of new tokens per prompt

# The worst difference of the logits on a few canvases is not that of all canvases. So rounding may
# cause a difference that is this many times larger.
TIE_ERROR = 4


@dataclass(frozen=True)
class Case:
    """A decoding run to compare: text that is generated after one prompt with one policy."""

    name: str
    tokens: list[int]
    policy: Policy
    max_new_tokens: int


@dataclass(frozen=True)
class Expected:
    """The expected results, which torch has computed.

    ``logits`` contains the logits of some rows of each canvas. ``runs`` contains each case and its
    generated canvas.
    """

    canvases: list[Canvas]
    logits: list[np.ndarray]
    runs: list[tuple[Case, reference.Reference]]


def check_parity(
    folder: Path,
    source: Source,
    presets: dict[str, Policy],
    precision: str,
    *,
    cache_dtype: str,
    prompts: list[list[int]] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    opening: Opening = ON_CPU,
    progress: Progress | None = None,
) -> Parity:
    """Compare a bundle's logits and generated text with the results of its source in torch.

    Args:
        folder: The bundle.
        source: The source of the bundle.
        presets: Maps names to the policies that generate text.
        precision: The precision of the bundle, a key of ``TOLERANCES``.
        cache_dtype: Type of cached keys and values, as in the manifest. Torch rounds its cache in
            the same way.
        prompts: The token IDs of each prompt. If ``None``, random prompts are used.
        max_new_tokens: The number of tokens to generate after each prompt.
        seed: Seed of random prompts and canvases.
        opening: The options for opening the bundle.
        progress: The progress to report to, which is advanced ``parity_units`` times.

    Raises:
        DlmError: The bundle or its source cannot be run.
    """
    network, progress = source.network, progress or Silent()
    if prompts is None:
        prompts = random_prompts(network, PROMPT_COUNT, seed)
        max_new_tokens = max(1, min(max_new_tokens, network.max_canvas_length - len(prompts[0])))
    longest = max(len(prompt) for prompt in prompts)
    room = network.max_canvas_length - longest
    if max_new_tokens > room:
        raise RequestError(
            f"a prompt of {longest} tokens leaves room for {room} tokens on a canvas of {network.max_canvas_length}, "
            f"not for {max_new_tokens}"
        )
    denoiser = families.load(source.parameters, network)
    cases = make_cases(presets, prompts, max_new_tokens, network)
    expected = expect(denoiser, prompts, cases, seed, progress.advance, cache_dtype)
    del denoiser
    with opening.open(folder, check_hashes=False) as opened:
        tolerance = tolerance_of(precision, cache_dtype, opened.visible_block)
        graph = compare_logits(opened, expected.canvases, expected.logits, progress.advance)
        runs = [_run(opened, *pair, progress.advance) for pair in expected.runs]
    parity = Parity(precision, tolerance, graph, loop_rows(runs))
    if parity.misses and any(run.after for run in runs):
        denoiser = families.load(source.parameters, network)
        worst = max(row.worst_difference for row in graph)
        parity = replace(
            parity, loop=loop_rows([_explain(run, denoiser, worst, cache_dtype) for run in runs])
        )
    return parity


def by_layers(
    parity: Parity,
    folder: Path,
    manifest: Mapping[str, Any],
    source: Source,
    on_done: Callable[[], None],
    workplace: Workplace | None = None,
) -> Parity:
    """Compare each layer of an unquantised bundle with the same layer in torch.

    Use this function for networks with experts. If two experts have nearly equal scores for a
    token, the bundle and torch may choose different experts. Both choices are correct, but all
    later values differ. The function therefore compares the layers one by one with
    ``check_layers``. The result also contains the comparison of whole passes from ``parity``, for
    display only.
    """
    network, graph = source.network, manifest["loop"]["graph"]
    traced = trace.trace_pass(network, parity.precision, is_plain=manifest["opset"] == PLAIN_OPSET)
    taps = find_taps(traced)
    if "device_file" in graph and joins_experts(folder, manifest):
        experts.spread(traced.model, network)
        taps |= find_taps(traced)
    nothing = Quantisation(Recipe(parity.precision, ()), {}, Folded(source.parameters, network))
    found = by_layer.check_layers(
        folder,
        network,
        nothing,
        parity.precision,
        taps,
        cache_dtype=graph["cache_dtype"],
        is_simulated=graph["simulated"],
        on_done=on_done,
        workplace=workplace,
    )
    return replace(found, graph=parity.graph, loop=parity.loop)


def parity_units(
    presets: dict[str, Policy], network: NetworkSpec, prompts: int = PROMPT_COUNT
) -> int:
    """Return the number of units by which ``check_parity`` advances its progress."""
    return 2 * (len(MASK_RATIOS) + len(make_cases(presets, [[0]] * prompts, 1, network)))


def make_cases(
    bundle_presets: dict[str, Policy],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    network: NetworkSpec,
) -> list[Case]:
    """List the decoding runs to compare: each prompt with each policy.

    The policies are the bundle's presets, and these variants of the presets:

    - For block-causal networks without draft passes: each preset that uses a cache, without the
      cache.
    - For networks that are not block-causal: the preset fast-dllm with the commit rule "factor". If
      fast-dllm uses a cache: also fast-dllm without a cache, and with a prefix cache.

    For networks that are not block-causal, the function reduces the block length, so that each run
    has at least two blocks.
    """
    policies = dict(bundle_presets)
    if network.visible_block is not None:
        cached = {
            name: policy
            for name, policy in policies.items()
            if policy.cache != "none" and network.draft_block is None
        }
        policies |= {
            f"{name}, no cache": policy.with_fields({"cache": "none"})
            for name, policy in cached.items()
        }
        return [
            Case(name, list(prompt), policy, max_new_tokens)
            for name, policy in policies.items()
            for prompt in prompts
        ]
    if "fast-dllm" in policies:
        if policies["fast-dllm"].cache != "none":
            policies["fast-dllm, no cache"] = policies["fast-dllm"].with_fields({"cache": "none"})
            prefix = policies["fast-dllm"].with_fields({"cache": "prefix"})
            policies["fast-dllm, prefix cache"] = prefix
        policies["fast-dllm, factor"] = policies["fast-dllm"].with_fields({"commit": "factor"})
    cases = []
    for name, policy in policies.items():
        block_length = min(policy.block_length, max(1, max_new_tokens // 2))
        shortened = policy.with_fields({"block_length": block_length})
        cases += [Case(name, list(prompt), shortened, max_new_tokens) for prompt in prompts]
    return cases


@torch.no_grad()
def expect(
    denoiser: Denoiser,
    prompts: Sequence[Sequence[int]],
    cases: list[Case],
    seed: int,
    on_done: Callable[[], None],
    cache_dtype: str = "float32",
) -> Expected:
    """Compute the expected results in torch: logits on random canvases, and the text of each case.

    ``on_done`` is called once per mask ratio, and once per case.
    """
    expected = Expected(make_canvases(denoiser.network, prompts, seed), [], [])
    for number, canvas in enumerate(expected.canvases, start=1):
        ids = torch.from_numpy(canvas.tokens).unsqueeze(0)
        places = Span.of_canvas(denoiser.network, canvas.tokens).ids(denoiser.network)
        positions = torch.from_numpy(places).unsqueeze(0)
        features, _ = denoiser.hidden(ids, positions, cache_dtype=cache_dtype)
        expected.logits.append(
            denoiser.project(features[0, torch.from_numpy(canvas.rows)]).float().numpy()
        )
        if number % len(prompts) == 0:
            on_done()
    for case in cases:
        done = reference.generate(
            denoiser,
            case.tokens,
            case.policy,
            case.max_new_tokens,
            cache_dtype=cache_dtype,
        )
        expected.runs.append((case, done))
        on_done()
    return expected


@dataclass(frozen=True, eq=False)
class CaseRun:
    """A decoding run of the bundle, and what torch generates.

    ``after`` contains the bundle's canvas after each pass, and is empty if both generate the same
    text with the same number of passes. ``is_tie`` says that rounding explains why the texts
    differ. ``difference`` describes a difference.
    """

    case: Case
    wanted: reference.Reference
    nfe: int
    after: list[State] = field(default_factory=list)
    is_tie: bool = False
    difference: str | None = None


def _run(
    bundle: Bundle, case: Case, wanted: reference.Reference, on_done: Callable[[], None]
) -> CaseRun:
    """Generate the text of a case with the bundle."""
    fields = case.policy.as_dict() | {"tokens": case.tokens, "new_tokens": case.max_new_tokens}
    after: list[State] = []
    out: Generation | None = None
    for event in bundle.stream(**fields):
        after.append(State(np.array(event.canvas), np.array(event.undecided)))
        out = event.result
    assert out is not None  # the last event has a result
    on_done()
    if out.tokens == wanted.tokens and out.nfe == wanted.nfe:
        return CaseRun(case, wanted, out.nfe)
    # The lengths differ only if the denoiser changes the length of canvases.
    pairs = enumerate(zip(wanted.tokens, out.tokens, strict=False))
    said = next(
        (f"position {at} is {b}, the reference has {a}" for at, (a, b) in pairs if a != b),
        f"{len(out.tokens)} tokens in {out.nfe} passes, the reference made {len(wanted.tokens)} in {wanted.nfe}",
    )
    return CaseRun(case, wanted, out.nfe, after, difference=f"{case.name}: {said}")


def _explain(run: CaseRun, denoiser: Denoiser, worst: float, cache_dtype: str) -> CaseRun:
    """Find the pass in which a run first decides differently from torch, and why.

    The run is a tie if an error of the logits of ``TIE_ERROR`` times ``worst`` explains the
    decision. ``worst`` is the worst difference on the canvases that were compared. Passes that rewrite
    a block are not examined, because one pass may change all its tokens.
    """
    if not run.after or denoiser.network.rewrites:
        return run
    passes: list[Decided] = []
    start = start_canvas(run.case.tokens, run.case.max_new_tokens, denoiser.network.mask_token_id)
    reference.fill(
        denoiser,
        start,
        run.case.policy,
        cache_dtype=cache_dtype,
        on_pass=lambda turn, found, logits: passes.append(Decided(turn, found, logits.numpy())),
    )
    network = denoiser.network
    resizing = (network.expand_token_id, network.delete_token_id)
    found = find_divergence(passes, run.after, run.case.policy, resizing)
    if found is None:
        return run
    said = f"{run.case.name}: {found}, but they differ by at most {worst:.2e} elsewhere"
    return replace(run, is_tie=found.needed <= TIE_ERROR * worst, difference=said)


def loop_rows(runs: Sequence[CaseRun]) -> list[LoopRow]:
    by_name: dict[str, list[CaseRun]] = {}
    for run in runs:
        by_name.setdefault(run.case.name, []).append(run)
    return [
        LoopRow(
            name,
            len(found),
            sum(run.is_tie or not run.after for run in found),
            sum(run.nfe for run in found),
            all(run.is_tie or run.nfe == run.wanted.nfe for run in found),
            next((run.difference for run in found if run.difference and not run.is_tie), None),
            sum(run.is_tie for run in found),
        )
        for name, found in by_name.items()
    ]
