"""A fake ``tensorrt`` module that behaves like TensorRT 10 on a device.

The fake module has the classes, methods, arguments and enumerations that
tests/golden/tensorrt_api.json lists. The JSON file describes the real bindings of TensorRT-RTX.
``RTX_ONLY`` and ``FLAGS`` describe how standard TensorRT differs. Unknown names raise
AttributeError, and calls with wrong arguments raise TypeError. Every call is recorded in
``module.calls``.
"""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

API = json.loads((Path(__file__).parent / "golden" / "tensorrt_api.json").read_text())
VERSION = "10.13.3.9"  # the version in JetPack 7.0
# Names that are missing from TensorRT 10.3, the version in JetPack 6.1.
STREAMING = {
    "IStreamWriter",
    "build_serialized_network_to_stream",
}
# Names that are missing from standard TensorRT (NvInfer.h of version 10.14), which cannot set a
# compute capability.
RTX_ONLY = {
    "ComputeCapability",
    "num_compute_capabilities",
    "get_compute_capability",
    "set_compute_capability",
}
FLAGS = {
    "EXPLICIT_BATCH": 0,
    "STRONGLY_TYPED": 1,
}  # NetworkDefinitionCreationFlag, NvInfer.h of 10.14
NAMES = ("HALF", "BF16", "FLOAT", "INT8", "INT4", "FP8", "FP4")
INSPECTED = dict(
    zip(NAMES, ("Half", "BFloat16", "Float", "Int8", "Int4", "FP8", "FP4"), strict=True)
)


class Number(enum.Enum):
    """An enumeration whose members behave like pybind11's: they are not ints, but ``int()`` accepts
    them.
    """

    def __int__(self) -> int:
        return int(self.value)


@dataclass
class Device:
    """Settings of the fake TensorRT: the parsed network, the engine's size, log messages, and what
    the inspector prints.

    ``network`` describes the parsed network, in the form that ``describe`` returns. If None, the
    fake calls ``describe`` for the parsed file. ``engine_bytes`` is the size of a built engine in
    bytes. If None, an engine is as large as its weights. ``logs`` are pairs (severity, message)
    that the parser logs. ``shown_as`` maps layers to the number types that the inspector prints for
    them. If ``is_old`` is true, the fake behaves like TensorRT 10.3.
    """

    network: dict[str, Any] | None = None
    engine_bytes: int | None = None
    logs: Sequence[tuple[str, str]] = ()
    shown_as: Mapping[str, list[str]] = field(default_factory=dict)
    is_old: bool = False


