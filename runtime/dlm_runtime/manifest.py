"""Checks the parts of a bundle's manifest that the native reader does not use.

When the native library opens a bundle, it checks the members ``loop`` and ``files``. All other
members are for people and for the exporter. Code that reads one of the other members must first
check the manifest with the functions of this module. These functions use ``manifest.schema.json``.
"""

from __future__ import annotations

import functools
import itertools
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlm_runtime import precision
from dlm_runtime.abi import native as _native
from dlm_runtime.cache_dtypes import CACHE_ROWS
from dlm_runtime.constraints.layout import LAYOUTS
from dlm_runtime.errors import BundleError, shown
from dlm_runtime.tools import FORMATS

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

MANIFEST_FILE = "manifest.json"
_MESSAGE_LIMIT = 300  # most characters of an error message; a manifest may contain very long texts


@dataclass(frozen=True)
class TextFiles:
    """The text files of a bundle: the paths of its tokenizer and chat template.

    A path is None if the bundle does not contain the file.

    ``special_tokens`` contains the texts of the special tokens that the template may use.
    """

    tokenizer: Path | None
    template: Path | None
    special_tokens: dict[str, str]


def check_manifest(manifest: Mapping[str, Any], folder: Path) -> None:
    """Check the whole manifest of the bundle in ``folder``.

    The native library must have opened the bundle already.

    Raises BundleError. The message contains the file's path, the wrong member and the reason.
    """
    from jsonschema.exceptions import best_match

    # Only the first error is searched for, because a hostile manifest may contain a million errors.
    error = best_match(itertools.islice(validator().iter_errors(manifest), 1))
    if error is not None:
        _refuse(folder, _place(error), _reason(error))
    text_files(manifest, folder)


def text_files(manifest: Mapping[str, Any], folder: Path) -> TextFiles:
    """Find the tokenizer and the chat template that a manifest names.

    Raises BundleError if the manifest's member ``files`` does not list one of the two files.
    """

    def listed(name: object, place: str) -> Path:
        # The native library has already rejected names in ``files`` that point outside the folder.
        if not isinstance(name, str) or name not in manifest["files"]:
            _refuse(folder, place, "names a file that is not listed in files")
        return folder / name

    name, chat = manifest.get("tokenizer"), manifest.get("chat_template")
    tokenizer = None if name is None else listed(name, "tokenizer")
    if chat is None:
        return TextFiles(tokenizer, None, {})
    special_tokens = chat.get("special_tokens") if isinstance(chat, dict) else None
    if not isinstance(special_tokens, dict) or not all(
        isinstance(text, str) for text in special_tokens.values()
    ):
        _refuse(
            folder,
            "chat_template",
            "expected an object with a file and the texts of special_tokens",
        )
    return TextFiles(tokenizer, listed(chat.get("file"), "chat_template.file"), special_tokens)


def check_text_options(manifest: Mapping[str, Any], folder: Path) -> None:
    """Check that this version of the runtime knows the manifest's JSON layout and call format.

    Raises BundleError if a name is unknown.
    """
    for key, known in (("json_layout", LAYOUTS), ("call_format", FORMATS)):
        name = manifest.get(key)
        if key in manifest and not (isinstance(name, str) and name in known):
            _refuse(
                folder,
                key,
                f"{_short(shown(name))} is not one of {', '.join(known)}: build the bundle again, or update dlm-export",
            )


@functools.cache
def schema() -> dict[str, Any]:
    """Load manifest.schema.json, and add the lists of allowed names that Python code defines.

    The lists contain the names of policy fields, cache types, layer formats, JSON layouts and call
    formats.
    """
    found: dict[str, Any] = json.loads(
        Path(__file__).with_name("manifest.schema.json").read_text(encoding="utf-8")
    )
    fields = {field.name.decode(): _policy_rule(field) for field in _native.policy_fields()}
    found["$defs"]["preset"] |= {"properties": fields, "additionalProperties": False}
    found["$defs"]["cache_dtype"]["enum"] = list(CACHE_ROWS)
    found["$defs"]["format"]["enum"] = list(precision.FORMATS)
    found["properties"]["json_layout"]["enum"] = list(LAYOUTS)
    found["properties"]["call_format"]["enum"] = list(FORMATS)
    return found


def _policy_rule(field: Any) -> dict[str, Any]:
    said = {"description": f"{field.name.decode()} of dlm_policy: see dlm_runtime.h."}
    if field.choices:
        names = itertools.takewhile(lambda name: name is not None, field.choices)
        choices = [name.decode() for name in names]
        return said | {"type": "string", "enum": choices, "default": choices[0]}
    if field.kind == _native.HEADER.constants["DLM_FIELD_DOUBLE"]:
        kind, highest, initial = "number", field.highest, field.initial
    else:  # some JSON readers reject 2**63 and above
        kind, highest, initial = "integer", min(field.highest, 2**63 - 1), int(field.initial)
    return said | {"type": kind, "minimum": field.lowest, "maximum": highest, "default": initial}


@functools.cache
def validator() -> Draft202012Validator:
    """Create a validator for manifests.

    Like the native reader, the validator accepts 1 but not 1.0 as an integer.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry

    def is_integer(_: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    made: Draft202012Validator = extend(Draft202012Validator, type_checker=types)(
        schema(), registry=Registry()
    )
    return made


def _place(error: ValidationError) -> str:
    """Return the path of the manifest's wrong member, as the native library's messages write it:
    ``layers["a b"]``, ``targets[0]``.
    """
    place = ""
    for key in error.absolute_path:
        if isinstance(key, str) and key.isidentifier() and key.isascii():
            place += f".{key}"
        else:
            place += f"[{json.dumps(key)}]"
    return _short(place.removeprefix(".")) or "the manifest"


def _reason(error: ValidationError) -> str:
    """Return the message of the schema validator, with the rejected value shortened."""
    return _short(error.message.replace(repr(error.instance), reprlib.repr(error.instance)))


def _short(text: str) -> str:
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 3] + "..."


def _refuse(folder: Path, place: str, reason: str) -> NoReturn:
    raise BundleError(f"{folder / MANIFEST_FILE}: {place}: {reason}")
