"""Finds the header, libraries, pkg-config file and CMake package of this package, for programs that
embed the runtime.

The files have the layout of ``cmake --install`` under one prefix, which can be moved as a whole.
``_native`` also loads the shared library from there. ``dlm-export embed`` prints these paths.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import EngineError

# Libraries that the static library needs: libstdc++ and parts of libc.
_STATIC_NEEDS = "-lstdc++ -lm -ldl -lpthread"


def prefix() -> Path:
    """The folder with ``include/dlm_runtime.h`` and ``lib/``.

    Raises EngineError if the package was installed without them.
    """
    folders = _native.package_folders()
    for folder in folders:
        if (folder / "include" / "dlm_runtime.h").is_file():
            return folder
    raise EngineError(
        f"include/dlm_runtime.h is not in {', '.join(map(str, folders))}: reinstall dlm-export"
    )


def cflags() -> str:
    """Options for a C or C++ compiler, quoted for a shell."""
    return shlex.quote(f"-I{prefix() / 'include'}")


def libs(*, static: bool = False) -> str:
    """Options for a linker, quoted for a shell: the shared library with its run path, or the
    static.
    """
    folder = prefix() / "lib"
    if static:
        return f"{shlex.quote(str(folder / 'libdlm_runtime.a'))} {_STATIC_NEEDS}"
    return f"{shlex.quote(f'-L{folder}')} -ldlm_runtime {shlex.quote(f'-Wl,-rpath,{folder}')}"


def engine_library() -> str | None:
    """The installed ONNX Runtime's library, for ``$DLM_ONNXRUNTIME``, or None if it is not installed."""
    return _native.onnxruntime_library()
