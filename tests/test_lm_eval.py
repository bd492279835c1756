"""Tests of the model that lm-eval runs, and of log-likelihoods."""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import denoisers
import published
import pytest
import torch
from click.testing import CliRunner
from conftest import DEMO_CHECKPOINT
from serving_process import Served

import dlm_runtime
from dlm_export.judging.likelihood import check_likelihood, log_likelihood
from dlm_export.network.denoiser import Denoiser
from dlm_runtime import RequestError

CONTEXT, TARGET = [5, 9, 3, 17, 8, 2, 11], [4, 21, 4, 30, 7]


def by_orders(denoiser: Denoiser, context: Sequence[int], target: Sequence[int]) -> float:
    """Return the mean of ln p(target | context) over all orders of decoding one token at a time.

    Block-causal denoisers decode the blocks in turn. This mean equals the bound that
    ``log_likelihood`` computes from masks (arXiv:2110.02037).
    """
    network, tokens = denoiser.network, [*context, *target]
    size = network.visible_block or len(tokens)
    total, first = 0.0, len(context)
    while first < len(tokens):
        last = min(len(tokens), first - first % size + size)

        def step(known: frozenset[int], at: int, first: int = first, last: int = last) -> float:
            canvas = [
                network.mask_token_id if first <= place and place not in known else token
                for place, token in enumerate(tokens[:last])
            ]
            with torch.no_grad():
                logits = denoiser(torch.tensor([canvas]))[0, at - network.shift]
            return float(logits.double().log_softmax(-1)[tokens[at]])

        found: dict[tuple[frozenset[int], int], float] = {}
        sums = []
        for order in itertools.permutations(range(first, last)):
            steps = [(frozenset(order[:number]), at) for number, at in enumerate(order)]
            sums.append(sum(found.setdefault(key, found.get(key) or step(*key)) for key in steps))
        total += statistics.fmean(sums)
        first = last
    return total


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("visible_block", [0, 4, 1])
def test_all_masks_give_the_mean_over_all_orders(visible_block: int, shift: int) -> None:
    denoiser = published.random_network(visible_block, shift, 3)
    bundle = denoisers.under_native_loop(denoiser)
    wanted = by_orders(denoiser, CONTEXT, TARGET)
    assert log_likelihood(bundle, CONTEXT, TARGET, 31, 0) == pytest.approx(wanted, abs=1e-4)


def test_random_masks_have_the_same_mean() -> None:
    denoiser = published.random_network(0, 0, 3)
    bundle = denoisers.under_native_loop(denoiser)
    exact = log_likelihood(bundle, CONTEXT, TARGET, 31, 0)
    drawn = [log_likelihood(bundle, CONTEXT, TARGET, 10, seed) for seed in range(40)]
    error = statistics.stdev(drawn) / math.sqrt(len(drawn))
    assert 0 < error < 1
    assert statistics.fmean(drawn) == pytest.approx(exact, abs=4 * error)
    assert log_likelihood(bundle, CONTEXT, TARGET, 10, 7) == drawn[7]


@pytest.mark.parametrize(
    ("loop", "after_prompt", "reason"),
    [
        ({"noise": "uniform"}, False, "random tokens"),
        ({"delete_token_id": 3}, False, "deletes tokens"),
        ({}, True, "where the prompt ends"),
    ],
)
def test_a_likelihood_that_is_not_defined_is_refused(
    loop: dict[str, Any], after_prompt: bool, reason: str
) -> None:
    bundle: Any = SimpleNamespace(
        manifest={"loop": loop}, blocks_after_prompt=after_prompt, visible_block=1, shift=0
    )
    with pytest.raises(RequestError, match=reason):
        check_likelihood(bundle)
    bundle.shift = 1  # the next token is predicted from the tokens before it, without masks
    check_likelihood(bundle)


# ---- With lm-eval ----

