"""Turns the values of shared options into option dataclasses, and rejects wrong combinations.

Large packages such as torch are imported only inside functions, because some commands must run
without torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from dlm_export.cli.options import BUDGETS

if TYPE_CHECKING:
    from dlm_export.building.options import BuildOptions, QuantiseOptions
    from dlm_export.families.base import Overrides
    from dlm_export.judging.accuracy.effort import Effort
    from dlm_export.judging.accuracy.verdict import Budgets
    from dlm_export.opening import Opening
    from dlm_export.tensorrt.estimate import EngineOptions


JSON_LIMIT_BYTES = 4 << 20
_Options = TypeVar("_Options")


def taken(kind: type[_Options], values: dict[str, Any]) -> _Options:
    """Create a dataclass ``kind`` from the entries of ``values`` whose keys are its fields."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


def opening(values: dict[str, Any]) -> Opening:
    """Remove the options for opening a bundle from ``values``, and return them as an ``Opening``."""
    from dlm_export.opening import Opening

    names = [each.name for each in fields(Opening)]
    return Opening(**{name: values.pop(name) for name in names if name in values})


_QUANTISED_ONLY = (
    *("activations", "resume", "calib", "calib_samples", "calib_states", "calib_source"),
    *("calib_preset", "calib_min_tokens_per_expert", "calibrator"),
    *("observer", "solver", "smoothing", "rotate_down", "embedding"),
    *BUDGETS,
)
_JUDGED_ONLY = ("judged", *BUDGETS)
_DEFAULT = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
_ENGINE_ONLY = (
    *("canvas", "block", "workspace", "timing_cache"),
    *("builder", "version_compatible", "allow_fallback", "no_engine", "plain_graph"),
)


def split(text: str) -> list[str]:
    """Split a text at its commas, and drop empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def integers(option: str, text: str) -> list[int]:
    """Parse integers that are separated by commas or spaces. Raises UsageError."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as err:
        raise click.UsageError(f"{option}: {text!r} is not a list of integers") from err


