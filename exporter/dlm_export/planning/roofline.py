"""Counts the work of a pass, and computes the shortest time in which a machine can do it.

This is the roofline model (doi:10.1145/1498765.1498785). Only work that no implementation can avoid
is counted: reading every weight once, reading every cached row once, writing every new row once,
and the multiply-adds of matrix products. Activations are not counted, because they may stay in a
processor's cache. Norms, rotations, softmax and the choice of tokens are not counted either. Real
times therefore always exceed ``limit_s``.

The rates of a CPU are measured with ONNX Runtime (``measure``). Its products are the fastest that a
bundle can reach, and it uses the engine's threads.
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

FULL = "full"  # arithmetic in the precision of the unquantised denoiser: fp32, fp16 or bf16


@dataclass(frozen=True)
class Work:
    """The work of one pass.

    ``macs`` has the number of multiply-adds by keys ``part.arithmetic``. The part is ``layers``,
    ``attention`` or ``head``. The arithmetic is the format of the operands: ``full``, ``int8``,
    ``fp8`` or ``nvfp4``. ``cache_bytes`` is the size of the cached rows that are read and of the
    new rows that are written.
    """

    weight_bytes: int
    cache_bytes: int
    macs: Mapping[str, int]

    def by_arithmetic(self) -> dict[str, int]:
        """Multiply-adds by arithmetic, summed over the parts of the pass."""
        out: Counter[str] = Counter()
        for kind, count in self.macs.items():
            out[kind.rpartition(".")[2]] += count
        return dict(out)


@dataclass(frozen=True)
class Rates:
    """The rates of a machine per second: bytes read from memory, and multiply-adds by arithmetic.

    A multiply-add is two of the operations that vendors count.
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
    """The work of a pass over ``batch`` canvases.

    Scales are counted as fp32. Of the experts, the number that tokens reach on average is counted,
    assuming that all experts are equally likely.

    Args:
        network: The denoiser's description.
        layers: The format of each quantised layer, a key of ``FORMATS``. Other layers are in full
            precision.
        tokens: Tokens of the pass, per canvas.
        cached: Cached tokens, per canvas.
        rows: Scored rows, per canvas.
        batch: Number of canvases.
        element_bytes: Bytes of an element that is not quantised, 4 or 2. This is also the default
            for the table and the cache.
        table_bytes: Bytes of an element of the embedding table.
        cache_dtype: Type of the cache, as the manifest names it.
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
    """The bytes of one token's keys and values, for each cache type of ``--cache-dtype``."""
    return {
        name: network.cache_bytes(*CACHE_ROWS[CACHE_DTYPES[name]])
        for name in ("fp32", "fp16", "int8")
    }


@dataclass(frozen=True)
class MatrixKind:
    """``number`` matrices of equal cost. Each consists of ``experts`` experts; a plain matrix is
    one expert.

    Each expert has ``expert_bytes`` and processes a ``share`` of the rows.
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
    """The matrices of a network in the formats of ``layers``, grouped by cost.

    Each element of a tied head that is not quantised takes ``table_bytes`` bytes.
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
    """The same as ``work_of``, for matrices that are grouped already."""
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
    # Attention multiplies queries by keys, and then weights by values. Every token sees the cached
    # tokens and the tokens of the pass.
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
    """Bytes of the embedding table. If the head is tied, the head's matrix is the table."""
    if network.tied_head:
        return sum(kind.expert_bytes for kind in kinds if kind.part == HEAD)
    return element_bytes * network.vocab_size * network.hidden_size


def weights_bytes(
    network: NetworkSpec,
    kinds: tuple[MatrixKind, ...],
    element_bytes: int,
    table_bytes: int | None = None,
) -> int:
    """Bytes of all weights, including the embedding and scales. ``kinds`` are from ``kinds_of``.

    A table that is tied to the head is counted once, in the format of the head.
    """
    matrices = sum(kind.number * kind.experts * kind.expert_bytes for kind in kinds)
    table = _table_bytes(network, kinds, table_bytes or element_bytes)
    return element_bytes * network.vector_elements + matrices + (0 if network.tied_head else table)


