"""Measures the loss of accuracy of a quantised denoiser, from logits, canvases and texts.

There are four kinds of metrics:

- cross-entropy, agreement and Kullback-Leibler divergence at masked positions, in nats;
- the likelihood bound of masked diffusion (arXiv:2502.09992, equation 6), in bits per byte;
- comparisons of whole generations (free runs);
- 95% intervals. Ratios of sums get the paired bootstrap over samples (Efron 1979). Shares get the
  score interval (Wilson 1927), and the difference of two shares of the same samples gets the
  interval for paired proportions that is built from it (Newcombe 1998, method 10). A bootstrap of
  shares would claim certainty if all samples agree.

All metrics are computed in float64. In fp32, the rounding of sums could hide the effect of
quantisation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_calibration.samples import Sample
from dlm_calibration.states import MASK_RATIOS

# Number of resamples of a bootstrap.
RESAMPLES = 1000
_Z = 1.959963984540054  # the standard normal distribution exceeds it with probability 0.025
TOP = 5
SHOWN_SAMPLES = 12  # largest number of free runs whose texts are reported
# The number of logits that are processed at a time: 32 MB in float64, or 33 rows with a vocabulary
# of 126,464 tokens.
_CHUNK_ELEMENTS = 1 << 22

Decode = Callable[[list[int]], str | None]


# --- Masked positions ---


@dataclass(frozen=True, eq=False)
class Rows:
    """Metrics of two denoisers at R positions. Each metric is an array ``[R]``, float64 or int64.

    The candidate denoiser is compared with the reference denoiser.

    ``reference_ce`` and ``candidate_ce`` are the two denoisers' cross-entropies of the true token.
    ``kl`` is the Kullback-Leibler divergence of the candidate from the reference. ``rank`` is the
    number of tokens that the candidate ranks before the reference's best token. Tokens of equal
    probability are ranked by id. A rank of 0 means that both denoisers have the same best token.
    """

    reference_ce: np.ndarray
    candidate_ce: np.ndarray
    kl: np.ndarray
    rank: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Join ``parts`` into one object. ``parts`` may be empty."""
        if not parts:
            return cls(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
        columns = zip(*((p.reference_ce, p.candidate_ce, p.kl, p.rank) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def take(self, chosen: np.ndarray) -> Rows:
        """Return the metrics at the ``chosen`` positions: bool ``[R]`` or an array of indices."""
        return Rows(
            self.reference_ce[chosen], self.candidate_ce[chosen], self.kl[chosen], self.rank[chosen]
        )

    def __len__(self) -> int:
        return len(self.kl)


def log_probabilities(logits: np.ndarray, mask_token_id: int) -> np.ndarray:
    """Return the log-softmax ``[R, V]`` in float64 of raw logits ``[R, V]``.

    The result is -inf for the mask token, if there is one, which is never predicted. NaN or
    infinite logits give NaN.
    """
    x = np.array(logits, dtype=np.float64)
    x[:, mask_token_id : mask_token_id + 1] = -np.inf
    with np.errstate(invalid="ignore"):
        x -= x.max(-1, keepdims=True)
        x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return KL(p || q) in nats, ``[R]``, of log-probabilities ``[R, V]``.

    The result is at least 0. The result is infinite if a token has probability 0 in q and a
    probability above 0 in p.
    """
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    # For equal distributions, rounding errors could make the sum -1e-17. maximum does not change
    # NaN.
    out: np.ndarray = np.maximum(terms.sum(-1), 0.0)
    return out


def compare_rows(
    reference: np.ndarray, candidate: np.ndarray, truth: np.ndarray, mask_token_id: int
) -> Rows:
    """Compare the raw logits ``[R, V]`` of two denoisers at R positions, whose true tokens are
    ``truth`` ``[R]``.

    NaN or infinite logits give NaN or infinite metrics. The amount of temporary memory does not
    depend on ``R`` or ``V``.
    """
    assert reference.shape == candidate.shape, (reference.shape, candidate.shape)
    count, vocab = reference.shape
    chunk = max(1, _CHUNK_ELEMENTS // vocab)
    parts = []
    for first in range(0, count, chunk):
        log_p = log_probabilities(reference[first : first + chunk], mask_token_id)
        log_q = log_probabilities(candidate[first : first + chunk], mask_token_id)
        true = truth[first : first + chunk, None]
        # Count the tokens that rank before the reference's best one. Of two equally likely tokens,
        # the token with the lower id ranks first.
        best = log_p.argmax(-1)[:, None]
        value = np.take_along_axis(log_q, best, 1)
        is_lower = np.arange(vocab) < best
        parts.append(
            Rows(
                -np.take_along_axis(log_p, true, 1)[:, 0],
                -np.take_along_axis(log_q, true, 1)[:, 0],
                divergence(log_p, log_q),
                ((log_q > value) | ((log_q == value) & is_lower)).sum(-1),
            )
        )
    return Rows.join(parts)


def summarise(rows: Rows, sample: np.ndarray, samples: int, seed: int) -> dict[str, Any]:
    """Return the mean of each metric, and intervals of top-1 agreement and of ``ce_increase``.

    ``sample`` ``[R]`` is the index of the sample that contains each position, and ``samples`` is
    the number of samples. ``ce_increase`` is relative: 0.01 is an increase of one per cent.
    ``ce_increase`` is ``None`` if the reference's loss is 0 and the candidate's loss is not 0.
    ``top5`` is the share of positions where the reference's best token is among the candidate's
    best five. Raises ValueError if there are no positions.
    """
    if not len(rows):
        raise ValueError("no rows to summarise")
    has_rows = np.bincount(sample, None, samples) > 0
    theirs, ours = (
        np.bincount(sample, loss, samples)[has_rows]
        for loss in (rows.reference_ce, rows.candidate_ce)
    )
    increase = ratio(float(ours.sum()), float(theirs.sum()))
    interval = ratio_interval(ours, theirs, seed)
    return {
        "positions": len(rows),
        "reference_ce": float(rows.reference_ce.mean()),
        "candidate_ce": float(rows.candidate_ce.mean()),
        "ce_increase": None if increase is None else increase - 1,
        "ce_increase_interval": None if interval is None else [interval[0] - 1, interval[1] - 1],
        "top1": float((rows.rank == 0).mean()),
        "top1_interval": list(
            share_interval(
                np.bincount(sample, rows.rank == 0, samples), np.bincount(sample, None, samples)
            )
        ),
        "top5": float((rows.rank < TOP).mean()),
        "kl_mean": float(rows.kl.mean()),
        "kl_p95": float(np.percentile(rows.kl, 95)),
    }


def direction(row: Mapping[str, Any]) -> int:
    """Return whether a result of ``summarise`` shows a significant change of cross-entropy.

    The result is 1 for an increase, -1 for a decrease, and 0 if the 95% interval includes zero. An
    increase that is ``None`` or not finite is significant.
    """
    increase, interval = row["ce_increase"], row["ce_increase_interval"]
    if increase is None or not np.isfinite(increase):
        return 1
    return 0 if interval is None else int(interval[0] > 0) - int(interval[1] < 0)


def ratio(above: float, below: float) -> float | None:
    """Return ``above / below``.

    If both values are 0, the result is 1. If only ``below`` is 0, the result is ``None``.
    """
    if below == 0:
        return 1.0 if above == 0 else None
    return above / below


def ratio_interval(above: np.ndarray, below: np.ndarray, seed: int) -> tuple[float, float] | None:
    """Return the 95% bootstrap interval of ``sum(above) / sum(below)``.

    Each resample consists of N random pairs ``(above[i], below[i])``, selected with replacement.
    Both values of a pair come from the same sample. The difficulty of the sample therefore cancels
    out in the ratio. The quantiles are those of the expanded percentile interval (see ``_tail``).
    Returns ``None`` if there are fewer than two samples, or if the ratio of a resample is undefined.
    """
    if len(above) < 2:
        return None
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(above), size=len(above))
        value = ratio(float(above[drawn].sum()), float(below[drawn].sum()))
        if value is None:
            return None
        found.append(value)
    low, high = np.quantile(found, [tail := _tail(len(above)), 1 - tail])
    return float(low), float(high)


def _tail(count: int) -> float:
    """Return the share of resamples that an interval of ``count`` samples excludes on each side.

    The percentiles of a bootstrap of few samples are too narrow: they ignore the factor n / (n - 1)
    of the variance, and the tails of Student's t. Expanded percentiles include both (Hesterberg, The
    American Statistician 69, 2015).
    """
    free = count - 1
    t = _Z + (_Z**3 + _Z) / (4 * free) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * free**2)
    return math.erfc(t * math.sqrt(count / free) / math.sqrt(2)) / 2


def share_interval(hits: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return the 95% score interval of the share ``sum(hits) / sum(counts)``.

    Element i of each array belongs to sample i. Positions of one sample resemble each other, so N
    positions tell less than N samples. The interval therefore uses the effective number of
    positions: the number that gives the variance between the samples (Korn and Graubard 1998). If
    the share is 0 or 1, no variance is known, and each sample counts once. ``(0, 1)`` without
    samples.
    """
    is_used = counts > 0
    hits, counts = hits[is_used], counts[is_used]
    samples, total = len(counts), float(counts.sum())
    if not samples:
        return 0.0, 1.0
    share = float(hits.sum()) / total
    effective = float(samples)
    if samples > 1 and 0 < share < 1:
        variance = float(((hits - share * counts) ** 2).sum()) / total**2
        effective = min(share * (1 - share) / variance, total) if variance else total
        effective = max(effective, 1.0)
    return wilson_interval(share, effective)


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Return the 95% score interval (Wilson 1927) of a share of ``count`` independent trials."""
    middle = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def paired_interval(reference: np.ndarray, candidate: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of ``mean(candidate) - mean(reference)`` of paired trials.

    Both arrays ``[N]`` contain 1 for success and 0 for failure. This is method 10 of Newcombe
    (Statistics in Medicine 17, 1998): the score intervals of both shares, combined with the
    correlation of the pairs.
    """
    count = len(reference)
    theirs, ours = float(reference.mean()), float(candidate.mean())
    both = int((reference * candidate).sum())
    only_theirs, only_ours = int(reference.sum()) - both, int(candidate.sum()) - both
    neither = count - both - only_theirs - only_ours
    product = float(both * neither - only_theirs * only_ours)
    if product > 0:  # the continuity correction of the paper
        product = max(product - count / 2, 0.0)
    spread = math.sqrt(
        (both + only_theirs) * (only_ours + neither) * (both + only_ours) * (only_theirs + neither)
    )
    phi = product / spread if spread else 0.0
    (low_r, high_r), (low_c, high_c) = (wilson_interval(p, count) for p in (theirs, ours))

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a**2 - 2 * phi * a * b + b**2))

    difference = ours - theirs
    return (
        difference - reach(ours - low_c, high_r - theirs),
        difference + reach(high_c - ours, theirs - low_r),
    )


