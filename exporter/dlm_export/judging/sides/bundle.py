"""Implements the interface of a comparison's denoisers for a bundle in the native runtime.

Each pass computes a single canvas. If a pass computed several canvases, the quantisation range of
an activation would depend on all these canvases.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlm_export.bundle.manifest import network_of
from dlm_export.judging.sides.drafting import DraftPasses
from dlm_export.judging.sides.side import DraftPass, JudgeError, Side
from dlm_export.machine import this_machine
from dlm_export.network.loop_turns import Canvas, reserve_end, start_canvas
from dlm_runtime import Bundle, Generation, Policy


class Spent(NamedTuple):
    """The time and the number of passes that one generated text needed.

    ``cached_tokens`` is the number of prompt tokens that were reused from earlier prompts.
    """

    seconds: float
    nfe: int
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def on(cls, done: Generation) -> Spent:
        return cls(done.timings["total"], done.nfe, done.prompt_tokens, done.cached_tokens)


class BundlePredictor(Side):
    """A bundle that predicts tokens and generates text with the native runtime."""

    def __init__(self, bundle: Bundle, name: str) -> None:
        """``bundle`` must have been opened from a folder, because this class needs the manifest."""
        super().__init__(name, network_of(bundle.manifest))
        self.bundle = bundle
        self.spent: list[Spent] = []  # one element for each generated text

    def logits(
        self,
        canvas: np.ndarray,
        rows: np.ndarray | None = None,
        draft: DraftPass | None = None,
    ) -> np.ndarray:
        if draft is not None:
            assert rows is not None
            if self.bundle.engine != "none" and not self.bundle.is_on_cpu:
                raise JudgeError(
                    f"{self.name}: draft passes are compared on CPUs only: open the bundle with --engine onnxruntime "
                    "--provider cpu"
                )
            return self._draft_passes.logits(canvas, rows, draft)
        return self.bundle.logits(canvas.tolist(), None if rows is None else rows.tolist())

    @functools.cached_property
    def _draft_passes(self) -> DraftPasses:
        return DraftPasses(self.bundle)

    def courses(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[list[Canvas]]:
        for prompt, room in asked:
            start = start_canvas(prompt, room, self.mask_token_id)
            found = [reserve_end(start, policy, self.eos_token_ids)]
            for event in self.bundle.stream(tokens=prompt, new_tokens=room, **policy.as_dict()):
                found.append(Canvas(np.array(event.canvas, np.int64), np.array(event.undecided)))
                if event.result is not None:
                    self.spent.append(Spent.on(event.result))
            yield found

    def texts(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[tuple[list[int], int]]:
        """See ``Side``. Keeps no canvases, and measures generation without the steps of a stream."""
        for prompt, room in asked:
            done = self.bundle.generate(tokens=prompt, new_tokens=room, **policy.as_dict())
            self.spent.append(Spent.on(done))
            yield done.tokens, done.nfe

    def seconds(self) -> list[float]:
        return [done.seconds for done in self.spent]

    def reused(self) -> tuple[int, int]:
        """Return the number of tokens in the prompts of all texts generated so far.

        Also returns how many of these tokens were reused from earlier prompts.
        """
        return (
            sum(done.prompt_tokens for done in self.spent),
            sum(done.cached_tokens for done in self.spent),
        )

    def speed(self) -> dict[str, Any] | None:
        """Return the speed of text generation so far, and a description of the machine.

        Returns ``None`` if the bundle has generated no text, or if the CPU only simulates the
        bundle's number formats.
        """
        seconds = sum(done.seconds for done in self.spent)
        passes = sum(done.nfe for done in self.spent)
        is_simulated = self.bundle.manifest["loop"]["graph"]["simulated"] and self.bundle.is_on_cpu
        if is_simulated or not passes:
            return None
        machine = {
            name: value
            for name, value in this_machine().items()
            if name in ("processor", "cores", "gpu_sm")
        }
        times = {
            "ms_per_pass": 1e3 * seconds / passes,
            "ms_per_prompt": 1e3 * seconds / len(self.spent),
        }
        return {
            "prompts": len(self.spent),
            "passes": passes,
            **times,
            "engine": self.bundle.engine,
            **machine,
        }
