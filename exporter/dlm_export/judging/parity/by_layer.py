"""Compares each layer of a graph with the same layer in torch, for the same input.

In a quantised network, whole passes of two correct implementations may differ a lot because of
rounding. A value near the boundary between two quantisation codes may get either code, and all
later layers amplify the difference.

For this reason, this module compares the layers one by one. The graph runs part by part, and
returns the input and output of every quantised layer. Torch computes the same layers. The
comparison of a layer has four steps:

1. The layer's input in torch is compared with the layer's input in the graph. This comparison
   checks the operators between the previous layer and this layer.
2. Torch computes the layer from the graph's input, instead of torch's own input.
3. Torch's output is compared with the graph's output. This comparison checks the layer itself.
4. Torch continues with the graph's output, instead of torch's own output.

The comparisons of all layers together check the whole graph, and differences of several layers do
not add up. Memory contains one part of the graph at a time.

Torch also computes whole passes without using any value of the graph. The difference between
torch's and the graph's final logits is reported, but no tolerance applies to the difference.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from dlm_calibration.precision_rounding import FP32, quantise_activation
from dlm_calibration.precisions import FORMATS, HIGH
from dlm_calibration.solvers import rotate
from dlm_calibration.states import Draft
from dlm_export import families
from dlm_export.graph import GRAPH_FILE
from dlm_export.graph.parts import END, Part, cut
from dlm_export.graph.taps import ROUTES, SHOWN, Tap, show
from dlm_export.judging.parity.canvases import Canvas, make_canvases, random_prompts
from dlm_export.judging.parity.graph_parts import Values, full_pass, run_parts
from dlm_export.judging.parity.verdict import (
    LOGITS,
    PART_TOLERANCES,
    ROUTER,
    LayerRow,
    Parity,
    graph_rows,
    rounded,
)
from dlm_export.memory import give_back
from dlm_export.network.experts import BlockRows, RoutedMLPs, Router, Stacked
from dlm_export.network.layered import HEAD_COLUMNS, Carried, ReadTensor, named
from dlm_export.network.linear import activate
from dlm_export.network.spec import EMBEDDING, NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.workplace import Workplace

# An input near the boundary between two quantisation codes may get either code. An input is near
# the boundary if its relative distance is smaller than ``_BOUNDARY``. This value is a few times the
# relative rounding error of fp32.
_BOUNDARY = 2.0**-20
SEED = 0  # of the random canvases and soft embeddings
# The largest slope of each activation function of experts, rounded up.
_STEEPEST = {"silu": 1.1, "gelu-tanh": 1.13}


def units(network: NetworkSpec) -> int:
    """Return the number of times that ``check_layers`` calls ``on_done``."""
    return len(network.layers) + 2


def largest_bytes(network: NetworkSpec) -> int:
    """Return the number of bytes of memory that ``check_layers`` needs.

    The result is the size of two fp32 copies of the network's largest part: the original and the
    quantised copy.
    """
    sizes: dict[str, int] = defaultdict(int)
    for name, shape in network.parameters().items():
        sizes[".".join(name.split(".")[:2])] += math.prod(shape)
    return 2 * 4 * max(sizes.values())


@torch.no_grad()
def check_layers(
    folder: Path,
    network: NetworkSpec,
    done: Quantisation,
    base: str,
    taps: Mapping[str, Tap],
    *,
    cache_dtype: str,
    is_simulated: bool,
    on_done: Callable[[], None],
    workplace: Workplace | None = None,
) -> Parity:
    """Compare each layer of a bundle with torch, on one random canvas per mask ratio.

    If the network has self-conditioning, every second canvas is computed in a draft pass, with
    random soft embeddings.

    Args:
        folder: The bundle.
        network: The description of the bundle's network.
        done: The quantised weights and ranges from which the graph was made.
        base: The precision of all unquantised parts.
        taps: Maps each layer to the names of its input and output in the graph.
        cache_dtype: The value of ``cache_dtype`` in the manifest.
        is_simulated: The value of ``is_simulated`` in the manifest.
        on_done: Called after each part of the graph, ``units`` times in total.
        workplace: The memory and device to use.

    Raises:
        DlmError: The graph cannot be run.
    """
    canvases = make_canvases(network, random_prompts(network, 1, SEED), SEED)
    parts = cut(ir.load(folder / GRAPH_FILE))
    for part in parts:
        show(part.model, taps)
    wanted = {name for part in parts for name in part.outputs if name.startswith(SHOWN)} | {LOGITS}
    drafts = _drafts(network, canvases)
    beside = _Beside(done, taps, canvases, drafts, cache_dtype, workplace or Workplace())
    passes = []
    for batch in beside.equal.batches:
        read = beside.equal.conditioning(batch)
        passes.append(
            full_pass(
                network,
                cache_dtype,
                batch.ids.numpy(),
                np.stack([canvases[number].rows for number in batch.numbers]),
                beside.layered.positions(batch).cpu().numpy(),
                None if read is None else read.numpy(),
            )
        )
    for part, shown in run_parts(folder, parts, passes, wanted, is_simulated=is_simulated):
        beside.run(part, shown)
        on_done()
    graph = graph_rows(canvases, beside.found, beside.expected)
    return Parity(
        f"quantised, {base}" if done.formats else base,
        rounded(PART_TOLERANCES[base], cache_dtype, network.visible_block),
        graph,
        [],
        layers=list(beside.rows.values()),
    )


def _drafts(network: NetworkSpec, canvases: Sequence[Canvas]) -> list[Draft | None]:
    """Return a draft pass over every second canvas, if the network has self-conditioning."""
    rng, found = np.random.default_rng(SEED), list[Draft | None]()
    for number, canvas in enumerate(canvases):
        draft, length = None, len(canvas.tokens)
        if network.conditioning is not None and number % 2:
            soft = rng.normal(size=(length, network.hidden_size)).astype(np.float32)
            draft = Draft(0, soft)
        found.append(draft)
    return found


class _Beside:
    """Computes in torch what the graph computes, and compares every layer.

    Torch makes two passes at the same time. In the pass ``equal``, the graph's values replace
    torch's values before and after each layer. In the pass ``alone``, torch uses only its own
    values.

    ``rows`` contains one result per quantised layer. If the head is not quantised, ``rows`` also
    contains one result for the logits. After the last part of the graph, ``found`` contains the
    graph's logits, and ``expected`` contains the logits of the pass ``alone``. For each canvas,
    ``found`` and ``expected`` contain an array ``[R, V]``, for R rows and V tokens.
    """

    def __init__(
        self,
        done: Quantisation,
        taps: Mapping[str, Tap],
        canvases: Sequence[Canvas],
        drafts: Sequence[Draft | None],
        cache_dtype: str,
        workplace: Workplace,
    ) -> None:
        self.done, self.taps, self.canvases = done, taps, canvases
        self.layered = families.layered(
            done.parameters, done.parameters.network, device=workplace.device
        )
        if done.recipe.embedding is not None or done.has_tied_table:
            self.layered.read = functools.partial(read_rounded, done, self.layered.read)
        tokens = [canvas.tokens for canvas in canvases]
        self.equal, self.alone = (
            Carried(self.layered, tokens, cache_dtype=cache_dtype, drafts=drafts) for _ in range(2)
        )
        self.rows: dict[str, LayerRow] = {}
        self.found: list[np.ndarray] = []
        self.expected: list[np.ndarray] = []
        # The values that the graph computed in the current part, with one mapping per batch.
        self._shown: list[Values] = []
        # The blocks of the pass that computes now, for each mixture of experts.
        self._blocks: dict[str, BlockRows | None] = {}

    def run(self, part: Part, shown: Sequence[Values]) -> None:
        """Compute one part of the graph in torch, and compare the layers of the part.

        ``shown`` contains the values that the graph computed in this part, with one mapping per
        batch.
        """
        # Remove the prefix that ``taps.show`` adds to the names of values.
        self._shown = [
            {name.removeprefix(SHOWN): value for name, value in each.items()} for each in shown
        ]
        if part.block is not None:
            self._block(part.block)
        elif part.name == END:
            self._end()

    def _block(self, i: int) -> None:
        block = self.layered.block(i)
        modules = named(i, block)
        layers = [layer for layer in self.done.formats if layer in modules]
        calibrate.simulate(modules, self.done, layers)
        give_back()
        self.alone.through(i, block)
        for path, module in modules.items():
            if not isinstance(module, RoutedMLPs):
                continue
            module.is_dense = f"{path}.gate" in self.taps
            # Skip experts, because a single operator of the graph computes all experts.
            if not module.is_dense:
                layers = [layer for layer in layers if not layer.startswith(f"{path}.")]
            router = modules[_router_of(path)]
            assert isinstance(router, Router)
            router.register_forward_pre_hook(functools.partial(self._note_blocks, path))
            if router.norm is not None:
                router.register_forward_pre_hook(functools.partial(self._before_router, path))
            module.register_forward_pre_hook(functools.partial(self._before_experts, path, router))
            module.register_forward_hook(functools.partial(self._after_experts, path))
        for layer in layers:
            if self.done.formats[layer] != HIGH:
                # ``calibrate.simulate`` has added a hook that quantises the layer's input. The new
                # hook must get the unquantised input, so ``prepend`` makes the new hook run first.
                modules[layer].register_forward_pre_hook(
                    functools.partial(self._before, layer), prepend=True
                )
                modules[layer].register_forward_hook(functools.partial(self._after, layer))
        self.equal.through(i, block)

    def _before(self, layer: str, _: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
        theirs = self._shown_now()[self.taps[layer].input]
        self._note_input(layer, inputs[0].cpu().numpy(), theirs)
        return torch.from_numpy(theirs).to(inputs[0].device) if np.isfinite(theirs).all() else None

    def _after(self, layer: str, module: Any, _: Any, output: Tensor) -> Tensor | None:
        values, tap = self._shown_now(), self.taps[layer]
        if tap.output not in values:
            return None
        x, theirs = values[tap.input], values[tap.output]
        if np.isfinite(x).all() and np.isfinite(theirs).all():
            weight = module.wide() if isinstance(module, Stacked) else module.weight
            slack = _slack(self.done, layer, x, weight.cpu().numpy())
            self._note_output(layer, output.cpu().numpy(), theirs, slack)
            return torch.from_numpy(theirs).to(output.device)
        self._note(layer, 0.0, float("inf"))
        return None

    def _note_blocks(self, path: str, _: Any, inputs: tuple[Any, ...]) -> None:
        self._blocks[path] = inputs[1]

    def _before_router(self, path: str, router: Any, inputs: tuple[Tensor, ...]) -> None:
        """Compare the router's inputs, whose norm is not that of the experts' inputs."""
        theirs = self._shown_now()[self.taps[_router_of(path)].input]
        self._note_input(_router_of(path), router.prepared(inputs[0]).cpu().numpy(), theirs)

    def _before_experts(
        self, path: str, router: Router, _: Any, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Compare the experts' scores, because either choice is correct if two score the same."""
        values, routes = self._shown_now(), self.taps[f"{path}{ROUTES}"]
        self._note_input(path, inputs[0].cpu().numpy(), values[self.taps[path].input])
        x = torch.from_numpy(values[self.taps[path].input]).to(inputs[0].device)
        chosen = torch.from_numpy(values[routes.input]).to(x.device, torch.int64)
        entered = torch.from_numpy(values[self.taps[_router_of(path)].input]).to(x.device)
        scores, judged = router.scores_of(entered)
        weights = router.weights_of(scores, judged, chosen)
        theirs = torch.from_numpy(values[routes.output]).to(x.device)
        for wrong, right in (
            (router.shortfall(judged, chosen, self._blocks[path]), judged),
            ((weights - theirs).abs(), weights),
        ):
            relative = float(wrong.amax() / right.abs().amax().clamp(min=1e-30))
            relative = relative if math.isfinite(relative) else math.inf
            self._note(_router_of(path), 0.0, relative)
        return x, chosen, theirs

    def _after_experts(
        self, path: str, module: RoutedMLPs, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        theirs = self._shown_now()[self.taps[path].output]
        slack = np.zeros(theirs.shape, np.float32)
        if not module.is_dense and self._format_of(path) != HIGH:
            slack = _experts_slack(self.done, path, module, *inputs).cpu().numpy()
        self._note_output(path, output.cpu().numpy(), theirs, slack)
        return torch.from_numpy(theirs).to(output.device)

    def _format_of(self, layer: str) -> str:
        """Return the number format of a layer or of a mixture of experts."""
        return self.done.formats.get(layer, self.done.formats.get(f"{layer}.gate", HIGH))

    def _shown_now(self) -> Values:
        """Return the graph's values for the batch that the pass ``equal`` computes now."""
        return self._shown[self.equal.batches.index(self.equal.now)]

    def _end(self) -> None:
        rows = [canvas.rows for canvas in self.canvases]
        places = {
            number: (i, row)
            for i, batch in enumerate(self.equal.batches)
            for row, number in enumerate(batch.numbers)
        }
        values = [
            {name: value[row] for name, value in self._shown[i].items()}
            for _, (i, row) in sorted(places.items())
        ]
        self.found = [each[LOGITS] for each in values]
        equal, alone = self.equal.features(rows), self.alone.features(rows)
        if self.done.formats.get("head", HIGH) == HIGH:
            project = self.layered.head()
            for ours, each in zip(equal, values, strict=True):
                self._note_input(LOGITS, project(ours).numpy()[None], each[LOGITS][None])
            self.expected = [project(features).numpy() for features in alone]
            return
        tap = self.taps["head"]
        x = []
        for ours, each in zip(equal, values, strict=True):
            theirs = each[tap.input]
            self._note_input("head", ours.numpy()[None], theirs[None])
            x.append(theirs if np.isfinite(theirs).all() else ours.numpy())
        counts = np.cumsum([len(each) for each in x])[:-1]
        together = _project(self.done, np.concatenate(x), np.concatenate(alone))
        results, slack, self.expected = (np.split(each, counts) for each in together)
        for mine, room, each in zip(results, slack, values, strict=True):
            self._note_output("head", mine[None], each[tap.output][None], room[None])

    def _note_input(self, layer: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        self._note(layer, max(map(_relative, ours, theirs)), None)

    def _note_output(
        self, layer: str, ours: np.ndarray, theirs: np.ndarray, slack: np.ndarray
    ) -> None:
        self._note(layer, 0.0, max(map(_relative, ours, theirs, slack)))

    def _note(self, layer: str, input_relative: float, output_relative: float | None) -> None:
        row = self.rows.get(
            layer,
            LayerRow(
                layer, ROUTER if layer.endswith(".router") else self._format_of(layer), 0.0, None
            ),
        )
        outputs = [each for each in (row.output_relative, output_relative) if each is not None]
        self.rows[layer] = LayerRow(
            layer, row.format, max(row.input_relative, input_relative), max(outputs, default=None)
        )


def _router_of(path: str) -> str:
    return f"{path.removesuffix('.experts')}.router"


def read_rounded(
    done: Quantisation,
    read: ReadTensor,
    name: str,
    dtype: torch.dtype | None,
    rows: Tensor | None = None,
) -> Tensor:
    """Read a tensor like ``Layered.read``, but round a quantised embedding table.

    The rounded values are equal to the values that the graph computes from the quantised table.
    """
    if name != EMBEDDING:
        return read(name, dtype, rows)
    table = read(name, torch.float32, rows).numpy()
    return torch.from_numpy(
        done.embedding_rows(table, np.arange(len(table)) if rows is None else rows.numpy())
    )


def _project(
    done: Quantisation, x: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the logits of a quantised head for two arrays of hidden states.

    Both arrays have the shape ``[R, hidden]``. Returns three arrays ``[R, V]``: the logits for
    ``x``, the allowed difference of each logit for ``x`` (see ``_slack``), and the logits for
    ``others``. To save memory, the function processes a few columns of the matrix at a time.
    """
    stored = done.weight("head")
    seen, others_seen = (calibrate.as_seen(done, "head", each) for each in (x, others))
    found, slack, whole = (
        np.zeros((len(each), stored.shape[1]), np.float32) for each in (x, x, others)
    )
    apart = _apart(done, "head", x)
    for start in range(0, stored.shape[1], HEAD_COLUMNS):
        columns = slice(start, start + HEAD_COLUMNS)
        weight = stored.columns(columns).dequantise()
        found[:, columns], whole[:, columns] = seen @ weight, others_seen @ weight
        if apart is not None:
            slack[:, columns] = apart @ np.abs(weight)
    if done.parameters.network.head.bias:
        bias = done.parameters.read("head.bias", FP32)
        found, whole = found + bias, whole + bias
    return found, slack, whole


def _relative(ours: np.ndarray, theirs: np.ndarray, slack: np.ndarray | float = 0.0) -> float:
    """Return the largest difference beyond ``slack``, divided by the range of ``theirs``."""
    worst = float(np.maximum(np.abs(ours - theirs) - slack, 0).max())
    return (
        worst / max(float(theirs.max() - theirs.min()), 1e-30)
        if np.isfinite(worst)
        else float("inf")
    )


def _slack(done: Quantisation, layer: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return how much each output of a layer may differ between the graph and torch.

    An input near the boundary between two quantisation codes may get a different code in torch than
    in the graph.
    """
    apart = _apart(done, layer, x)
    return (
        np.zeros((*x.shape[:-1], weight.shape[1]), np.float32)
        if apart is None
        else apart @ np.abs(weight)
    )


def _experts_slack(
    done: Quantisation, path: str, module: RoutedMLPs, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Like ``_slack``, for a mixture: the inputs of gate and up, and of down, are quantised."""
    gate, down, tokens = f"{path}.gate", f"{path}.down", x.flatten(0, -2)
    room = torch.zeros_like(tokens)
    slots, shares = chosen.flatten(0, -2), weights.flatten(0, -2)
    for expert in range(module.count):
        rows, places = (slots == expert).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        mine, share = tokens[rows], shares[rows, places, None]
        gated, wide = module.gate(mine, expert), module.up(mine, expert)
        activated = activate(gated, module.spec.activation, is_plain=False)
        hidden = activated * wide * share
        apart = _apart(done, gate, mine.cpu().numpy())
        # ``moved`` is how much each value of ``hidden`` may differ from torch's value. Even with
        # equal inputs, sums differ if their terms are added in a different order.
        moved = hidden.abs().amax(-1, keepdim=True) * _BOUNDARY
        if apart is not None:
            by_gate, by_up = (
                torch.from_numpy(apart).to(x) @ each.matrix(expert).abs()
                for each in (module.gate, module.up)
            )
            steepest = _STEEPEST[module.spec.activation]
            moved = moved + share.abs() * (
                steepest * by_gate * (wide.abs() + by_up) + activated.abs() * by_up
            )
        seen, low, high = (
            torch.from_numpy(calibrate.as_seen(done, down, each.cpu().numpy())).to(x)
            for each in (hidden, hidden - moved, hidden + moved)
        )
        room[rows] += (
            torch.maximum((high - seen).abs(), (low - seen).abs())
            @ module.down.matrix(expert).abs()
        )
    return room.view(x.shape)


def _apart(done: Quantisation, layer: str, x: np.ndarray) -> np.ndarray | None:
    """Return how much each quantised input may differ because of the order of additions.

    An input near the boundary between two codes may get either. The function finds such inputs
    by quantising slightly larger and slightly smaller copies of ``x``: once with the largest input
    of each row unchanged, so that the row's range stays the same, and once with all inputs
    changed. Returns ``None`` if no code differs.
    """
    chosen = FORMATS[done.formats[layer]]
    if chosen.activations is None:
        return None
    if layer in done.rotated:
        x = rotate(x)
    size = np.abs(x)
    inner = np.where(size < size.max(-1, keepdims=True), _BOUNDARY, 0.0).astype(np.float32)

    def rounded(moved: np.ndarray) -> np.ndarray:
        return quantise_activation(
            moved, chosen.activations or "", done.amax.get(layer), done.scale_dtype
        )

    apart = np.zeros_like(x)
    for step in (inner, np.full_like(x, _BOUNDARY)):
        apart = np.maximum(apart, np.abs(rounded(x * (1 + step)) - rounded(x * (1 - step))))
    # If the range changes slightly, all quantised values change slightly, even if the codes stay
    # the same. Ignore such small differences.
    apart[apart <= 4 * _BOUNDARY * np.abs(x)] = 0
    return apart if apart.any() else None
