"""Chooses texts for calibration and for measuring accuracy, and makes calibration states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_calibration.samples import Sample, builtin_samples, read_samples, samples_sha256
from dlm_calibration.states import Draft, State, Trajectories, make_states, random_tokens
from dlm_export.network.loop_random import temperature_before
from dlm_export.network.loop_turns import Canvas, reserve_end, start_canvas
from dlm_export.network.pass_plan import block_length_of
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.errors import RequestError
from dlm_runtime.policy import Policy
from dlm_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dlm_export.network.layered import Layered
    from dlm_export.sources import Source

# If the checkpoint's folder contains a file with this name, the file is the default data.
CALIBRATION_FILE = "calibration.jsonl"
MIXES = {"denoising": (0.5, 0.4, 0.1), "text": (0.0, 0.0, 1.0)}
"""The shares of masked, trajectory and clean states in each mix. "denoising" is the default. "text"
contains only clean states (texts without masks), like the calibration data of autoregressive
language models.
"""
# Every fourth sample of a file is used to measure accuracy. All other samples are used for
# calibration.
JUDGED_EVERY = 4
FEWEST_TOKENS = 32
"""By default, GPTQ rounds an expert's weights if at least this many tokens are routed to the
expert. Measured with independent inputs, GPTQ is better than rounding to nearest from 8 tokens on.
From 32 tokens on, its loss is a third smaller. The default is 32 instead of 8, because the tokens
of a few texts are often similar.
"""
RANDOM_LENGTH = 64  # length of a random sample in tokens; its first half is the prompt
# The maximum number of passes per block. Without a maximum, a denoiser with low confidences would
# need one pass per token.
TRAJECTORY_PASSES = 16


@dataclass(frozen=True)
class CalibrationOptions:
    """The user's choice of calibration data.

    ``data`` is a JSONL or text file. ``samples`` is the maximum number of prompts to use.
    ``states_per_sample`` is the number of canvases to make from each prompt. ``source`` is a key of
    ``MIXES``.
    """

    data: Path | None = None
    samples: int = 128
    states_per_sample: int = 8
    source: str = "denoising"
    seed: int = 0
    preset: str | None = None


@dataclass(frozen=True)
class Data:
    """Samples for calibration and for measuring accuracy, and the name of the samples' source.

    If ``is_made_up`` is true, the user gave no data, so results say little about the user's task.
    If ``is_shared`` is true, there were too few samples to split, so ``calibration`` (the samples
    for calibration) and ``judging`` (the samples for measuring accuracy) are the same list.
    """

    name: str
    calibration: list[Sample]
    judging: list[Sample]
    is_made_up: bool
    is_shared: bool

    def doubts(self, *, option: str, has_ranges: bool = False, is_judged: bool = True) -> list[str]:
        """Return warnings about results that were measured with these samples.

        ``option`` is the command-line option with which the user can give better data.
        ``has_ranges`` is true if static activation ranges were found with these samples.
        ``is_judged`` is true if a loss was measured with these samples.
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
    """Return a preset's name, and the preset's policy without random choices (``comparable``).

    If ``name`` is ``None``, the function chooses a preset that commits several tokens per pass and
    suits the network. Raises RequestError if ``presets`` does not contain the preset.
    """
    if name is not None:
        chosen = name
    elif len(presets) == 1:
        (chosen,) = presets
    elif network.has_masks_last:
        chosen = "wedlm"  # with "sdar", each block of a causal network would contain one token
    elif network.has_causal_drafts:
        chosen = "self-speculation"
    elif network.draft_block is not None:
        chosen = "nemotron-diffusion"
    elif network.visible_block is not None:
        # ``presets`` contains "fast-dllm-v2" only if it supports the network's block length.
        chosen = "fast-dllm-v2" if network.shift and "fast-dllm-v2" in presets else "sdar"
    else:
        chosen = "dream-block" if network.shift else "fast-dllm"
    if chosen not in presets:
        raise RequestError(f"no preset {chosen!r}: choose one of {', '.join(presets)}")
    return chosen, comparable(presets[chosen])


def comparable(policy: Policy) -> Policy:
    """Return a policy with which denoisers are calibrated and compared.

    The policy has no guidance and no sampling. If blocks start from random tokens, sampling stays,
    because such a loop is defined by its draws. The draws depend only on the seed.
    """
    return policy.with_fields({"cfg_scale": 0.0}) if policy.remask == "noise" else policy.greedy()