def describe(path: Path) -> dict[str, Any]:
    """Return a JSON description of the network that TensorRT's parser makes from a device graph.

    The description only includes the parts that the audit reads. TensorRT makes a constant layer
    with the output ``<initialiser>_output`` for each initialiser. It inserts a shuffle layer
    between a weight matrix and the matrix multiplication.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    layer_types = {
        "MatMul": "MATRIX_MULTIPLY",
        "DequantizeLinear": "DEQUANTIZE",
        "QuantizeLinear": "QUANTIZE",
        "TRT_FP4DynamicQuantize": "DYNAMIC_QUANTIZE",
        "Transpose": "SHUFFLE",
        "Reshape": "SHUFFLE",
        "Cast": "CAST",
        "Constant": "CONSTANT",
    }
    of_onnx = {
        onnx.TensorProto.FLOAT: "FLOAT",
        onnx.TensorProto.FLOAT16: "HALF",
        onnx.TensorProto.BFLOAT16: "BF16",
        onnx.TensorProto.INT8: "INT8",
        onnx.TensorProto.INT4: "INT4",
        onnx.TensorProto.INT32: "INT32",
        onnx.TensorProto.INT64: "INT64",
        onnx.TensorProto.BOOL: "BOOL",
        onnx.TensorProto.FLOAT8E4M3FN: "FP8",
        onnx.TensorProto.FLOAT4E2M1: "FP4",
    }
    tensors: dict[str, list[Any]] = {}
    layers: list[list[Any]] = []  # type, name, metadata, inputs, outputs
    inputs = []
    for value in graph.input:
        kind = value.type.tensor_type
        tensors[value.name] = [
            of_onnx[kind.elem_type],
            [dim.dim_value or -1 for dim in kind.shape.dim],
        ]
        inputs.append(value.name)
    for held in graph.initializer:
        tensors[f"{held.name}_output"] = [of_onnx[held.data_type], list(held.dims)]
        layers.append(["CONSTANT", held.name, "", [], [f"{held.name}_output"]])
    constants = {held.name for held in graph.initializer}
    for node in graph.node:
        names = [f"{name}_output" if name in constants else name for name in node.input if name]
        types = [tensors[name][0] for name in names]
        made = [types[0] if types else "INT64"] * len(node.output)
        if node.op_type == "DequantizeLinear":
            made = [types[1]]
        elif node.op_type == "QuantizeLinear":
            made = [types[2]]
        elif node.op_type == "TRT_FP4DynamicQuantize":
            made = ["FP4", "FP8"]
        elif node.op_type == "Cast":
            made = [of_onnx[node.attribute[0].i]]
        shape = tensors[names[0]][1] if node.op_type == "DequantizeLinear" else [-1]
        for name, kind in zip(node.output, made, strict=True):
            tensors[name] = [kind, shape]
        if node.op_type == "MatMul":
            broadcast = f"{node.name}.broadcast"
            tensors[broadcast] = tensors[names[1]]
            layers.append(["SHUFFLE", "ONNXTRT_Broadcast", "", [names[1]], [broadcast]])
            names[1] = broadcast
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            names = names[:2]  # TensorRT drops zero points, which are all 0
        kind = layer_types.get(node.op_type, "ELEMENTWISE")
        layers.append([kind, node.name, f"[ONNX Layer: {node.name}]", names, list(node.output)])
    return {"inputs": inputs, "tensors": tensors, "layers": layers}


def module(device: Device | None = None) -> Any:
    """Make the fake module, to store it as ``sys.modules["tensorrt"]``.

    The module's list ``calls`` contains a tuple of the name and the named arguments of each call.
    """
    device = device or Device()
    absent = RTX_ONLY | (STREAMING if device.is_old else set())
    trt: Any = ModuleType("tensorrt")
    trt.__spec__ = ModuleSpec("tensorrt", None)
    trt.__version__ = "10.3.0" if device.is_old else VERSION
    trt.calls = []
    enums = {
        name: Number(name.rpartition(".")[2], members)
        for name, members in API["enums"].items()
        if name not in absent
    }
    enums["NetworkDefinitionCreationFlag"] = Number("NetworkDefinitionCreationFlag", FLAGS)
    for name, made in enums.items():
        if "." not in name:
            setattr(trt, name, made)
    behaviour = _Behaviour(trt, device)
    for name in API["classes"].keys() - absent:
        setattr(trt, name, _class(trt, name, absent, behaviour))
    trt.ILogger.Severity = enums["ILogger.Severity"]
    return trt


def _class(trt: Any, name: str, absent: set[str], behaviour: _Behaviour) -> type:
    # A real IHostMemory supports the buffer protocol. Before Python 3.12, a Python class can only
    # support this protocol as a subclass of bytes.
    base: type = bytes if name == "IHostMemory" else object
    described = API["classes"][name]
    settable = {key: value for key, value in described["properties"].items() if key not in absent}

    def set_attribute(self: Any, key: str, value: Any) -> None:
        if settable.get(key):
            trt.calls.append((f"{name}.{key}", {"value": value}))
        elif type(self) is made:  # tests may set any attribute of their own subclasses
            raise AttributeError(f"{name} has no attribute {key!r} that can be set")
        object.__setattr__(self, f"_{key}" if key in settable else key, value)

    members: dict[str, Any] = {"__setattr__": set_attribute}
    for key in settable:
        members[key] = property(_getter(name, key, behaviour), lambda self, value: None)
    for method, signatures in described["methods"].items():
        if method not in absent:
            members[method] = _method(trt, name, method, signatures, behaviour)
    made = type(name, (base,), members)
    return made


def _getter(name: str, key: str, behaviour: _Behaviour) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        found = getattr(behaviour, f"{name}_get_{key}", None)
        return found(self) if found is not None else self.__dict__[f"_{key}"]

    return get


def _method(
    trt: Any, owner: str, name: str, signatures: list[list[list[Any]]] | None, behaviour: _Behaviour
) -> Callable[..., Any]:
    full = f"{owner}.{name}"

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if signatures is None:
            raise NotImplementedError(f"tests/golden/tensorrt_api.json has no signature of {full}")
        for signature in signatures:
            bound = _bind(trt, signature, arguments, named)
            if bound is not None:
                trt.calls.append((full, bound))
                done = getattr(behaviour, f"{owner}_{name}", None)
                return None if done is None else done(self, **bound)
        raise TypeError(f"{full}{arguments}{named}: takes {signatures}")

    return call


def _bind(
    trt: Any, signature: list[list[Any]], arguments: Any, named: Any
) -> dict[str, Any] | None:
    """Bind arguments to the names of a signature.

    Raises TypeError unless the number, names and types of the arguments fit the signature.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, default=None if has_default else inspect.Parameter.empty)
        for name, _, has_default in signature
    ]
    try:
        bound = inspect.Signature(parameters).bind(*arguments, **named).arguments
    except TypeError:
        return None
    types = {name: text for name, text, _ in signature}
    return (
        dict(bound) if all(_is(trt, types[name], value) for name, value in bound.items()) else None
    )


