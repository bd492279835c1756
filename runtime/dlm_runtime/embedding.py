"""Finds the installed files that a C or C++ program needs to use the runtime.

The files are the header, the libraries, the pkg-config file and the CMake package.

All files are in one folder, in the subfolders that ``cmake --install`` creates. You can move the
whole folder. The module ``abi.native`` loads the shared library from the same folder. ``dlm-export
embed`` prints the paths of the files.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import EngineError

# A program that links the static library must also link these system libraries.
_STATIC_NEEDS = "-lstdc++ -lm -ldl -lpthread"


def prefix() -> Path:
    """Return the folder that contains ``include/dlm_runtime.h`` and ``lib/``.

    Raises EngineError if the package was installed without the header and the libraries.
    """
    folders = _native.package_folders()
    for folder in folders:
        if (folder / "include" / "dlm_runtime.h").is_file():
            return folder
    raise EngineError(
        f"include/dlm_runtime.h is not in {', '.join(map(str, folders))}: reinstall dlm-export"
    )


def cflags() -> str:
    """Return the compiler options for a C or C++ program that includes the header.

    The options are quoted for a shell.
    """
    return shlex.quote(f"-I{prefix() / 'include'}")


def libs(*, static: bool = False) -> str:
    """Return the linker options, quoted for a shell.

    By default, the options link the shared library and set its run path. If ``static`` is true, the
    options link the static library.
    """
    folder = prefix() / "lib"
    if static:
        return f"{shlex.quote(str(folder / 'libdlm_runtime.a'))} {_STATIC_NEEDS}"
    return f"{shlex.quote(f'-L{folder}')} -ldlm_runtime {shlex.quote(f'-Wl,-rpath,{folder}')}"


def engine_library() -> str | None:
    """Return the path of the installed ONNX Runtime's library, as a value for ``$DLM_ONNXRUNTIME``.

    Returns None if ONNX Runtime is not installed.
    """
    return _native.onnxruntime_library()
