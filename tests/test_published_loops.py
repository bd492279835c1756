"""Compares the passes of this project's presets with the passes of published decoding loops.

``make_published_loops.py`` runs the published loops on small random networks and writes
``golden/published_loops.json``. Its docstring lists the source files of the loops. Three
differences are not compared:

- The loops of SDAR and Stable-DiffCoder run a pass that stores the last block in the cache. No
  later pass reads this block, so the presets skip this pass.
- If a step should commit more positions than are masked, SDAR's sampler replaces tokens that are
  already decided. The file contains no request in which this happens.
- If a prompt is exactly one block long, Fast-dLLM v2's loop does not store its keys and values, and
  thereby ignores the prompt. The file contains no such prompt.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from denoisers import under_native_loop
from published import END, MASK, REWRITING, prompt_of, random_network

from dlm_export.network import reference
from dlm_export.network.commit_rules import floor_count
from dlm_export.network.pass_plan import transfer_counts
from dlm_runtime import CallbackPass, Policy
from dlm_runtime.presets import PRESETS

TRACES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "published_loops.json").read_text()
)
COMMITS = {
    "low_confidence_dynamic": "dynamic",
    "low_confidence_static": "static",
    "sequential": "sequential",
}
Passes = list[tuple[int, list[int]]]
"""For each pass: the first position that the pass computes, and the tokens."""


def traces_of(*families: str) -> list[Any]:
    """Return the traces of the loops of ``families``.

    Each two settings of a loop occur together in a trace that `make test` runs, and so does each
    length of a prompt with each block length. The other traces are slow tests.
    """
    seen: set[Any] = set()
    found = []
    for trace in random.Random(0).sample(TRACES, len(TRACES)):
        if trace["family"] not in families:
            continue
        named = {name: trace[name] for name in trace if name not in ("tokens", "passes")}
        settings = {*named.items()} - {(name, named[name]) for name in ("prompt", "new", "seed")}
        pairs = {*itertools.combinations(sorted(settings, key=str), 2)}
        pairs.add((trace["family"], trace["prompt"], trace.get("block")))
        marks = [pytest.mark.slow] if pairs <= seen else []
        found.append(pytest.param(trace, id="-".join(map(str, named.values())), marks=marks))
        seen |= pairs
    return found


def until_end(tokens: list[int], prompt: int) -> list[int]:
    """Return the tokens up to and including the first generated end token."""
    ends = [at for at in range(prompt, len(tokens)) if tokens[at] == END]
    return tokens[: ends[0] + 1] if ends else tokens


def run(
    trace: dict[str, Any], policy: Policy, tokens: list[int], new: int
) -> tuple[list[int], Passes]:
    """Run the native loop. Returns the canvas and the passes."""
    shift = int(trace["family"] in ("fast-dllm-v2", "rnd1", "d3llm-dream", "d2f-dream"))
    is_full = trace["family"] in ("d3llm", "d3llm-cached", "d3llm-dream", "wedlm")
    denoiser = random_network(
        0 if is_full else trace.get("block", 0),
        shift,
        trace["seed"],
        visibility="after-prompt" if trace["family"].startswith("d2f") else "block",
        has_masks_last=trace["family"] == "wedlm",
        **(REWRITING if trace["family"] == "llada2.2" else {}),
    )
    passes: Passes = []
    longest = denoiser.network.max_canvas_length

    def note(p: CallbackPass) -> None:
        passes.append((int(p.position_ids[0]) % longest, p.input_ids.tolist()))

    with under_native_loop(denoiser, note) as bundle:
        out = bundle.generate(tokens=tokens, max_new_tokens=new, **policy.as_dict())
    assert out.nfe == len(passes)
    wanted = reference.generate(denoiser, tokens, policy, new)
    assert (wanted.tokens, wanted.nfe) == (out.tokens, out.nfe)
    return out.tokens, passes


def deciding(passes: Passes, trace: dict[str, Any]) -> Passes:
    """Select the passes whose tokens include mask tokens.

    For each selected pass, return the end of its positions and the tokens of its block.
    """
    block = trace.get("block", 0)
    return [(first + len(ids), ids[-block:]) for first, ids in passes if MASK in ids]


def published(trace: dict[str, Any]) -> Passes:
    return [(first, tokens) for first, tokens in trace["passes"]]


@pytest.mark.parametrize("trace", traces_of("sdar"))
def test_sdar_equals_the_authors_code(trace: dict[str, Any]) -> None:
    policy = PRESETS["sdar"].with_fields(
        {
            "commit": COMMITS[trace["strategy"]],
            "steps_per_block": trace["steps"],
            "threshold": trace["threshold"],
        }
    )
    prompt = prompt_of(trace["prompt"], trace["seed"])
    tokens, passes = run(trace, policy, prompt, trace["new"])
    assert passes == published(trace)[:-1]
    assert until_end(tokens, len(prompt)) == until_end(trace["tokens"], len(prompt))


@pytest.mark.parametrize("trace", traces_of("llada2", "llada2.1"))
def test_llada2_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """The authors' code has no cache.

    Each pass of the authors' code computes the whole canvas up to the end of the current block.
    """
    fields = ("threshold", "edit_threshold", "edit_passes")
    policy = PRESETS[trace["family"]].with_fields(
        {name: trace[name] for name in fields if name in trace}
        | {"steps_per_block": trace.get("steps", 0)}
    )
    prompt, wanted = prompt_of(trace["prompt"], trace["seed"]), published(trace)
    tokens, passes = run(trace, policy, prompt, trace["new"])
    assert deciding(passes, trace) == deciding(wanted, trace)
    assert until_end(tokens, len(prompt)) == trace["tokens"]
    plain, passes = run(trace, policy.with_fields({"cache": "none"}), prompt, trace["new"])
    assert plain == tokens
    assert [ids[: len(seen)] for (_, ids), (_, seen) in zip(passes, wanted, strict=True)] == [
        seen for _, seen in wanted
    ]


@pytest.mark.parametrize("trace", traces_of("llada2.2"))
def test_llada22_equals_sglangs_code(trace: dict[str, Any]) -> None:
    fields = ("threshold", "edit_threshold", "edit_passes")
    policy = PRESETS["llada2.2"].with_fields({name: trace[name] for name in fields})
    prompt, wanted = prompt_of(trace["prompt"], trace["seed"]), published(trace)
    tokens, _ = run(trace, policy, prompt, trace["new"])
    assert tokens[: len(trace["tokens"])] == trace["tokens"]
    assert set(tokens[len(trace["tokens"]) :]) <= {END}
    plain, passes = run(trace, policy.with_fields({"cache": "none"}), prompt, trace["new"])
    assert plain == tokens
    assert [ids[: len(seen)] for (_, ids), (_, seen) in zip(passes, wanted, strict=True)] == [
        seen for _, seen in wanted
    ]


@pytest.mark.parametrize("trace", traces_of("fast-dllm-v2"))
def test_fast_dllm_v2_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """The last pass of the authors' code stores the last block and predicts one more token."""
    block, prompt = trace["block"], prompt_of(trace["prompt"], trace["seed"])
    policy = PRESETS["fast-dllm-v2"].with_fields(
        {"sub_block_length": trace["sub_block"], "threshold": trace["threshold"]}
    )
    new = (len(prompt) // block + trace["new"] // block) * block + 1 - len(prompt)
    if trace["block_cache"]:
        policy = policy.with_fields({"cache": "block-dual"})
    tokens, passes = run(trace, policy, prompt, new)
    assert passes == published(trace)
    assert until_end(tokens, len(prompt)) == until_end(trace["tokens"], len(prompt))
    if not trace["block_cache"]:
        plain, passes = run(trace, policy.with_fields({"cache": "none"}), prompt, new)
        only_stores = len(prompt) > block and len(prompt) % block > 0
        assert (plain, len(passes)) == (tokens, len(published(trace)) - only_stores)


@pytest.mark.parametrize("trace", traces_of("rnd1"))
def test_rnd1_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """If there are more steps than tokens, some passes of the authors' code commit no token. The
    next pass repeats the same computation.

    The preset skips repeated passes.
    """
    policy = PRESETS["rnd1"].with_fields({"steps_per_block": trace["steps"]})
    tokens, new = prompt_of(trace["prompt"], trace["seed"]), trace["new"]
    if not trace["end"]:  # the authors' code writes a padding token to the last position
        policy = policy.with_fields({"reserve": "none"})
        tokens, new = [*tokens, *[MASK] * (new - 1), trace["pad"]], 0
    out, passes = run(trace, policy, tokens, new)
    wanted = published(trace)
    assert passes == [made for made, _ in itertools.groupby(wanted)]
    assert len(passes) == min(len(wanted), trace["new"] - 1)
    assert out == trace["tokens"]


@pytest.mark.parametrize("trace", traces_of("d3llm", "d3llm-cached", "d3llm-dream"))
def test_d3llm_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """The authors' code may choose positions that already contain end tokens.

    ``make_published_loops.py`` prevents this. If the last pass decides an end token, the authors'
    code does not change the tokens after it.
    """
    changes = {
        "block_length": trace["block"],
        "next_block": trace["next_block"],
        "entropy_bound": trace["threshold"],
    }
    if trace["family"] == "d3llm-cached":
        changes |= {"cache": "prefix", "cache_delay": trace["delay"]}
        changes["refresh_interval"] = trace["interval"]
    policy = PRESETS[trace["family"].removesuffix("-cached")].with_fields(changes)
    prompt, wanted = prompt_of(trace["prompt"], trace["seed"]), published(trace)
    tokens, passes = run(trace, policy, prompt, trace["new"])
    assert passes == wanted
    assert until_end(tokens, len(prompt)) == until_end(trace["tokens"], len(prompt))


@pytest.mark.parametrize("trace", traces_of("d2f", "d2f-dream"))
def test_d2f_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """After the block of the first end token, the authors' code finishes the blocks that it has
    started. The preset does not compute them.

    The authors' code for Dream keeps the logits of the last cached row, from which it predicts the
    next position. The preset computes this row again.
    """
    names = ("next_block", "force_next", "threshold")
    changes = {name: trace[name] for name in names} | {"block_length": trace["block"]}
    changes["stop"] = "eos" if trace["family"] == "d2f-dream" else "none"
    policy = PRESETS["d2f"].with_fields(changes)
    prompt, wanted = prompt_of(trace["prompt"], trace["seed"]), published(trace)
    tokens, passes = run(trace, policy, prompt, trace["new"])
    if trace["family"] == "d2f-dream":
        passes[1:] = [(first + 1, ids[1:]) for first, ids in passes[1:]]
    has_end = "ends" in trace
    assert passes == wanted[: len(passes) if has_end else None]
    assert until_end(tokens, len(prompt)) == until_end(trace["tokens"], len(prompt))


@pytest.mark.parametrize("trace", traces_of("wedlm"))
def test_wedlm_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """The authors' code has no cache, and does not stop at end tokens.

    Each pass of the authors' code computes the whole canvas up to the end of the current block.
    With the threshold 0, each pass commits one token.
    """
    prompt, wanted = prompt_of(trace["prompt"], trace["seed"]), published(trace)
    policy = PRESETS["wedlm"].with_fields({"block_length": trace["block"], "stop": "none"})
    policy = policy.with_fields({"threshold": trace["threshold"] or 1.0})
    tokens, passes = run(trace, policy, prompt, trace["new"])
    assert tokens == trace["tokens"]
    made = [(first + len(ids), ids) for first, ids in passes if MASK in ids]
    assert made == [
        (len(ids), ids[-len(own) :]) for (_, own), (_, ids) in zip(made, wanted, strict=True)
    ]
    plain, passes = run(trace, policy.with_fields({"cache": "none"}), prompt, trace["new"])
    assert plain == tokens
    assert [ids[: len(seen)] for (_, ids), (_, seen) in zip(passes, wanted, strict=True)] == [
        seen for _, seen in wanted
    ]


@pytest.mark.parametrize("trace", traces_of("stable-diffcoder"))
def test_stable_diffcoder_equals_the_authors_code(trace: dict[str, Any]) -> None:
    """Without a threshold, each pass of the authors' code commits a fixed number of tokens."""
    policy = PRESETS["stable-diffcoder"].with_fields({"steps_per_block": trace["steps"]})
    rule: dict[str, Any] = {"commit": "static"}
    if trace["threshold"] is not None:
        rule = {"threshold": trace["threshold"]}
    prompt, wanted = prompt_of(trace["prompt"], trace["seed"]), published(trace)
    tokens, passes = run(trace, policy.with_fields(rule), prompt, trace["new"])
    assert passes == (wanted if MASK in wanted[-1][1] else wanted[:-1])
    assert until_end(tokens, len(prompt)) == until_end(trace["tokens"], len(prompt))


def test_the_schedules_share_positions_as_published() -> None:
    """The schedules "masked" and "floor" distribute 10 positions differently over 4 passes."""
    assert transfer_counts(10, 4) == [3, 3, 2, 2]
    left, shares = 10, []
    while left:
        shares.append(floor_count(10, left, 4))
        left -= shares[-1]
    assert shares == [3, 2, 3, 2]
