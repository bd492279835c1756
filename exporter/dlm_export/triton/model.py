"""Runs a bundle in the Python backend of Triton Inference Server.

``dlm-export triton`` wrote this file. dlm-export's guide "Serve a bundle with Triton" describes the
tensors and parameters of a request.

A separate thread runs an event loop with one coroutine per request. All requests of a model
instance use one scheduler, and can share passes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # Triton provides this module

import dlm_runtime
from dlm_runtime.constraints.compiled import CompileLimits
from dlm_runtime.errors import BusyError, ClosedError, DlmError, RequestError

INPUTS = ("TEXT", "MESSAGES", "INPUT_IDS")
NUMBERS = ("max_new_tokens", "steps", "max_steps")
NAMES = ("preset", "effort")
FLAGS = ("stream", "special_tokens", "json_object")
JSON_TEXTS = ("stop_strings", "enum")
CONSTRAINTS = ("schema", "regex", "grammar", "enum", "json_object")
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(NUMBERS, (int, "a whole number")),
    **dict.fromkeys((*NAMES, "schema", "regex", "grammar"), (str, "a string")),
    **dict.fromkeys(FLAGS, (bool, "true or false")),
    **dict.fromkeys(JSON_TEXTS, (str, "a string that contains a JSON list of strings")),
    "deadline_ms": ((int, float), "a number"),
}
POLICY_FIELDS = tuple(dlm_runtime.Policy.__dataclass_fields__)
COMPILE_LIMITS = CompileLimits(seconds=5)
COMPILE_THREADS = 2
CANCEL_CHECK_S = 0.02
METRICS = {
    "dlm_requests_running": ("GAUGE", "Requests that run"),
    "dlm_requests_waiting": ("GAUGE", "Requests that wait for the scheduler"),
    "dlm_passes_total": ("COUNTER", "Passes"),
    "dlm_tokens_total": ("COUNTER", "Generated tokens"),
}


@dataclass
class Asked:
    """A request, after its tensors and parameters were read."""

    given: dict[str, Any]
    options: dict[str, Any]
    constraint: dict[str, Any]
    streams: bool


class TritonPythonModel:
    """The class that Triton's Python backend loads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle in the folder of the model's version."""
        config = json.loads(args["model_config"])
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        settings = {
            name: value["string_value"] for name, value in config.get("parameters", {}).items()
        }
        folder = Path(args["model_repository"], args["model_version"], "bundle")
        self._bundle = dlm_runtime.open(
            folder,
            engine=settings.get("engine", "auto"),
            provider=settings.get("provider", "cpu"),
            allow_fallback=settings.get("allow_fallback") == "1",
            threads=int(settings.get("threads", 0)),
        )
        self._scheduler = self._bundle.scheduler(
            max_running=int(settings.get("max_running", 16)),
            max_waiting=int(settings.get("max_waiting", 1024)),
        )
        self._compiling = ThreadPoolExecutor(COMPILE_THREADS, "dlm-compile")
        self._passes = 0  # number of passes that the metrics already contain
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._families = {
            name: pb_utils.MetricFamily(
                name=name,
                description=description,
                kind=getattr(pb_utils.MetricFamily, kind),
            )
            for name, (kind, description) in METRICS.items()
        }
        self._metrics = {
            name: family.Metric(labels={**labels, "instance": args["model_instance_name"]})
            for name, family in self._families.items()
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dlm-answers")
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Start the requests. The event loop sends the responses later."""
        for request in requests:
            sender = request.get_response_sender()
            outputs = {*request.requested_output_names()}
            try:
                asked = read(request)
            except RequestError as err:
                send_error(sender, err)
                continue
            asyncio.run_coroutine_threadsafe(self._answer(asked, outputs, sender), self._loop)

    def finalize(self) -> None:
        """Stop the threads. Triton calls this method when no requests are left."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._compiling.shutdown()
        self._scheduler.close()
        self._bundle.close()

    async def _answer(self, asked: Asked, outputs: set[str], sender: Any) -> None:
        try:
            await self._generate(asked, outputs, sender)
        except Exception as err:  # otherwise, the client would wait forever
            send_error(sender, err)

    async def _generate(self, asked: Asked, outputs: set[str], sender: Any) -> None:
        streams = asked.streams and self._is_decoupled
        if asked.constraint:
            asked.options["constraint"] = await self._loop.run_in_executor(
                self._compiling, self._compile, asked.constraint
            )
        job = self._scheduler.submit(**asked.given, **asked.options, events=streams)
        watching = asyncio.ensure_future(cancel_with(job, sender))
        sent = ""
        try:
            if streams:
                async for event in job:
                    if not event.done:
                        sent = event.text or ""
                        start = text_start(asked, job.prompt_tokens)
                        send(sender, outputs, step_tensors(event, start, job.prompt_tokens))
            made = await job
        finally:
            watching.cancel()
        self._report(made.completion_tokens)
        if made.finish == "cancelled":
            error = pb_utils.TritonError(
                "the request was cancelled", pb_utils.TritonError.CANCELLED
            )
            final = pb_utils.InferenceResponse(error=error)
            sender.send(final, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        tensors = result_tensors(made, text_start(asked, made.prompt_tokens), len(sent))
        send(sender, outputs, tensors, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _compile(self, constraint: dict[str, Any]) -> Any:
        return self._bundle.constraint(**constraint, limits=COMPILE_LIMITS, cache_dir=None)

    def _report(self, tokens: int) -> None:
        stats = self._scheduler.stats
        self._metrics["dlm_requests_running"].set(stats.running)
        self._metrics["dlm_requests_waiting"].set(stats.waiting)
        self._metrics["dlm_passes_total"].increment(stats.passes - self._passes)
        self._metrics["dlm_tokens_total"].increment(tokens)
        self._passes = stats.passes


async def cancel_with(job: dlm_runtime.Job, sender: Any) -> None:
    """Cancel the job if the client cancels the request."""
    while not job.done:
        if sender.is_cancelled():
            job.cancel()
            return
        await asyncio.sleep(CANCEL_CHECK_S)


def read(request: Any) -> Asked:
    """Read the tensors and the parameters of a request. Raises RequestError."""
    given = {
        name: tensor.as_numpy()
        for name in INPUTS
        if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is not None
    }
    if len(given) != 1:
        raise RequestError(f"give one of the inputs {', '.join(INPUTS)}")
    [(name, array)] = given.items()
    parameters = json.loads(request.parameters() or "{}")
    options: dict[str, Any] = {}
    for key, value in parameters.items():
        if key in TYPES:
            kind, said = TYPES[key]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise RequestError(f"parameter {key}: give {said}")
            options[key] = strings(key, value) if key in JSON_TEXTS else value
        elif key in POLICY_FIELDS:
            options[key] = value
        else:
            known = ", ".join([*TYPES, *POLICY_FIELDS])
            raise RequestError(f"parameter {key} is unknown; known parameters are {known}")
    options = {
        key: value for key, value in options.items() if (key, value) != ("json_object", False)
    }
    constraint = {key: options.pop(key) for key in CONSTRAINTS if key in options}
    streams = options.pop("stream", False)
    return Asked(canvas(name, array), options, constraint, streams)


def canvas(name: str, array: Any) -> dict[str, Any]:
    """Return the prompt, the chat or the token ids of an input tensor. Raises RequestError."""
    if name == "INPUT_IDS":
        return {"tokens": array.reshape(-1).tolist()}
    if array.size != 1:
        raise RequestError(f"{name} has {array.size} strings: give one")
    try:
        text = array.reshape(-1)[0].decode()
    except UnicodeDecodeError as err:
        raise RequestError(f"{name} is not UTF-8") from err
    if name == "TEXT":
        return {"prompt": text}
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RequestError(f"MESSAGES is not JSON: {err}") from err
    is_chat = isinstance(messages, list) and all(
        isinstance(each, dict)
        and each.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in each.values())
        for each in messages
    )
    if not is_chat:
        raise RequestError("MESSAGES: give a JSON list of objects with role and content")
    return {"chat": messages}


def strings(name: str, text: str) -> list[str]:
    """Parse a JSON list of strings. Raises RequestError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RequestError(f"parameter {name} is not JSON: {err}") from err
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise RequestError(f"parameter {name}: give a JSON list of strings")
    return found


