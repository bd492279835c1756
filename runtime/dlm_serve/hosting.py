"""Manages the bundles that the server has opened. Each bundle has one scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_serve.errors import ApiError


class Model:
    """A bundle and its scheduler. An HTTP request chooses a model by the model's ``name``.

    ``limits`` contains arguments of ``Bundle.scheduler``.
    """

    def __init__(self, name: str, bundle: dlm_runtime.Bundle, limits: Mapping[str, Any]) -> None:
        self.name, self.bundle = name, bundle
        self.created = int(time.time())
        self.scheduler = bundle.scheduler(**limits)
        self.most_requests = limits["max_running"] + limits["max_waiting"]
        self.takes_conversations = self.has_chat and _takes_conversations(bundle)
        self._users = 0
        self._is_retired = False

    @property
    def can_infill(self) -> bool:
        """True if the tokens of a hole can attend to the text after the hole."""
        return self.bundle.tokenizer is not None and self.bundle.visible_block is None

    @property
    def has_chat(self) -> bool:
        return self.bundle.tokenizer is not None and self.bundle.tokenizer.template is not None

    @property
    def efforts(self) -> list[str]:
        """The names of the bundle's effort levels."""
        return list(self.bundle.manifest["loop"].get("effort", {}).get("levels", {}))

    @property
    def advice(self) -> str:
        """The end of an error message: how to get effort levels, or why the bundle cannot have any."""
        if self.bundle.policy().commit == "verify":
            return ", because its text does not depend on its passes"
        return ": run `dlm-export effort` on its bundle"

    def acquire(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Close the bundle after its last request has ended."""
        self._is_retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and self._users == 0:
            self.scheduler.close()
            self.bundle.close()


class Models:
    """All models by name. Only the thread of the event loop may use this object.

    Args:
        paths: Maps the name of each model to its bundle's folder.
        opener: A function that opens the bundle in a folder.
        max_running: The maximum number of requests that share a pass of one model.
        max_waiting: The maximum number of requests that wait for one model.
        prefix_cache_bytes: The maximum number of bytes of keys and values that one model keeps
            after its requests have ended. If None, the limit is the memory for keys and values that
            running requests do not need.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        opener: Callable[[Path], dlm_runtime.Bundle],
        max_running: int,
        max_waiting: int,
        prefix_cache_bytes: int | None = None,
    ) -> None:
        self._paths, self._opener = dict(paths), opener
        self._limits = {
            "max_running": max_running,
            "max_waiting": max_waiting,
            "prefix_cache_bytes": prefix_cache_bytes,
        }
        self._models = {name: self._opened(name) for name in self._paths}

    def _opened(self, name: str) -> Model:
        return Model(name, self._opener(self._paths[name]), self._limits)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    @property
    def longest_context(self) -> int:
        """The longest context of all models, in tokens."""
        return max(model.bundle.max_canvas_length for model in self)

    def named(self, name: str | None) -> Model:
        """Return the model with this name. Raises ApiError.

        If ``name`` is None and there is only one model, return that model.
        """
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        found = None if name is None else self._models.get(name)
        if found is None:
            said = "name a model" if name is None else f"the model {name!r} does not exist"
            raise ApiError(
                404,
                f"{said}: this server has {', '.join(self._models)}",
                "model",
                "model_not_found",
            )
        return found

    @contextmanager
    def using(self, name: str | None) -> Iterator[Model]:
        """Yield a model that stays open until the ``with`` block ends. Raises ApiError."""
        model = self.named(name)
        model.acquire()
        try:
            yield model
        finally:
            model.release()

    async def reload(self) -> None:
        """Open all bundles again. Running requests finish with the old bundles.

        Raises DlmError if a bundle cannot be opened. The server then keeps the old bundles.
        """
        opened: dict[str, Model] = {}
        try:
            for name in self._paths:
                opened[name] = await asyncio.to_thread(self._opened, name)
        except BaseException:
            for model in opened.values():
                model.retire()
            raise
        old, self._models = self._models, opened
        for model in old.values():
            model.retire()

    def close(self) -> None:
        for model in self._models.values():
            model.retire()


def _takes_conversations(bundle: dlm_runtime.Bundle) -> bool:
    """Return True if the chat template accepts a conversation of several messages."""
    assert bundle.tokenizer is not None
    roles = ("user", "assistant", "user")
    try:
        bundle.tokenizer.encode_chat([{"role": role, "content": "a"} for role in roles])
    except dlm_runtime.RequestError:
        return False
    return True


def describe(model: Model) -> dict[str, Any]:
    """Return the description of a model for ``/v1/models``.

    The description contains the fields of OpenAI's and Mercury's APIs.
    """
    endpoints = ["completions"]
    if model.has_chat:
        endpoints = ["chat.completions", "responses", *endpoints]
    if model.bundle.tokenizer is not None:
        endpoints.append("decisions")
    if model.can_infill:
        endpoints += ["fim.completions", "edit.completions"]
    features = ["streaming", "structured_outputs", "json_mode"]
    if model.has_chat:
        features.append("tools")
    free = {"prompt": "0", "completion": "0", "image": "0", "request": "0"}
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "dlm-export",
        "name": model.name,
        "context_length": model.bundle.max_canvas_length,
        "max_output_length": model.bundle.max_canvas_length,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "pricing": free,
        "supported_endpoints": endpoints,
        "supported_features": features,
        "supported_sampling_parameters": ["temperature", "top_p", "top_k", "stop", "seed"],
        "effort_levels": model.efforts,
        "takes_conversations": model.takes_conversations,
    }
