"""Tests of calibration: the data, the states that are made from the data, and the statistics of
layer inputs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import DEMO_CHECKPOINT
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_calibration.errors import CalibrationError
from dlm_calibration.observers import SMALLEST_AMAX, Observer, Observers
from dlm_calibration.samples import Sample, builtin_samples, read_samples, samples_sha256
from dlm_calibration.states import MASK_RATIOS, TRAJECTORY_POINTS, State, make_states, mask_share
from dlm_runtime.text.tokenizer import Tokenizer

EOS, MASK, USER, ASSISTANT = range(4)  # token ids of the demo
LIMITS: dict[str, int] = {"eos_token_id": EOS, "max_canvas_length": 512}
HELD_OUT = Path(__file__).parent.parent / "examples" / "demo" / "heldout.jsonl"
METHODS = ("max", "percentile", "mse", "entropy")

TURNS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|assistant|>"
    "{% else %}{{ message['content'] }}<|eos|>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo's tokenizer, with a chat template for several turns.

    The tokenizer puts a user token before a prompt and an assistant token after it. The chat
    template does the same in every turn.
    """
    loaded = (DEMO_CHECKPOINT / "tokenizer.json").read_bytes()
    config = json.loads((DEMO_CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    return Tokenizer(loaded, TURNS, {"eos_token": config["eos_token"]})


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# --- Samples ---


def test_prompt_and_completion_become_a_wrapped_prompt_plain_completion_and_one_eos(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "data.jsonl", {"prompt": "call amir", "completion": '{"name":"call"}', "id": 7}
    )
    (sample,) = read_samples(path, tokenizer, **LIMITS)
    prompt = tokenizer.encode("call amir")
    assert (prompt[0], prompt[-1]) == (USER, ASSISTANT)
    assert sample.tokens.tolist() == [*prompt, *tokenizer.encode_plain('{"name":"call"}'), EOS]
    assert sample.tokens.dtype == np.int64
    assert not {USER, ASSISTANT} & set(sample.tokens[len(prompt) :].tolist())
    assert (sample.prompt_length, sample.prompt, sample.answer) == (
        len(prompt),
        "call amir",
        '{"name":"call"}',
    )


def test_the_last_message_of_the_assistant_is_the_completion(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "call amir"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    (sample,) = read_samples(
        write(tmp_path / "chat.jsonl", {"messages": chat}), tokenizer, **LIMITS
    )
    prompt = tokenizer.encode_chat(chat[:3])
    assert sample.tokens.tolist() == [*prompt, *tokenizer.encode_plain("done"), EOS]
    assert sample.prompt_length == len(prompt)
    assert sample.answer == "done"
    assert sample.prompt is not None
    assert "call amir" in sample.prompt


def test_prompts_are_read_without_their_completions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "call amir"}
    answered = {"role": "assistant", "content": "done"}
    path = write(
        tmp_path / "data.jsonl",
        {"prompt": "call amir"},
        {"prompt": "call amir", "completion": " ".join(["long"] * 10_000)},
        {"messages": [asked]},
        {"messages": [asked, answered]},
        {"messages": [asked, answered, asked]},
        {"text": "call amir"},
    )
    samples = read_samples(path, tokenizer, **LIMITS, prompts_only=True)
    given = [sample.tokens[: sample.prompt_length].tolist() for sample in samples]
    plain, chat = tokenizer.encode("call amir"), tokenizer.encode_chat([asked])
    longer = tokenizer.encode_chat([asked, answered, asked])
    assert given == [plain, plain, chat, chat, longer, []]
    assert all(sample.answer is None for sample in samples)
    assert [len(sample.tokens) for sample in samples[:5]] == list(map(len, given[:5]))
    for record, message in (
        ({"completion": "a"}, "it has none of these keys: prompt, messages, text"),
        ({"prompt": 1}, "prompt is a int"),
        ({"messages": []}, "messages contain no prompt"),
        ({"messages": [answered]}, "messages contain no prompt"),
    ):
        with pytest.raises(CalibrationError, match=f"line 1: {message}"):
            read_samples(write(path, record), tokenizer, **LIMITS, prompts_only=True)


def test_plain_text_has_no_prompt_and_no_wrapping(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (sample,) = read_samples(
        write(tmp_path / "data.jsonl", {"text": "call amir"}), tokenizer, **LIMITS
    )
    assert sample.tokens.tolist() == tokenizer.encode_plain("call amir")
    assert (sample.prompt_length, sample.prompt, sample.answer) == (0, None, None)


def test_paragraphs_of_a_text_file_are_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes("\ufeff\r\ncall amir\r\n  at nine\r\n\r\n \r\n{not json\n\nlast".encode())
    texts = [
        tokenizer.decode(sample.tokens.tolist())
        for sample in read_samples(path, tokenizer, **LIMITS)
    ]
    assert texts == ["call amir\n  at nine", "{not json", "last"]


def test_blank_lines_are_skipped_and_reading_ends_at_the_limit(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('\n{"text": "a"}\n\n  \n{"text": "b"}\nbroken\n', encoding="utf-8")
    assert len(read_samples(path, tokenizer, **LIMITS, limit=2)) == 2
    with pytest.raises(CalibrationError, match="line 6: not JSON"):
        read_samples(path, tokenizer, **LIMITS, limit=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 2: not JSON"),
        (b"plain words", "line 2: not JSON .*; put plain text into a file with the suffix .txt"),
        (b"[" * 100_000, "line 2: not JSON"),
        (
            b'{"prompt": "a", "txt": "b"}',
            "line 2: it has none of these keys: prompt and completion, messages, text",
        ),
        (b'{"text": ["a"]}', "line 2: text is a list, expected a string"),
        (b'{"text": "\\ud800"}', "line 2: .*rejects this text"),
        (b'{"prompt": "a", "completion": " "}', "line 2: the completion is empty"),
        (
            b'{"messages": [{"role": "user", "content": ["a"]}]}',
            "line 2: a message has no content, or it is not a string",
        ),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "line 2: messages contain no answer"),
        (b'{"text": "caf\xe9"}', "line 2: not UTF-8"),
        (
            json.dumps({"text": "a " * 600}).encode(),
            r"line 2: \d+ tokens do not fit the canvas of 512",
        ),
        (b'{"text": "' + b"a" * (1 << 20) + b'"}', "line 2: longer than 1048576 bytes"),
    ],
)
def test_a_line_at_fault_is_named_by_its_number(
    tokenizer: Tokenizer, tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(CalibrationError, match=message) as caught:
        read_samples(path, tokenizer, **LIMITS)
    assert str(caught.value).startswith(str(path))
    assert caught.value.exit_code == 2


def test_a_file_that_is_no_data_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n", encoding="utf-8")
    wide = tmp_path / "wide.jsonl"
    wide.write_text('{"text": "a"}', encoding="utf-16")
    long = tmp_path / "long.txt"
    long.write_text("\nbegin\n" + "a word\n" * 200_000, encoding="utf-8")
    for path, message in (
        (empty, "contains no samples"),
        (wide, "line 1: not UTF-8"),
        (long, "line 2: a paragraph is longer than"),
        (tmp_path, "no such file"),
        (tmp_path / "missing.jsonl", "no such file"),
    ):
        with pytest.raises(CalibrationError, match=message):
            read_samples(path, tokenizer, **LIMITS)
    with pytest.raises(CalibrationError, match="at least 1 sample is needed, not 0"):
        read_samples(empty, tokenizer, **LIMITS, limit=0)


def test_text_without_a_tokenizer_and_messages_without_a_template_are_refused(
    tmp_path: Path,
) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "chat.jsonl", {"messages": chat})
    bare = Tokenizer((DEMO_CHECKPOINT / "tokenizer.json").read_bytes(), None, {})
    with pytest.raises(CalibrationError, match="line 1: messages need a chat template"):
        read_samples(path, bare, **LIMITS)
    with pytest.raises(CalibrationError, match="text needs a tokenizer"):
        read_samples(path, None, **LIMITS)
    with pytest.raises(CalibrationError, match="has no tokenizer"):
        builtin_samples(None, **LIMITS)


def test_the_built_in_samples_come_as_chats_and_those_too_long_are_left_out(
    tokenizer: Tokenizer,
) -> None:
    samples = builtin_samples(tokenizer, **LIMITS)
    assert len(samples) == 64
    assert len({sample.prompt for sample in samples}) == 64
    assert all(
        sample.tokens[0] == USER and sample.tokens[sample.prompt_length - 1] == ASSISTANT
        for sample in samples
    )
    assert samples_sha256(builtin_samples(tokenizer, **LIMITS, limit=5)) == samples_sha256(
        samples[:5]
    )
    short = builtin_samples(tokenizer, eos_token_id=EOS, max_canvas_length=60)
    assert 0 < len(short) < 64
    assert max(len(sample.tokens) for sample in short) <= 60
    with pytest.raises(
        CalibrationError, match="none of the built-in samples fits a canvas of 8 tokens"
    ):
        builtin_samples(tokenizer, eos_token_id=EOS, max_canvas_length=8)


# --- States ---

MASK_ID, PAD_ID = 999, 998


def make_samples(count: int, prompt_length: int = 5, length: int = 30) -> list[Sample]:
    rng = np.random.default_rng(4)
    return [
        Sample(rng.integers(0, 900, prompt_length + length), prompt_length, "answer", "prompt")
        for _ in range(count)
    ]


def states_of(samples: list[Sample], **options: Any) -> list[State]:
    defaults: dict[str, Any] = {
        "mask_token_id": MASK_ID,
        "pad_token_id": PAD_ID,
        "block_length": 32,
        "max_canvas_length": 512,
        "seed": 1,
    }
    return list(make_states(samples, **(defaults | options)))


def left_to_right(sample: Sample, length: int = 40) -> list[np.ndarray]:
    """Return the canvases after each pass of a generation that commits one token per pass, from
    left to right.
    """
    canvas = np.append(sample.tokens[: sample.prompt_length], np.full(length, MASK_ID))
    return [
        np.where(
            np.arange(len(canvas)) < sample.prompt_length + taken,
            np.where(canvas == MASK_ID, 7, canvas),
            canvas,
        )
        for taken in range(1, length + 1)
    ]


samples_strategy = st.lists(
    st.builds(
        lambda prompt, rest, answer: Sample(
            np.array([*prompt, *rest], dtype=np.int64), len(prompt), answer
        ),
        st.lists(st.integers(0, 900), max_size=12),
        st.lists(st.integers(0, 900), min_size=1, max_size=40),
        st.sampled_from((None, "answer")),
    ),
    max_size=8,
)


@settings(max_examples=40)
@given(
    samples=samples_strategy,
    block_length=st.integers(0, 40),
    max_canvas_length=st.integers(52, 70),
    per_sample=st.integers(1, 10),
    mix=st.tuples(*[st.floats(0, 1)] * 3).filter(lambda mix: sum(mix) > 0.01),
    seed=st.integers(0, 2**32),
    with_trajectory=st.booleans(),
)
def test_every_state_keeps_the_prompt_masks_something_and_fits_the_canvas(
    samples: list[Sample], with_trajectory: bool, **options: Any
) -> None:
    runs = (
        (lambda asked: [left_to_right(sample, 12) for sample in asked]) if with_trajectory else None
    )
    states = states_of(samples, trajectories=runs, **options)
    again = states_of(samples, trajectories=runs, **options)
    assert [state.sha256 for state in states] == [state.sha256 for state in again]
    prompts = {sample.tokens[: sample.prompt_length].tobytes() for sample in samples}
    for state in states:
        is_masked = state.canvas == MASK_ID
        assert state.canvas.dtype == np.int64
        assert len(state.canvas) <= options["max_canvas_length"]
        assert state.canvas[: state.prompt_length].tobytes() in prompts
        assert state.mask_ratio == pytest.approx(is_masked[state.prompt_length :].mean())
        assert is_masked.any() == (state.source != "clean")
        assert state.bucket == -1 if state.source == "clean" else 0 <= state.bucket <= 9
    masked_or_walked = sum(state.source != "clean" for state in states)
    assert masked_or_walked <= options["per_sample"] * len(samples)
    assert len(states) - masked_or_walked <= len(samples)


def test_the_mix_buckets_and_trajectory_points_hold_over_all_samples() -> None:
    states = states_of(make_samples(100), trajectories=lambda asked: map(left_to_right, asked))
    assert Counter(state.source for state in states) == {
        "masked": 400,
        "trajectory": 320,
        "clean": 80,
    }
    buckets = Counter(state.bucket for state in states if state.source == "masked")
    assert buckets == dict.fromkeys(range(10), 40)
    points = Counter(
        round(state.mask_ratio * 40) for state in states if state.source == "trajectory"
    )
    assert points.keys() == {40 - round(point * 39) for point in TRAJECTORY_POINTS}
    assert max(points.values()) - min(points.values()) <= 2
    # Some of the 800 states are equal to others, for example if all positions are masked.
    assert len({state.sha256 for state in states}) > 700


def test_no_mask_ratio_goes_with_every_nth_sample() -> None:
    states = states_of(make_samples(50), per_sample=5, mix=(1, 0, 0))
    ratios = [tuple(state.bucket for state in states[i : i + 5]) for i in range(0, 250, 10)]
    assert len(set(ratios)) == len(ratios)


def test_a_trajectory_is_taken_from_before_its_first_pass_to_its_last_mask() -> None:
    calls: list[Sample] = []

    def run(asked: Sequence[Sample]) -> list[list[np.ndarray]]:
        calls.extend(asked)
        return [left_to_right(sample, 20) for sample in asked]

    samples = make_samples(3)
    states = states_of(samples, per_sample=7, mix=(0, 1, 0), trajectories=run)
    assert calls == samples
    for sample, own in zip(samples, (states[:7], states[7:14], states[14:]), strict=True):
        left = sorted(int((state.canvas == MASK_ID).sum()) for state in own)
        assert left == sorted(20 - round(point * 19) for point in TRAJECTORY_POINTS)
        assert all((state.canvas[:5] == sample.tokens[:5]).all() for state in own)


def test_masked_states_stand_in_for_trajectories_that_are_missing_or_too_short() -> None:
    samples = make_samples(4)
    assert {state.source for state in states_of(samples, mix=(0, 1, 0))} == {"masked"}
    assert {
        state.source
        for state in states_of(
            samples, mix=(0, 1, 0), trajectories=lambda asked: [[] for _ in asked]
        )
    } == {"masked"}
    short = states_of(
        samples,
        mix=(0, 1, 0),
        trajectories=lambda asked: [left_to_right(sample, 2) for sample in asked],
    )
    assert Counter(state.source for state in short) == {"trajectory": 8, "masked": 24}


def test_completions_are_padded_to_whole_blocks_within_the_canvas() -> None:
    (sample,) = make_samples(1)

    def clean(sample: Sample, **options: Any) -> np.ndarray:
        (state,) = states_of([sample], mix=(0, 0, 1), **options)
        return state.canvas

    assert len(clean(sample, block_length=16)) == 5 + 32
    assert clean(sample, block_length=16)[35:].tolist() == [PAD_ID, PAD_ID]
    assert len(clean(sample, block_length=15)) == 35
    assert len(clean(sample, block_length=0)) == 35
    assert len(clean(sample, block_length=64, max_canvas_length=40)) == 40
    assert len(clean(Sample(sample.tokens, 0), block_length=64)) == 35  # a sample of plain text


def test_runs_are_asked_for_once_and_taken_one_sample_at_a_time() -> None:
    asked: list[int] = []
    taken: list[int] = []

    def run(samples: Sequence[Sample]) -> Any:
        asked.append(len(samples))
        for number, sample in enumerate(samples):
            taken.append(number)
            yield left_to_right(sample)

    options = {
        "mask_token_id": MASK_ID,
        "pad_token_id": PAD_ID,
        "block_length": 8,
        "max_canvas_length": 64,
        "seed": 0,
    }
    states = make_states(make_samples(10), **options, per_sample=1, trajectories=run)
    sources = [state.source for state in islice(states, 5)]
    assert asked == [4]  # 4 of the 10 states are taken from generations of the denoiser
    assert len(taken) == sources.count("trajectory") == 2


def test_a_mix_that_is_no_shares_and_a_sample_with_the_mask_token_are_refused() -> None:
    samples = make_samples(2)
    for mix in ((0, 0, 0), (1, -1, 1), (1, 1), (float("nan"), 1, 1), (float("inf"), 0, 0)):
        with pytest.raises(CalibrationError, match="is not 3 shares"):
            make_states(
                samples,
                mask_token_id=1,
                pad_token_id=0,
                block_length=8,
                max_canvas_length=64,
                seed=0,
                mix=mix,
            )
    with pytest.raises(CalibrationError, match="at least 1 state per sample"):
        states_of(samples, per_sample=0)
    samples[1].tokens[9] = MASK_ID
    with pytest.raises(CalibrationError, match="sample 2: its text contains the mask token"):
        states_of(samples)


@settings(max_examples=100)
@given(
    length=st.integers(1, 60),
    protected=st.integers(0, 20),
    ratio=st.sampled_from(MASK_RATIOS),
    seed=st.integers(0, 2**32),
)
def test_a_masked_share_stays_within_half_a_position_of_its_ratio(
    length: int, protected: int, ratio: float, seed: int
) -> None:
    tokens = np.arange(protected + length)
    out = mask_share(tokens, ratio, -1, np.random.default_rng(seed), protected)
    count = int((out == -1).sum())
    assert not (out[:protected] == -1).any()
    assert count == 1 or abs(count - ratio * length) <= 0.5 + 1e-9
    assert ((out == tokens) | (out == -1)).all()


# --- Observers ---


def observe(x: np.ndarray, is_masked: Any = False, bucket: int = 0, **options: Any) -> Observer:
    observer = Observer("blocks.0.mlp.up", x.shape[1], **options)
    observer.add(x, np.broadcast_to(np.asarray(is_masked, dtype=bool), len(x)), bucket)
    return observer


def heavy_tailed(count: int = 2000, channels: int = 48, seed: int = 0) -> np.ndarray:
    """Make normally distributed values.

    One channel has larger values than the others, as in real denoisers.
    """
    x = np.random.default_rng(seed).standard_normal((count, channels)).astype(np.float32)
    x[:, 3] *= 40
    return x


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_percentiles_and_kurtosis_are_those_of_the_values(scale: float) -> None:
    x = (heavy_tailed() + np.float32(4)) * np.float32(scale)
    statistics = observe(x).statistics()
    magnitudes = np.abs(x.astype(np.float64))
    centred = x.astype(np.float64) - x.mean(dtype=np.float64)
    assert statistics["count"] == 2000
    assert statistics["amax"] == magnitudes.max()
    assert statistics["p999"] == pytest.approx(np.percentile(magnitudes, 99.9), rel=0.03)
    assert statistics["p9999"] == pytest.approx(np.percentile(magnitudes, 99.99), rel=0.03)
    assert statistics["kurtosis"] == pytest.approx(
        (centred**4).mean() / (centred**2).mean() ** 2, rel=1e-5
    )


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=60),
    cut=st.integers(1, 3),
    is_masked=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_the_order_of_passes_makes_no_difference(
    values: list[float], cut: int, is_masked: list[bool]
) -> None:
    x = np.array(values, dtype=np.float32).reshape(-1, 1)
    flags = np.array(is_masked[: len(x)])
    one, two = Observer("l", 1), Observer("l", 1)
    one.add(x, flags, 4)
    two.add(x[cut:], flags[cut:], 4)
    two.add(x[:cut], flags[:cut], 4)
    ranges = [[o.amax(method, levels="int8") for method in METHODS] for o in (one, two)]  # type: ignore[arg-type]
    assert ranges[0] == ranges[1]
    assert (one.channel_amax == two.channel_amax).all()
    assert one.count == two.count == len(x)
    largest = max(np.abs(x).max(), SMALLEST_AMAX)
    assert all(0 < value <= largest for value in ranges[0])


def squared_error(x: np.ndarray, clip: float, levels: str) -> float:
    if levels == "int8":
        scale = clip / 127
        image = np.clip(np.round(x / scale), -128, 127) * scale
    else:
        scale = clip / 448
        image = (
            np.clip(x / scale, -448, 448)
            .astype(np.float32)
            .astype(ml_dtypes.float8_e4m3fn)
            .astype(np.float64)
            * scale
        )
    return float(((x - image) ** 2).sum())


@pytest.mark.parametrize("levels", ["int8", "fp8"])
@pytest.mark.parametrize("outliers", [0, 40, 1000])
def test_the_mse_range_has_nearly_the_least_error_of_all(levels: Any, outliers: float) -> None:
    x = np.random.default_rng(1).standard_normal((1500, 32)).astype(np.float32)
    if outliers:
        x[::500, 3] *= outliers
    clip = observe(x).amax("mse", levels=levels)
    largest = float(np.abs(x).max())
    least = min(
        squared_error(x.astype(np.float64), c, levels)
        for c in largest * np.geomspace(1 / 200, 1, 400)
    )
    assert squared_error(x.astype(np.float64), clip, levels) <= 1.03 * least
    if levels == "int8" and not outliers:
        assert clip < 0.95 * largest


def test_the_entropy_range_clips_a_thin_tail_and_keeps_an_even_spread() -> None:
    rng = np.random.default_rng(2)
    thin = rng.standard_normal((4000, 16)).astype(np.float32)
    thin[0, 0] = 30
    assert 2 < observe(thin).amax("entropy", levels="int8") < 15
    even = rng.uniform(-1, 1, (4000, 16)).astype(np.float32)
    assert observe(even).amax("entropy", levels="int8") > 0.95
    assert observe(even).amax("entropy", levels="fp8") > 0.9


def divergences(x: np.ndarray) -> dict[float, float]:
    """For each clipping range, return how far the distribution of the magnitudes diverges from the
    distribution of their INT8 values.

    The computation follows Migacz (GTC 2017), but uses the single values instead of a histogram.
    """
    counts, edges = np.histogram(np.abs(x[x != 0]), 2048, range=(0, float(np.abs(x).max())))
    out = {}
    for bins in range(128, 2049, 16):
        p = counts[:bins].astype(np.float64)
        q = np.zeros(bins)
        level = np.round((np.arange(bins) + 0.5) / bins * 127).clip(0, 127)
        for code in range(128):
            same = (level == code) & (p > 0)
            q[same] = p[same].mean() if same.any() else 0
        p[-1] += counts[bins:].sum()
        if (q[p > 0] > 0).all():
            p, q = p[p > 0] / p.sum(), q[p > 0] / q.sum()
            out[float(edges[bins])] = float((p * np.log(p / q)).sum())
    return out


def test_the_entropy_range_is_nearly_the_one_found_on_the_values_themselves() -> None:
    x = np.random.default_rng(0).laplace(size=(3000, 16)).astype(np.float32)
    losses = divergences(x)
    found = observe(x).amax("entropy", levels="int8")
    nearest = min(losses, key=lambda clip: abs(clip - found))
    assert losses[nearest] <= 1.15 * min(losses.values())
    zeros = np.zeros((30_000, 16), dtype=np.float32)
    assert observe(np.concatenate((zeros, x))).amax("entropy", levels="int8") == found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("levels", ["int8", "fp8"])
def test_an_input_that_is_zero_or_as_good_as_zero_still_has_a_range(
    method: Any, levels: Any
) -> None:
    zeros = np.zeros((5, 4), dtype=np.float32)
    assert observe(zeros).amax(method, levels=levels) == SMALLEST_AMAX
    assert np.float32(SMALLEST_AMAX / (6 * 448)) * np.float32(2**-9) > np.finfo(np.float32).tiny
    tiny = zeros + np.float32(1e-12)
    assert SMALLEST_AMAX < observe(tiny).amax(method, levels=levels) <= np.float32(1e-12)
    huge = zeros + np.float32(1e38)
    assert 0 < observe(huge).amax(method, levels=levels) <= np.float32(1e38)


def test_masked_and_committed_positions_and_buckets_are_kept_apart() -> None:
    observer = Observer("blocks.1.attention.q", 2)
    ones = np.ones((3, 2), dtype=np.float32)
    is_masked = np.array([True, False, False])
    observer.add(
        ones * np.array([[8], [1], [2]], dtype=np.float32) * np.array([1, -0.5], dtype=np.float32),
        is_masked,
        0,
    )
    observer.add(ones * np.array([[16], [0.5], [0.25]], dtype=np.float32), is_masked, 9)
    observer.add(ones * 100, np.zeros(3, dtype=bool), -1)
    summary = observer.summary()
    assert summary["layer"] == "blocks.1.attention.q"
    assert (summary["count"], summary["amax"]) == (9, 100)
    assert (summary["masked_amax"], summary["committed_amax"], summary["clean_amax"]) == (
        16,
        100,
        100,
    )
    assert summary["by_bucket"] == [8, *[None] * 8, 16]
    assert summary["masked_by_bucket"] == [8, *[None] * 8, 16]
    assert summary["committed_by_bucket"] == [2, *[None] * 8, 0.5]
    assert summary["drift"] == 2  # clean states have no mask ratio and do not affect the drift
    assert observer.statistics(bucket=9, is_masked=False)["count"] == 2
    assert observer.channel_amax.tolist() == [100, 100]
    assert json.loads(json.dumps(summary)) == summary


def test_nan_and_infinite_inputs_are_an_error_that_names_the_layer_and_takes_in_nothing() -> None:
    observer = observe(heavy_tailed(), keep_rows=4)
    before = (observer.summary(), observer.rows.copy())
    x = heavy_tailed(10)
    x[2, 5], x[7, 0] = np.nan, np.inf
    with pytest.raises(
        CalibrationError, match=r"^blocks\.0\.mlp\.up: 2 of 480 inputs are NaN or infinite"
    ):
        observer.add(x, np.zeros(10, dtype=bool), 3)
    assert observer.summary() == before[0]
    assert (observer.rows == before[1]).all()


def test_rows_are_drawn_evenly_from_all_that_passed() -> None:
    kept = Counter()
    for seed in range(100):
        observer = Observer("l", 1, keep_rows=10, seed=seed)
        for start in (0, 4, 30):
            stop = {0: 4, 4: 30, 30: 50}[start]
            x = np.arange(start, stop, dtype=np.float32)[:, None]
            observer.add(x, np.zeros(len(x), dtype=bool), 0)
            if stop == 4:
                assert observer.rows.ravel().tolist() == [0, 1, 2, 3]
        assert observer.rows.shape == (10, 1)
        assert len(set(observer.rows.ravel().tolist())) == 10
        kept.update(observer.rows.ravel().astype(int).tolist())
    assert len(kept) == 50
    # The expected number is 20, with a standard deviation of 4.
    assert all(4 <= count <= 40 for count in kept.values())
    x = heavy_tailed(100)
    assert (observe(x, keep_rows=8, seed=3).rows == observe(x, keep_rows=8, seed=3).rows).all()
    assert (observe(x, keep_rows=8, seed=3).rows != observe(x, keep_rows=8, seed=4).rows).any()


def test_every_layer_without_an_observation_is_named() -> None:
    observers = Observers()
    observers["seen"] = observe(heavy_tailed(5))
    observers["empty"] = Observer("empty", 4)
    observers.check(["seen"])
    with pytest.raises(CalibrationError, match="ran empty, absent: ") as caught:
        observers.check(["seen", "empty", "absent"])
    assert "seen" not in str(caught.value)
    with pytest.raises(CalibrationError, match="empty: no range"):
        observers["empty"].amax("max", levels="int8")
    assert observers["empty"].summary()["amax"] is None
