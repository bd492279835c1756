"""Reads constraints from the options of requests, and compiles these constraints.

Each bundle stores the constraints that were used last, so that a later request can reuse them. If
several threads need the same constraint, one of them compiles it, and the others wait for it.

This module also adds up how much log probability the constraints cost, and warns once if the cost
is large.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlm_runtime.constraints import compiled
from dlm_runtime.constraints.compiled import CompileLimits, Content
from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.constraints.records import Csv, JsonLines
from dlm_runtime.constraints.vocabulary import Vocabulary, read_vocabulary
from dlm_runtime.errors import ConstraintWarning, RequestError, shown
from dlm_runtime.generation.handle import Handle
from dlm_runtime.generation.request import (
    JSON_KINDS,
    KINDS,
    Options,
    count_of,
    flag_of,
    layout_of,
    listed,
    text_of,
    texts_of,
)
from dlm_runtime.generation.results import Generation
from dlm_runtime.text.tokenizer import Tokenizer
from dlm_runtime.tools import Tools

KEPT = 64  # number of compiled constraints that a bundle stores
FAILURE_S = 60.0  # number of seconds for which a bundle remembers that a constraint is invalid
MOST_RECORDS = 1_000_000  # the largest number of lines or rows that a caller may set as a limit
RECORD_KINDS = ("json_lines", "csv", "xml")
UNLIKELY_NATS = 1.0
"""A bundle warns if its constraints cost more nats per token than this limit on average.

The second demo was measured on 100 commands. In the layout that this demo was trained on,
constraints cost 0.013 nats per token, and at most 1.35 in one command. In the layout "compact",
constraints cost 2.5 nats per token. In the layout "spaced", constraints cost 3.6 nats per token.
"""


@dataclass(frozen=True)
class _Source:
    """A constraint that a caller wants. Equal constraints have equal keys."""

    key: tuple[Any, ...]
    content: Callable[[], Content]
    limits: CompileLimits
    folder: Path | None = None


@dataclass
class _Stored:
    """A constraint, or why it failed. The thread that compiles it holds ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: compiled.Constraint | None = None
    failure: str = ""
    failed_at: float = 0.0

    def found(self) -> compiled.Constraint | None:
        """Return the constraint, or None if it must be compiled. Raises RequestError."""
        if self.failure and time.monotonic() - self.failed_at < FAILURE_S:
            raise RequestError(self.failure)
        return self.made


