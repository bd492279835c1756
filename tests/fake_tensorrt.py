"""A fake ``tensorrt`` module that behaves like TensorRT 10 on a device.

The fake has the classes, methods and arguments of the real bindings that a build uses. Any other
name raises AttributeError, and any other argument raises TypeError. Every call of a method and
every setting of a property is recorded in ``module.calls``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dlm_runtime.precision import FORMATS

VERSION = "10.13.3.9"  # the version in JetPack 7.0
# The names of number formats in a parsed network, and in the inspector's report.
SHOWN = {"float16": ("HALF", "Half"), "bfloat16": ("BF16", "BFloat16")}
SHOWN |= {"int8": ("INT8", "Int8"), "int4": ("INT4", "Int4")}
SHOWN |= {"fp8": ("FP8", "FP8"), "nvfp4": ("FP4", "FP4")}


Shape = tuple[int, ...]


class Number(enum.Enum):
    """An enumeration whose members behave like pybind11's: they are not ints, but ``int()`` accepts
    them.
    """

    def __int__(self) -> int:
        return int(self.value)


@dataclass
class Device:
    """Settings of the fake TensorRT.

    ``shown_as`` maps layers to the number types that the inspector prints for them. If ``is_old``
    is true, the fake behaves like TensorRT 10.3, the version in JetPack 6.1, which does not write
    engines to a stream.
    """

    shown_as: Mapping[str, list[str]] = field(default_factory=dict)
    is_old: bool = False


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: Shape = ()


@dataclass
class Layer:
    """A layer of a parsed network. The last element of ``tensors`` is the layer's output."""

    type: str
    name: str
    tensors: list[Tensor]
    shown: list[str] = field(default_factory=list)  # how the inspector prints the layer's inputs

    num_outputs = 1

    @property
    def metadata(self) -> str:
        return f"[ONNX Layer: {self.name}]"

    def get_input(self, index: int) -> Tensor:
        return self.tensors[index]

    def get_output(self, index: int) -> Tensor:
        return self.tensors[len(self.tensors) - 1 + index]


def parse(bundle: Path) -> list[Layer]:
    """Return the network that the parser would make from the device graph of a bundle.

    The layers come from the manifest. TensorRT inserts a shuffle layer between a weight matrix and
    the matrix multiplication.
    """
    manifest = json.loads((bundle / "manifest.json").read_text())
    wide = manifest["loop"]["graph"]["cache_dtype"]
    layers: list[Layer] = []

    def add(kind: str, name: str, inputs: Sequence[Tensor], dtype: str, *shape: int) -> Tensor:
        output = Tensor(f"{name}_output", f"DataType.{SHOWN[dtype][0]}", shape)
        layers.append(Layer(f"LayerType.{kind}", name, [*inputs, output]))
        return output

    for path, name in manifest["precision"]["layers"].items():
        known, operands, shown = FORMATS[name], [], []
        for role, number, maker in (
            ("input", known.activations, "QUANTIZE"),
            ("weight", known.weights, "CONSTANT"),
        ):
            operand = f"{path}.{role}"
            held = add(maker, operand, [], number or wide, known.group_size or 1, 1)
            if number:
                scales = Tensor(f"{operand}.scales", held.dtype, (1, 1))
                held = add("DEQUANTIZE", f"{operand}.wide", [held, scales], wide)
            operands.append(held)
            shown.append(SHOWN[number or wide][1])
        operands[1] = add("SHUFFLE", f"{path}.shuffle", operands[1:], wide)
        add("MATRIX_MULTIPLY", f"{path}/MatMul", operands, wide)
        layers[-1].shown = shown
    return layers


