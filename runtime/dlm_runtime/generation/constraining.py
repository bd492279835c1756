"""The constraints of a bundle: read from a request's options, compiled, and the last ones kept.

It also sums up how much log probability they cost, and warns once if that is a lot.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlm_runtime.constraints import compiled
from dlm_runtime.constraints.compiled import CompileLimits, Content
from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.constraints.vocabulary import read_vocabulary
from dlm_runtime.errors import ConstraintWarning, RequestError, shown
from dlm_runtime.generation.handle import Handle
from dlm_runtime.generation.request import Options, count_of, layout_of, text_of, texts_of
from dlm_runtime.generation.results import Generation
from dlm_runtime.text.tokenizer import Tokenizer
from dlm_runtime.tools import Tools

KEPT = 64  # compiled constraints
UNLIKELY_NATS = 1.0
"""Nats per token that a bundle's constraints may lose on average without a warning. Over 100
commands the second demo loses 0.013 with its own layout (1.35 in the worst command), 2.5 with
"compact" and 3.6 with "spaced".
"""


class Constraints:
    """The constraints of one bundle. May be shared by threads."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._kept: dict[tuple[Any, ...], compiled.Constraint] = {}
        self._lost = 0.0  # nats, over all constrained requests
        self._has_warned = False
        self.json_layout = str(handle.manifest.get("json_layout", "compact"))
        """Name of the layout of JSON text that the denoiser was trained on, one of ``LAYOUTS``."""
        self.tokens = 0
        """Completion tokens of all constrained requests so far."""

    def of_request(
        self, tokenizer: Tokenizer | None, options: Options, tools: Tools | None
    ) -> compiled.Constraint | None:
        """The compiled constraint of a request; None if its text is free. Raises RequestError."""
        asked = options.constrained_by
        if options.constraint is not None and asked:
            raise RequestError(f"give constraint or {next(iter(asked))}, not both")
        if options.constraint is None and tools is not None and tools.is_forced:
            asked["tools"] = tools
        if asked:
            return self.compile(
                tokenizer,
                asked,
                before=options.prefix,
                json_layout=options.json_layout,
                max_depth=options.max_depth,
            )
        if options.constraint is not None and not isinstance(
            options.constraint, compiled.Constraint
        ):
            raise RequestError(
                f"constraint = {shown(options.constraint)} is none: Bundle.constraint makes one"
            )
        return options.constraint

    def compile(
        self,
        tokenizer: Tokenizer | None,
        asked: Mapping[str, Any],
        *,
        max_depth: int | None = None,
        before: str = "",
        behind: str = "",
        json_layout: str | Layout | None = None,
        limits: CompileLimits | None = None,
        cache_dir: str | Path | None = "",
    ) -> compiled.Constraint:
        """The constraint that the arguments of ``Bundle.constraint`` ask for: a kept one, or compiled
        now.

        ``asked`` has the arguments that say what the text may be, by name. One of them must be
        given; None and False mean: not given. Raises RequestError and DlmError.
        """
        kind, value = _chosen(asked)
        if tokenizer is None:
            raise RequestError("constraints are of text, and this bundle has no tokenizer")
        is_json = kind in ("schema", "json_object", "tools")
        if json_layout is not None and not is_json:
            raise RequestError(
                f"json_layout is of schema, json_object and tools, not of {kind}: leave it out"
            )
        content = _content(kind, value)
        depth = None if max_depth is None else count_of("max_depth", max_depth)
        layout = layout_of(self.json_layout if json_layout is None else json_layout)
        around = (text_of("before", before), text_of("behind", behind))
        if limits is not None and not isinstance(limits, CompileLimits):
            raise RequestError(f"limits = {shown(limits)}: give CompileLimits, or None")
        chosen = limits or CompileLimits()
        folder = compiled.default_folder() if cache_dir == "" else _folder(cache_dir)
        key = (kind, content, depth, layout if is_json else None, around, chosen)
        with self._lock:
            made = self._kept.get(key)
        if made is None:
            wanted = Content(
                "tree" if kind == "tools" else kind,
                _text(kind, content, layout, asked.get("tools")),
                layout if is_json else COMPACT,
                depth,
                *around,
            )
            handle = self._handle

            def compile_now(made_of: bytes) -> compiled.Constraint:
                has_text = "file" in handle.manifest.get("text", {})
                return compiled.compile_content(
                    wanted,
                    chosen,
                    bundle=handle.pointer,
                    vocabulary=None if has_text else read_vocabulary(tokenizer),
                    vocab_size=handle.vocab_size,
                    ends=handle.eos_token_ids,
                    made_of=made_of,
                )

            vocabulary = [tokenizer.sha256, handle.vocab_size, list(handle.eos_token_ids)]
            made = compiled.keep_compiled(wanted, chosen, vocabulary, folder, compile_now)
            with self._lock:
                if len(self._kept) >= KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = made
        return made

    def count_loss(self, made: Generation) -> None:
        """Count a constrained request's loss. Warn, once per bundle, if constraints make texts far
        less likely than the denoiser's own choices.

        The mean over all constrained requests of the bundle counts, as a single hard request may
        lose much.
        """
        with self._lock:
            self._lost += made.constraint_log_prob_loss
            self.tokens += max(1, made.completion_tokens)
            lost, tokens = self._lost, self.tokens
            is_news = not self._has_warned and lost / tokens > UNLIKELY_NATS
            self._has_warned |= is_news
        if is_news:
            warnings.warn(
                f"the constraint lost {lost:.1f} nats of log probability over {tokens} tokens: the denoiser would have "
                f"written something else. For JSON, check the layout that it was trained on: the bundle says "
                f"{self.json_layout!r}. Give another json_layout, or build the bundle with --json-layout and --call-format",
                ConstraintWarning,
                stacklevel=2,
            )


