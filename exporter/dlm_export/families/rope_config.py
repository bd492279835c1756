"""Reads rotary positions and their scaling from config.json, in the form of transformers 4 or 5.

Version 4 uses separate keys: ``rope_theta``, ``rope_scaling`` (with ``type`` or ``rope_type``) and
``partial_rotary_factor``. Version 5 stores all of these settings in the object ``rope_parameters``.
This object may contain one object for each type of layer
(https://huggingface.co/docs/transformers/internal/rope_utils).

If a setting is missing, the module uses the default of transformers. The module rejects a setting
that transformers ignores, because such a setting means that the network was trained differently.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any, NoReturn

from dlm_export.checkpoints.folder import CheckpointError, Config
from dlm_export.network import rope_scaling
from dlm_export.network.rope_scaling import Dynamic, Linear, Llama3, QueryScale, Scaling, Yarn
from dlm_export.network.spec import Rope

OBJECTS = ("rope_scaling", "rope_parameters")
LENGTH, ORIGINAL_LENGTH = "max_position_embeddings", "original_max_position_embeddings"
KINDS = ("default", *rope_scaling.KINDS)
"""The supported values of ``rope_type``."""


def read_rope(config: Config, has_query_scale: bool = False) -> Rope:
    """Read the rotary positions. Raises CheckpointError for missing and for unknown values.

    If ``has_query_scale`` is true, the function also reads how queries are scaled on long canvases,
    as in Ministral 3.
    """
    settings = _Settings(config)
    kind = settings.take("rope_type")
    kind = "default" if kind is None else kind
    if kind not in KINDS:
        raise CheckpointError(
            f"{config.path}: rope_type {reprlib.repr(kind)} is not supported, only {', '.join(KINDS)}"
        )
    fraction = settings.take("partial_rotary_factor")
    try:
        scaling = _scaling(settings, kind)
        rope = Rope(
            config.positive("rope_theta", settings.take("rope_theta")),
            config.positive("partial_rotary_factor", 1.0 if fraction is None else fraction),
            scaling,
            _query_scale(settings, scaling) if has_query_scale else None,
        )
    except ValueError as err:
        raise CheckpointError(
            f"{config.path}: {err}. Correct the numbers of rope_type {kind} in {settings.object}."
        ) from err
    settings.check_all_read(kind)
    if rope.fraction > 1:
        settings.refuse(f"partial_rotary_factor {rope.fraction} is greater than 1")
    return rope


class _Settings:
    """The settings of rotary positions from all keys of config.json."""

    def __init__(self, config: Config) -> None:
        """Raises CheckpointError if two keys contradict each other."""
        self.config = config
        self.object = next(
            (key for key in OBJECTS if isinstance(config.get(key), dict)), OBJECTS[0]
        )
        self._values: dict[str, Any] = {}
        self.nulls: set[str] = set()
        """Names of the settings that are null in ``rope_scaling`` or ``rope_parameters``."""
        for key in ("rope_theta", "partial_rotary_factor"):
            if (value := config.get(key)) is not None:
                self._values[key] = value
        for key in OBJECTS:
            for name, value in _object(config, key).items():
                name = "rope_type" if name == "type" else name
                if value is None:
                    self.nulls.add(name)
                    continue
                if name in self._values and self._values[name] != value:
                    self._refuse_both(name, self._values[name], key, value)
                self._values[name] = value

    def take(self, name: str) -> Any:
        """Return a setting and mark it as used, or return ``None`` if it is missing."""
        return self._values.pop(name, None)

    def has(self, name: str) -> bool:
        """Return True if the setting exists and ``take`` has not returned it yet."""
        return name in self._values

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises CheckpointError."""
        value = self.take(name)
        if value is None and default is not None:
            return default
        return self.config.positive(f"{name} in {self.object}", value)

    def number_or_zero(self, name: str) -> float:
        """Return a number that is not negative. The default is 0. Raises CheckpointError."""
        value = self._values.get(name)
        if value == 0 and not isinstance(value, bool):
            self.take(name)
        return self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false. Raises CheckpointError."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(
                f"{name} in {self.object} must be true or false, found {reprlib.repr(value)}"
            )
        return default if value is None else value

    def length(self) -> int:
        """Return ``max_position_embeddings``, the number of positions. Raises CheckpointError."""
        return self._positions(LENGTH, self.config.get(LENGTH))

    def original_length(self) -> int:
        """Return the number of positions before any scaling. Raises CheckpointError.

        Some releases store this number outside of ``rope_scaling``. If the number is missing, the
        result is ``max_position_embeddings``, as in transformers.
        """
        outer, inner = self.config.get(ORIGINAL_LENGTH), self.take(ORIGINAL_LENGTH)
        if outer is not None and inner is not None and outer != inner:
            self._refuse_both(ORIGINAL_LENGTH, outer, self.object, inner)
        found = inner if outer is None else outer
        if found is None and self.config.get(LENGTH) is not None:
            return self.length()
        return self._positions(ORIGINAL_LENGTH, found)

    def check_all_read(self, kind: str) -> None:
        """Raises CheckpointError if config.json contains a setting that this module did not use."""
        if self._values:
            unknown = ", ".join(repr(name[:64]) for name in self._values)
            self.refuse(
                f"{unknown} in rope_scaling or rope_parameters is not supported with rope_type {kind}. "
                "Remove it if the network was trained without it."
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raises CheckpointError with this reason."""
        raise CheckpointError(f"{self.config.path}: {reason}")

    def _positions(self, name: str, value: object) -> int:
        if value is None:
            self.refuse(
                f"{name} is missing, and a guess would change what the network computes. Add it."
            )
        longest = rope_scaling.LONGEST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= longest:
            self.refuse(f"{name} must be an integer in 1..{longest}, found {reprlib.repr(value)}")
        return value

    def _refuse_both(self, name: str, first: object, key: str, second: object) -> NoReturn:
        both = f"{reprlib.repr(first)} and, in {key}, {reprlib.repr(second)}"
        self.refuse(f"{name} is {both}: keep only the value used in training")


def _object(config: Config, key: str) -> dict[str, Any]:
    """Return the object under ``key``, or an empty object. Raises CheckpointError."""
    values = config.get(key)
    if values is None or values is False:  # in RND1's release, rope_scaling is false
        return {}
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{config.path}: {key} must be an object, found {reprlib.repr(values)}"
        )
    if values and all(isinstance(value, dict) for value in values.values()):
        if values.keys() != {"full_attention"}:
            kinds = ", ".join(map(reprlib.repr, values))
            raise CheckpointError(
                f"{config.path}: {key} is by layer type, {kinds}; only full_attention is supported"
            )
        inner: dict[str, Any] = values["full_attention"]
        return inner
    return values


def _query_scale(settings: _Settings, scaling: Scaling | None) -> QueryScale | None:
    """Read how queries are scaled on long canvases, if they are. Raises CheckpointError."""
    settings.take(LENGTH)  # transformers ignores this copy of the number of positions
    if not settings.has("llama_4_scaling_beta"):
        settings.refuse(
            f"llama_4_scaling_beta is missing in {settings.object}, and a guess would change what the network computes. Add it."
        )
    beta = settings.number_or_zero("llama_4_scaling_beta")
    original = getattr(scaling, "original_length", None) or settings.original_length()
    return QueryScale(beta, original) if beta else None


def _scaling(settings: _Settings, kind: str) -> Scaling | None:
    """Read the numbers that describe how rotary positions are scaled.

    Raises CheckpointError if a number is missing or invalid, and ValueError if numbers contradict
    each other.
    """
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(settings.number("factor"))
    if kind == "dynamic":
        return Dynamic(settings.number("factor"), settings.length())
    original_length = settings.original_length()
    if kind == "llama3":
        return Llama3(
            settings.number("factor"),
            original_length,
            settings.number("low_freq_factor"),
            settings.number("high_freq_factor"),
        )
    # If ``factor`` is null, compute the factor as transformers does: divide the number of positions
    # by the original number of positions.
    ratio = settings.length() / original_length if "factor" in settings.nulls else None
    factor = settings.number("factor", ratio)
    return Yarn(
        factor,
        original_length,
        _attention_factor(settings, factor),
        settings.number("beta_fast", 32.0),
        settings.number("beta_slow", 1.0),
        settings.flag("truncate", True),
    )


def _attention_factor(settings: _Settings, factor: float) -> float:
    """Return the number by which YaRN multiplies cosines and sines. Raises CheckpointError.

    The number is ``attention_factor`` if config.json contains this key. Otherwise, the number
    follows from ``factor``, and from ``mscale`` and ``mscale_all_dim`` if both are set.
    """
    scales = {name: settings.number_or_zero(name) for name in ("mscale", "mscale_all_dim")}
    said = [name for name, value in scales.items() if value]
    found = settings.take("attention_factor")
    if said and (found is not None or len(said) == 1):
        reason = (
            "one of mscale and mscale_all_dim has no effect without the other"
            if found is None
            else "mscale and mscale_all_dim have no effect beside attention_factor"
        )
        settings.refuse(
            f"{settings.object} contains {' and '.join(said)}, but {reason}. Keep only what was used "
            "in training."
        )
    if found is not None:
        return settings.config.positive(f"attention_factor in {settings.object}", found)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if said:
        return magnitude(scales["mscale"]) / magnitude(scales["mscale_all_dim"])
    return magnitude(1.0)
