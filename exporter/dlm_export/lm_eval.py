"""Runs the tasks of lm-eval on a bundle: ``python -m dlm_export.lm_eval run --model dlm-export ...``.

The options are those of the program ``lm-eval``, in which this module registers the model
``dlm-export``. ``python -m dlm_export.lm_eval compare RUN RUN`` compares the samples of two runs.
The package ``lm_eval`` must be installed: ``pip install dlm-export[eval]``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

if __name__ == "__main__" and find_spec("lm_eval") is None:
    sys.exit("error: lm_eval is not installed: pip install 'dlm-export[eval]'")
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import dlm_runtime
from dlm_calibration import metrics
from dlm_export.judging.likelihood import check_likelihood, log_likelihood
from dlm_runtime import Policy
from dlm_runtime.errors import DlmError, RequestError

log = logging.getLogger(__name__)
POLICY_FIELDS = frozenset(Policy.__dataclass_fields__)


@register_model("dlm-export")
class BundleLM(TemplateLM):
    """The model ``dlm-export`` of lm-eval.

    Args:
        bundle: The bundle's folder.
        effort, preset: The decoding loop, as in ``dlm_runtime.Options``.
        batch_size: The largest number of requests that share passes. "auto" means 16.
        max_new_tokens: The length of answers for tasks that set none. If None, the length of the
            answers that the denoiser was trained on.
        samples: As in ``log_likelihood``.
        seed: Seed of log-likelihoods and of the policy. The default is the seed that lm-eval's models
            for servers send.
        threads, provider: As in ``dlm_runtime.open``.
        device, max_batch_size: Not used. lm-eval always passes them.
        fields: Fields of ``Policy`` to change, such as ``threshold=0.9``.

    Raises:
        DlmError: The bundle or an argument is invalid. The message names it.
    """

    def __init__(
        self,
        bundle: str | None = None,
        *,
        effort: str | None = None,
        preset: str | None = None,
        batch_size: int | str = 8,
        max_new_tokens: int | None = None,
        samples: int = 128,
        seed: int = 1234,
        threads: int = 0,
        provider: str = "cpu",
        device: str | None = None,
        max_batch_size: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        if bundle is None:
            raise RequestError("the bundle is missing: pass --model_args bundle=FOLDER")
        if not re.fullmatch(r"auto(:\d+)?|[1-9]\d{0,3}", str(batch_size)):
            raise RequestError(f"--batch_size {batch_size}: give 1 to 4096, or auto")
        if samples < 1:
            raise RequestError(f"samples={samples}: give 1 or more")
        self.bundle = dlm_runtime.open(bundle, provider=provider, threads=threads)
        self.name = Path(bundle).resolve().name
        if self.bundle.tokenizer is None:
            raise RequestError(f"{bundle}: the bundle has no tokenizer, and tasks consist of text")
        self.tokens = self.bundle.tokenizer
        self.loop: dict[str, Any] = {"effort": effort, "preset": preset}
        self.policy = {**fields, "seed": seed}
        self.bundle.policy(preset, effort, **self.policy)  # names what is wrong
        self.max_running = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.samples, self.seed = samples, seed
        self.max_new_tokens = max_new_tokens or self.bundle.max_new_tokens
        self._is_chat = False
        self._ignored: set[str] = set()
        self._counts = {"requests": 0, "passes": 0, "tokens": 0, "shortened_prompts": 0}
        self._seconds = 0.0

    # ---- What lm-eval asks for ----

    @property
    def eot_token_id(self) -> int:
        ends = self.bundle.eos_token_ids
        if not ends:
            raise RequestError("the denoiser has no end token, so an empty context has no start")
        return ends[0]

    @property
    def tokenizer_name(self) -> str:
        return self.tokens.sha256

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokens.template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._is_chat = True
        if add_generation_prompt:
            return self.tokens.render(chat_history)
        *before, last = chat_history  # the last message is the start of the answer
        return self.tokens.render(before) + last["content"]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if self._is_chat or add_special_tokens is False:
            return self.tokens.encode_plain(string, special_tokens=True)
        return self.tokens.encode(string, special_tokens=True)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the prompt as ``generate_until`` encodes it, and the tokens that continue it.

        A tokenizer may add tokens after a prompt. They belong before the continuation.
        """
        length = len(context.rstrip())  # as in lm-eval, spaces belong to the continuation
        context, continuation = context[:length], context[length:] + continuation
        whole = self.tokens.encode_plain(context + continuation, special_tokens=True)
        start = self.tokens.encode_plain(context, special_tokens=True)
        return self.tok_encode(context), whole[len(start) :]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        began, jobs = time.perf_counter(), []
        waiting = max(1, len(requests))
        with self.bundle.scheduler(max_running=self.max_running, max_waiting=waiting) as scheduler:
            for request in requests:
                context, given = request.args
                options = self._options(given)
                room = self.bundle.max_canvas_length - options["max_new_tokens"]
                if room < 1:
                    raise RequestError(
                        f"{options['max_new_tokens']} new tokens do not fit into the denoiser's canvas of "
                        f"{self.bundle.max_canvas_length}: pass --gen_kwargs max_gen_toks=N"
                    )
                tokens = self.tok_encode(context)
                self._counts["shortened_prompts"] += len(tokens) > room
                jobs.append(scheduler.submit(tokens=tokens[-room:], **options))
            texts = []
            for request, job in zip(requests, tqdm(jobs, disable=disable_tqdm), strict=True):
                made = job.result()
                self._counts["requests"] += 1
                self._counts["passes"] += made.nfe
                self._counts["tokens"] += made.completion_tokens
                texts.append(made.text or "")
                self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        self._seconds += time.perf_counter() - began
        if self._counts["shortened_prompts"]:
            cut = self._counts["shortened_prompts"]
            log.warning("%d prompts were too long for the canvas. Their starts were cut off.", cut)
        log.info("dlm-export: %s", self.get_model_info()["generation"])
        return texts

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        check_likelihood(self.bundle)
        found = []
        for request in tqdm(requests, disable=disable_tqdm):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            most = self.bundle.max_canvas_length - 1
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, most, 1)
            found.append(sum(self._likelihood(*make_disjoint_window(each)) for each in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside the scores, without the path of the bundle."""
        counts, seconds = self._counts, self._seconds
        generation: dict[str, Any] = {**counts, "seconds": round(seconds, 3)}
        if counts["passes"]:
            generation["tokens_per_pass"] = round(counts["tokens"] / counts["passes"], 3)
            generation["tokens_per_second"] = round(counts["tokens"] / seconds, 3)
        loop = {key: value for key, value in self.loop.items() if value is not None} | self.policy
        return {
            "bundle": self.name,
            "precision": self.bundle.manifest["precision"]["name"],
            "loop": loop,
            "likelihood_samples": self.samples,
            "generation": generation,
        }

    # ---- How requests run ----

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request for the arguments of a task."""
        kwargs = normalize_gen_kwargs(dict(given), self.max_new_tokens)
        stops, most = kwargs.pop("until"), kwargs.pop("max_gen_toks")
        kwargs.pop("do_sample")
        for name in sorted(kwargs.keys() - POLICY_FIELDS - self._ignored):
            log.warning("dlm-export: the argument %s of the task has no effect on a bundle", name)
            self._ignored.add(name)
        chosen = {name: value for name, value in kwargs.items() if name in POLICY_FIELDS}
        return {
            **self.loop,
            "max_new_tokens": most,
            "stop_strings": [stop for stop in stops if stop],
            **(self.policy | chosen),
        }

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihoods, and whether the loop would generate the continuations."""
        check_likelihood(self.bundle)
        found = []
        for texts, context, target in tqdm(requests, disable=kwargs.get("disable_tqdm", False)):
            room = self.bundle.max_canvas_length - len(target)
            if room < 1:
                raise RequestError(
                    f"a continuation of {len(target)} tokens does not fit into the denoiser's canvas of "
                    f"{self.bundle.max_canvas_length}"
                )
            before = context[-room:]
            options = {**self.loop, **self.policy, "new_tokens": len(target)}
            made = self.bundle.generate(tokens=before, **options)
            is_generated = made.tokens[len(before) :] == target
            found.append((self._likelihood(before, target), is_generated))
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def _likelihood(self, context: list[int], target: list[int]) -> float:
        return log_likelihood(self.bundle, context, target, self.samples, self.seed)


# ---- Two runs ----


def _samples(run: Path) -> dict[tuple[str, str, str], dict[str, float]]:
    """Read the samples of a run: a value per sample, by task, filter and metric.

    If the folder has several runs of a task, the last one is read.
    """
    files: dict[str, Path] = {}
    for path in sorted(run.rglob("samples_*.jsonl"), key=lambda path: path.name):
        files[re.sub(r"_\d{4}-\d\d-\d\dT[\d.:-]+$", "", path.stem).removeprefix("samples_")] = path
    if not files:
        raise click.ClickException(
            f"{run}: no file samples_*.jsonl; run lm-eval with --output_path and --log_samples"
        )
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for task, path in files.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                name = f"{row['doc_id']} {row['doc_hash']} {row['target_hash']}"
                for metric in row["metrics"]:
                    if isinstance(row[metric], (int, float)):
                        key = (task, str(row["filter"]), metric)
                        found.setdefault(key, {})[name] = float(row[metric])
            except (ValueError, KeyError, TypeError) as err:
                raise click.ClickException(f"{path}, line {number}: no sample of lm-eval") from err
    return found


@click.command()
@click.argument("reference", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("candidate", type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(reference: Path, candidate: Path) -> None:
    """Compare the samples of two runs, and print a Markdown table.

    REFERENCE and CANDIDATE are folders that lm-eval wrote with --output_path and --log_samples.
    """
    theirs, ours = _samples(reference), _samples(candidate)
    lines = [
        "| task | metric | samples | reference | candidate | difference, 95% interval | lost | won |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(theirs.keys() & ours.keys()):
        if theirs[key].keys() != ours[key].keys():
            raise click.ClickException(f"{key[0]}: the two runs have different samples")
        before, after = (
            np.array([values[key][name] for name in theirs[key]]) for values in (theirs, ours)
        )
        is_share = set(before) | set(after) <= {0.0, 1.0}
        low, high = (
            metrics.paired_interval(before, after)
            if is_share
            else metrics.difference_interval(after - before, 0)
        )
        task, filtered, metric = key
        cells = (
            *(task, metric if filtered == "none" else f"{metric} ({filtered})", str(len(before))),
            *(f"{before.mean():.4f}", f"{after.mean():.4f}"),
            f"{after.mean() - before.mean():+.4f} ({low:+.4f} to {high:+.4f})",
            *(str(int((after < before).sum())), str(int((after > before).sum()))),
        )
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))


def main() -> None:
    try:
        if sys.argv[1:2] == ["compare"]:
            compare(sys.argv[2:], prog_name="python -m dlm_export.lm_eval compare")
        else:
            cli_evaluate()
    except DlmError as err:
        sys.exit(f"error: {err}")


if __name__ == "__main__":
    main()
