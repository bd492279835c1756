"""Which text a denoiser is calibrated on and judged by, and the states that calibration makes of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_calibration.states import (
    Sample,
    State,
    Trajectories,
    builtin_samples,
    make_states,
    random_tokens,
    read_samples,
    samples_sha256,
)
from dlm_export.network.spec import NetworkSpec
from dlm_export.network.turns import Canvas, start_canvas
from dlm_runtime.errors import RequestError
from dlm_runtime.policy import Policy
from dlm_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dlm_export.network.layered import Layered
    from dlm_export.sources import Source

CALIBRATION_FILE = "calibration.jsonl"  # beside a checkpoint: used where no other data is named
MIXES = {"denoising": (0.5, 0.4, 0.1), "text": (0.0, 0.0, 1.0)}
"""Shares of independently masked, trajectory and clean states: CALIBRATION.md's default, and what
other tools do.
"""
JUDGED_EVERY = 4  # of one file's samples, every fourth is kept for judging and never calibrated on
FEWEST_TOKENS = 32
"""Calibration tokens from which an expert's weights are solved by them, unless told otherwise.

On inputs drawn alike GPTQ loses less than rounding from 8 on, a third less from 32; tokens of a few
texts are alike too often.
"""
RANDOM_LENGTH = 64  # tokens of a random sample, half of it prompt
TRAJECTORY_PASSES = 16  # a block at most: a denoiser that is sure of nothing would take one a token


@dataclass(frozen=True)
class CalibrationOptions:
    """``data``: JSONL or text file. ``samples`` prompts times ``states_per_sample`` canvases;
    ``source`` of ``MIXES``.
    """

    data: Path | None = None
    samples: int = 128
    states_per_sample: int = 8
    source: str = "denoising"
    seed: int = 0
    preset: str | None = None


@dataclass(frozen=True)
class Data:
    """Samples to calibrate on and other samples to judge by, with where they came from.

    ``is_made_up``: nobody gave any, and they say little of what the denoiser will be asked.
    ``is_shared``: too few to keep some apart, so that both lists are the same.
    """

    name: str
    calibration: list[Sample]
    judging: list[Sample]
    is_made_up: bool
    is_shared: bool

    def doubts(self, *, option: str, has_ranges: bool = False, is_judged: bool = True) -> list[str]:
        """What a user should know of figures that rest on this data. ``option`` would name better
        data.

        ``has_ranges``: static activation ranges were found on it; ``is_judged``: a loss was.
        """
        found = []
        if self.is_made_up and has_ranges:
            found.append(
                f"no {option}: activation ranges come from made-up samples ({self.name}), and values beyond them are clipped. "
                f"Give {option} text of the kind that the denoiser will be asked"
            )
        if self.is_made_up and is_judged:
            found.append(
                f"no {option}: judged by made-up samples ({self.name}). The loss on text of your own is not known; give "
                f"{option} some, best with answers"
            )
        if self.is_shared and is_judged:
            found.append(
                f"{self.name}: {len(self.judging)} samples are too few to keep some apart: judged by what was calibrated on"
            )
        return found

    def provenance(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "samples": len(self.calibration),
            "sha256": samples_sha256(self.calibration),
        }


def threshold_preset(
    network: NetworkSpec, presets: Mapping[str, Policy], name: str | None
) -> tuple[str, Policy]:
    """The named preset, or the parallel loop published for such a network, without draws.

    Raises RequestError that lists the choices.
    """
    chosen = name or ("dream-block" if network.shift else "fast-dllm")
    # The preset of Fast-dLLM v2 takes only some block lengths.
    if name is None and network.visible_block is not None:
        chosen = "fast-dllm-v2" if network.shift and "fast-dllm-v2" in presets else "sdar"
    if chosen not in presets:
        raise RequestError(f"no preset {chosen!r}: one of {', '.join(presets)}")
    return chosen, presets[chosen].greedy()


def load_data(
    network: NetworkSpec,
    folder: Path,
    tokenizer: Tokenizer | None,
    options: CalibrationOptions,
    *,
    is_calibrating: bool = True,
) -> Data:
    """Read the data named in ``options``; else the checkpoint's own; else a built-in set; else
    random ids.

    Where nothing is calibrated, all samples of named data are judged by. Raises CalibrationError
    and RequestError for files that cannot be used.
    """
    c = network
    own = folder / CALIBRATION_FILE
    path = options.data or (own if own.is_file() and tokenizer is not None else None)
    limits: dict[str, Any] = {
        "eos_token_id": c.end_token_id,
        "max_canvas_length": c.max_canvas_length,
    }
    if path is not None:
        if tokenizer is None:
            raise RequestError(f"{path}: {folder} has no tokenizer to read text with")
        name, samples = path.name, read_samples(path, tokenizer, **limits)
    elif tokenizer is not None:
        name, samples = "built-in", builtin_samples(tokenizer, **limits)
    else:
        name, samples = "random ids", _random_samples(c, options)
    if options.data is not None and not is_calibrating:
        return Data(name, [], samples, is_made_up=False, is_shared=False)
    judging = samples[JUDGED_EVERY - 1 :: JUDGED_EVERY]
    calibration = [
        sample for i, sample in enumerate(samples) if i % JUDGED_EVERY != JUDGED_EVERY - 1
    ]
    is_shared = not judging
    if is_shared:
        calibration, judging = samples, samples
    return Data(name, calibration[: options.samples], judging, path is None, is_shared)


def _random_samples(c: NetworkSpec, options: CalibrationOptions) -> list[Sample]:
    rng = np.random.default_rng(options.seed)
    length = min(RANDOM_LENGTH, c.max_canvas_length)
    special = (c.mask_token_id, *c.eos_token_ids)
    count = options.samples * JUDGED_EVERY // (JUDGED_EVERY - 1) + 1
    return [
        Sample(random_tokens(length, c.vocab_size, special, rng), length // 2, None, None)
        for _ in range(count)
    ]


def trajectories(
    layered: Layered, policy: Policy, memory_bytes: int | None, on_done: Callable[[], None]
) -> Trajectories:
    """Samples' canvases under a policy: before the first pass and after each one, their responses
    masked.

    A block takes ``TRAJECTORY_PASSES`` at most. ``memory_bytes``: see ``lockstep.courses``.
    ``on_done`` is called a sample, as soon as that share of all masked positions is decided.
    """
    # Imported here, because reading data and judging bundles need no torch.
    from dlm_export.network import lockstep

    c = layered.network
    block_length = policy.block_length or 32
    if policy.commit == "threshold":
        policy = replace(
            policy, commit="dynamic", steps_per_block=min(block_length, TRAJECTORY_PASSES)
        )

    def start(sample: Sample) -> Canvas:
        prompt_length = sample.prompt_length or max(1, len(sample.tokens) // 2)
        room = c.max_canvas_length - prompt_length
        length = min(room, -(-(len(sample.tokens) - prompt_length) // block_length) * block_length)
        return start_canvas(sample.tokens[:prompt_length].tolist(), length, c.mask_token_id)

    def run(samples: Sequence[Sample]) -> Iterator[list[np.ndarray]]:
        starts = [start(sample) for sample in samples]
        masked, decided, done = sum(int(canvas.undecided.sum()) for canvas in starts), 0, 0

        def on_decided(positions: int) -> None:
            nonlocal decided, done
            decided += positions
            for _ in range(decided * len(samples) // masked - done):
                done += 1
                on_done()

        for course in lockstep.courses(layered, starts, policy, memory_bytes, on_decided):
            yield [canvas.tokens for canvas in course]

    return run


def calibration_states(
    source: Source,
    layered: Layered,
    data: Data,
    options: CalibrationOptions,
    on_sample: Callable[[], None],
    memory_bytes: int | None = None,
) -> Iterator[State]:
    """The states of ``data.calibration``; see ``trajectories``, which are run if they are asked
    for.
    """
    _, policy = threshold_preset(source.network, source.presets, options.preset)
    runs = (
        trajectories(layered, policy, memory_bytes, on_sample) if MIXES[options.source][1] else None
    )
    return _states(source, data, options, runs)


def masked_states(source: Source, data: Data, options: CalibrationOptions) -> Iterator[State]:
    """States of ``data.calibration`` that need no denoiser: masked ones take the places of those of
    trajectories.
    """
    return _states(source, data, options, None)


def _states(
    source: Source, data: Data, options: CalibrationOptions, runs: Trajectories | None
) -> Iterator[State]:
    c = source.network
    _, policy = threshold_preset(c, source.presets, options.preset)
    return make_states(
        data.calibration,
        mask_token_id=c.mask_token_id,
        pad_token_id=c.end_token_id,
        block_length=policy.block_length or 32,
        max_canvas_length=c.max_canvas_length,
        per_sample=options.states_per_sample,
        mix=MIXES[options.source],
        seed=options.seed,
        trajectories=runs,
    )
