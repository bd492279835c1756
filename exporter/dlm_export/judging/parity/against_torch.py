"""Compares a bundle with our torch denoiser: logits at each mask ratio, and complete canvases.

Torch runs first. Only the sampled rows and the finished canvases are kept, and the denoiser is
freed before the bundle is opened. Memory therefore never holds two models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlm_calibration.recipes import Recipe
from dlm_calibration.states import MASK_RATIOS
from dlm_export import families
from dlm_export.graph import PLAIN_OPSET, experts, trace
from dlm_export.graph.taps import find_taps
from dlm_export.judging.parity import by_layer
from dlm_export.judging.parity.canvases import Canvas, make_canvases, random_prompts
from dlm_export.judging.parity.verdict import LoopRow, Parity, compare_logits, tolerance_of
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec
from dlm_export.opening import ON_CPU, Opening
from dlm_export.progress import Progress, Silent
from dlm_export.quantising.numbers import Folded, Quantisation
from dlm_export.sources import Source
from dlm_export.workplace import Workplace
from dlm_runtime import Bundle, Policy
from dlm_runtime.errors import RequestError

PROMPT_COUNT, NEW_TOKENS = 2, 16  # used in the check at the end of a build


@dataclass(frozen=True)
class Case:
    """A loop to compare: one prompt under one policy."""

    name: str
    tokens: list[int]
    policy: Policy
    max_new_tokens: int
    steps: int = 0


@dataclass(frozen=True)
class Expected:
    """The results of torch: logits of the rows of each canvas, and the finished canvas of each
    case.
    """

    canvases: list[Canvas]
    logits: list[np.ndarray]
    cases: list[Case]
    finished: list[reference.Reference]


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
    """Compare a bundle with its source in torch.

    Args:
        folder: The bundle.
        source: The checkpoint that it was built from.
        presets: The policies to run, by name.
        precision: A key of ``TOLERANCES``.
        cache_dtype: The manifest's value. Torch rounds cached rows in the same way.
        prompts: Token ids; ``None`` uses random prompts.
        max_new_tokens: Tokens to generate after each prompt.
        seed: Seed of random prompts and canvases.
        opening: How to open the bundle.
        progress: Advanced ``parity_units`` times.

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
    cases = make_cases(presets, prompts, max_new_tokens, network.visible_block)
    expected = expect(denoiser, prompts, cases, seed, progress.advance, cache_dtype)
    del denoiser
    with opening.open(folder, check_hashes=False) as opened:
        return compare(opened, expected, precision, progress.advance, cache_dtype)


def by_layers(
    parity: Parity,
    folder: Path,
    manifest: Mapping[str, Any],
    source: Source,
    on_done: Callable[[], None],
    workplace: Workplace | None = None,
) -> Parity:
    """Check an unquantised bundle with experts layer by layer, after its whole passes differed.

    If two experts suit a token equally well, the bundle and torch may choose different ones. Their
    results then differ although neither is wrong. See ``check_layers``. The figures of whole passes
    in ``parity`` are kept, for display.
    """
    network, graph = source.network, manifest["loop"]["graph"]
    traced = trace.trace_pass(network, parity.precision, is_plain=manifest["opset"] == PLAIN_OPSET)
    taps = find_taps(traced)
    if "device_file" in graph:
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
    """Return how often ``check_parity`` advances its progress."""
    return 2 * (
        len(MASK_RATIOS) + len(make_cases(presets, [[0]] * prompts, 1, network.visible_block))
    )


def make_cases(
    bundle_presets: dict[str, Policy],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    visible_block: int | None = None,
) -> list[Case]:
    """List the loops to compare: each prompt under each policy, with two blocks per generation.

    The policies are the presets and, if present, the preset fast-dllm with each kind of cache. For
    a block-causal network they are the presets with and without their caches. The block length is
    then the network's own.
    """
    policies = dict(bundle_presets)
    if visible_block is not None:
        cached = {name: policy for name, policy in policies.items() if policy.cache != "none"}
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
        policies["fast-dllm, no cache"] = policies["fast-dllm"].with_fields({"cache": "none"})
        policies["fast-dllm, prefix cache"] = policies["fast-dllm"].with_fields({"cache": "prefix"})
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
    """Run torch: on every prompt followed by random ids, at each mask ratio, and the loop of each
    case.

    ``on_done`` is called once per mask ratio and once per case.
    """
    expected = Expected(make_canvases(denoiser.network, prompts, seed), [], cases, [])
    for number, canvas in enumerate(expected.canvases, start=1):
        ids = torch.from_numpy(canvas.tokens).unsqueeze(0)
        features, _ = denoiser.hidden(ids, torch.arange(ids.shape[1]).unsqueeze(0))
        expected.logits.append(
            denoiser.project(features[0, torch.from_numpy(canvas.rows)]).float().numpy()
        )
        if number % len(prompts) == 0:
            on_done()
    for case in cases:
        expected.finished.append(
            reference.generate(
                denoiser,
                case.tokens,
                case.policy,
                case.max_new_tokens,
                case.steps,
                cache_dtype=cache_dtype,
            )
        )
        on_done()
    return expected


def compare(
    bundle: Bundle,
    expected: Expected,
    precision: str,
    on_done: Callable[[], None],
    cache_dtype: str = "float32",
) -> Parity:
    """Run the bundle on the same canvases and cases, and compare.

    ``on_done`` is called as often as in ``expect``.
    """
    graph = compare_logits(bundle, expected.canvases, expected.logits, on_done)
    loop: dict[str, LoopRow] = {}
    for case, wanted in zip(expected.cases, expected.finished, strict=True):
        fields = case.policy.as_dict()
        out = bundle.generate(
            tokens=case.tokens, max_new_tokens=case.max_new_tokens, steps=case.steps, **fields
        )
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
    return Parity(precision, tolerance_of(precision, cache_dtype), graph, list(loop.values()))


def _first_difference(
    case: Case, wanted: reference.Reference, tokens: list[int], nfe: int
) -> str | None:
    for position, (theirs, ours) in enumerate(zip(wanted.tokens, tokens, strict=True)):
        if theirs != ours:
            return f"{case.name}: position {position} is {ours}, the reference has {theirs}"
    return (
        None if nfe == wanted.nfe else f"{case.name}: {nfe} passes, the reference made {wanted.nfe}"
    )
