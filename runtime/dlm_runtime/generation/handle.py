"""A bundle that the native library has opened, and a pool of sessions.

Several threads may use a handle. Each running request uses one session of the pool.
"""

from __future__ import annotations

import ctypes as C
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import ClosedError, RequestError, shown
from dlm_runtime.generation.cancelling import Cancels, seen_between_passes
from dlm_runtime.generation.forks import Origin
from dlm_runtime.policy import TEXT_FIELDS, Policy


class Handle:
    """Owns an open ``dlm_bundle``.

    Args:
        pointer: The ``dlm_bundle``.
        default_policy: The policy of requests that do not name a preset. If None, the bundle's
            default preset is used.
        owned: An object that must live as long as the bundle, such as a callback.
        causes: The object in which callbacks store exceptions: ``causes.error`` is the exception
            that a callback raised. None if the bundle has no callback.
        prefix_cache_bytes: Limit on the bytes of keys and values that each session stores between
            calls.
    """

    def __init__(
        self,
        pointer: C.c_void_p,
        default_policy: Policy | None = None,
        owned: object = None,
        causes: threading.local | None = None,
        prefix_cache_bytes: int = 0,
    ) -> None:
        self.pointer = pointer
        self.origin = Origin("bundle")
        self._library = _native.library()
        self._default_policy, self._owned, self._causes = default_policy, owned, causes
        self._lock = threading.Lock()
        self._idle: list[C.c_void_p] = []
        self._prefix_cache_bytes = prefix_cache_bytes
        # Number of running calls that use the bundle. If the bundle is closed during these calls,
        # the last call frees the bundle.
        self._busy = 0
        self._is_closed = False
        self._with: list[Callable[[], None]] = []
        about = self._library.dlm_bundle_describe(pointer).contents
        self.manifest: dict[str, Any] = json.loads(about.manifest) if about.manifest else {}
        self.engine: str = about.engine.decode()
        info = about.denoiser.contents
        self.vocab_size: int = info.vocab_size
        self.mask_token_id: int = info.mask_token_id
        self.max_canvas_length: int = info.max_canvas_length
        self.eos_token_ids: tuple[int, ...] = tuple(info.eos_token_ids[: info.eos_count])
        self.shift: int = info.shift
        self.visible_block: int | None = info.visible_block or None
        self.blocks_after_prompt: bool = info.blocks_after_prompt == 1
        self.draft_block: int | None = info.draft_block or None
        self.conditioning_size: int = info.conditioning_size
        self.max_new_tokens: int = info.max_new_tokens
        self.resizes: bool = info.expand_token_id >= 0

    def close(self) -> None:
        """Reject new requests, and free the bundle after the running requests have ended.

        Raises ForkError.
        """
        self.origin.check()
        with self._lock:
            self._is_closed = True
            self._free()

    def close_with(self, close: Callable[[], None]) -> None:
        """Register a function to call when the bundle is freed. Running requests end before."""
        with self._lock:
            self._with.append(close)

    def _free(self) -> None:
        """Free the bundle if it is closed and no request is running. The caller must hold the lock."""
        if not self._is_closed or self._busy:
            return
        while self._idle:
            self._library.dlm_session_destroy(self._idle.pop())
        if self.pointer:
            self._library.dlm_bundle_destroy(self.pointer)
            self.pointer = C.c_void_p()
        while self._with:
            self._with.pop()()

    def __del__(self) -> None:
        if getattr(self, "pointer", None) and self.origin.is_here:
            self.close()

    def check_open(self) -> None:
        """Raise ClosedError if the handle is closed, or ForkError in a forked process."""
        self.origin.check()
        if self._is_closed:
            raise ClosedError("the bundle is closed")

    def begin(self) -> None:
        """Keep the engine alive until ``end`` is called. Each ``begin`` needs one ``end``."""
        # A forked process is rejected before the lock is taken. In a forked process, the lock may
        # be locked forever.
        self.origin.check()
        with self._lock:
            self.check_open()
            self._busy += 1

    def end(self) -> None:
        """End a use of the engine that ``begin`` has started.

        In a forked process, this does nothing.
        """
        if not self.origin.is_here:
            return
        with self._lock:
            self._busy -= 1
            self._free()

    @contextmanager
    def session(self, cancels: Cancels = ()) -> Iterator[C.c_void_p]:
        """Return a session for one native call.

        Between the passes of a native call, signal handlers run, and requests are cancelled if
        their event is set.
        """
        self.begin()
        session = None
        try:
            with self._lock:
                session = self._idle.pop() if self._idle else None
            if session is None:
                made = C.c_void_p()
                create = self._library.dlm_session_create
                _native.check(create, (self.pointer,), C.byref(made))
                session = made
                self._library.dlm_session_prefix_cache(session, self._prefix_cache_bytes)
            with seen_between_passes(session, cancels):
                yield session
        finally:
            if session is not None and self.origin.is_here:
                with self._lock:
                    self._idle.append(session)
            self.end()

    def check(self, status: int, session: C.c_void_p) -> None:
        """Raise the error of a failed native call.

        If a callback raised an exception, this exception becomes the cause of the raised error.
        """
        if not status:
            return
        error = _native.error(status, self._library.dlm_session_last_error(session))
        cause: BaseException | None = (
            None if self._causes is None else self._causes.__dict__.pop("error", None)
        )
        if cause is None or isinstance(cause, Exception):
            raise error from cause
        raise cause from None

    def policy(self, preset: str | None, effort: str | None) -> Policy:
        """Return the policy of a preset, or the policy that was fitted for an effort level.

        If ``preset`` is None, the default preset is used. Raises RequestError.
        """
        self.check_open()
        if self._default_policy is not None and preset is None and effort is None:
            return self._default_policy
        names = []
        for kind, name in (("preset", preset), ("effort", effort)):
            if name is not None and not isinstance(name, str):
                raise RequestError(f"{kind} = {shown(name)} is not a name")
            # A C string ends at a NUL, so a name with a NUL would be read as a shorter name.
            names.append(
                None if name is None else name.replace("\0", "?").encode("utf-8", "replace")
            )
        native, message = (
            _native.initialised(_native.Policy),
            C.create_string_buffer(_native.MESSAGE_BYTES),
        )
        if self._library.dlm_bundle_policy(
            self.pointer, *names, message, len(message), C.byref(native)
        ):
            raise RequestError(message.value.decode("utf-8", "replace"))
        values = {field.name: getattr(native, field.name) for field in fields(Policy)}
        values |= {name: values[name].decode() for name in TEXT_FIELDS}
        return Policy(**values)