def refuse(values: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    """Raise UsageError if the user gave an option that ``names`` contains.

    The error message names the option, followed by ``why``.
    """
    context = click.get_current_context(silent=True)
    for name in names:
        is_default = context is not None and context.get_parameter_source(name) in _DEFAULT
        if values.get(name) is not None and not is_default:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def read_json_file(path: Path) -> Any:
    """Read the JSON file at ``path``. Raises RequestError."""
    from dlm_runtime.errors import RequestError
    from dlm_runtime.files import parse_json, read_text

    try:
        return parse_json(read_text(path, JSON_LIMIT_BYTES, RequestError))
    except ValueError as err:
        if isinstance(err, RequestError):
            raise
        raise RequestError(f"{path}: not readable as JSON ({err})") from err


def read_text_file(path: Path) -> str:
    """Read the text file at ``path``. Raises RequestError."""
    from dlm_runtime.errors import RequestError
    from dlm_runtime.files import read_text

    return read_text(path, JSON_LIMIT_BYTES, RequestError)


def text_or_stdin(text: str) -> str:
    """Return an option's text. If the text is ``-``, return stdin without its last line feed."""
    return sys.stdin.read().removesuffix("\n") if text == "-" else text


def policy_changes(changes: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Parse the values of ``option``, which changes fields of a policy.

    Raises UsageError or RequestError.
    """
    from dlm_runtime import Policy

    fields: dict[str, Any] = {}
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{option} {text}: write FIELD=VALUE, such as seed=7")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    # This call raises an error if ``fields`` contains a name that is not a field of a policy.
    Policy().with_fields(fields)
    return fields


def check_build_options(values: dict[str, Any]) -> None:
    """Check the options of a build without importing torch, because the import takes seconds.

    Raises UsageError, TargetError or RecipeError.
    """
    from dlm_export import targets

    precision = values["precision"]
    if precision in ("fp32", "fp16", "bf16"):
        refuse(values, _QUANTISED_ONLY, f"needs a quantised precision; --precision is {precision}")
    if precision != "auto":
        refuse(values, ("auto_formats", "tune"), "needs --precision auto")
    if precision == "stored":
        solving = ("observer", "solver", "smoothing", "rotate_down")
        refuse(values, solving, "has no effect on stored codes and scales")
    if values["no_verify"]:
        asked = values | {"judge": "full" if values["judge"] == "full" else None}
        refuse(asked, ("judge", *_JUDGED_ONLY), "has no effect with --no-verify")
    if values["no_engine"]:
        building = ("workspace", "timing_cache", "builder", "version_compatible")
        refuse(values, building, "has no effect with --no-engine")
    devices = targets.find_all(split(values["target"]))
    recipe = targets.recipe_for(devices, precision)
    if recipe is not None and values["no_verify"]:
        recipe = replace(recipe, **_recipe_changes(values))
        if not recipe.needs_states(dict(recipe.layers)):
            why = f"has no effect: {precision} needs no data, and --no-verify skips judging"
            refuse(values, ("calib",), why)
    if devices[0].sm is None:
        what = "engines" if devices[0].is_gpu else "GPUs"
        refuse(values, _ENGINE_ONLY, f"is for {what}; --target is {values['target']}")
    if not devices[0].is_gpu:
        refuse(values, ("activations",), f"is for GPUs; --target is {values['target']}")
    else:
        refuse(values, ("tune",), f"times this processor; --target is {values['target']}")
        why = "is for CPUs; on a GPU keys and values are in the type of its activations"
        refuse(values, ("cache_dtype",), why)


def build_options(values: dict[str, Any]) -> BuildOptions:
    """Turn the values of ``build`` or ``quantize`` into ``BuildOptions``.

    ``check_build_options`` must have accepted the values.
    """
    from dlm_export.building.options import BuildOptions

    return BuildOptions(
        targets=tuple(split(values["target"])),
        precision=values["precision"],
        activations=values["activations"],
        cache_dtype=values["cache_dtype"],
        engine=None if values["no_engine"] else engine_options(values),
        plain_graph=bool(values["plain_graph"]),
        force=values["force"],
        check_parity=not values["no_verify"],
        quantise=_quantise_options(values),
        device=values["device"],
        memory_bytes=values["memory"],
        resume=values["resume"],
    )


def overrides(values: dict[str, Any]) -> Overrides:
    """Turn the options that override a checkpoint's values into ``Overrides``.

    A command may support only some of the options, so ``values`` need not contain every option.
    """
    from dlm_export.families.base import Overrides

    return taken(Overrides, values)


def budgets(values: dict[str, Any]) -> Budgets:
    """Turn the budget options into ``Budgets``. Raises UsageError for NaN and infinity."""
    from dlm_export.judging.accuracy.verdict import Budgets

    for name in BUDGETS:
        if values[name] is not None and not math.isfinite(values[name]):
            raise click.UsageError(
                f"--{name.replace('_', '-')} {values[name]} is not a limit: give a finite number"
            )
    return taken(Budgets, values)


def effort(values: dict[str, Any]) -> Effort:
    """Turn ``--judge`` and ``--judged`` into an ``Effort``.

    Raises UsageError if an option has no effect together with ``--judge none``.
    """
    from dlm_export.judging.accuracy.effort import Effort

    if values["judge"] == "none":
        refuse(values, _JUDGED_ONLY, "has no effect with --judge none")
    return Effort(values["judge"], values["judged"])


def _recipe_changes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe fields that the user's options set, and their new values."""
    fields = ("observer", "solver", "smoothing", "rotate_down", "embedding")
    return {name: values[name] for name in fields if values[name] is not None}


def _quantise_options(values: dict[str, Any]) -> QuantiseOptions:
    from dlm_export.building.options import QuantiseOptions
    from dlm_export.judging.precision_search.search import AutoOptions
    from dlm_export.quantising.samples import FEWEST_TOKENS, CalibrationOptions

    formats = tuple(split(values["auto_formats"] or ""))
    return QuantiseOptions(
        calibration=CalibrationOptions(
            data=values["calib"],
            samples=values["calib_samples"],
            states_per_sample=values["calib_states"],
            source=values["calib_source"],
            seed=values["seed"],
            preset=values["calib_preset"],
        ),
        budgets=budgets(values),
        effort=effort(values),
        recipe_changes=_recipe_changes(values),
        calibrator=values["calibrator"],
        min_tokens_per_expert=values["calib_min_tokens_per_expert"] or FEWEST_TOKENS,
        auto=AutoOptions(formats=formats or None, tune=bool(values["tune"])),
    )


def engine_options(values: dict[str, Any]) -> EngineOptions:
    """Turn the values of ``ENGINE_OPTIONS`` into ``EngineOptions``."""
    from dlm_export.tensorrt.estimate import EngineOptions

    return EngineOptions(
        canvas=values["canvas"],
        block=values["block"],
        workspace_bytes=None if values["workspace"] is None else values["workspace"] << 20,
        timing_cache=values["timing_cache"],
        allow_fallback=bool(values["allow_fallback"]),
        builder=values["builder"],
        version_compatible=bool(values["version_compatible"]),
    )