def _is(trt: Any, text: str, value: Any) -> bool:
    if text == "Dims":
        return isinstance(value, (tuple, list)) and all(isinstance(size, int) for size in value)
    if text == "SupportsInt":
        return hasattr(value, "__int__")
    plain: dict[str, Any] = {
        "str": str,
        "bool": bool,
        "Buffer": (bytes, bytearray, memoryview),
        "IStreamReaderV2": (),
    }
    return isinstance(
        value, plain[text] if text in plain else getattr(trt, text, None) or trt.ILogger.Severity
    )


class _Behaviour:
    """The implementations of fake methods and properties that do more than record a call.

    Their names are ``<class>_<method>`` and ``<class>_get_<property>``.
    """

    def __init__(self, trt: Any, device: Device) -> None:
        self.trt, self.device = trt, device

    def made(self, name: str, **held: Any) -> Any:
        """Create an object of a fake class without calling its constructor."""
        new = object.__new__(getattr(self.trt, name))
        new.__dict__.update(held)
        return new

    def memory(self, data: bytes) -> Any:
        return self.trt.IHostMemory(data)

    def IHostMemory_get_nbytes(self, memory: Any) -> int:
        return len(memory)

    # ---- Network ----

    def Builder_create_network(self, builder: Any, flags: int = 0) -> Any:
        return self.made("INetworkDefinition", inputs=[], layers=[])

    def OnnxParser___init__(self, parser: Any, network: Any, logger: Any) -> None:
        parser.__dict__.update(network=network, logger=logger)

    def OnnxParser_parse_from_file(self, parser: Any, model: str) -> bool:
        for severity, text in self.device.logs:
            parser.logger.log(self.trt.ILogger.Severity[severity], text)
        self.weights_bytes = (Path(model).parent / "denoiser.onnx.data").stat().st_size
        described = self.device.network or describe(Path(model))
        tensors = {
            name: self.made(
                "ITensor", _name=name, _dtype=self.trt.DataType[kind], _shape=tuple(shape)
            )
            for name, (kind, shape) in described["tensors"].items()
        }
        layers = [
            self.made(
                "ILayer",
                _type=self.trt.LayerType[kind],
                _name=name,
                _metadata=metadata,
                inputs=[tensors[each] for each in inputs],
                outputs=[tensors[each] for each in outputs],
            )
            for kind, name, metadata, inputs, outputs in described["layers"]
        ]
        parser.network.__dict__.update(
            inputs=[tensors[name] for name in described["inputs"]], layers=layers
        )
        return not any(severity == "ERROR" for severity, _ in self.device.logs)

    def INetworkDefinition_get_num_inputs(self, network: Any) -> int:
        return len(network.inputs)

    def INetworkDefinition_get_num_layers(self, network: Any) -> int:
        return len(network.layers)

    def INetworkDefinition_get_input(self, network: Any, index: int) -> Any:
        return network.inputs[index]

    def INetworkDefinition_get_layer(self, network: Any, index: int) -> Any:
        return network.layers[index]

    def ILayer_get_num_inputs(self, layer: Any) -> int:
        return len(layer.inputs)

    def ILayer_get_num_outputs(self, layer: Any) -> int:
        return len(layer.outputs)

    def ILayer_get_input(self, layer: Any, index: int) -> Any:
        return layer.inputs[index]

    def ILayer_get_output(self, layer: Any, index: int) -> Any:
        return layer.outputs[index]

    # ---- Building ----

    def Builder_create_builder_config(self, builder: Any) -> Any:
        return self.made(
            "IBuilderConfig",
            profiles=[],
            _progress_monitor=None,
            _profiling_verbosity=None,
            timings=None,
        )

    def Builder_create_optimization_profile(self, builder: Any) -> Any:
        return self.made("IOptimizationProfile")

    def IBuilderConfig_add_optimization_profile(self, config: Any, profile: Any) -> int:
        config.profiles.append(profile)
        return len(config.profiles) - 1

    def IBuilderConfig_create_timing_cache(
        self, config: Any, serialized_timing_cache: bytes
    ) -> Any:
        return self.made("ITimingCache", held=bytes(serialized_timing_cache))

    def IBuilderConfig_set_timing_cache(
        self, config: Any, cache: Any, ignore_mismatch: bool
    ) -> bool:
        config.__dict__["timings"] = cache
        return True

    def IBuilderConfig_get_timing_cache(self, config: Any) -> Any:
        return config.timings

    def ITimingCache_serialize(self, cache: Any) -> Any:
        return self.memory(cache.held + b"timed ")

    def Builder_build_serialized_network_to_stream(
        self, builder: Any, network: Any, config: Any, writer: Any
    ) -> bool:
        plan = self.Builder_build_serialized_network(builder, network, config)
        if plan is None:
            return False
        half = len(plan) // 2
        return all(writer.write(piece) == len(piece) for piece in (plan[:half], plan[half:]))

    def Builder_build_serialized_network(self, builder: Any, network: Any, config: Any) -> Any:
        monitor = config.__dict__["_progress_monitor"]
        if monitor is not None:
            monitor.phase_start("Building Engine", None, 2)
            for step in range(2):
                if not monitor.step_complete("Building Engine", step):
                    return None
            monitor.phase_finish("Building Engine")
        self.network, self.verbosity = network, config.__dict__["_profiling_verbosity"]
        size = self.device.engine_bytes
        return self.memory(bytes(self.weights_bytes if size is None else size))

    # ---- Looking at the engine ----

    def Runtime_deserialize_cuda_engine(self, runtime: Any, serialized_engine: Any) -> Any:
        return self.made("ICudaEngine")

    def ICudaEngine_create_engine_inspector(self, engine: Any) -> Any:
        return self.made("EngineInspector")

    def EngineInspector_get_engine_information(self, inspector: Any, format: Any) -> str:
        matmuls = [layer for layer in self.network.layers if layer.type.name == "MATRIX_MULTIPLY"]
        if self.verbosity is not self.trt.ProfilingVerbosity.DETAILED:
            return json.dumps({"Layers": [layer.name for layer in matmuls], "Bindings": []})
        return json.dumps({"Layers": [self._shown(layer) for layer in matmuls], "Bindings": []})

    def _shown(self, layer: Any) -> dict[str, Any]:
        """Return the description of a layer that the inspector prints.

        TensorRT fuses a matrix multiplication with the quantisation of its operands into one layer.
        """
        path = layer.name.partition("/")[0]
        types = self.device.shown_as.get(path) or [self._codes(tensor) for tensor in layer.inputs]
        tensors = [
            {"Name": f"{path}.{i}", "Dimensions": [1], "Format/Datatype": kind}
            for i, kind in enumerate(types)
        ]
        return {
            "Name": f"__myl_{path}_7",
            "LayerType": "gemm",
            "Inputs": tensors,
            "Metadata": layer.metadata,
        }

    def _codes(self, tensor: Any) -> str:
        makers = {output.name: layer for layer in self.network.layers for output in layer.outputs}
        maker = makers.get(tensor.name)
        while maker is not None and maker.type.name == "SHUFFLE":
            maker = makers.get(maker.inputs[0].name)
        if maker is not None and maker.type.name == "DEQUANTIZE":
            tensor = maker.inputs[0]
        return INSPECTED.get(tensor.dtype.name, tensor.dtype.name)
