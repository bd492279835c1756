"""The C ABI of ``libdlm_runtime`` in ctypes: structs and signatures as ``dlm_runtime.h`` declares
them, and nothing more.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
import functools
import importlib.util
import math
import os
from pathlib import Path
from typing import TypeVar

from dlm_runtime import policy
from dlm_runtime.errors import (
    BundleError,
    BusyError,
    CancelledError,
    DlmError,
    EngineError,
    RequestError,
)

ABI_VERSION = 3
MESSAGE_BYTES = 2048
i32p, i64p, f32p = C.POINTER(C.c_int32), C.POINTER(C.c_int64), C.POINTER(C.c_float)


class Denoiser(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("vocab_size", C.c_int32),
        ("mask_token_id", C.c_int32),
        ("max_canvas_length", C.c_int32),
        ("layers", C.c_int32),
        ("kv_heads", C.c_int32),
        ("head_size", C.c_int32),
        ("top_k", C.c_int32),
        ("kv_element_bytes", C.c_int32),
        ("shift", C.c_int32),
        ("has_cache", C.c_int32),
        ("eos_token_ids", i32p),
        ("eos_count", C.c_size_t),
        ("visible_block", C.c_int64),
    ]


class Pass(C.Structure):
    _fields_ = [
        ("batch", C.c_int32),
        ("tokens", C.c_int32),
        ("cached", C.c_int32),
        ("rows", C.c_int32),
        ("layers", C.c_int32),
        ("input_ids", i64p),
        ("position_ids", i64p),
        ("score_rows", i64p),
        ("past_keys", C.POINTER(C.c_void_p)),
        ("past_values", C.POINTER(C.c_void_p)),
        ("present_keys", C.POINTER(C.c_void_p)),
        ("present_values", C.POINTER(C.c_void_p)),
        ("top_tokens", i32p),
        ("top_probs", f32p),
        ("entropy", f32p),
        ("logits", f32p),
    ]


# By the annotation of a field of dlm_runtime.policy.Policy, whose fields are those of the struct.
POLICY_TYPES: dict[str, type[C.c_char_p | C.c_int32 | C.c_double | C.c_uint64]] = {
    "str": C.c_char_p,
    "int": C.c_int32,
    "float": C.c_double,
    "UInt64": C.c_uint64,
}


class Policy(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        *(
            (field.name, POLICY_TYPES[str(field.type)])
            for field in dataclasses.fields(policy.Policy)
        ),
    ]


FIELD_DOUBLE = 2  # DLM_FIELD_DOUBLE


class PolicyField(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("kind", C.c_int32),
        ("offset", C.c_size_t),
        ("choices", C.POINTER(C.c_char_p)),
        ("initial", C.c_double),
        ("lowest", C.c_double),
        ("highest", C.c_double),
    ]


class OpenOptions(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("engine", C.c_char_p),
        ("engine_library", C.c_char_p),
        ("threads", C.c_int32),
        ("check_hashes", C.c_int32),
        ("provider", C.c_char_p),
        ("device", C.c_int32),
        ("allow_fallback", C.c_int32),
    ]


class Step(C.Structure):
    _fields_ = [
        ("canvas", i32p),
        ("guess", i32p),
        ("score", f32p),
        ("length", C.c_int32),
        ("block_start", C.c_int32),
        ("block_end", C.c_int32),
        ("nfe", C.c_int32),
        ("committed", C.c_int32),
        ("done", C.c_int32),
    ]


StepFn = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.POINTER(Step))
BeforePassFn = C.CFUNCTYPE(C.c_int32, C.c_void_p)
PassFn = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.POINTER(Pass))


class GenerateOptions(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("policy", C.POINTER(Policy)),
        ("max_new_tokens", C.c_int32),
        ("steps", C.c_int32),
        ("on_step", StepFn),
        ("user", C.c_void_p),
        ("policies", C.POINTER(C.POINTER(Policy))),
        ("deadline_ms", C.c_double),
        ("max_steps", C.c_int32),
        ("special_tokens", C.c_int32),
    ]


class KernelSet(C.Structure):
    _fields_ = [("name", C.c_char_p), ("refusal", C.c_char_p)]


class Stats(C.Structure):
    _fields_ = [
        ("nfe", C.c_int32),
        ("prefill_s", C.c_double),
        ("passes_s", C.c_double),
        ("selection_s", C.c_double),
        ("cache_s", C.c_double),
        ("total_s", C.c_double),
        ("cache_bytes", C.c_uint64),
    ]


class PassCounts(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("prefill", C.c_int32),
        ("denoise", C.c_int32),
        ("store", C.c_int32),
    ]


class Result(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("finish", C.c_int32),
        ("nfe", C.c_int32),
        ("prompt_tokens", C.c_int32),
        ("completion_tokens", C.c_int32),
        ("log_probs", f32p),
        ("undecided", C.POINTER(C.c_uint8)),
        ("length", C.c_size_t),
        ("constraint_log_prob_loss", C.c_double),
    ]


FINISHES = ("none", "stop", "length", "steps", "deadline", "cancelled", "constraint")
"""Names of DLM_FINISH_..., by number."""


def finish_name(number: int) -> str:
    """The name of a DLM_FINISH_... value; ``unknown (N)`` for one that only a newer library knows."""
    return FINISHES[number] if 0 <= number < len(FINISHES) else f"unknown ({number})"


def outcome(result: Result) -> dict[str, object]:
    """The fields of ``Generation`` that a native result holds."""
    return {
        "nfe": result.nfe,
        "finish": finish_name(result.finish),
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "log_probs": [
            None if math.isnan(value) else value for value in result.log_probs[: result.length]
        ],
        "undecided": [bool(flag) for flag in result.undecided[: result.length]],
        "constraint_log_prob_loss": result.constraint_log_prob_loss,
    }


class Request(C.Structure):
    _fields_ = [
        ("tokens", i32p),
        ("count", C.c_size_t),
        ("capacity", C.c_size_t),
        ("length", C.c_size_t),
        ("nfe", C.c_int32),
    ]


class PassCost(C.Structure):
    _fields_ = [
        ("pass_ms", C.c_double),
        ("token_ms", C.c_double),
        ("row_ms", C.c_double),
        ("pair_ms", C.c_double),
    ]


class SchedulerOptions(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("max_running", C.c_int32),
        ("max_waiting", C.c_int32),
        ("max_tokens", C.c_int32),
        ("cache_bytes", C.c_uint64),
        ("max_pass_ms", C.c_double),
        ("cost", PassCost),
    ]


class SchedulerStats(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("waiting", C.c_int32),
        ("running", C.c_int32),
        ("submitted", C.c_int64),
        ("finished", C.c_int64),
        ("refused", C.c_int64),
        ("passes", C.c_int64),
        ("shares", C.c_int64),
        ("busy_s", C.c_double),
        ("cache_bytes", C.c_uint64),
        ("passes_s", C.c_double),
        ("expected_s", C.c_double),
    ]


class Message(C.Structure):
    _fields_ = [("role", C.c_char_p), ("content", C.c_char_p), ("content_size", C.c_size_t)]


TextFn = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_void_p, C.c_size_t)
_size = C.POINTER(C.c_size_t)
_chat = [C.POINTER(Message), C.c_size_t]
_message = [C.c_char_p, C.c_size_t]
_out = C.POINTER(C.c_void_p)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "dlm_abi_version": (C.c_uint32, []),
    "dlm_version": (C.c_char_p, []),
    "dlm_status_name": (C.c_char_p, [C.c_int32]),
    "dlm_denoiser_init": (None, [C.POINTER(Denoiser)]),
    "dlm_denoiser_init_sized": (None, [C.POINTER(Denoiser), C.c_size_t]),
    "dlm_policy_init": (None, [C.POINTER(Policy)]),
    "dlm_policy_init_sized": (None, [C.POINTER(Policy), C.c_size_t]),
    "dlm_policy_field_at": (C.POINTER(PolicyField), [C.c_size_t]),
    "dlm_open_options_init": (None, [C.POINTER(OpenOptions)]),
    "dlm_open_options_init_sized": (None, [C.POINTER(OpenOptions), C.c_size_t]),
    "dlm_generate_options_init": (None, [C.POINTER(GenerateOptions)]),
    "dlm_generate_options_init_sized": (None, [C.POINTER(GenerateOptions), C.c_size_t]),
    "dlm_kernel_set_at": (C.POINTER(KernelSet), [C.c_size_t]),
    "dlm_bundle_open": (C.c_int32, [C.c_char_p, C.POINTER(OpenOptions), *_message, _out]),
    "dlm_bundle_from_callback": (
        C.c_int32,
        [C.POINTER(Denoiser), PassFn, C.c_void_p, *_message, _out],
    ),
    "dlm_bundle_destroy": (None, [C.c_void_p]),
    "dlm_bundle_denoiser": (None, [C.c_void_p, C.POINTER(Denoiser)]),
    "dlm_bundle_denoiser_sized": (None, [C.c_void_p, C.POINTER(Denoiser), C.c_size_t]),
    "dlm_bundle_manifest": (C.c_char_p, [C.c_void_p]),
    "dlm_bundle_engine": (C.c_char_p, [C.c_void_p]),
    "dlm_bundle_max_new_tokens": (C.c_int32, [C.c_void_p]),
    "dlm_bundle_preset": (C.c_int32, [C.c_void_p, C.c_char_p, *_message, C.POINTER(Policy)]),
    "dlm_bundle_effort": (C.c_int32, [C.c_void_p, C.c_char_p, *_message, C.POINTER(Policy)]),
    "dlm_session_create": (C.c_int32, [C.c_void_p, *_message, _out]),
    "dlm_session_destroy": (None, [C.c_void_p]),
    "dlm_session_last_error": (C.c_char_p, [C.c_void_p]),
    "dlm_automaton_open": (C.c_int32, [C.c_char_p, *_message, _out]),
    "dlm_automaton_read": (C.c_int32, [C.c_char_p, C.c_size_t, *_message, _out]),
    "dlm_automaton_destroy": (None, [C.c_void_p]),
    "dlm_automaton_shortest": (C.c_int32, [C.c_void_p]),
    "dlm_session_constrain": (C.c_int32, [C.c_void_p, C.c_void_p]),
    "dlm_session_constrain_from": (C.c_int32, [C.c_void_p, C.c_void_p, C.c_int32]),
    "dlm_session_before_pass": (C.c_int32, [C.c_void_p, BeforePassFn, C.c_void_p]),
    "dlm_session_generate": (
        C.c_int32,
        [
            C.c_void_p,
            C.POINTER(GenerateOptions),
            i32p,
            C.c_size_t,
            C.c_size_t,
            C.POINTER(Stats),
            C.POINTER(C.c_size_t),
        ],
    ),
    "dlm_session_generate_batch": (
        C.c_int32,
        [
            C.c_void_p,
            C.POINTER(GenerateOptions),
            C.POINTER(Request),
            C.c_size_t,
            C.c_int32,
            C.POINTER(Stats),
        ],
    ),
    "dlm_session_start": (C.c_int32, [C.c_void_p, C.POINTER(GenerateOptions), i32p, C.c_size_t]),
    "dlm_session_step": (C.c_int32, [C.c_void_p, C.POINTER(Step)]),
    "dlm_session_stats": (None, [C.c_void_p, C.POINTER(Stats)]),
    "dlm_session_pass_counts_sized": (None, [C.c_void_p, C.POINTER(PassCounts), C.c_size_t]),
    "dlm_session_result_sized": (
        C.c_int32,
        [C.c_void_p, C.c_size_t, C.POINTER(Result), C.c_size_t],
    ),
    "dlm_session_cancel": (None, [C.c_void_p, C.c_size_t]),
    "dlm_session_undecided": (C.POINTER(C.c_uint8), [C.c_void_p, C.POINTER(C.c_size_t)]),
    "dlm_session_logits": (
        C.c_int32,
        [C.c_void_p, i32p, C.c_size_t, i32p, C.c_size_t, f32p, C.c_size_t],
    ),
    "dlm_scheduler_options_init_sized": (None, [C.POINTER(SchedulerOptions), C.c_size_t]),
    "dlm_scheduler_create": (C.c_int32, [C.c_void_p, C.POINTER(SchedulerOptions), *_message, _out]),
    "dlm_scheduler_destroy": (None, [C.c_void_p]),
    "dlm_scheduler_submit": (
        C.c_int32,
        [
            C.c_void_p,
            C.POINTER(GenerateOptions),
            C.c_void_p,
            C.c_int32,
            i32p,
            C.c_size_t,
            *_message,
            _out,
        ],
    ),
    "dlm_scheduler_run": (C.c_int32, [C.c_void_p, C.c_int32, BeforePassFn, C.c_void_p, *_message]),
    "dlm_scheduler_stop": (None, [C.c_void_p]),
    "dlm_scheduler_stats_sized": (None, [C.c_void_p, C.POINTER(SchedulerStats), C.c_size_t]),
    "dlm_job_wait": (C.c_int32, [C.c_void_p, C.c_double]),
    "dlm_job_tokens": (i32p, [C.c_void_p, C.POINTER(C.c_size_t)]),
    "dlm_job_result_sized": (C.c_int32, [C.c_void_p, C.POINTER(Result), C.c_size_t]),
    "dlm_job_message": (C.c_char_p, [C.c_void_p]),
    "dlm_job_cancel": (None, [C.c_void_p]),
    "dlm_job_destroy": (None, [C.c_void_p]),
    "dlm_session_time_passes": (
        C.c_int32,
        [C.c_void_p, C.c_int32, C.c_int32, C.c_int32, C.c_int32, C.POINTER(C.c_double), C.c_size_t],
    ),
    "dlm_bundle_text": (C.c_int32, [C.c_void_p, *_message, _out]),
    "dlm_text_read": (C.c_int32, [C.c_char_p, C.c_size_t, *_message, _out]),
    "dlm_text_destroy": (None, [C.c_void_p]),
    "dlm_text_encode": (
        C.c_int32,
        [C.c_void_p, C.c_char_p, C.c_size_t, C.c_int32, *_message, i32p, C.c_size_t, _size],
    ),
    "dlm_text_decode": (
        C.c_int32,
        [C.c_void_p, i32p, C.c_size_t, *_message, C.c_char_p, C.c_size_t, _size],
    ),
    "dlm_decoder_create": (C.c_int32, [C.c_void_p, *_message, _out]),
    "dlm_decoder_destroy": (None, [C.c_void_p]),
    "dlm_decoder_push": (C.c_int32, [C.c_void_p, i32p, C.c_size_t, C.c_int32, _out, _size]),
    "dlm_chat_render": (C.c_int32, [C.c_void_p, *_chat, *_message, C.c_char_p, C.c_size_t, _size]),
    "dlm_chat_encode": (
        C.c_int32,
        [C.c_void_p, *_chat, C.c_int32, *_message, i32p, C.c_size_t, _size],
    ),
    "dlm_generate_text": (
        C.c_int32,
        [
            C.c_void_p,
            C.POINTER(GenerateOptions),
            C.c_char_p,
            C.c_size_t,
            TextFn,
            C.c_void_p,
            _out,
            _size,
        ],
    ),
    "dlm_generate_chat": (
        C.c_int32,
        [C.c_void_p, C.POINTER(GenerateOptions), *_chat, TextFn, C.c_void_p, _out, _size],
    ),
}

_ERRORS: dict[int, type[DlmError]] = {
    1: RequestError,
    2: BundleError,
    3: BundleError,
    4: RequestError,
    5: EngineError,
    7: CancelledError,
    9: EngineError,
    10: BusyError,
}


def error(status: int, message: bytes) -> DlmError:
    """The exception for a status that is not DLM_OK."""
    text = message.decode("utf-8", "replace") or library().dlm_status_name(status).decode()
    return _ERRORS.get(status, DlmError)(text)


def package_folders() -> list[Path]:
    """Where this package lies: one folder, or two of an editable install, where what was built is
    apart from the sources.
    """
    spec = importlib.util.find_spec("dlm_runtime")
    return [
        Path(folder)
        for folder in (spec.submodule_search_locations or [] if spec is not None else [])
    ]


@functools.cache
def library() -> C.CDLL:
    """``libdlm_runtime``, loaded once: $DLM_RUNTIME_LIBRARY, or the one that was built with this
    package.
    """
    chosen = os.environ.get("DLM_RUNTIME_LIBRARY")
    name = f"libdlm_runtime.so.{ABI_VERSION}"
    candidates = (
        [Path(chosen)] if chosen else [folder / "lib" / name for folder in package_folders()]
    )
    for path in candidates:
        if path.is_file():
            try:
                loaded = C.CDLL(str(path))
            except OSError as err:
                raise EngineError(
                    f"{path} cannot be loaded ({err}): reinstall dlm-export, or set "
                    "DLM_RUNTIME_LIBRARY to the path of its library"
                ) from err
            break
    else:
        raise EngineError(
            f"{name} is not in {', '.join(str(path) for path in candidates)}: reinstall dlm-export, or set "
            "DLM_RUNTIME_LIBRARY to its path"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise EngineError(
                f"{path} has no function {name}: it is older than this package. Install the one of its version"
            )
        function.restype, function.argtypes = result, arguments
        if (
            name == "dlm_abi_version" and function() != ABI_VERSION
        ):  # the first: the others may be none that this package knows
            raise EngineError(
                f"{path} has ABI version {function()}, this package needs {ABI_VERSION}"
            )
    return loaded


Initialised = TypeVar(
    "Initialised", Denoiser, Policy, OpenOptions, GenerateOptions, SchedulerOptions
)


def initialised(kind: type[Initialised]) -> Initialised:
    """A struct with its size and the library's defaults."""
    names = {
        Denoiser: "dlm_denoiser",
        Policy: "dlm_policy",
        OpenOptions: "dlm_open_options",
        GenerateOptions: "dlm_generate_options",
        SchedulerOptions: "dlm_scheduler_options",
    }
    struct = kind()
    getattr(library(), f"{names[kind]}_init_sized")(C.byref(struct), C.sizeof(struct))
    return struct