def difference_interval(differences: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the mean of paired differences ``[N]`` of two shares.

    One sample gives the whole range from -1 to 1.
    """
    if len(differences) < 2:
        return -1.0, 1.0
    interval = ratio_interval(differences, np.ones(len(differences)), seed)
    assert interval is not None  # the ratio is defined, because all denominators are 1
    return interval


def bits_per_byte(nats: float, text_bytes: int) -> float | None:
    """Convert a bound on the negative log-likelihood of a text from nats to bits per byte of the
    text.

    Returns ``None`` if the text is empty.
    """
    return nats / math.log(2) / text_bytes if text_bytes else None


# --- The frontier: the positions that a denoiser commits next ---


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Jaccard index of two sets, bool ``[M]``.

    The Jaccard index is the size of the intersection divided by the size of the union. If both sets
    are empty, the index is 1.
    """
    union = int((first | second).sum())
    return int((first & second).sum()) / union if union else 1.0


@dataclass(frozen=True, eq=False)
class Commitment:
    """A denoiser's predictions at the ``M`` masked positions of a block, and its choice of
    positions to commit.

    ``logits`` are the raw logits ``[M, V]``, and ``guess`` are the most likely tokens ``[M]``.
    ``is_chosen``, bool ``[M]``, is True for positions that the denoiser would commit.
    """

    logits: np.ndarray
    guess: np.ndarray
    is_chosen: np.ndarray


class Frontier:
    """Compares the tokens that two denoisers would commit, for each range of mask ratios.

    The caller adds the states one by one.
    """

    def __init__(self, mask_token_id: int) -> None:
        self._mask_token_id = mask_token_id
        self._samples: list[int] = []
        self._buckets: list[int] = []
        self._jaccard: list[float] = []
        self._committed: list[int] = []
        self._flips: list[int] = []
        self._frontier_kl: list[np.ndarray] = []

    def add(
        self, sample: int, mask_ratio: float, reference: Commitment, candidate: Commitment
    ) -> None:
        """Compare the tokens that the two denoisers would commit in one state of a decoding run.

        ``sample`` is the index of the run's sample. ``mask_ratio`` is the share of positions after
        the prompt that are masked. A flip is a position where the two denoisers commit different
        tokens.
        """
        self._samples.append(sample)
        both = reference.is_chosen & candidate.is_chosen
        rows = compare_rows(
            reference.logits, candidate.logits, reference.guess, self._mask_token_id
        )
        self._buckets.append(min(len(MASK_RATIOS) - 1, int(mask_ratio * len(MASK_RATIOS) + 1e-9)))
        self._jaccard.append(jaccard(reference.is_chosen, candidate.is_chosen))
        self._committed.append(int(both.sum()))
        self._flips.append(int((both & (reference.guess != candidate.guess)).sum()))
        self._frontier_kl.append(rows.kl[reference.is_chosen])

    @property
    def is_measured(self) -> bool:
        """True if at least one state was added."""
        return bool(self._samples)

    @property
    def frontier_kl(self) -> float:
        """The mean KL divergence in nats, over the positions that the reference commits."""
        return float(np.concatenate(self._frontier_kl).mean())

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain Python objects, for accuracy.json.

        Ranges of mask ratios without states are left out.
        """
        buckets, shared = np.array(self._buckets), np.array(self._jaccard)
        committed, flips = np.array(self._committed), np.array(self._flips)

        def summary(chosen: np.ndarray) -> dict[str, Any]:
            return {
                "jaccard": float(shared[chosen].mean()),
                "committed": int(committed[chosen].sum()),
                "flips": int(flips[chosen].sum()),
            }

        rows = [
            {"mask_ratio": mask_ratio, "states": int((buckets == index).sum())}
            | summary(buckets == index)
            for index, mask_ratio in enumerate(MASK_RATIOS)
            if (buckets == index).any()
        ]
        overall = summary(np.ones(len(buckets), bool))
        rate = overall["flips"] / overall["committed"] if overall["committed"] else 0.0
        interval = share_interval(
            np.bincount(self._samples, flips), np.bincount(self._samples, committed)
        )
        found = {"flip_rate": rate, "flip_rate_interval": list(interval)}
        return {"buckets": rows, **overall, **found, "kl_mean": self.frontier_kl}


# --- Free runs: whole generations of both denoisers ---


def until_end(tokens: Sequence[int], eos_token_ids: Iterable[int]) -> list[int]:
    """Return ``tokens`` up to and including the first end token."""
    ends = set(eos_token_ids)
    for i, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: i + 1])
    return list(tokens)


def token_agreement(first: Sequence[int], second: Sequence[int]) -> tuple[int, int]:
    """Return the number of positions with equal tokens, and the length of the longer sequence."""
    return sum(a == b for a, b in zip(first, second, strict=False)), max(len(first), len(second))


def first_divergence(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the position of the first difference, or ``None`` for equal sequences.

    If one sequence is a prefix of the other, the result is the length of the shorter sequence.
    """
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))


