"""Quantisation recipes: presets and files that say how to quantise a denoiser.

A recipe defines the format of each layer, and the methods that find ranges, scales and weights.

A recipe is a preset of ``RECIPES`` or a TOML file:

.. code-block:: toml

    name = "mine"
    observer = "mse"            # max | percentile | mse | entropy: how static activation ranges are clipped
    solver = "gptq"             # nearest | awq | gptq: how weights are rounded
    smoothing = 0.5             # SmoothQuant's alpha, folded into norms; omit to disable
    rotate_down = true          # Hadamard rotation of the input of every mlp.down
    embedding = "int8"          # int8 | fp8: the embedding table on disk; omit for full precision

    [layers]                    # module path or pattern = format; the last match wins
    "blocks.*" = "int4-g32"
    "blocks.0.mlp.down" = "high"

Layers that no pattern matches keep full precision.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.files import read_text
from dlm_runtime.precision import FORMATS as FORMATS
from dlm_runtime.precision import HIGH as HIGH
from dlm_runtime.precision import LayerFormat as LayerFormat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class RecipeError(DlmError):
    """Raised if a recipe uses an unknown name or an invalid value."""

    exit_code = ExitCode.WRONG_INPUT


OBSERVERS = ("max", "percentile", "mse", "entropy")
SOLVERS = ("nearest", "awq", "gptq")
EMBEDDINGS = ("int8", "fp8")


@dataclass(frozen=True)
class Recipe:
    """A quantisation recipe. The module docstring explains the fields.

    ``layers`` are pairs of a pattern and a format. The last pattern that matches a layer wins.
    """

    name: str
    layers: tuple[tuple[str, str], ...]
    observer: str = "mse"
    solver: str = "nearest"
    smoothing: float | None = None
    rotate_down: bool = False
    embedding: str | None = None
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check the fields. Raises RecipeError. The message lists the valid choices."""
        for name, value, choices in (
            ("observer", self.observer, OBSERVERS),
            ("solver", self.solver, SOLVERS),
            ("embedding", self.embedding or EMBEDDINGS[0], EMBEDDINGS),
            *((f"format of {pattern!r}", value, tuple(FORMATS)) for pattern, value in self.layers),
        ):
            if value not in choices:
                raise RecipeError(
                    f"recipe {self.name}: {name} is {value!r}, expected one of {', '.join(choices)}"
                )
        if self.smoothing is not None and not 0 <= self.smoothing <= 1:
            raise RecipeError(f"recipe {self.name}: smoothing {self.smoothing} is outside 0..1")

    def formats(self, layers: Sequence[str]) -> dict[str, str]:
        """Map each layer to the name of its format.

        Raises RecipeError if a pattern matches no layer.
        """
        chosen = dict.fromkeys(layers, HIGH)
        for pattern, name in self.layers:
            matched = fnmatch.filter(layers, pattern)
            if not matched:
                raise RecipeError(
                    f"recipe {self.name}: no layer matches {pattern!r}. Layers are {abridged(layers)}; * matches anything."
                )
            chosen |= dict.fromkeys(matched, name)
        return chosen

    def needs_states(self, formats: Mapping[str, str]) -> bool:
        """Return True if this recipe needs calibration.

        Calibration runs the denoiser on calibration states.
        """
        is_static = any(FORMATS[name].is_static for name in formats.values())
        return is_static or self.solver != "nearest" or self.smoothing is not None

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as plain Python objects, for the manifest.

        ``recipe_from`` reads these objects.
        """
        values = {
            key: value
            for key, value in asdict(self).items()
            if value is not None and key != "description"
        }
        return values | {"layers": dict(self.layers)}


def _recipe(name: str, description: str, layers: Mapping[str, str], **options: Any) -> Recipe:
    return Recipe(name, tuple(layers.items()), description=description, **options)


def _int4(group_size: int) -> dict[str, str]:
    """Return the formats of a recipe with INT4 layers, dynamic activations and an INT8 head."""
    return {"*": "int8-dynamic", "blocks.*": f"int4-g{group_size}-dynamic"}


_BY_ROWS = "activations per row in each pass"
_HEAD = "; the head in INT8"
_MIXED = {"blocks.*.mlp.*": "nvfp4", "blocks.*.attention.*": "fp8"}
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe(
            "int8",
            "INT8 weights per channel, activations per row in each pass",
            {"*": "int8-dynamic"},
        ),
        _recipe(
            "int8-static",
            "INT8 weights per channel, calibrated activations",
            {"blocks.*": "int8-static"},
        ),
        _recipe(
            "int8-weight",
            "INT8 weights per channel, the head too, GPTQ",
            {"*": "int8-weight"},
            solver="gptq",
        ),
        _recipe(
            "int4",
            f"INT4 weights in groups of 32, the head too, GPTQ, {_BY_ROWS}",
            {"*": "int4-g32-dynamic"},
            solver="gptq",
        ),
        _recipe(
            "int4-rtn",
            f"INT4 weights in groups of 32, round to nearest, {_BY_ROWS}{_HEAD}",
            _int4(32),
        ),
        _recipe(
            "int4-awq",
            f"INT4 weights in groups of 32, AWQ, {_BY_ROWS}{_HEAD}",
            _int4(32),
            solver="awq",
        ),
        _recipe(
            "int4-g64-dynamic",
            f"INT4 weights in groups of 64, GPTQ, {_BY_ROWS}{_HEAD}",
            _int4(64),
            solver="gptq",
        ),
        _recipe(
            "int4-g128-dynamic",
            f"INT4 weights in groups of 128, GPTQ, {_BY_ROWS}{_HEAD}",
            _int4(128),
            solver="gptq",
        ),
        _recipe(
            "int4-g32",
            "INT4 weights in groups of 32, the head too, GPTQ",
            {"*": "int4-g32"},
            solver="gptq",
        ),
        _recipe(
            "int4-g64",
            "INT4 weights in groups of 64, GPTQ",
            {"blocks.*": "int4-g64"},
            solver="gptq",
        ),
        _recipe(
            "int4-g128",
            "INT4 weights in groups of 128, GPTQ",
            {"blocks.*": "int4-g128"},
            solver="gptq",
        ),
        _recipe(
            "fp8",
            "FP8 E4M3 weights per channel, GPTQ, calibrated activations",
            {"blocks.*": "fp8"},
            solver="gptq",
        ),
        _recipe("nvfp4", "NVFP4 weights and activations (W4A4)", {"blocks.*": "nvfp4"}),
        _recipe("nvfp4-weight", "NVFP4 weights only", {"blocks.*": "nvfp4-weight"}),
        _recipe("mixed", "NVFP4 in the MLP, FP8 in attention", _MIXED),
    )
}
_MOST_BYTES = 1 << 20
# Maximum number of dots in a line. tomllib's time is quadratic in the number of dots in a key.
_MOST_PARTS = 200


def find(name: str) -> Recipe:
    """Return the preset called ``name``, or the recipe in the ``.toml`` file ``name``.

    For an unknown name, raises RecipeError. The message lists the presets.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name.endswith(".toml"):
        return read_recipe(Path(name))
    raise RecipeError(
        f"unknown recipe {name!r}: use one of {', '.join(RECIPES)}, or the path of a .toml file"
    )


