"""Where a program that embeds the runtime finds it: header, libraries, pkg-config file and CMake
package of this package.

They lie as ``cmake --install`` lays them, under one prefix, which may be moved as a whole.
``_native`` loads the shared library from there too. ``dlm-export embed`` prints what is here.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import EngineError

# What the static library needs beside itself: libstdc++ and parts of libc.
_STATIC_NEEDS = "-lstdc++ -lm -ldl -lpthread"


def prefix() -> Path:
    """The folder that holds ``include/dlm_runtime.h`` and ``lib/``.

    Raises EngineError where the package was installed without them.
    """
    folders = _native.package_folders()
    for folder in folders:
        if (folder / "include" / "dlm_runtime.h").is_file():
            return folder
    raise EngineError(
        f"include/dlm_runtime.h is not in {', '.join(map(str, folders))}: reinstall dlm-export"
    )


def cflags() -> str:
    """What a C or C++ compiler must be told, quoted for a shell."""
    return shlex.quote(f"-I{prefix() / 'include'}")


def libs(*, static: bool = False) -> str:
    """What a linker must be told, quoted for a shell: the shared library and where a program finds
    it, or the static one.
    """
    folder = prefix() / "lib"
    if static:
        return f"{shlex.quote(str(folder / 'libdlm_runtime.a'))} {_STATIC_NEEDS}"
    return f"{shlex.quote(f'-L{folder}')} -ldlm_runtime {shlex.quote(f'-Wl,-rpath,{folder}')}"


def engine_library() -> str | None:
    """The installed ONNX Runtime's library, for ``$DLM_ONNXRUNTIME``; None where the package is not
    installed.
    """
    return _native.onnxruntime_library()
