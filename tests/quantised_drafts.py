"""Calibration states of denoisers with draft passes, and checks of these states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner, Result

from dlm_calibration.samples import Sample
from dlm_calibration.states import State, make_states, read_states, write_states
from dlm_export import families
from dlm_export.cli import main
from dlm_export.network import lockstep, reference
from dlm_export.network.layered import Carried
from dlm_export.network.loop_turns import start_canvas
from dlm_export.network.states import features_of
from dlm_export.sources import Source
from dlm_runtime import Policy

BLOCK, PROMPT, ANSWER = 8, 11, 13
WORDS = 150
"""All tokens of the samples are smaller. The networks have more tokens."""


def make_samples(count: int, *, seed: int = 0) -> list[Sample]:
    tokens = np.random.default_rng(seed).integers(2, WORDS, (count, PROMPT + ANSWER))
    return [Sample(each, PROMPT, "an answer", "a prompt") for each in tokens]


def states_of(source: Source, samples: Sequence[Sample], **options: Any) -> list[State]:
    c = source.network
    given: dict[str, Any] = {
        "mask_token_id": c.mask_token_id,
        "pad_token_id": c.end_token_id,
        "block_length": BLOCK,
        "max_canvas_length": c.max_canvas_length,
        "seed": 4,
    }
    return list(make_states(samples, **given | options))


def after_a_file(states: list[State], path: Path) -> list[State]:
    """Write states to a file, read them again, and check that they are the same."""
    write_states(states, path)
    found = read_states(path)
    assert [each.sha256 for each in found] == [each.sha256 for each in states]
    return found


def check_generations(source: Source, policy: Policy, count: int) -> Iterator[list[State]]:
    """Check that the states of generations are the passes that the loop makes.

    Yields the states of each generation.
    """
    denoiser, seen = families.load(source.parameters, source.network), list[Any]()
    hidden, longest = denoiser.hidden, source.network.max_canvas_length

    def record(ids: torch.Tensor, positions: torch.Tensor, *given: Any) -> Any:
        times, first = divmod(int(positions[0, 0]), longest)
        if times:
            seen.append(((first, times == 2, ids[0].tolist()), given[2]))
        return hidden(ids, positions, *given)

    denoiser.hidden = record  # type: ignore[method-assign]
    prompts = [sample.tokens[:PROMPT].tolist() for sample in make_samples(count)]
    starts = [start_canvas(prompt, 2 * BLOCK, source.network.mask_token_id) for prompt in prompts]
    layered = families.layered(source.parameters, source.network)
    for start, course in zip(starts, lockstep.courses(layered, starts, policy), strict=True):
        seen.clear()
        reference.fill(denoiser, start, policy)
        for state, (made, read) in zip(course.drafts, seen, strict=True):
            draft = state.draft
            assert draft is not None
            assert made == (draft.start, draft.is_updated, state.canvas[draft.start :].tolist())
            assert (draft.conditioning is None) == (read is None)
            if read is not None:
                ours = torch.from_numpy(draft.conditioning).float()
                torch.testing.assert_close(ours, read[0], rtol=2e-3, atol=2e-3)
        yield course.drafts


def check_layers(source: Source, states: Sequence[State]) -> None:
    """Check that single layers compute draft passes after causal passes as the network does."""
    layered = families.layered(source.parameters, source.network)
    denoiser = families.load(source.parameters, source.network)
    drafts = [state.draft for state in states]
    carried = Carried(layered, [state.canvas for state in states], drafts=drafts)
    for i in range(len(source.network.layers)):
        carried.through(i, layered.block(i))
    rows = [
        np.arange(0 if state.draft is None else state.draft.start, len(state.canvas))
        for state in states
    ]
    for state, own, found in zip(states, rows, carried.features(rows), strict=True):
        with torch.no_grad():
            wanted = features_of(denoiser, state.canvas, torch.from_numpy(own), state.draft)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
