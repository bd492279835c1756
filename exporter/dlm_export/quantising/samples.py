"""Chooses the text for calibration and judging, and creates calibration states from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_calibration.samples import Sample, builtin_samples, read_samples, samples_sha256
from dlm_calibration.states import State, Trajectories, make_states, random_tokens
from dlm_export.network.spec import NetworkSpec
from dlm_export.network.turns import Canvas, start_canvas
from dlm_runtime.errors import RequestError
from dlm_runtime.policy import Policy
from dlm_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dlm_export.network.layered import Layered
    from dlm_export.sources import Source

CALIBRATION_FILE = "calibration.jsonl"  # beside a checkpoint: the default data
MIXES = {"denoising": (0.5, 0.4, 0.1), "text": (0.0, 0.0, 1.0)}
"""Shares of masked, trajectory and clean states: our default, and the method of other tools."""
JUDGED_EVERY = 4  # every fourth sample of a file is used for judging, not calibration
FEWEST_TOKENS = 32
"""Default number of calibration tokens that an expert needs for its weights to be solved.

On independent inputs, GPTQ beats rounding from 8 tokens on, and loses a third less from 32 on.
Tokens of a few texts are often too similar.
"""
RANDOM_LENGTH = 64  # tokens of a random sample; half of them are the prompt
TRAJECTORY_PASSES = 16  # limit per block, because an unsure denoiser would take one pass per token


@dataclass(frozen=True)
class CalibrationOptions:
    """Calibration data and its use.

    ``data``: JSONL or text file. Up to ``samples`` prompts give ``states_per_sample`` canvases
    each. ``source`` is a key of ``MIXES``.
    """

    data: Path | None = None
    samples: int = 128
    states_per_sample: int = 8
    source: str = "denoising"
    seed: int = 0
    preset: str | None = None


@dataclass(frozen=True)
class Data:
    """Samples for calibration and for judging, and their origin.

    ``is_made_up``: the user gave no data, so results say little about the real task. ``is_shared``:
    there are too few samples to split, so both lists are the same.
    """

    name: str
    calibration: list[Sample]
    judging: list[Sample]
    is_made_up: bool
    is_shared: bool

    def doubts(self, *, option: str, has_ranges: bool = False, is_judged: bool = True) -> list[str]:
        """Warnings about figures that depend on this data; ``option`` is the command-line option
        for better data.

        ``has_ranges``: static activation ranges were found on it. ``is_judged``: a loss was
        measured on it.
        """
        found = []
        if self.is_made_up and has_ranges:
            found.append(
                f"no {option}: activation ranges come from made-up samples ({self.name}), and values beyond them are clipped. "
                f"Give {option} text of the kind that the denoiser will be used for"
            )
        if self.is_made_up and is_judged:
            found.append(
                f"no {option}: judged on made-up samples ({self.name}). The loss on your own text is not known; give "
                f"{option} some, preferably with answers"
            )
        if self.is_shared and is_judged:
            found.append(
                f"{self.name}: {len(self.judging)} samples are too few to split: judged on the calibration samples"
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
    """The named preset, or the published parallel loop for such a network, without sampling.

    Raises RequestError that lists the choices.
    """
    chosen = name or ("dream-block" if network.shift else "fast-dllm")
    # The preset of Fast-dLLM v2 supports only some block lengths.
    if name is None and network.visible_block is not None:
        chosen = "fast-dllm-v2" if network.shift and "fast-dllm-v2" in presets else "sdar"
    if chosen not in presets:
        raise RequestError(f"no preset {chosen!r}: choose one of {', '.join(presets)}")
    return chosen, presets[chosen].greedy()


def load_data(
    network: NetworkSpec,
    folder: Path,
    tokenizer: Tokenizer | None,
    options: CalibrationOptions,
    *,
    is_calibrating: bool = True,
) -> Data:
    """Load the data named in ``options``, else the checkpoint's own, else built-in samples, else
    random ids.

    Without calibration, all samples of named data are used for judging. Raises CalibrationError and
    RequestError for unusable files.
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
    """Canvases of samples under a policy, before the first pass and after each one, with responses
    masked.

    A block takes at most ``TRAJECTORY_PASSES``. ``memory_bytes``: see ``lockstep.courses``.
    ``on_done`` is called once per sample, when a proportional share of all masked positions is
    decided.
    """
    # Imported here because reading data and judging bundles must work without torch.
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
    """States of ``data.calibration``; runs ``trajectories`` if the mix includes them."""
    _, policy = threshold_preset(source.network, source.presets, options.preset)
    runs = (
        trajectories(layered, policy, memory_bytes, on_sample) if MIXES[options.source][1] else None
    )
    return _states(source, data, options, runs)


def masked_states(source: Source, data: Data, options: CalibrationOptions) -> Iterator[State]:
    """States of ``data.calibration`` that need no denoiser: masked ones replace trajectories."""
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
