"""Text of tokens as they come, in pieces that never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "�"
"""What bytes that are no whole character decode to."""


def find_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """Where the first stop string in a text starts."""
    found = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
    return min(found, default=None)


class TextStream:
    """Decodes tokens piece by piece, each time a window of two pieces: what stands before a token
    may change how it is spelled, what came long before does not.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.tokens = 0  # taken so far
        self.is_stopped = False
        self._decode, self._stop_strings = decode, stop_strings
        self._window: list[int] = []
        self._told = 0  # characters of the window's text that were taken from it
        self._held = ""  # taken, and perhaps the start of a stop string

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """What further tokens add to the text; ``is_last``: no others will come."""
        if self.is_stopped:
            return ""
        self.tokens += len(tokens)
        self._window += tokens
        decoded = self._decode(self._window) if self._window else ""
        whole = decoded if is_last else decoded.rstrip(BROKEN)
        fresh, self._told = whole[self._told :], max(self._told, len(whole))
        if len(whole) == len(decoded) and len(tokens) < len(self._window):
            self._window = list(tokens)
            self._told = len(self._decode(self._window)) if tokens else 0
        return self._give(self._held + fresh, is_last)

    def _give(self, text: str, is_last: bool) -> str:
        stop = find_stop(text, self._stop_strings)
        self.is_stopped = stop is not None
        end = stop if stop is not None else len(text) if is_last else self._safe(text)
        self._held = text[end:]
        self.text += text[:end]
        return text[:end]

    def _safe(self, text: str) -> int:
        """How much of a text cannot belong to a stop string that is still to come."""
        longest = max(map(len, self._stop_strings), default=0)
        starts = range(max(0, len(text) - longest + 1), len(text))
        return next(
            (at for at in starts if any(stop.startswith(text[at:]) for stop in self._stop_strings)),
            len(text),
        )