LINES = (DEMO_CHECKPOINT.parent / "demo" / "heldout.jsonl").read_text().splitlines()[:24]
SAMPLES: list[dict[str, str]] = [json.loads(line) for line in LINES]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
"""
CALLS = """
generation_kwargs: {until: %s, max_gen_toks: 48, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
NAMES = ("set_light", "play_music", "add_reminder", "send_message")
CHOICES = """
doc_to_choice: [set_light, play_music, add_reminder, send_message]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package, with a cache of data sets that no other program uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def ours(lm_eval: Any) -> Any:
    """The module whose model lm-eval runs."""
    import dlm_export.lm_eval

    return dlm_export.lm_eval


@pytest.fixture(scope="module")
def tasks(lm_eval: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's manager of the tasks ``calls``, ``starts``, ``names`` and ``texts``."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    (folder / "all.jsonl").write_text("\n".join(LINES))
    (folder / "few.jsonl").write_text("\n".join(LINES[:3]))
    whole = {"text": "{{prompt}}", "target": "{{completion}}"}
    for name, kind, data, texts, rest in (
        ("calls", "generate_until", "all", whole, CALLS % "[]"),
        ("starts", "generate_until", "few", whole, CALLS % "[arguments]"),
        ("names", "multiple_choice", "few", {"text": "{{prompt}}", "target": "0"}, CHOICES),
        (
            *("texts", "loglikelihood_rolling", "few"),
            *({"text": "", "target": "{{completion}}"}, ROLLING),
        ),
    ):
        head = TASK.format(name=name, kind=kind, data=folder / f"{data}.jsonl", **texts)
        (folder / f"{name}.yaml").write_text(head + rest)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def run(lm_eval: Any, ours: Any, tasks: Any, demo_bundle: Path) -> Any:
    @functools.cache
    def evaluate(*names: str, model: str = "dlm-export", options: str = "{}") -> Any:
        given: dict[str, Any] = {
            "model_args": {"bundle": str(demo_bundle), "samples": 16, "seed": 0}
        }
        return lm_eval.simple_evaluate(
            **(given | json.loads(options) | {"model": model, "tasks": [*names]}),
            **{"task_manager": tasks, "bootstrap_iters": 0},
        )

    return evaluate


def texts_of(results: Any, task: str) -> list[str]:
    return [sample["resps"][0][0] for sample in results["samples"][task]]


def test_answers_and_counts_are_those_of_the_runtime(run: Any, demo_bundle: Path) -> None:
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        made = [bundle.generate(prompt=each["prompt"], max_new_tokens=48) for each in SAMPLES]
        stop = {"max_new_tokens": 48, "stop_strings": ["arguments"]}
        starts = [bundle.generate(prompt=each["prompt"], **stop) for each in SAMPLES[:3]]
    found = run("calls", "starts", options='{"batch_size": 4}')
    assert texts_of(found, "calls") == [each.text for each in made]
    right = [each.text == sample["completion"] for each, sample in zip(made, SAMPLES, strict=True)]
    assert found["results"]["calls"]["exact_match,none"] == pytest.approx(statistics.fmean(right))
    assert texts_of(found, "starts") == [each.text for each in starts]
    counts = found["config"]["generation"]
    assert counts["requests"] == len(SAMPLES) + 3
    assert counts["passes"] == sum(each.nfe for each in [*made, *starts])
    assert counts["tokens"] == sum(each.completion_tokens for each in [*made, *starts])
    assert counts["tokens_per_pass"] == pytest.approx(counts["tokens"] / counts["passes"], abs=1e-3)


def test_chats_and_the_server_give_the_same_texts(
    run: Any, served: Served, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tenacity", reason="lm-eval's extra [api] is not installed")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        chats = [[{"role": "user", "content": each["prompt"]}] for each in SAMPLES]
        made = [bundle.generate(chat=chat, max_new_tokens=48).text for chat in chats]
    plain, found = run("calls"), run("calls", options='{"apply_chat_template": true}')
    assert texts_of(found, "calls") == made
    for model, path, options in (
        ("local-completions", "completions", {}),
        ("local-chat-completions", "chat/completions", {"apply_chat_template": True}),
    ):
        given = {"model": served.model, "base_url": f"{served.url}/v1/{path}"}
        given |= {"tokenizer_backend": None, "tokenized_requests": False}
        theirs = run("calls", model=model, options=json.dumps({"model_args": given} | options))
        wanted = found if options else plain
        assert texts_of(theirs, "calls") == texts_of(wanted, "calls")
        assert theirs["results"]["calls"] == wanted["results"]["calls"]


def test_the_start_of_an_answer_follows_the_template(ours: Any, demo_bundle: Path) -> None:
    model = ours.BundleLM(str(demo_bundle))
    user = {"role": "user", "content": "stop"}
    whole = model.apply_chat_template([user])
    start = [user, {"role": "assistant", "content": "{"}]
    assert model.apply_chat_template(start, add_generation_prompt=False) == whole + "{"


def test_choices_are_compared_by_their_likelihood(run: Any, demo_bundle: Path) -> None:
    found = run("names", "texts")
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        assert bundle.tokenizer is not None
        for sample, row in zip(SAMPLES, found["samples"]["names"], strict=False):
            before = bundle.tokenizer.encode(sample["prompt"])
            values = []
            for name in NAMES:
                plain = bundle.tokenizer.encode_plain(sample["prompt"])
                whole = bundle.tokenizer.encode_plain(f"{sample['prompt']} {name}")
                target = whole[len(plain) :]
                values.append(log_likelihood(bundle, before, target, 16, 0))
            assert [float(value) for ((value, _),) in row["resps"]] == pytest.approx(values)
        nats = length = 0.0
        for sample in SAMPLES[:3]:
            tokens = bundle.tokenizer.encode_plain(sample["completion"])
            nats += log_likelihood(bundle, [bundle.eos_token_ids[0]], tokens, 16, 0)
            length += len(sample["completion"].encode())
    bits = -nats / length / math.log(2)
    assert found["results"]["texts"]["bits_per_byte,none"] == pytest.approx(bits)


def test_answers_and_likelihoods_have_the_same_prompt(ours: Any, demo_bundle: Path) -> None:
    """The demo's tokenizer adds a token after a prompt."""
    model = ours.BundleLM(str(demo_bundle), samples=16, batch_size="auto")
    prompts = [sample["prompt"] for sample in SAMPLES[:3]]
    answers = model.generate_until([SimpleNamespace(args=(each, {})) for each in prompts])
    pairs = [SimpleNamespace(args=pair) for pair in zip(prompts, answers, strict=True)]
    assert all(is_generated for _, is_generated in model.loglikelihood(pairs))


def test_wrong_arguments_are_named(ours: Any, demo_bundle: Path) -> None:
    with pytest.raises(RequestError, match="thresold"):
        ours.BundleLM(str(demo_bundle), thresold=0.5)
    for wrong, said in (
        ({"samples": 0}, "samples=0"),
        ({"batch_size": "abc"}, "--batch_size abc"),
        ({"batch_size": 0}, "--batch_size 0"),
        ({"bundle": None}, "bundle=FOLDER"),
    ):
        with pytest.raises(RequestError, match=said):
            ours.BundleLM(**({"bundle": str(demo_bundle)} | wrong))
    model = ours.BundleLM(str(demo_bundle))
    long = SimpleNamespace(args=("stop", {"max_gen_toks": 512}))
    with pytest.raises(RequestError, match="max_gen_toks"):
        model.generate_until([long])


def test_two_runs_are_compared_sample_by_sample(run: Any, ours: Any, tmp_path: Path) -> None:
    rows = run("calls")["samples"]["calls"]
    values = [row["exact_match"] for row in rows]
    changed = [row | {"exact_match": float(at > 1)} for at, row in enumerate(rows)]
    for name, samples in (("before", rows), ("after", changed), ("other", rows[1:])):
        (tmp_path / name / "model").mkdir(parents=True)
        path = tmp_path / name / "model" / "samples_calls_2026-12-01T02-09-46.786609.jsonl"
        path.write_text("\n".join(map(json.dumps, samples)))
        # An earlier run in the same folder is not read.
        path.with_name("samples_calls_2026-11-01T02-09-46.786609.jsonl").write_text("")

    def compared(*names: str) -> Any:
        return CliRunner().invoke(ours.compare, [str(tmp_path / name) for name in names])

    found = compared("before", "after")
    assert not found.exit_code, found.output
    cells = [cell.strip() for cell in found.output.splitlines()[-1].strip("|").split("|")]
    after = [float(at > 1) for at in range(len(rows))]
    difference = f"{statistics.fmean(after) - statistics.fmean(values):+.4f}"
    assert cells[:3] == ["calls", "exact_match", str(len(rows))]
    assert cells[5].startswith(difference)
    lost = sum(a < b for a, b in zip(after, values, strict=True))
    assert cells[6:] == [str(lost), str(sum(map(int, after)) - sum(map(int, values)) + lost)]
    assert "different samples" in compared("before", "other").output
    (tmp_path / "empty").mkdir()
    assert "--log_samples" in compared("before", "empty").output
    (tmp_path / "empty" / "samples_x_2026-12-01T02-09-46.786609.jsonl").write_text("{")
    assert "line 1" in compared("before", "empty").output