class Constraints:
    """The constraints of one bundle. Threads may share this object."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        # The constraint that was used last is at the end.
        self._stored: OrderedDict[tuple[Any, ...], _Stored] = OrderedDict()
        # Python reads the vocabulary only if the bundle has no compiled tokenizer.
        self._vocabulary: Vocabulary | None = None
        self._lost = 0.0  # total loss in nats of all constrained requests
        self._has_warned = False
        self.json_layout = str(handle.manifest.get("json_layout", "compact"))
        """The layout of the JSON that the denoiser was trained on: a name of ``LAYOUTS``."""
        self.tokens = 0
        """The number of tokens that all constrained requests generated so far."""

    def of_request(
        self, tokenizer: Tokenizer | None, options: Options, tools: Tools | None
    ) -> compiled.Constraint | None:
        """Return the compiled constraint of a request, or None if the request has no constraint.
        Raises RequestError.
        """
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
                any_order=options.any_order,
                more_properties=options.more_properties,
            )
        if options.constraint is not None and not isinstance(
            options.constraint, compiled.Constraint
        ):
            raise RequestError(
                f"constraint = {shown(options.constraint)} is not a constraint: Bundle.constraint makes one"
            )
        return options.constraint

    def compile(
        self, tokenizer: Tokenizer | None, asked: Mapping[str, Any], **how: Any
    ) -> compiled.Constraint:
        """Return the constraint for the arguments of ``Bundle.constraint``.

        The constraint is compiled, unless it is already stored. ``asked`` contains the arguments
        that define the allowed texts, and ``how`` the other arguments. Exactly one argument in
        ``asked`` must be set. None and False mean that an argument is not set. Raises RequestError
        and DlmError.
        """
        source = self._source(tokenizer, asked, **how)
        assert tokenizer is not None
        return self._compiled(tokenizer, source)

    def find(
        self, tokenizer: Tokenizer | None, asked: Mapping[str, Any], **how: Any
    ) -> compiled.Constraint | None:
        """Like ``compile``, but return None if the constraint is not stored."""
        stored = self._stored_for(self._source(tokenizer, asked, **how).key)
        return None if stored is None else stored.found()

    def _source(
        self,
        tokenizer: Tokenizer | None,
        asked: Mapping[str, Any],
        *,
        max_depth: int | None = None,
        any_order: bool = False,
        more_properties: bool = False,
        before: str = "",
        behind: str = "",
        json_layout: str | Layout | None = None,
        limits: CompileLimits | None = None,
        cache_dir: str | Path | None = "",
    ) -> _Source:
        """Check the arguments of ``Bundle.constraint``. Raises RequestError."""
        kind, value = _chosen(asked)
        if tokenizer is None:
            raise RequestError("constraints need a tokenizer, and this bundle has none")
        is_json = kind in JSON_KINDS
        of_json = {
            "json_layout": json_layout is not None,
            "any_order": flag_of("any_order", any_order),
            "more_properties": flag_of("more_properties", more_properties),
        }
        for name, is_given in of_json.items():
            if is_given and not is_json:
                raise RequestError(
                    f"{name} is for {listed(JSON_KINDS)}, not for {kind}: leave it out"
                )
        content = _content(kind, value)
        depth = None if max_depth is None else count_of("max_depth", max_depth)
        layout = layout_of(self.json_layout if json_layout is None else json_layout)
        around = (text_of("before", before), text_of("behind", behind))
        if limits is not None and not isinstance(limits, CompileLimits):
            raise RequestError(f"limits = {shown(limits)}: give CompileLimits, or None")
        chosen = limits or CompileLimits()
        folder = compiled.default_folder() if cache_dir == "" else _folder(cache_dir)
        objects = (any_order, more_properties)
        key = (kind, content, depth, layout if is_json else None, around, objects, chosen)

        def wanted() -> Content:
            return Content(
                "tree" if kind in ("tools", *RECORD_KINDS) else kind,
                _text(kind, content, layout, asked.get("tools"), tokenizer),
                layout if is_json else COMPACT,
                depth,
                *around,
                *objects,
            )

        return _Source(key, wanted, chosen, folder)

    @property
    def layout(self) -> Layout:
        """The layout of the JSON that the denoiser was trained on."""
        return layout_of(self.json_layout)

    def of_decisions(
        self, tokenizer: Tokenizer, content: str, limits: CompileLimits
    ) -> compiled.Constraint:
        """Return the constraint on the answer of a decision.

        ``content`` is the source of a constraint of the kind ``DLM_CONSTRAINT_DECISIONS``. Raises
        RequestError.
        """
        key = ("decisions", content, limits)
        return self._compiled(tokenizer, _Source(key, lambda: Content(*key[:2]), limits))

    def _stored_for(self, key: tuple[Any, ...]) -> _Stored | None:
        with self._lock:
            if key in self._stored:
                self._stored.move_to_end(key)
            return self._stored.get(key)

    def _compiled(self, tokenizer: Tokenizer, source: _Source) -> compiled.Constraint:
        """Return the stored constraint. If it is not stored yet, compile it and store it."""
        with self._lock:
            stored = self._stored.setdefault(source.key, _Stored())
            self._stored.move_to_end(source.key)
            if len(self._stored) > KEPT:
                self._stored.popitem(last=False)
        with stored.lock:
            if (made := stored.found()) is not None:
                return made
            try:
                stored.made = self._compiled_now(tokenizer, source)
            except RequestError as err:
                stored.failure, stored.failed_at = str(err), time.monotonic()
                raise
            return stored.made

    def _compiled_now(self, tokenizer: Tokenizer, source: _Source) -> compiled.Constraint:
        handle, wanted, limits = self._handle, source.content(), source.limits

        def compile_now(made_of: bytes) -> compiled.Constraint:
            has_text = "file" in handle.manifest.get("text", {})
            return compiled.compile_content(
                wanted,
                limits,
                bundle=handle.pointer,
                vocabulary=None if has_text else self._vocabulary_of(tokenizer),
                vocab_size=handle.vocab_size,
                ends=handle.eos_token_ids,
                made_of=made_of,
            )

        vocabulary = [tokenizer.sha256, handle.vocab_size, list(handle.eos_token_ids)]
        return compiled.keep_compiled(wanted, limits, vocabulary, source.folder, compile_now)

    def _vocabulary_of(self, tokenizer: Tokenizer) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(tokenizer)
            return self._vocabulary

    def count_loss(self, made: Generation) -> None:
        """Add the ``constraint_log_prob_loss`` of a request to the bundle's total.

        If the average loss per token is large, issue a warning.

        The warning appears once per bundle. A large average loss means that the constraints force
        texts that are far less likely than the denoiser's own choices.
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
    """Return the only argument that is set, and its name. Raises RequestError."""
    flag_of("json_object", asked.get("json_object", False))
    given = [
        (kind, value)
        for kind, value in asked.items()
        if value is not None and (kind != "json_object" or value)
    ]
    if len(given) != 1:
        raise RequestError(f"give one of {listed((*KINDS, 'tools'))}")
    return given[0]


