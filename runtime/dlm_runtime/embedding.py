"""Finds the files that a C or C++ program needs to embed the runtime: the header, the libraries,
the pkg-config file and the CMake package.

The files have the layout that ``cmake --install`` writes, under one prefix. The whole folder can be
moved. ``_native`` loads the shared library from the same folder. ``dlm-export embed`` prints these
paths.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import EngineError

# The system libraries that a program must also link when it links the static library.
_STATIC_NEEDS = "-lstdc++ -lm -ldl -lpthread"


def prefix() -> Path:
    """The folder that contains ``include/dlm_runtime.h`` and ``lib/``.

    Raises EngineError if the package was installed without these files.
    """
    folders = _native.package_folders()
    for folder in folders:
        if (folder / "include" / "dlm_runtime.h").is_file():
            return folder
    raise EngineError(
        f"include/dlm_runtime.h is not in {', '.join(map(str, folders))}: reinstall dlm-export"
    )


def cflags() -> str:
    """Compiler options for a C or C++ program that includes the header, quoted for a shell."""
    return shlex.quote(f"-I{prefix() / 'include'}")


def libs(*, static: bool = False) -> str:
    """Linker options, quoted for a shell. By default they link the shared library and set its run
    path. With ``static``, they link the static library.
    """
    folder = prefix() / "lib"
    if static:
        return f"{shlex.quote(str(folder / 'libdlm_runtime.a'))} {_STATIC_NEEDS}"
    return f"{shlex.quote(f'-L{folder}')} -ldlm_runtime {shlex.quote(f'-Wl,-rpath,{folder}')}"


def engine_library() -> str | None:
    """The path of the installed ONNX Runtime's library, as a value for ``$DLM_ONNXRUNTIME``. None
    if ONNX Runtime is not installed.
    """
    return _native.onnxruntime_library()
