"""Finds the installed files that a C or C++ program needs to use the runtime.

The files are the header, the libraries, the pkg-config file and the CMake package.

All files are in one folder, in the subfolders that ``cmake --install`` creates. You can move the
whole folder. The module ``abi.native`` loads the shared library from the same folder. ``dlm-export
embed`` prints the paths of the files.
"""

from __future__ import annotations

import shlex

from dlm_runtime.abi.native import prefix as prefix

# A program that links the static library must also link these system libraries.
_STATIC_NEEDS = "-lstdc++ -lm -ldl -lpthread"


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
