"""The Python API of dlm-export's runtime.

The API opens bundles, and generates text with the opened bundles.

>>> import dlm_runtime as dlm
>>> bundle = dlm.open("build/demo")
>>> bundle.generate(prompt="turn on the kitchen lights", max_new_tokens=64).text

All functions call the native library ``libdlm_runtime`` through its C ABI (``dlm_runtime.h``).
Importing this package needs neither torch nor onnx.
"""

from dlm_runtime.bundle import Bundle
from dlm_runtime.callback import CallbackPass, DenoiserInfo, from_callback
from dlm_runtime.constraints.layout import LAYOUTS, Layout
from dlm_runtime.constraints.records import Csv, JsonLines
from dlm_runtime.errors import (
    BundleError,
    BusyError,
    CancelledError,
    ClosedError,
    ConstraintWarning,
    DlmError,
    DlmWarning,
    EngineError,
    ForkError,
    RequestError,
)
from dlm_runtime.generation.deciding import Answer, Choice, Decision, Score, YesNo
from dlm_runtime.generation.infill import Infill
from dlm_runtime.generation.pass_cost import PassCost
from dlm_runtime.generation.results import Event, Generation
from dlm_runtime.generation.scheduler import Job, Scheduler
from dlm_runtime.opening import open
from dlm_runtime.policy import Policy
from dlm_runtime.presets import PRESETS
from dlm_runtime.tools import CallFormat, ToolCall

__all__ = [
    "LAYOUTS",
    "PRESETS",
    "Answer",
    "Bundle",
    "BundleError",
    "BusyError",
    "CallFormat",
    "CallbackPass",
    "CancelledError",
    "Choice",
    "ClosedError",
    "ConstraintWarning",
    "Csv",
    "Decision",
    "DenoiserInfo",
    "DlmError",
    "DlmWarning",
    "EngineError",
    "Event",
    "ForkError",
    "Generation",
    "Infill",
    "Job",
    "JsonLines",
    "Layout",
    "PassCost",
    "Policy",
    "RequestError",
    "Scheduler",
    "Score",
    "ToolCall",
    "YesNo",
    "from_callback",
    "open",
]
