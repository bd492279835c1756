"""Parses ``dlm_runtime.h`` into ctypes: structs, callbacks, functions and constants.

C functions and struct fields are declared only in ``dlm_runtime.h``. The header uses only a small
part of C's syntax, so that a few regular expressions can parse it. Each statement contains one
declaration. Structs are written as ``typedef struct NAME { ... } NAME;``, and constants as ``NAME =
number``.
"""

from __future__ import annotations

import ctypes as C
import re
from dataclasses import dataclass
from typing import Any

_SCALARS: dict[str, Any] = {
    "int32_t": C.c_int32,
    "int64_t": C.c_int64,
    "uint8_t": C.c_uint8,
    "uint32_t": C.c_uint32,
    "uint64_t": C.c_uint64,
    "size_t": C.c_size_t,
    "double": C.c_double,
    "float": C.c_float,
    "char": C.c_char,
    "dlm_status": C.c_int32,
}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\} \1;", re.DOTALL)
_COMMENTED = re.compile(r"(\w+);\s*/\*(.*?)\*/", re.DOTALL)
_OPAQUE = re.compile(r"typedef struct (\w+) \1;")
_CALLBACK = re.compile(r"typedef (\w+) \(\*(\w+)\)\(([^)]*)\);")
_FUNCTION = re.compile(r"DLM_API ([\w\s*]+?)\b(\w+)\(([^)]*)\);")
_ENUMERATOR = re.compile(r"\b(DLM_\w+) = (-?\d+)")
_DEFINE = re.compile(r"#define (DLM_\w+) \(?(-?\d+)\)?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Header:
    """The declarations of the header. The keys of each dict are the declared names.

    Args:
        structs: The structs, as ctypes structures.
        callbacks: The types of function pointers.
        functions: For each function, its result type (None for void) and the types of its
            arguments.
        constants: The members of enums, and the macros whose values are numbers.
        policy_comments: The comment of each field of ``dlm_policy``.
    """

    structs: dict[str, Any]
    callbacks: dict[str, Any]
    functions: dict[str, tuple[Any, list[Any]]]
    constants: dict[str, int]
    policy_comments: dict[str, str]


def read_header(text: str) -> Header:
    """Parse the text of the header. Raises ValueError if a type is used before it is declared."""
    constants = {name: int(value) for name, value in _DEFINE.findall(text)}
    plain = _COMMENT.sub(" ", text)
    constants |= {name: int(value) for name, value in _ENUMERATOR.findall(plain)}
    types: dict[str, Any] = dict(_SCALARS)
    types |= dict.fromkeys(_OPAQUE.findall(plain))  # Python only passes pointers to these structs
    structs: dict[str, Any] = {}
    callbacks: dict[str, Any] = {}
    found = [*_STRUCT.finditer(plain), *_CALLBACK.finditer(plain)]
    for match in sorted(found, key=lambda each: each.start()):
        if match.re is _STRUCT:
            name, body = match.groups()
            structs[name] = types[name] = _structure(name, body, types)
        else:
            result, name, arguments = match.groups()
            callbacks[name] = types[name] = C.CFUNCTYPE(
                _type(result, types), *_arguments(arguments, types, is_callback=True)
            )
    functions = {
        name: (_type(result, types), _arguments(arguments, types))
        for result, name, arguments in _FUNCTION.findall(plain)
    }
    policy = next(match[2] for match in _STRUCT.finditer(text) if match[1] == "dlm_policy")
    comments = {name: " ".join(said.split()) for name, said in _COMMENTED.findall(policy)}
    return Header(structs, callbacks, functions, constants, comments)


def _structure(name: str, body: str, types: dict[str, Any]) -> Any:
    fields: list[tuple[str, Any]] = []
    for statement in filter(None, map(str.strip, body.split(";"))):
        first, *others = statement.split(",")
        base = re.match(r"(?:const )?\w+", first)
        assert base is not None
        for declarator in (first, *(f"{base[0]} {other}" for other in others)):
            fields.append((declarator.split("*")[-1].split()[-1], _type(declarator, types, True)))
    sized = {field.removesuffix("_size") for field, _ in fields if field.endswith("_size")}
    # If a struct contains a text and a field with the size of the text, the text may contain NUL.
    # Reading a c_char_p stops at the first NUL, so a plain pointer is used for such a text.
    fields = [
        (field, C.POINTER(C.c_char) if field in sized and kind is C.c_char_p else kind)
        for field, kind in fields
    ]
    return type(name, (C.Structure,), {"_fields_": fields})


def _arguments(text: str, types: dict[str, Any], is_callback: bool = False) -> list[Any]:
    if text.strip() == "void":
        return []
    kinds = [_type(argument, types, True) for argument in text.split(",")]
    if not is_callback:
        return kinds
    # If an argument of a callback is a c_char_p, ctypes passes a copy of the text. Callbacks must
    # write to the original memory, so they get a c_void_p.
    return [C.c_void_p if kind is C.c_char_p else kind for kind in kinds]


def _type(declaration: str, types: dict[str, Any], has_name: bool = False) -> Any:
    """Return the ctypes type of a declaration such as ``const int32_t* tokens``."""
    pointers = declaration.count("*")
    words = [word for word in re.findall(r"\w+", declaration) if word != "const"]
    base = words[0]
    if base == "void":
        kind = None
    elif base in types:
        kind = types[base]
    else:
        raise ValueError(f"dlm_runtime.h: {declaration.strip()} has a type that is not declared")
    assert not has_name or len(words) == 2, declaration
    if pointers and kind is None:
        kind, pointers = C.c_void_p, pointers - 1
    elif pointers and kind is C.c_char:
        kind, pointers = C.c_char_p, pointers - 1
    for _ in range(pointers):
        kind = C.POINTER(kind)
    return kind
