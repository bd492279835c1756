"""Counts the work of a pass, and computes the shortest time in which a machine can do the work.

The module implements the roofline model (doi:10.1145/1498765.1498785). The model counts the work
that every implementation has to do:

- read every weight once,
- read the cached keys and values of every token once, and write the keys and values of every new
  token,
- compute the multiply-adds of all matrix products.

Activations are not counted, because they may stay in a processor's cache. Norms, rotations, softmax
and the choice of tokens are not counted either. Because the model ignores this work, real times are
always longer than ``limit_s``.

``measure`` measures a CPU's rates with ONNX Runtime, because no bundle computes matrix products
faster than ONNX Runtime. The measurement uses as many threads as the bundle.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.network.spec import HEAD, NetworkSpec
from dlm_runtime.cache_dtypes import CACHE_DTYPES, CACHE_ROWS, CPU_CACHES

FULL = "full"  # the name for the number format of unquantised parts, which is fp32, fp16 or bf16


@dataclass(frozen=True)
class Work:
    """The work of one pass.

    - ``weight_bytes``: number of bytes of weights to read.
    - ``cache_bytes``: number of bytes of keys and values to read and to write.
    - ``macs``: numbers of multiply-adds. The keys are strings such as ``head.int8``. The word
      before the dot is ``layers``, ``attention`` or ``head``. The word after the dot is the number
      format of the operands: ``full``, ``int8``, ``fp8`` or ``nvfp4``.
    """

    weight_bytes: int
    cache_bytes: int
    macs: Mapping[str, int]

    def by_arithmetic(self) -> dict[str, int]:
        """Return a dict that maps each operand format to its count of multiply-adds."""
        out: Counter[str] = Counter()
        for kind, count in self.macs.items():
            out[kind.rpartition(".")[2]] += count
        return dict(out)


@dataclass(frozen=True)
class Rates:
    """A machine's rates: bytes read from memory per second, and multiply-adds per second.

    ``macs`` contains a rate for each operand format. Vendors count a multiply-add as two
    operations.
    """

    read_bytes: float
    macs: Mapping[str, float]


def cache_bytes_by_type(network: NetworkSpec) -> dict[str, int]:
    """Map each cache type to the number of bytes for the keys and values of one token."""
    return {name: network.cache_bytes(*CACHE_ROWS[CACHE_DTYPES[name]]) for name in CPU_CACHES}


@dataclass(frozen=True)
class _MatrixKind:
    """A group of ``number`` matrices with the same cost.

    Each matrix consists of ``experts`` equal parts, one for each expert. A layer without experts
    counts as one expert. The part of an expert takes ``expert_bytes`` bytes, and consists of
    ``expert_macs`` elements. ``share`` is the fraction of all tokens that an expert computes.
    """

    number: int
    part: str
    arithmetic: str
    experts: int
    share: float
    expert_macs: int
    expert_bytes: int


@dataclass(frozen=True, eq=False)
class Costs:
    """The costs of a denoiser's weights and passes in one precision.

    - ``layers``: maps each quantised layer to its format, a key of ``FORMATS``. All other layers are
      in full precision.
    - ``element_bytes``: number of bytes of each unquantised element, 4 or 2. It is also the default
      for the embedding table and the cache.
    - ``table_bytes``: number of bytes of each element of an unquantised embedding table.

    Scales are counted as fp32. The matrices of low-rank updates for draft passes are counted for all
    passes.
    """

    network: NetworkSpec
    layers: Mapping[str, str]
    element_bytes: int = 4
    table_bytes: int | None = None

    @functools.cached_property
    def _kinds(self) -> tuple[_MatrixKind, ...]:
        """The network's matrices, grouped by their cost."""
        found: Counter[tuple[str, str, int, float, int, int]] = Counter()
        for layer in self.network.linear_layers():
            chosen, elements = (
                FORMATS[self.layers.get(layer.path, HIGH)],
                layer.inputs * layer.outputs,
            )
            plain_bytes = (self.table_bytes if layer.is_tied else None) or self.element_bytes
            size = (
                plain_bytes * elements
                if chosen.weights is None
                else chosen.weight_bytes(layer.inputs, layer.outputs)
            )
            part, arithmetic = HEAD if layer.role == HEAD else "layers", chosen.activations or FULL
            found[part, arithmetic, layer.count, layer.share, elements, size] += 1
        for layer, update in self.network.draft_updates().values():
            elements = update.rank * (layer.inputs + layer.outputs)
            found["layers", FULL, 1, 1.0, elements, self.element_bytes * elements] += 1
        return tuple(_MatrixKind(number, *kind) for kind, number in found.items())

    @functools.cached_property
    def _held_table_bytes(self) -> int:
        """The size in bytes of the embedding table, which a tied head uses too."""
        if self.network.tied_head:
            return sum(kind.expert_bytes for kind in self._kinds if kind.part == HEAD)
        elements = self.network.vocab_size * self.network.hidden_size
        return (self.table_bytes or self.element_bytes) * elements

    @property
    def weight_bytes(self) -> int:
        """The size of all weights in bytes, including the embedding table and scales.

        If the head and the embedding share a table, the table is counted once, in the head's format.
        """
        matrices = sum(kind.number * kind.experts * kind.expert_bytes for kind in self._kinds)
        table = 0 if self.network.tied_head else self._held_table_bytes
        return self.element_bytes * self.network.vector_elements + matrices + table

    @property
    def file_bytes(self) -> int:
        """The size in bytes of a bundle's weight file, without padding.

        The file contains the weights, the rotary tables, and a bias for each token of the
        vocabulary.
        """
        c = self.network
        rotary = c.rotary_copies * sum(table.size for table in c.rotary_tables())
        elements = c.max_canvas_length * rotary
        return self.weight_bytes + self.element_bytes * elements + 4 * c.vocab_size

    def work(
        self,
        tokens: int,
        cached: int,
        rows: int,
        batch: int = 1,
        *,
        cache_dtype: str | None = None,
        all_experts: bool = False,
    ) -> Work:
        """Count the work of a pass over ``batch`` canvases.

        A pass reads only the experts that the router chooses, unless ``all_experts`` is true. The
        function counts the expected number of these experts, and assumes that all experts are
        equally likely. A block does not use more experts than its router allows.

        Args:
            tokens: Number of tokens that the pass computes, per canvas.
            cached: Number of tokens whose keys and values are in the cache, per canvas.
            rows: Number of rows of logits that the pass computes, per canvas.
            batch: Number of canvases.
            cache_dtype: The cache's type, as in the manifest.
            all_experts: Count all experts of a layer for every token.
        """
        network = self.network
        looked_up = batch * tokens * self._held_table_bytes // network.vocab_size
        weight_bytes = self.element_bytes * network.vector_elements + looked_up
        macs: Counter[str] = Counter()
        most_experts, block = math.inf, network.visible_block
        if network.block_experts is not None and block is not None and not all_experts:
            most_experts = network.block_experts * batch * -(-tokens // block)
        for kind in self._kinds:
            scored = batch * (rows if kind.part == HEAD else tokens)
            if scored == 0:
                continue
            share = 1.0 if all_experts else kind.share
            reached = min(kind.experts * (1 - (1 - share) ** scored), most_experts)
            weight_bytes += kind.number * round(reached * kind.expert_bytes)
            macs[f"{kind.part}.{kind.arithmetic}"] += (
                kind.number * round(scored * kind.experts * share) * kind.expert_macs
            )
        # Attention computes two products: of queries and keys, and of attention weights and values.
        # Every token attends to all cached tokens and all tokens of the pass. A layer with a window
        # has only the cached tokens in its window.
        near = cached if network.cache_window is None else min(cached, network.cache_window)
        pairs = sum(
            layer.attention.heads
            * layer.attention.head_size
            * ((cached if window is None else near) + tokens)
            for layer, window in zip(network.layers, network.cache_windows(), strict=True)
        )
        macs[f"attention.{FULL}"] = batch * 2 * tokens * pairs
        row = (self.element_bytes, 0) if cache_dtype is None else CACHE_ROWS[cache_dtype]
        cache_bytes = batch * network.cache_bytes_of(cached + tokens, near + tokens, *row)
        return Work(weight_bytes, cache_bytes, dict(macs))


def limit_s(work: Work, rates: Rates) -> float:
    """Compute the shortest possible time for ``work``, in seconds.

    The result is either the time to read all bytes or the time to do all multiply-adds, whichever
    is longer, because reading and arithmetic can overlap. The times of multiply-adds in different
    formats are added, because all multiply-adds use the same units of the processor. Raises
    KeyError if the rate of a format is unknown.
    """
    reading = (work.weight_bytes + work.cache_bytes) / rates.read_bytes
    multiplying = sum(
        count / rates.macs[arithmetic]
        for arithmetic, count in work.by_arithmetic().items()
        if count
    )
    return max(reading, multiplying)


# ---- This machine ----

_READ_BYTES = 256 << 20  # smallest size in bytes of the array for measuring the memory bandwidth
# The measured matrix products are [rows, 2048] x [2048, 2048]. The matrices are large enough for
# full speed, and small enough for a processor's cache.
_ROWS, _SQUARE = 512, 2048
_FEW_ROWS = 32  # number of rows in a pass over one block


@dataclass(frozen=True)
class Machine:
    """The measured rates of this machine.

    All rates except ``int8_macs_per_s_32_rows`` were measured with matrices of 512 rows.
    """

    read_bytes_per_s: float
    int8_macs_per_s: float
    int8_macs_per_s_32_rows: float
    fp32_macs_per_s: float

    def rates(self) -> Rates:
        """Convert the measured rates to the ``Rates`` that ``limit_s`` needs.

        The result contains the faster of the two int8 rates. All unquantised parts get the rate of
        fp32. Parts in fp16 get this rate too, because ONNX Runtime converts fp16 to fp32 on
        processors that cannot multiply fp16.
        """
        int8 = max(self.int8_macs_per_s, self.int8_macs_per_s_32_rows)
        return Rates(self.read_bytes_per_s, {"int8": int8, FULL: self.fp32_macs_per_s})


def measure(threads: int, rounds: int = 9) -> Machine:
    """Measure this machine's rates with ONNX Runtime on ``threads`` threads.

    ``threads=0`` means all cores. The function measures every rate once in each of ``rounds``
    rounds, and returns the median of each rate. Raises ModuleNotFoundError if onnx is not
    installed.

    The memory bandwidth is measured with the operator ReduceSum, which reads a large array once.
    ``_read_bytes`` determines the size of the array.

    The int8 rate is measured with MatMulInteger of uint8 and int8. In all matrix products, the
    right operand is a constant, like a weight, so that ONNX Runtime packs the right operand only
    once.
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
        # Prevent the threads of an idle session from using the processor.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda: session.run(None, {"x": x})

    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (_SQUARE, _SQUARE), np.int8)
    inputs = rng.integers(0, 256, (_ROWS, _SQUARE), np.uint8)
    # Use more rows than threads, so that all threads read memory.
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
            # Run the operator once without timing, because the previous measurement has removed the
            # operands from the processor's cache.
            run()
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    rate = {name: amount / statistics.median(seconds[name]) for name, (_, amount) in probes.items()}
    return Machine(rate["read"], rate["int8"], rate["few"], rate["fp32"])


def _read_bytes() -> int:
    """Return the size of an array that is larger than the caches but fits into free memory."""
    from dlm_export.machine import last_level_cache_bytes
    from dlm_export.memory import available_memory_bytes

    wanted = max(_READ_BYTES, 4 * last_level_cache_bytes())
    free = available_memory_bytes()
    return wanted if free is None else min(wanted, free // 4)
