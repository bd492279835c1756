"""Counts the work of one pass, and computes the least time in which a machine can do it (the
roofline model, doi:10.1145/1498765.1498785).

The count includes only work that no implementation can avoid: reading every weight once, reading
every cached row and writing every new one once, and the multiply-adds of matrix products.
Activations are free, because they may stay in a processor's cache; norms, rotations, softmax and
the choice of tokens are free too. Real times therefore always exceed ``limit_s``.

A CPU's rates are measured with ONNX Runtime (``measure``), because its own products are the fastest
that a bundle can reach and it uses the engine's threads.
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

FULL = "full"  # arithmetic in the denoiser's precision: fp32, fp16 or bf16


@dataclass(frozen=True)
class Work:
    """The work of one pass.

    ``macs`` are multiply-adds by ``part.arithmetic``. The part is ``layers``, ``attention`` or
    ``head``; the arithmetic is the operands' format: ``full``, ``int8``, ``fp8`` or ``nvfp4``.
    ``cache_bytes``: S rows read and T rows written.
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
    """A machine's rates per second: bytes read from memory, and multiply-adds by arithmetic (half
    of a vendor's operations).
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
    """The work of a pass of ``tokens`` tokens with ``cached`` cached ones that scores ``rows``, for
    ``batch`` canvases.

    Scales count as fp32. Experts count as far as tokens spread evenly over them reach them on
    average.

    Args:
        network: The denoiser's description.
        layers: Module path -> key of ``FORMATS``; others are in full precision.
        tokens: Tokens of the pass, per canvas.
        cached: Cached tokens, per canvas.
        rows: Scored rows, per canvas.
        batch: Number of canvases.
        element_bytes: Bytes of an unquantised element, 4 or 2; also of table and cache by default.
        table_bytes: Bytes of an element of the embedding table.
        cache_dtype: Type of the cache, a manifest value.
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
    """Cache type of ``--cache-dtype`` -> bytes of one token's keys and values."""
    return {
        name: network.cache_bytes(*CACHE_ROWS[CACHE_DTYPES[name]])
        for name in ("fp32", "fp16", "int8")
    }


@dataclass(frozen=True)
class MatrixKind:
    """``number`` matrices of equal cost, with ``experts`` experts each; an expert has
    ``expert_bytes`` and sees ``share`` of the rows.
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
    """A network's matrices in the formats of ``layers``, grouped by cost. An unquantised tied head
    has elements of ``table_bytes``.
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
    """``work_of`` for matrices that are already grouped."""
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
    # Queries times keys, then weights times values; every token sees the cached tokens and those of
    # the pass.
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
    """Bytes of all weights, with embedding and scales; ``kinds`` come from ``kinds_of``. A tied
    table counts once, in the head's format.
    """
    matrices = sum(kind.number * kind.experts * kind.expert_bytes for kind in kinds)
    table = _table_bytes(network, kinds, table_bytes or element_bytes)
    return element_bytes * network.vector_elements + matrices + (0 if network.tied_head else table)


def file_bytes(network: NetworkSpec, weights: int, element_bytes: int) -> int:
    """Bytes of a bundle's data file without padding: weights, rotary tables, mask token bias."""
    rotary = network.max_canvas_length * sum(table.size for table in network.rotary_tables())
    return weights + element_bytes * rotary + 4 * network.vocab_size


def limit_s(work: Work, rates: Rates) -> float:
    """The least seconds for ``work``: the larger of the time to read all bytes and the time of all
    multiply-adds.

    Reading and arithmetic can overlap, so the larger counts. Different arithmetic shares the same
    units, so these times add up. Raises KeyError for an arithmetic without a rate.
    """
    reading = (work.weight_bytes + work.cache_bytes) / rates.read_bytes
    multiplying = sum(
        count / rates.macs[arithmetic]
        for arithmetic, count in work.by_arithmetic().items()
        if count
    )
    return max(reading, multiplying)


# ---- This machine ----

_READ_BYTES = 256 << 20  # smallest array for the rate of reads
# Products of [rows, 2048] by [2048, 2048]: large enough for full speed, small enough for a cache.
_ROWS, _SQUARE = 512, 2048
_FEW_ROWS = 32  # a block pass


@dataclass(frozen=True)
class Machine:
    """This machine's rates per second; int8 multiply-adds with 512 and 32 rows, fp32 with 512."""

    read_bytes_per_s: float
    int8_macs_per_s: float
    int8_macs_per_s_32_rows: float
    fp32_macs_per_s: float

    def rates(self) -> Rates:
        """Rates for ``limit_s``: the faster of the int8 rates, and fp32 for full precision,
        including fp16.

        ONNX Runtime's CPU kernels convert fp16 to fp32 if the processor cannot multiply it.
        """
        int8 = max(self.int8_macs_per_s, self.int8_macs_per_s_32_rows)
        return Rates(self.read_bytes_per_s, {"int8": int8, FULL: self.fp32_macs_per_s})


def measure(threads: int, rounds: int = 9) -> Machine:
    """Measure this machine with ONNX Runtime on ``threads`` threads (0: all cores); medians of
    ``rounds`` interleaved runs.

    The rate of reads comes from ReduceSum over the rows of an array of four times the last-level
    cache, at least 256 MiB. This operator reads every byte once, is limited by memory, and uses the
    engine's threads, unlike a numpy loop. Products have a constant right operand, like weights,
    which the library packs once. INT8 is MatMulInteger of uint8 by int8. Raises ModuleNotFoundError
    without onnx.
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
        # Sessions take turns, so idle ones must not spin.
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
            # The first run is not timed: the previous probe has evicted this one's operands from
            # the cache.
            run()
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    rate = {name: amount / statistics.median(seconds[name]) for name, (_, amount) in probes.items()}
    return Machine(rate["read"], rate["int8"], rate["few"], rate["fp32"])


def _read_bytes() -> int:
    """Size of the array for the rate of reads: four times the last-level caches, but at most a
    quarter of free memory.
    """
    from dlm_export.memory import available_memory_bytes

    wanted = max(_READ_BYTES, 4 * last_level_cache_bytes())
    free = available_memory_bytes()
    return wanted if free is None else min(wanted, free // 4)


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Total size of all caches of the highest level that Linux reports; 0 if unknown."""
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