def file_bytes(network: NetworkSpec, weights: int, element_bytes: int) -> int:
    """Bytes of a bundle's data file without padding: weights, rotary tables, and the bias of the
    mask token.
    """
    rotary = network.max_canvas_length * sum(table.size for table in network.rotary_tables())
    return weights + element_bytes * rotary + 4 * network.vocab_size


def limit_s(work: Work, rates: Rates) -> float:
    """The shortest time for ``work`` in seconds.

    This is the larger of the time to read all bytes and the time of all multiply-adds, because
    reading and arithmetic can overlap. Different kinds of arithmetic use the same units of the
    processor, so their times are added up. Raises KeyError if the rate of an arithmetic is unknown.
    """
    reading = (work.weight_bytes + work.cache_bytes) / rates.read_bytes
    multiplying = sum(
        count / rates.macs[arithmetic]
        for arithmetic, count in work.by_arithmetic().items()
        if count
    )
    return max(reading, multiplying)


# ---- This machine ----

_READ_BYTES = 256 << 20  # smallest array for measuring the rate of reads
# The products measured are [rows, 2048] by [2048, 2048]. These are large enough for full speed, and
# small enough for a processor's cache.
_ROWS, _SQUARE = 512, 2048
_FEW_ROWS = 32  # rows of a pass over a block


@dataclass(frozen=True)
class Machine:
    """This machine's rates per second. int8 is measured with 512 rows and with 32 rows, fp32 with
    512.
    """

    read_bytes_per_s: float
    int8_macs_per_s: float
    int8_macs_per_s_32_rows: float
    fp32_macs_per_s: float

    def rates(self) -> Rates:
        """The rates for ``limit_s``: the faster of the two int8 rates, and the fp32 rate for full
        precision.

        Full precision includes fp16, because the CPU kernels of ONNX Runtime convert fp16 to fp32
        on processors that cannot multiply fp16.
        """
        int8 = max(self.int8_macs_per_s, self.int8_macs_per_s_32_rows)
        return Rates(self.read_bytes_per_s, {"int8": int8, FULL: self.fp32_macs_per_s})


def measure(threads: int, rounds: int = 9) -> Machine:
    """Measure this machine with ONNX Runtime on ``threads`` threads; 0 means all cores.

    Each rate is the median of ``rounds`` runs, where the kinds of measurement take turns. The rate
    of reads is that of ReduceSum over the rows of an array of at least 256 MiB and at least four
    times the last-level cache. Unlike a numpy loop, this operator reads every byte once, is limited
    by memory, and uses the engine's threads. In products, the right operand is constant like a
    weight, so ONNX Runtime packs it once. The int8 rate is that of MatMulInteger of uint8 by int8.
    Raises ModuleNotFoundError without onnx.
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
        # Sessions take turns, so the threads of an idle session must not spin.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda: session.run(None, {"x": x})

    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (_SQUARE, _SQUARE), np.int8)
    inputs = rng.integers(0, 256, (_ROWS, _SQUARE), np.uint8)
    # There are more rows than threads, and each row is long.
    large = np.ones((256, _read_bytes() // 1024), np.float32)
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
            # The first run is not timed, because the previous measurement has removed this one's
            # operands from the processor's cache.
            run()
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    rate = {name: amount / statistics.median(seconds[name]) for name, (_, amount) in probes.items()}
    return Machine(rate["read"], rate["int8"], rate["few"], rate["fp32"])


def _read_bytes() -> int:
    """The size of the array for measuring the rate of reads.

    It is four times the last-level caches, but at most a quarter of the free memory.
    """
    from dlm_export.memory import available_memory_bytes

    wanted = max(_READ_BYTES, 4 * last_level_cache_bytes())
    free = available_memory_bytes()
    return wanted if free is None else min(wanted, free // 4)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Total size of all caches of the highest level that Linux reports. 0 if it is unknown."""
    found: dict[tuple[int, str], int] = {}  # a cache is listed by every core that shares it
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