def module(device: Device | None = None) -> Any:
    """Make the fake module, to store it as ``sys.modules["tensorrt"]``.

    The module's list ``calls`` contains a tuple of the name and the named arguments of each call.
    """
    device = device or Device()
    trt: Any = ModuleType("tensorrt")
    trt.__spec__ = ModuleSpec("tensorrt", None)
    trt.__version__ = "10.3.0" if device.is_old else VERSION
    trt.calls = calls = []
    for name, members in {
        "MemoryPoolType": {"WORKSPACE": 0},
        "ProfilingVerbosity": {"LAYER_NAMES_ONLY": 0, "DETAILED": 2},
        "LayerInformationFormat": {"ONELINE": 0, "JSON": 1},
        "NetworkDefinitionCreationFlag": {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1},
        "BuilderFlag": {"VERSION_COMPATIBLE": 13, "EXCLUDE_LEAN_RUNTIME": 14},
        "Severity": {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2, "INFO": 3, "VERBOSE": 4},
    }.items():
        setattr(trt, name, Number(name, members))

    def public(made: type) -> type:
        """Put a class into the module, and record the calls of its methods."""

        def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(method)

            @functools.wraps(method)
            def call(*arguments: Any, **named: Any) -> Any:
                given = signature.bind(*arguments, **named).arguments
                del given["self"]
                calls.append((f"{made.__name__}.{method.__name__}", dict(given)))
                return method(*arguments, **named)

            return call

        for name, member in list(vars(made).items()):
            if inspect.isfunction(member) and name != "__setattr__":
                setattr(made, name, recorded(member))
        setattr(trt, made.__name__, made)
        return made

    @public
    class ILogger:
        Severity = trt.Severity

        def __init__(self) -> None: ...

    @public
    class IProgressMonitor:
        def __init__(self) -> None: ...

    class Network:
        layers: Sequence[Layer] = ()
        weights_bytes = 0

        @property
        def num_layers(self) -> int:
            return len(self.layers)

        def get_layer(self, index: int) -> Layer:
            return self.layers[index]

    @public
    class OnnxParser:
        def __init__(self, network: Network, logger: Any) -> None:
            self.network = network

        def parse_from_file(self, model: str) -> bool:
            self.network.layers = parse(Path(model).parent)
            self.network.weights_bytes = Path(model).with_name("denoiser.onnx.data").stat().st_size
            return True

    @public
    class IOptimizationProfile:
        def set_shape(self, input: str, min: Shape, opt: Shape, max: Shape) -> None: ...

    class TimingCache:
        def __init__(self, held: bytes) -> None:
            self.held = held

        def serialize(self) -> bytes:
            return self.held + b"timed "

    @public
    class IBuilderConfig:
        __slots__ = ("_timings", "profiling_verbosity", "progress_monitor")

        def __setattr__(self, name: str, value: Any) -> None:
            calls.append((f"IBuilderConfig.{name}", {"value": value}))
            super().__setattr__(name, value)

        def set_memory_pool_limit(self, pool: Number, pool_size: int) -> None: ...

        def set_flag(self, flag: Number) -> None: ...

        def add_optimization_profile(self, profile: Any) -> int:
            return 0

        def create_timing_cache(self, serialized_timing_cache: bytes) -> TimingCache:
            return TimingCache(serialized_timing_cache)

        def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
            self._timings = cache
            return True

        def get_timing_cache(self) -> TimingCache:
            return self._timings

    def built(network: Network, config: Any) -> bytes | None:
        """Return an engine that is as large as its weights, or None if the build was cancelled."""
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        for step in range(2):
            if not monitor.step_complete("Building Engine", step):
                return None
        monitor.phase_finish("Building Engine")
        trt.inspected = network.layers, config.profiling_verbosity
        return bytes(network.weights_bytes)

    @public
    class Builder:
        def __init__(self, logger: Any) -> None: ...

        def create_network(self, flags: int) -> Network:
            return Network()

        def create_builder_config(self) -> Any:
            return IBuilderConfig()

        def create_optimization_profile(self) -> Any:
            return IOptimizationProfile()

        if device.is_old:

            def build_serialized_network(self, network: Network, config: Any) -> bytes | None:
                return built(network, config)

        else:

            def build_serialized_network_to_stream(
                self, network: Network, config: Any, writer: Any
            ) -> bool:
                plan = built(network, config)
                if plan is None:
                    return False
                half = len(plan) // 2
                return all(writer.write(part) == len(part) for part in (plan[:half], plan[half:]))

    if not device.is_old:

        @public
        class IStreamWriter:
            def __init__(self) -> None: ...

    @public
    class EngineInspector:
        def get_engine_information(self, format: Number) -> str:
            layers, verbosity = trt.inspected
            matmuls = [layer for layer in layers if layer.type.endswith("MATRIX_MULTIPLY")]
            if verbosity is not trt.ProfilingVerbosity.DETAILED:
                return json.dumps({"Layers": [layer.name for layer in matmuls], "Bindings": []})
            return json.dumps({"Layers": [shown(layer) for layer in matmuls], "Bindings": []})

    def shown(layer: Layer) -> dict[str, Any]:
        """Return the inspector's description of a layer.

        TensorRT fuses a matrix multiplication with the quantisation of its operands into one layer.
        """
        path = layer.name.partition("/")[0]
        types = device.shown_as.get(path, layer.shown)
        inputs = [{"Name": path, "Dimensions": [1], "Format/Datatype": kind} for kind in types]
        name = f"__myl_{path}_7"
        return {"Name": name, "LayerType": "gemm", "Inputs": inputs, "Metadata": layer.metadata}

    @public
    class ICudaEngine:
        def create_engine_inspector(self) -> Any:
            return EngineInspector()

    @public
    class Runtime:
        def __init__(self, logger: Any) -> None: ...

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
            return ICudaEngine()

    return trt
