"""Says in a sentence how much accuracy a candidate loses, and whether the samples can tell.

The sentence is about right answers, if the data has answers. Otherwise, it is about texts that
differ, and without texts, about the masked cross-entropy. A difference counts if its 95% interval
excludes zero. All pages and commands use these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from dlm_calibration.metrics import direction, paired_interval
from dlm_export.charts.numbers import as_change, as_interval, as_percent, as_points

NAME = "right answers"
"""The share of generated answers that equal the completions in the data."""


def counted(right: Sequence[int]) -> str:
    """Return how many answers are right, such as "29 of 32"."""
    return f"{sum(right)} of {len(right)}"


def compared(name: str, difference: float, interval: Sequence[float], other: str) -> str:
    """Say whether ``name`` gives fewer or more right answers than ``other``."""
    low, high = interval
    shown = f"({as_points(difference)} points, 95% interval {as_interval(interval, 'points')})"
    if high < 0:
        return f"{name} gives fewer {NAME} than {other} {shown}"
    if low > 0:
        return f"{name} gives more {NAME} than {other} {shown}"
    return f"cannot tell whether {name} or {other} gives more {NAME} {shown}"


def loss_name(judgement: Mapping[str, Any]) -> str:
    """Name the loss of a judgement. Autoregressive denoisers are judged without masks."""
    return "masked cross-entropy" if judgement["buckets"] else "cross-entropy"


def loss(judgement: Mapping[str, Any]) -> str:
    """Name the change of the cross-entropy if it is significant. Otherwise, return "".

    The loss at masked positions shows a smaller difference than whole answers do.
    """
    overall = judgement["overall"]
    way = direction(overall)
    if not way:
        return ""
    return (
        f" The {loss_name(judgement)} of {judgement['candidate']} {'rises' if way > 0 else 'falls'}: "
        f"{as_change(overall['ce_increase'])}, 95% interval {as_interval(overall['ce_increase_interval'], 'change')}."
    )


def sentence(judgement: Mapping[str, Any]) -> str:
    """Say how much accuracy the candidate of a judgement loses against the reference."""
    ours, theirs = judgement["candidate"], judgement["reference"]
    free = judgement["free_running"]
    if free is None:
        overall = judgement["overall"]
        interval = overall["ce_increase_interval"]
        is_open = interval is None or interval[0] <= 0 <= interval[1]
        told = (
            "Cannot tell whether the predictions are worse" if is_open else "The predictions differ"
        )
        return (
            f"{told}: the {loss_name(judgement)} of {ours} changes by {as_change(overall['ce_increase'])} against {theirs} "
            f"(95% interval {as_interval(interval, 'change')}, {judgement['data']['samples']} samples). No text was generated."
        )
    prompts, equal = free["prompts"], round(free["exact_match"] * free["prompts"])
    same = f"{equal} of {prompts} texts are the same as those of {theirs}"
    right = free["right_answers"]
    if right is None:
        interval = as_interval(free["exact_match_interval"], "percent")
        return (
            f"{same} (95% interval {interval}). The data has no answers, so it cannot tell whether the other texts of "
            f"{ours} are worse.{loss(judgement)}"
        )
    found = compared(ours, right["difference"], right["difference_interval"], theirs)
    return (
        f"{found[0].upper()}{found[1:]}: {counted(right['candidate_right'])} of its answers are right, and "
        f"{counted(right['reference_right'])} of {theirs}. {same}.{loss(judgement)}"
    )


def differences(named: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Compare the right answers of every two bundles, prompt by prompt.

    ``named`` maps the name of each bundle to 1 for each right answer and 0 for each wrong answer.
    The prompts are the same for all bundles.
    """
    found = []
    for other, name in combinations(named, 2):
        theirs, ours = (np.array(named[each]) for each in (other, name))
        interval = paired_interval(theirs, ours)
        found.append(
            {
                "name": name,
                "other": other,
                "only_name": int((ours > theirs).sum()),
                "only_other": int((theirs > ours).sum()),
                "difference": float(ours.mean() - theirs.mean()),
                "interval": list(interval),
                "told": compared(name, float(ours.mean() - theirs.mean()), interval, other),
            }
        )
    return found


def of_bundles(
    named: Mapping[str, Sequence[int]], pairs: Sequence[Mapping[str, Any]], prompts: int
) -> str:
    """Say what the right answers of several bundles tell about their accuracy.

    ``pairs`` is the result of ``differences``.
    """
    shares = ", ".join(
        f"{name} {sum(right)} ({as_percent(sum(right) / prompts)})" for name, right in named.items()
    )
    start = f"Right answers to the same {prompts} prompts: {shares}."
    told = [pair["told"] for pair in pairs if not pair["interval"][0] <= 0 <= pair["interval"][1]]
    if not told:
        widest = max((pair["interval"] for pair in pairs), key=lambda each: each[1] - each[0])
        return (
            f"{start} These prompts cannot tell which bundle is better: the 95% interval of every difference includes zero "
            f"(the widest is {as_interval(widest, 'points')} points)."
        )
    rest = " The other differences may be chance." if len(told) < len(pairs) else ""
    return f"{start} {'; '.join(told)}.{rest}"
