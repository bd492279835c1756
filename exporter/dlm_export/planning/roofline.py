"""The work of one pass, counted, and the least time in which a machine can do it (the roofline of
doi:10.1145/1498765.1498785).

Counted is what no implementation of the pass can leave out: every weight read once, every cached
row read once and every new one written once, every multiply-add of a matrix product. Activations
count as free, as they may stay in a processor's cache; so do norms, rotations, softmax and the
choice of the best tokens. ``limit_s`` is therefore never reached, only approached.

The rates of a CPU are measured by ONNX Runtime itself (``measure``): its own products are the
fastest that a bundle can get there, and its threads are those that the engine has.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlm_calibration.recipes import FORMATS, HIGH, LayerFormat
from dlm_export.graph import CACHE_DTYPES
from dlm_export.network.spec import CACHE_ROWS, HEAD, NetworkSpec

FULL = "full"  # arithmetic in the denoiser's own precision: fp32, fp16 or bf16


@dataclass(frozen=True)
class Work:
    """One pass, counted.

    ``macs`` are multiply-adds by kind, ``part.arithmetic``: part is ``layers``, ``attention`` or
    ``head``, arithmetic what the operands are in: ``full``, ``int8``, ``fp8`` or ``nvfp4``.
    ``cache_bytes``: S rows read and T rows written.
    """

    weight_bytes: int
    cache_bytes: int
    macs: Mapping[str, int]

    def by_arithmetic(self) -> dict[str, int]:
        """Multiply-adds by arithmetic, whatever part of the pass they belong to."""
        out: Counter[str] = Counter()
        for kind, count in self.macs.items():
            out[kind.rpartition(".")[2]] += count
        return dict(out)


@dataclass(frozen=True)
class Rates:
    """What a machine can do a second: bytes read from memory, multiply-adds by arithmetic (half of
    a vendor's operations).
    """

    read_bytes: float
    macs: Mapping[str, float]


def work_of(
    network: NetworkSpec,
    layers: Mapping[str, str],
    tokens: int,
    cached: int,
    rows: int,
    batch: int = 1,
    *,
    element_bytes: int = 4,
    table_bytes: int | None = None,
    cache_dtype: str | None = None,
) -> Work:
    """The work of a pass of ``tokens`` over ``cached`` ones that scores ``rows``, each in ``batch``
    rows of canvas.

    ``layers`` names a key of ``FORMATS`` by module path, all others are in full precision.
    ``element_bytes`` is an element of full-precision weights: 4, or 2 for fp16 and bf16; of the
    embedding table too, unless ``table_bytes`` is given, and of the cache, unless ``cache_dtype`` is.
    Scales count as fp32. Of experts, those are read
    that tokens spread evenly over all of them reach, on average.
    """
    kinds = kinds_of(network, layers, element_bytes, table_bytes)
    return count_work(
        network,
        kinds,
        tokens,
        cached,
        rows,
        batch,
        element_bytes=element_bytes,
        table_bytes=table_bytes,
        cache_dtype=cache_dtype,
    )


def cache_bytes_by_type(network: NetworkSpec) -> dict[str, int]:
    """Bytes of one token's keys and values by what ``--cache-dtype`` may be."""
    return {
        name: network.cache_bytes(*CACHE_ROWS[CACHE_DTYPES[name]])
        for name in ("fp32", "fp16", "int8")
    }


@dataclass(frozen=True)
class MatrixKind:
    """``number`` matrices that cost the same: ``experts`` of each, which see ``share`` of the rows,
    ``expert_bytes`` each.
    """

    number: int
    part: str
    arithmetic: str
    experts: int
    share: float
    expert_macs: int
    expert_bytes: int


def kinds_of(
    network: NetworkSpec,
    layers: Mapping[str, str],
    element_bytes: int,
    table_bytes: int | None = None,
) -> tuple[MatrixKind, ...]:
    """The matrices of a network in the formats that ``layers`` names, those that cost the same
    together. A tied head in full precision has elements of ``table_bytes``.
    """
    table_bytes = table_bytes or element_bytes
    found: Counter[tuple[str, str, int, float, int, int]] = Counter()
    for layer in network.linear_layers():
        chosen = FORMATS[layers.get(layer.path, HIGH)]
        plain_bytes = table_bytes if layer.is_tied else element_bytes
        size = _matrix_bytes(chosen, layer.inputs, layer.outputs, plain_bytes)
        part = HEAD if layer.role == HEAD else "layers"
        found[
            part,
            chosen.activations or FULL,
            layer.count,
            layer.share,
            layer.inputs * layer.outputs,
            size,
        ] += 1
    return tuple(MatrixKind(number, *kind) for kind, number in found.items())


def count_work(
    network: NetworkSpec,
    kinds: tuple[MatrixKind, ...],
    tokens: int,
    cached: int,
    rows: int,
    batch: int = 1,
    *,
    element_bytes: int = 4,
    table_bytes: int | None = None,
    cache_dtype: str | None = None,
) -> Work:
    """``work_of`` with the matrices sorted already."""
    rows_looked_up = batch * tokens * _table_bytes(network, kinds, table_bytes or element_bytes)
    weight_bytes = element_bytes * network.vector_elements + rows_looked_up // network.vocab_size
    macs: Counter[str] = Counter()
    for kind in kinds:
        scored = batch * (rows if kind.part == "head" else tokens)
        if scored == 0:
            continue
        reached = kind.experts * (1 - (1 - kind.share) ** scored)
        weight_bytes += kind.number * round(reached * kind.expert_bytes)
        macs[f"{kind.part}.{kind.arithmetic}"] += (
            kind.number * round(scored * kind.experts * kind.share) * kind.expert_macs
        )
    # Queries with keys, then weights with values; every token sees the cached ones and those of the
    # pass.
    features = sum(layer.attention.heads * layer.attention.head_size for layer in network.layers)
    macs[f"attention.{FULL}"] = batch * 2 * features * tokens * (cached + tokens)
    row = (element_bytes, 0) if cache_dtype is None else CACHE_ROWS[cache_dtype]
    return Work(weight_bytes, batch * (cached + tokens) * network.cache_bytes(*row), dict(macs))


def _matrix_bytes(chosen: LayerFormat, inputs: int, outputs: int, element_bytes: int) -> int:
    return (
        element_bytes * inputs * outputs
        if chosen.weights is None
        else chosen.weight_bytes(inputs, outputs)
    )


def _table_bytes(network: NetworkSpec, kinds: tuple[MatrixKind, ...], element_bytes: int) -> int:
    """Bytes of the embedding table; a tied head's matrix is the table."""
    if network.tied_head:
        return sum(kind.expert_bytes for kind in kinds if kind.part == HEAD)
    return element_bytes * network.vocab_size * network.hidden_size


def weights_bytes(
    network: NetworkSpec,
    kinds: tuple[MatrixKind, ...],
    element_bytes: int,
    table_bytes: int | None = None,
) -> int:
    """Bytes of all weights, embedding and scales included; ``kinds`` are the network's matrices by
    ``kinds_of``. A table that is also the head counts once, in the head's format.
    """
    matrices = sum(kind.number * kind.experts * kind.expert_bytes for kind in kinds)
    table = _table_bytes(network, kinds, table_bytes or element_bytes)
    return element_bytes * network.vector_elements + matrices + (0 if network.tied_head else table)


def file_bytes(network: NetworkSpec, weights: int, element_bytes: int) -> int:
    """Bytes of a bundle's data file, but for padding: weights, rotary tables, the mask token's bias."""
    rotary = network.max_canvas_length * sum(table.size for table in network.rotary_tables())
    return weights + element_bytes * rotary + 4 * network.vocab_size


def limit_s(work: Work, rates: Rates) -> float:
    """The least seconds for ``work``: the larger of all bytes at the rate of reads, and all
    multiply-adds at their rates.

    Reads may hide behind arithmetic and the other way round, so the larger counts; multiply-adds of
    different arithmetic take turns on the same units, so their times add up. KeyError for an
    arithmetic without a rate.
    """
    reading = (work.weight_bytes + work.cache_bytes) / rates.read_bytes
    multiplying = sum(
        count / rates.macs[arithmetic]
        for arithmetic, count in work.by_arithmetic().items()
        if count
    )
    return max(reading, multiplying)


# ---- The machine at hand ----

_READ_BYTES = 256 << 20  # at least, for the rate of reads
# Products of [rows, 2048] by [2048, 2048]: large enough for full speed, small enough for a cache.
_ROWS, _SQUARE = 512, 2048
_FEW_ROWS = 32  # a block pass


@dataclass(frozen=True)
class Machine:
    """Measured rates of this machine, a second; multiply-adds of int8 at 512 rows and at 32, of
    fp32 at 512.
    """

    read_bytes_per_s: float
    int8_macs_per_s: float
    int8_macs_per_s_32_rows: float
    fp32_macs_per_s: float

    def rates(self) -> Rates:
        """For ``limit_s``: the faster of the int8 rates, and fp32 for what is in full precision,
        fp16 included.

        ONNX Runtime's CPU kernels widen fp16 to fp32 where the processor does not multiply it.
        """
        int8 = max(self.int8_macs_per_s, self.int8_macs_per_s_32_rows)
        return Rates(self.read_bytes_per_s, {"int8": int8, FULL: self.fp32_macs_per_s})


def measure(threads: int, rounds: int = 9) -> Machine:
    """Measure this machine with ONNX Runtime at ``threads`` (0: all cores), medians of ``rounds``
    interleaved runs.

    Reads: ReduceSum over the rows of an array of four times the last-level cache, 256 MiB at least:
    the operator reads every byte once, keeps up with memory, and runs on the engine's kind of
    threads, which a loop in numpy would not. Products have a constant right side, as weights are,
    which the library lays out once; int8 is MatMulInteger of uint8 by int8. Raises
    ModuleNotFoundError without onnx.
    """
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    def runner(
        op: str, x: np.ndarray, constants: list[np.ndarray], out: int
    ) -> Callable[[], object]:
        names = [f"c{i}" for i in range(len(constants))]
        node = helper.make_node(op, ["x", *names], ["y"])
        graph = helper.make_graph(
            [node],
            "probe",
            [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
            [helper.make_tensor_value_info("y", out, None)],
            [
                numpy_helper.from_array(array, name)
                for array, name in zip(constants, names, strict=True)
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        # The probes take turns, as sessions would.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda: session.run(None, {"x": x})

    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (_SQUARE, _SQUARE), np.int8)
    inputs = rng.integers(0, 256, (_ROWS, _SQUARE), np.uint8)
    large = np.ones((256, _read_bytes() // 1024), np.float32)  # more rows than threads, each long
    weights = codes.astype(np.float32)
    probes = {
        "read": (runner("ReduceSum", large, [np.array([1])], TensorProto.FLOAT), large.nbytes),
        "int8": (
            runner("MatMulInteger", inputs, [codes], TensorProto.INT32),
            inputs.size * _SQUARE,
        ),
        "few": (
            runner("MatMulInteger", inputs[:_FEW_ROWS], [codes], TensorProto.INT32),
            _FEW_ROWS * codes.size,
        ),
        "fp32": (
            runner("MatMul", inputs.astype(np.float32), [weights], TensorProto.FLOAT),
            inputs.size * _SQUARE,
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in probes}
    for number in range(rounds + 1):
        for name, (run, _) in probes.items():
            # a first one at its turn: the probe before has pushed this one's operands out of the
            # cache
            run()
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    rate = {name: amount / statistics.median(seconds[name]) for name, (_, amount) in probes.items()}
    return Machine(rate["read"], rate["int8"], rate["few"], rate["fp32"])


def _read_bytes() -> int:
    """Size of the array for the rate of reads: four times the last-level caches, as far as a
    quarter of free memory goes.
    """
    from dlm_export.memory import available_memory_bytes

    wanted = max(_READ_BYTES, 4 * last_level_cache_bytes())
    free = available_memory_bytes()
    return wanted if free is None else min(wanted, free // 4)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """All caches of the highest level that Linux knows of, added up; 0 where it does not say."""
    found: dict[tuple[int, str], int] = {}  # each is listed by all the cores that share it
    for index in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = (
                (index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            found[int(level), shared] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == highest)