def policy_fields() -> list[PolicyField]:
    """What the library knows of each field of a policy, in the order of the struct."""
    found: list[PolicyField] = []
    while field := library().dlm_policy_field_at(len(found)):
        found.append(field.contents)
    return found


def kernel_sets() -> dict[str, str | None]:
    """Every set of kernels for this architecture, fastest first, and why it does not run here;
    None: it does.
    """
    found: dict[str, str | None] = {}
    while there := library().dlm_kernel_set_at(len(found)):
        refusal = there.contents.refusal
        found[there.contents.name.decode()] = None if refusal is None else refusal.decode()
    return found


def onnxruntime_library() -> str | None:
    """Path of libonnxruntime in the installed onnxruntime package, found without importing it; None
    if there is none.
    """
    return _packaged("onnxruntime", "capi/libonnxruntime.so*")


def tensorrt_libraries() -> dict[str, str]:
    """Paths of TensorRT's libraries in the installed packages of its wheels, by builder, found
    without importing them.
    """
    packages = {
        "tensorrt": ("tensorrt_libs", "libnvinfer.so.*"),
        "tensorrt_rtx": ("tensorrt_rtx_libs", "libtensorrt_rtx.so.*"),
    }
    found = {kind: _packaged(*where) for kind, where in packages.items()}
    return {kind: path for kind, path in found.items() if path is not None}


def tensorrt_library() -> str | None:
    """The first of ``tensorrt_libraries``; None if there is none."""
    return next(iter(tensorrt_libraries().values()), None)


def _packaged(package: str, pattern: str) -> str | None:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob(pattern)):
            return str(path)
    return None