def for_experts(recipe: Recipe) -> Recipe:
    """Adapt a preset to a network with experts.

    The function changes only the preset ``nvfp4``. It keeps attention in FP8, because attention is
    a small part of a network with experts.
    """
    preset = RECIPES["nvfp4"]
    is_preset = (recipe.name, recipe.layers) == (preset.name, preset.layers)
    return replace(recipe, layers=tuple(_MIXED.items())) if is_preset else recipe


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file of at most 1 MiB.

    Raises RecipeError. The message lists the valid choices.
    """
    text = read_text(path, _MOST_BYTES, RecipeError)
    if any(line.count(".") > _MOST_PARTS for line in text.splitlines()):
        raise RecipeError(f"{path}: a line has more than {_MOST_PARTS} dots, too many for a recipe")
    try:
        values = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
        # TOMLDecodeError is a ValueError. Python also raises ValueError for an integer with
        # thousands of digits.
    ) as err:
        raise RecipeError(f"{path}: not TOML ({err})") from err
    return recipe_from(values, str(path))


def recipe_from(values: Mapping[str, Any], where: str) -> Recipe:
    """Create a recipe from the result of ``as_dict``. Raises RecipeError."""
    types: dict[str, tuple[type, ...]] = {
        "name": (str,),
        "layers": (dict,),
        "observer": (str,),
        "solver": (str,),
        "smoothing": (int, float),
        "rotate_down": (bool,),
        "embedding": (str,),
    }
    for key, value in values.items():
        if key not in types:
            raise RecipeError(f"{where}: unknown key {key!r}; known keys are {', '.join(types)}")
        if not isinstance(value, types[key]) or (
            isinstance(value, bool) and bool not in types[key]
        ):
            wanted = {dict: "table", str: "string", bool: "boolean"}.get(types[key][0], "number")
            raise RecipeError(
                f"{where}: {key} is of type {type(value).__name__}, expected a {wanted}"
            )
    layers = values.get("layers", {})
    for pattern, name in layers.items():
        if not isinstance(name, str):
            raise RecipeError(
                f'{where}: the format of {pattern!r} is not a name; quote module paths: "blocks.0.mlp.down" = ...'
            )
    if not layers and "embedding" not in values:
        raise RecipeError(
            f'{where}: the recipe quantises nothing; add a table [layers] with lines such as "blocks.*" = "int8-dynamic"'
        )
    rest = {key: value for key, value in values.items() if key not in ("name", "layers")}
    return Recipe(values.get("name", Path(where).stem), tuple(layers.items()), **rest)


def abridged(layers: Sequence[str]) -> str:
    """List layer names for an error message.

    Block indices in the names are replaced by N, and each resulting name is listed once.
    """
    return ", ".join(dict.fromkeys(map(block_left_out, layers)))


def block_left_out(layer: str) -> str:
    """Replace the block index in the path of a layer with N, as in ``blocks.N.mlp.up``."""
    return re.sub(r"^blocks\.\d+\.", "blocks.N.", layer)
