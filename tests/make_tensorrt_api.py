"""Writes tests/golden/tensorrt_api.json, which describes the part of TensorRT's Python API that
builds engines.

Run ``python tests/make_tensorrt_api.py`` with the wheels tensorrt-rtx-cu13-bindings and -libs
installed. The signatures come from the docstrings that pybind11 generates.

In the file, a class has the form ``{"methods": {name: [signature, ...]}, "properties": {name:
whether the property can be set}}``. A signature is a list of ``[argument, type, whether the
argument has a default]`` without self. If a method is not needed to build engines, null is stored
instead of its list of signatures. An enumeration maps its members to their numbers.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "tensorrt_api.json"
# For each class, the methods whose signatures are stored. For other methods, only names are stored.
CLASSES: dict[str, tuple[str, ...]] = {
    "Builder": (
        "__init__",
        "build_serialized_network",
        "build_serialized_network_to_stream",
        "create_builder_config",
        "create_network",
        "create_optimization_profile",
    ),
    "EngineInspector": ("get_engine_information",),
    "IBuilderConfig": (
        "add_optimization_profile",
        "create_timing_cache",
        "get_timing_cache",
        "set_compute_capability",
        "set_memory_pool_limit",
        "set_timing_cache",
    ),
    "ICudaEngine": ("create_engine_inspector",),
    "IHostMemory": (),
    "ILayer": ("get_input", "get_output"),
    "ILogger": ("__init__", "log"),
    "INetworkDefinition": ("get_input", "get_layer"),
    "IOptimizationProfile": ("set_shape",),
    "IProgressMonitor": ("__init__", "phase_finish", "phase_start", "step_complete"),
    "IStreamWriter": ("__init__",),
    "ITensor": (),
    "ITimingCache": ("serialize",),
    "OnnxParser": ("__init__", "parse_from_file"),
    "Runtime": ("__init__", "deserialize_cuda_engine"),
}
ENUMS = (
    "ComputeCapability",
    "DataType",
    "ILogger.Severity",
    "LayerInformationFormat",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "ProfilingVerbosity",
)


def signatures(name: str, text: str) -> list[list[list[Any]]]:
    """Return the signatures in the docstring ``text`` of a method, without ``self``."""
    found = []
    for line in re.findall(rf"^(?:\d+\. )?({name}\(.*\)) -> ", text, re.MULTILINE):
        if line == f"{name}(*args, **kwargs)":
            continue  # a heading that pybind11 writes before overloads
        # Two parts of pybind11's signatures are not valid Python: default values like <...>, and
        # C++ names with ``::``.
        code = re.sub(r"\w+::", "", re.sub(r"<[^<>]*>", "...", line))
        arguments = ast.parse(f"def {code}: ...").body[0].args  # type: ignore[attr-defined]
        first_default = len(arguments.args) - len(arguments.defaults)
        found.append(
            [
                [
                    argument.arg,
                    ast.unparse(argument.annotation).rpartition(".")[2],
                    i >= first_default,
                ]
                for i, argument in enumerate(arguments.args)
                if argument.arg != "self"
            ]
        )
    return found


def describe(of: type, kept: tuple[str, ...]) -> dict[str, Any]:
    """Return the entry for a class in the bindings.

    Signatures are stored for the methods in ``kept``.
    """
    methods: dict[str, Any] = {}
    properties = {}
    for name, member in inspect.getmembers(of):
        if isinstance(member, property):
            properties[name] = member.fset is not None
        elif (
            callable(member)
            and not isinstance(member, type)
            and (not name.startswith("_") or name in kept)
        ):
            methods[name] = signatures(name, member.__doc__ or "") if name in kept else None
    return {"methods": methods, "properties": properties}


def text() -> str:
    """The text of the golden file for the installed bindings."""
    import tensorrt_rtx_bindings as trt
    import tensorrt_rtx_libs  # noqa: F401  (loads the libraries that the bindings link)

    enums = {}
    for name in ENUMS:
        found = trt
        for part in name.split("."):
            found = getattr(found, part)
        enums[name] = {member: int(value) for member, value in found.__members__.items()}
    golden = {
        "made_by": "tests/make_tensorrt_api.py",
        "module": f"tensorrt_rtx_bindings {trt.__version__}",
        "classes": {name: describe(getattr(trt, name), kept) for name, kept in CLASSES.items()},
        "enums": enums,
    }
    lines = json.dumps(golden, indent=1)
    # Write each signature on one line, so that changes are easy to review.
    for _ in range(2):
        lines = re.sub(
            r"\[\s+((?:[^\[\]{}]|\[[^\[\]]*\])*?)\s+\]",
            lambda found: "[" + " ".join(found[1].split()) + "]",
            lines,
        )
    return lines + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(text())
