"""Open a bundle: find the engine's library and its provider, and check the files."""

from __future__ import annotations

import contextlib
import ctypes as C
import os
import warnings
from pathlib import Path

from dlm_runtime import providers
from dlm_runtime.abi import native as _native
from dlm_runtime.bundle import Bundle
from dlm_runtime.errors import DlmWarning
from dlm_runtime.generation.handle import Handle
from dlm_runtime.manifest import check_text_options


def open(
    path: str | Path,
    *,
    engine: str = "auto",
    provider: str = "cpu",
    allow_fallback: bool = False,
    threads: int = 0,
    library: str | Path | None = None,
    check_hashes: bool = True,
) -> Bundle:
    """Open the bundle in the folder ``path``.

    ``engine`` is "auto" ("tensorrt" if the bundle was built for GPUs, else "onnxruntime"),
    "onnxruntime", "tensorrt", or "none" (the bundle is checked and makes no passes). ``library`` is
    the path of the engine's library; None looks at $DLM_ONNXRUNTIME or $DLM_TENSORRT, the installed
    packages and the system, in that order. ``threads`` are those of ONNX Runtime: 0 takes all
    cores, and more than the cores of this process gives as many as these and a DlmWarning. ONNX
    Runtime gets this package's kernels for the processor, or those that $DLM_KERNELS names ("none":
    its own).

    All files are compared with the manifest's hashes. A file of more than 16 MiB is not hashed again
    if its hash was right before and it has not changed since, unless ``engine`` is "none" or
    $DLM_HASH_FILES is "always". ``check_hashes=False`` compares files by size only.

    ``provider`` of ONNX Runtime: "cpu", or on a GPU "cuda", "tensorrt" or "nv_tensorrt_rtx", with
    the GPU's number behind it where that is not 0 ("cuda:1"); engine "auto" is then "onnxruntime".
    What such a provider does not run is refused by name, or with ``allow_fallback`` left to the
    CPU, and named in ``Bundle.engine``.

    Raises BundleError for a missing or damaged bundle, EngineError for a missing or failing engine,
    RequestError for an engine or provider that is not known, or that this bundle or device does not
    have.
    """
    name, device = providers.parse(provider)
    if name != "cpu":
        engine = "onnxruntime" if engine == "auto" else engine
        if library is None and not os.environ.get("DLM_ONNXRUNTIME"):
            providers.check_wheels()
            providers.load_libraries()
    if engine == "auto":
        # The library has to be found before the engine is opened, so which one it will be is asked
        # first.
        with contextlib.closing(_open(path, "none", library=None, check_hashes=False)) as looked_at:
            engine = (
                "tensorrt"
                if "device_file" in looked_at.manifest["loop"]["graph"]
                else "onnxruntime"
            )
    if library is None and engine == "onnxruntime" and not os.environ.get("DLM_ONNXRUNTIME"):
        library = _native.onnxruntime_library()
    if library is None and engine == "tensorrt" and not os.environ.get("DLM_TENSORRT"):
        library = _native.tensorrt_library()
    handle = _open(
        path,
        engine,
        library=library,
        check_hashes=check_hashes,
        provider=name.encode(),
        device=device,
        allow_fallback=int(allow_fallback),
        threads=threads,
    )
    cores = len(os.sched_getaffinity(0))  # as the native library counts them
    if threads > cores:
        said = f"threads = {threads} is more than the {cores} cores that this process may use: {cores} threads run"
        warnings.warn(said, DlmWarning, stacklevel=2)
    bundle = Bundle(handle, Path(path), checks_hashes=check_hashes, provider=name)
    check_text_options(bundle.manifest, Path(path))
    if engine != "none":
        _ = bundle.tokenizer  # a damaged one is noticed here
    return bundle


def _open(
    path: str | Path,
    engine: str,
    *,
    library: str | Path | None,
    check_hashes: bool,
    **others: bytes | int,
) -> Handle:
    """Open the native bundle. ``others`` are further fields of the C struct, by name."""
    native = _native.library()
    options = _native.initialised(_native.OpenOptions)
    options.engine = engine.encode() if isinstance(engine, str) else None
    options.engine_library = None if library is None else os.fsencode(library)
    options.check_hashes = int(check_hashes)
    for field, value in others.items():
        setattr(options, field, value)
    handle = C.c_void_p()
    message = C.create_string_buffer(_native.MESSAGE_BYTES)
    status = native.dlm_bundle_open(
        os.fsencode(path), C.byref(options), message, len(message), C.byref(handle)
    )
    if status:
        raise _native.error(status, message.value)
    return Handle(handle)