def _chosen(asked: Mapping[str, Any]) -> tuple[str, Any]:
    """The one argument that was given, and its name. Raises RequestError."""
    json_object = asked.get("json_object", False)
    if not isinstance(json_object, bool):
        raise RequestError(f"json_object = {shown(json_object)}: give True or False")
    given = [
        (kind, value)
        for kind, value in asked.items()
        if value is not None and (kind != "json_object" or value)
    ]
    if len(given) != 1:
        raise RequestError("give one of schema, regex, enum, json_object and tools")
    return given[0]


def _content(kind: str, value: Any) -> str:
    """A constraint's argument as text that is equal for equal content. The order of properties
    counts. Raises RequestError.
    """
    if kind == "regex":
        return text_of("regex", value)
    if kind == "enum":
        value = texts_of("enum", value)
    elif kind == "tools":
        if not isinstance(value, Tools):
            raise RequestError(
                f"tools = {shown(value)}: Bundle.tools makes them of a list of functions"
            )
        value = [value.listed, value.choice, asdict(value.written), value.is_parallel]
    elif kind == "schema" and callable(make := getattr(value, "model_json_schema", None)):
        try:
            value = make()
        except Exception as err:  # whatever the class raises
            raise RequestError(
                f"schema: {shown(value)}.model_json_schema() failed ({err})"[:300]
            ) from err
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as err:
        raise RequestError(f"{kind}: not JSON ({err})"[:300]) from err


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _text(kind: str, content: str, layout: Layout, tools: Tools | None) -> str:
    """The text of a ``Content``, from what ``_content`` made of an argument."""
    if kind == "tools":
        assert tools is not None
        return json.dumps(tools.tree(layout))
    return "" if kind == "json_object" else content


def _folder(cache_dir: str | Path | None) -> Path | None:
    """The folder where the caller wants compiled constraints. Raises RequestError."""
    if cache_dir is None:
        return None
    try:
        if b"\0" not in os.fsencode(cache_dir):
            return Path(os.fsdecode(cache_dir))
    except (TypeError, ValueError):
        pass
    raise RequestError(f"cache_dir = {shown(cache_dir)} is not the path of a folder")