def text_start(asked: Asked, prompt_tokens: int) -> int:
    """Return the canvas position where OUTPUT_IDS starts."""
    return 0 if asked.options.get("max_new_tokens") == 0 else prompt_tokens


def step_tensors(event: dlm_runtime.Event, start: int, prompt_tokens: int) -> dict[str, Any]:
    """Return the output tensors of a response that is not the last response to its request."""
    ids = np.where(event.undecided, -1, event.canvas)[start:]
    return {
        "TEXT": np.array([(event.delta or "").encode()], dtype=object),
        "OUTPUT_IDS": ids.astype(np.int32),
        "NFE": np.array([event.nfe], dtype=np.int32),
        "FINISH": np.array([b""], dtype=object),
        "PROMPT_TOKENS": np.array([prompt_tokens], dtype=np.int32),
        "COMPLETION_TOKENS": np.array([int((ids >= 0).sum())], dtype=np.int32),
    }


def result_tensors(made: dlm_runtime.Generation, start: int, sent: int) -> dict[str, Any]:
    """Return the output tensors of the last response.

    ``sent`` is the number of characters of the text that earlier responses contained.
    """
    return {
        "TEXT": np.array([(made.text or "")[sent:].encode()], dtype=object),
        "OUTPUT_IDS": np.array(made.tokens[start:], dtype=np.int32),
        "NFE": np.array([made.nfe], dtype=np.int32),
        "FINISH": np.array([made.finish.encode()], dtype=object),
        "PROMPT_TOKENS": np.array([made.prompt_tokens], dtype=np.int32),
        "COMPLETION_TOKENS": np.array([made.completion_tokens], dtype=np.int32),
    }


def send(sender: Any, outputs: set[str], tensors: dict[str, Any], flags: int = 0) -> None:
    """Send a response with the outputs that the client asked for."""
    chosen = [
        pb_utils.Tensor(name, array)
        for name, array in tensors.items()
        if not outputs or name in outputs
    ]
    sender.send(pb_utils.InferenceResponse(output_tensors=chosen), flags=flags)


def send_error(sender: Any, error: Exception) -> None:
    """Send an error as the last response of a request."""
    if isinstance(error, (BusyError, ClosedError)):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, RequestError):
        code = pb_utils.TritonError.INVALID_ARG
    else:
        code = pb_utils.TritonError.INTERNAL
    said = str(error) if isinstance(error, DlmError) else f"{type(error).__name__}: {error}"
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(said, code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