def load_data(
    network: NetworkSpec,
    folder: Path,
    tokenizer: Tokenizer | None,
    options: CalibrationOptions,
    *,
    is_calibrating: bool = True,
) -> Data:
    """Load the samples for calibration and for measuring accuracy.

    The samples come from the file in ``options``. If ``options`` contains no file, the samples come
    from the checkpoint's own file. If the checkpoint contains no such file, the built-in samples
    are used. If there is no tokenizer, the samples are random token IDs. If no layer is calibrated,
    all samples of the file in ``options`` are used to measure accuracy. Raises CalibrationError or
    RequestError if a file is unusable.
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
    """Return a function that generates text for samples, and yields each generation's canvases.

    If the denoiser has draft passes, the function yields the states of each generation's draft
    passes instead. The first canvas of a generation is the sample's prompt, followed by masks. Each
    pass adds one canvas. A block takes at most ``TRAJECTORY_PASSES`` passes. The docstring of
    ``lockstep.courses`` explains ``memory_bytes``. For n samples, ``on_done`` is called n times:
    once for every 1/n of the masked positions that has been decided.
    """
    # Import ``lockstep`` here, because reading data and comparing bundles must work without torch.
    from dlm_export.network import lockstep

    c = layered.network
    block_length = _block_length(c, policy)
    if policy.remask == "noise":
        policy = replace(policy, steps_per_block=min(policy.steps_per_block, TRAJECTORY_PASSES))
    if policy.commit == "threshold":
        policy = replace(
            policy,
            commit="dynamic",
            steps_per_block=min(block_length, TRAJECTORY_PASSES),
            next_block=1.0,
        )

    def start(sample: Sample) -> Canvas:
        prompt_length = sample.prompt_length or max(1, len(sample.tokens) // 2)
        room = c.max_canvas_length - prompt_length
        length = min(room, -(-(len(sample.tokens) - prompt_length) // block_length) * block_length)
        canvas = start_canvas(sample.tokens[:prompt_length].tolist(), length, c.mask_token_id)
        return reserve_end(canvas, policy, c.eos_token_ids)

    def run(samples: Sequence[Sample]) -> Iterator[Sequence[np.ndarray | State]]:
        starts = [start(sample) for sample in samples]
        masked, decided, done = sum(int(canvas.undecided.sum()) for canvas in starts), 0, 0

        def on_decided(positions: int) -> None:
            nonlocal decided, done
            decided += positions
            for _ in range(decided * len(samples) // masked - done):
                done += 1
                on_done()

        for course in lockstep.courses(layered, starts, policy, memory_bytes, on_decided):
            yield (
                [canvas.tokens for canvas in course.canvases]
                if c.draft_block is None
                else course.drafts
            )

    return run


def _block_length(network: NetworkSpec, policy: Policy) -> int:
    return block_length_of(policy, None, network.draft_block) or 32


def lacks_conditioning(network: NetworkSpec, state: State) -> bool:
    """Return True if the state's draft pass needs soft embeddings, but the state contains none.

    The first pass over a block reads no soft embeddings. All tokens of its block are random. States
    from generations already contain the soft embeddings that the generation has read.
    """
    if network.conditioning is None or state.draft is None or state.source != "masked":
        return False
    return state.mask_ratio < 1 and state.draft.conditioning is None


def with_conditioning(
    states: Sequence[State],
    layered: Layered,
    policy: Policy,
    memory_bytes: int | None,
    folder: Path | None,
    on_done: Callable[[], None] = lambda: None,
) -> list[State]:
    """Add soft embeddings to the states for which ``lacks_conditioning`` returns True.

    A soft embedding comes from a draft pass over the same canvas. Its temperature depends on
    ``policy`` and on the state's share of random tokens. ``on_done`` is called after each layer. If
    no state lacks soft embeddings, no layer is loaded.
    """
    # Import ``layered`` here, because reading data must work without torch.
    from dlm_export.network.layered import soft_embeddings

    network, found = layered.network, list(states)
    drafted = [
        (number, draft)
        for number, state in enumerate(found)
        if lacks_conditioning(network, state) and (draft := state.draft) is not None
    ]
    if not drafted:
        return found
    block_length = _block_length(network, policy)
    embeddings = soft_embeddings(
        layered,
        [found[number].canvas for number, _ in drafted],
        [draft for _, draft in drafted],
        [
            temperature_before(policy, found[number].mask_ratio, block_length)
            for number, _ in drafted
        ],
        memory_bytes=memory_bytes,
        folder=folder,
        on_done=on_done,
    )
    for (number, draft), read in zip(drafted, embeddings, strict=True):
        conditioned = Draft(draft.start, read.astype(np.float16))
        found[number] = replace(found[number], draft=conditioned)
    return found


def calibration_states(
    source: Source, data: Data, options: CalibrationOptions, runs: Trajectories | None
) -> Iterator[State]:
    """Return the calibration states of ``data.calibration``.

    Trajectory states are canvases from generations of the denoiser. If ``options.source`` asks for
    trajectory states, ``runs`` generates text for samples (see ``trajectories``). If ``runs`` is
    ``None``, masked states replace trajectory states, and the denoiser does not run.
    """
    c = source.network
    _, policy = threshold_preset(c, source.presets, options.preset)
    return make_states(
        data.calibration,
        mask_token_id=c.mask_token_id,
        pad_token_id=c.end_token_id,
        block_length=_block_length(c, policy),
        max_canvas_length=c.max_canvas_length,
        per_sample=options.states_per_sample,
        mix=MIXES[options.source],
        seed=options.seed,
        trajectories=runs if MIXES[options.source][1] else None,
        noise_vocab_size=None if c.has_mask_token else c.vocab_size,
        has_drafts=c.is_verifying or c.has_shifted_drafts,
        drafts_whole_blocks=c.has_causal_drafts or c.has_shifted_drafts,
    )
