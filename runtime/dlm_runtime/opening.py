"""Opens a bundle: finds the library of the engine, and checks the files."""

from __future__ import annotations

import contextlib
import ctypes as C
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from dlm_runtime import providers
from dlm_runtime.abi import native as _native
from dlm_runtime.bundle import Bundle
from dlm_runtime.errors import DlmWarning
from dlm_runtime.generation.handle import Handle
from dlm_runtime.generation.request import count_of
from dlm_runtime.manifest import check_text_options

MOST_BYTES = (1 << 63) - 1


def open(
    path: str | Path,
    *,
    engine: str = "auto",
    provider: str = "cpu",
    allow_fallback: bool = False,
    cuda_graphs: bool = False,
    threads: int = 0,
    library: str | Path | None = None,
    check_hashes: bool = True,
    prefix_cache_bytes: int = 0,
    prompt_caches: Sequence[str | Path] = (),
) -> Bundle:
    """Open the bundle in the folder ``path``.

    Args:
        path: A folder that ``dlm-export build`` wrote.
        engine: "onnxruntime", "tensorrt", "auto" or "none". "auto" means "tensorrt" if the bundle
            was built for a GPU, and "onnxruntime" otherwise. With "none", the bundle is opened and
            checked, but cannot run passes. ONNX Runtime uses the fastest kernels of this package
            that the processor can run. The variable $DLM_KERNELS selects different kernels. If the
            value of this variable is "none", ONNX Runtime's own kernels are used.
        provider: The provider of ONNX Runtime: "cpu", or on a GPU "cuda", "tensorrt" or
            "nv_tensorrt_rtx". For a GPU other than GPU 0, add the index of the GPU ("cuda:1"). If a
            GPU provider is chosen, the engine "auto" means "onnxruntime".
        allow_fallback: If True, the CPU runs the nodes that the provider cannot run, and
            ``Bundle.engine`` lists these nodes. If False, an EngineError is raised for such nodes.
        cuda_graphs: If True, the provider "cuda" runs the passes of each shape as one CUDA graph.
            The first pass of a shape takes longer. The bundle must be built for the target
            ``cuda``.
        threads: Number of threads of ONNX Runtime, 0..4096. 0 uses all cores. If the value is
            larger than the number of cores that this process may use, the number of cores is used
            instead, and a DlmWarning is issued.
        library: Path of the engine's library. If None, the variable $DLM_ONNXRUNTIME or
            $DLM_TENSORRT names the library. If the variable is not set, the library of an installed
            Python package is used, or else the system's library.
        check_hashes: If True, the hashes of all files are compared with the manifest. If False,
            only the sizes are compared. A file of more than 16 MiB is not hashed again if its hash
            matched before and the file has not changed since. Every file is always hashed if
            ``engine`` is "none" or $DLM_HASH_FILES is "always".
        prefix_cache_bytes: Limit on the bytes of keys and values that the bundle stores after a
            call of ``generate``, ``generate_batch`` or ``stream``. A later call reuses the stored
            keys and values if its prompt starts with the same tokens. If several threads call at
            the same time, the limit applies to each thread separately. If 0, nothing is stored.
            Schedulers have their own limit.
        prompt_caches: Files to load with ``Bundle.load_prompt_cache``.

    Raises:
        BundleError: The bundle or a prompt cache is missing or damaged.
        EngineError: The engine is missing or failed.
        RequestError: The engine or provider is unknown, or the bundle or the device does not
            support this engine or provider.
    """
    kept = count_of("prefix_cache_bytes", prefix_cache_bytes, MOST_BYTES)
    name, device = providers.parse(provider)
    plugin = None
    if name != "cpu":
        engine = "onnxruntime" if engine == "auto" else engine
        if library is None and not os.environ.get("DLM_ONNXRUNTIME"):
            providers.check_wheels()
            if name != "nv_tensorrt_rtx":
                providers.load_libraries()
        if name == "nv_tensorrt_rtx" and not os.environ.get("DLM_TENSORRT_RTX_PROVIDER"):
            plugin = providers.plugin_library()
    if engine == "auto":
        # The library depends on the engine, and the engine depends on the bundle's manifest. The
        # manifest is therefore read first, without an engine.
        with contextlib.closing(_open(path, "none", library=None, check_hashes=False)) as looked_at:
            engine = (
                "tensorrt"
                if "device_file" in looked_at.manifest["loop"]["graph"]
                else "onnxruntime"
            )
    if library is None and engine == "onnxruntime" and not os.environ.get("DLM_ONNXRUNTIME"):
        library = _native.onnxruntime_library()
    if library is None and engine == "tensorrt" and not os.environ.get("DLM_TENSORRT"):
        library = next(iter(_native.tensorrt_libraries().values()), None)
    if engine == "tensorrt" or name == "nv_tensorrt_rtx":
        providers.load_compiler()
    handle = _open(
        path,
        engine,
        library=library,
        check_hashes=check_hashes,
        provider=name.encode(),
        device=device,
        allow_fallback=int(allow_fallback),
        cuda_graphs=int(cuda_graphs),
        provider_library=None if plugin is None else os.fsencode(plugin),
        threads=threads,
        prefix_cache_bytes=kept,
    )
    cores = len(os.sched_getaffinity(0))  # the native library also counts cores this way
    if threads > cores:
        said = f"threads = {threads} is more than the {cores} cores that this process may use: {cores} threads run"
        warnings.warn(said, DlmWarning, stacklevel=2)
    bundle = Bundle(handle, Path(path), checks_hashes=check_hashes, provider=name, threads=threads)
    check_text_options(bundle.manifest, Path(path))
    if engine != "none":
        _ = bundle.tokenizer  # reading the tokenizer raises an error for a damaged file
    for cache in prompt_caches:
        bundle.load_prompt_cache(cache)
    return bundle


def _open(
    path: str | Path,
    engine: str,
    *,
    library: str | Path | None,
    check_hashes: bool,
    prefix_cache_bytes: int = 0,
    **others: bytes | int | None,
) -> Handle:
    """Open the bundle in the native library.

    ``others`` contains further fields of the C struct for options.
    """
    options = _native.initialised(_native.OpenOptions)
    options.engine = engine.encode() if isinstance(engine, str) else None
    options.engine_library = None if library is None else os.fsencode(library)
    options.check_hashes = int(check_hashes)
    for field, value in others.items():
        setattr(options, field, value)
    handle = C.c_void_p()
    given = (os.fsencode(path), C.byref(options))
    _native.check(_native.library().dlm_bundle_open, given, C.byref(handle))
    return Handle(handle, prefix_cache_bytes=prefix_cache_bytes)