def _content(kind: str, value: Any) -> str:
    """Convert the argument of a constraint to text. Equal arguments give equal texts.

    The order of properties is significant. Raises RequestError.
    """
    if kind in ("regex", "grammar"):
        return text_of(kind, value)
    if kind == "enum":
        value = texts_of("enum", value)
    elif kind == "tools":
        if not isinstance(value, Tools):
            raise RequestError(
                f"tools = {shown(value)}: give a list of functions, or the result of Bundle.tools"
            )
        about = asdict(value.written), value.is_parallel, value.otherwise
        value = [value.listed, value.choice, *about]
    elif kind == "schema":
        if isinstance(value, str):
            return value  # the native compiler parses the text
        value = _schema(kind, value)
    elif kind in RECORD_KINDS:
        value = _record(kind, value)
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as err:
        raise RequestError(f"{kind}: not JSON ({err})"[:300]) from err


def _schema(kind: str, value: Any) -> Any:
    """Convert a schema, its JSON text, or a class with a schema to JSON. Raises RequestError."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as err:
            raise RequestError(f"{kind}: {shown(value)} is not JSON ({err})"[:300]) from err
    make = getattr(value, "model_json_schema", None)
    if not callable(make):
        return value
    try:
        return make()
    except Exception as err:  # the class may raise any exception
        raise RequestError(
            f"{kind}: {shown(value)}.model_json_schema() failed ({err})"[:300]
        ) from err


def _record(kind: str, value: Any) -> dict[str, Any]:
    """Convert a JSON Lines, CSV or XML constraint to a part of a "tree". Raises RequestError."""
    schema, bounds = value, {}
    member: dict[str, Any] = {}
    if kind == "json_lines" and isinstance(value, JsonLines):
        schema = value.schema
        bounds = {"low": ("min_lines", value.min_lines), "high": ("max_lines", value.max_lines)}
    elif kind == "csv" and isinstance(value, Csv):
        schema = value.schema
        bounds = {"low": ("min_rows", value.min_rows), "high": ("max_rows", value.max_rows)}
        member = {name: getattr(value, name) for name in ("header", "delimiter", "line_end")}
    for key, (name, count) in bounds.items():
        if count is not None:
            member[key] = count_of(f"{kind}: {name}", count, MOST_RECORDS)
    schema = _schema(kind, schema)
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{kind} = {shown(schema)} is no JSON Schema")
    return {kind: schema, **member}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _text(
    kind: str, content: str, layout: Layout, tools: Tools | None, tokenizer: Tokenizer
) -> str:
    """Return the text of a ``Content``, computed from the result of ``_content``."""
    if kind == "tools":
        assert tools is not None
        return json.dumps(tools.tree(tokenizer.split, layout))
    return "" if kind == "json_object" else content


def _folder(cache_dir: str | Path | None) -> Path | None:
    """Return the caller's folder for compiled constraints. Raises RequestError."""
    if cache_dir is None:
        return None
    try:
        if b"\0" not in os.fsencode(cache_dir):
            return Path(os.fsdecode(cache_dir))
    except (TypeError, ValueError):
        pass
    raise RequestError(f"cache_dir = {shown(cache_dir)} is not the path of a folder")