def same_answer(text: str | None, answer: str) -> bool:
    """Return True if ``text`` gives the same answer as ``answer``.

    If ``answer`` is a JSON object or array, both texts are parsed and compared. Key order, spacing,
    and the difference between 1 and 1.0 do not matter. All other answers are compared as text. In
    this comparison, one or more whitespace characters equal one space. If ``text`` is ``None``, the
    result is False.
    """
    if text is None:
        return False
    try:
        wanted = json.loads(answer)
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, (dict, list)):
        return text.split() == answer.split()
    try:
        return _same_json(json.loads(text), wanted)
    except (ValueError, RecursionError):
        return False


def _same_json(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _same_json(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(
            _same_json(a, b) for a, b in zip(first, second, strict=True)
        )
    # In Python, True equals 1. In JSON, true and 1 are distinct values.
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


@dataclass(frozen=True)
class Run:
    """One generation: the tokens up to and including the first end token, the text of these tokens,
    and the number of passes (NFE).
    """

    tokens: list[int]
    text: str | None
    nfe: int


def as_run(
    tokens: Sequence[int],
    prompt: Sequence[int],
    nfe: int,
    eos_token_ids: Sequence[int],
    decode: Decode,
) -> Run:
    """Make a ``Run`` from the canvas of a finished generation. The end token is not decoded."""
    written = until_end(tokens[len(prompt) :], eos_token_ids)
    is_ended = bool(written) and written[-1] in eos_token_ids
    return Run(written, decode(written[:-1] if is_ended else written), nfe)


def summarise_runs(
    samples: Sequence[Sample],
    prompts: Sequence[str | None],
    reference: Sequence[Run],
    candidate: Sequence[Run],
    seed: int,
) -> dict[str, Any]:
    """Compare the generations (free runs) of two denoisers, for accuracy.json.

    ``prompts`` are the prompt texts to show.
    """
    pairs = list(zip(reference, candidate, strict=True))
    agreed = [token_agreement(a.tokens, b.tokens) for a, b in pairs]
    parted = [first_divergence(a.tokens, b.tokens) for a, b in pairs]
    divergences = [position for position in parted if position is not None]
    is_equal = np.array([position is None for position in parted])
    theirs, ours = (np.array([run.nfe for run in side]) for side in (reference, candidate))
    interval = ratio_interval(ours, theirs, seed)
    # Runs that differ come first.
    order = sorted(range(len(pairs)), key=lambda i: parted[i] is None)[:SHOWN_SAMPLES]
    return {
        "prompts": len(pairs),
        "exact_match": float(is_equal.mean()),
        "exact_match_interval": list(share_interval(is_equal, np.ones(len(pairs)))),
        "token_agreement": sum(same for same, _ in agreed)
        / max(1, sum(count for _, count in agreed)),
        "first_divergence_median": float(np.median(divergences)) if divergences else None,
        "reference_nfe": theirs.tolist(),
        "candidate_nfe": ours.tolist(),
        "nfe_ratio": ratio(float(ours.sum()), float(theirs.sum())),
        "nfe_ratio_interval": None if interval is None else list(interval),
        "right_answers": _right_answers(samples, pairs),
        "samples": [
            {
                "prompt": prompts[i],
                "answer": samples[i].answer,
                "reference": reference[i].text,
                "candidate": candidate[i].text,
                "reference_nfe": reference[i].nfe,
                "candidate_nfe": candidate[i].nfe,
            }
            for i in order
        ],
    }


def _right_answers(
    samples: Sequence[Sample], pairs: Sequence[tuple[Run, Run]]
) -> dict[str, Any] | None:
    """Return which answers of each denoiser are right, over the samples that have an answer.

    Returns ``None`` if no sample has an answer.
    """
    right = [
        [same_answer(run.text, sample.answer) for run in pair]
        for sample, pair in zip(samples, pairs, strict=True)
        if sample.answer is not None
    ]
    if not right:
        return None
    theirs, ours = np.array(right, np.int64).T
    return {
        "prompts": len(right),
        "reference": float(theirs.mean()),
        "candidate": float(ours.mean()),
        "difference": float(ours.mean() - theirs.mean()),
        "reference_interval": list(wilson_interval(float(theirs.mean()), len(right))),
        "candidate_interval": list(wilson_interval(float(ours.mean()), len(right))),
        "difference_interval": list(paired_interval(theirs, ours)),
        "reference_right": theirs.tolist(),
        "candidate_right": ours.tolist(),
    }
