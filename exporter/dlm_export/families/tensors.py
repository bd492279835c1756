"""Compares a checkpoint's tensors with the tensors that a denoiser needs.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from dlm_calibration.precision_rounding import FP16, FP32, NVFP4_GROUP_SIZE
from dlm_export.checkpoints import prequantised
from dlm_export.checkpoints.adapters import (
    DRAFT_ADAPTERS,
    WITHOUT,
    names_of,
    read_adapter,
    read_updates,
)
from dlm_export.checkpoints.folder import WEIGHT_DTYPES, Checkpoint, CheckpointError, weight_format
from dlm_export.checkpoints.prequantised import Expected
from dlm_export.families.base import Origin
from dlm_export.network.spec import NetworkSpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LISTED = 8  # maximum number of names that a message shows for each kind of error


class Tensors:
    """A checkpoint's tensors, under the names of the denoiser's parameters.

    The constructor checks the names, types and shapes of the tensors. ``quantised`` maps each
    parameter that is quantised in the checkpoint to the name of modelopt's algorithm. The
    checkpoint's ``notes`` get messages about tensors that are unused or unexpected.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        network: NetworkSpec,
        origins: Mapping[str, Origin],
        left_out: tuple[str, ...] = (),
    ) -> None:
        """Check the checkpoint's tensors against the network's parameters.

        ``left_out`` contains prefixes of names of tensors that the network does not need. Raises
        CheckpointError, which names all tensors that are missing, unknown, or wrong.
        """
        self.checkpoint, self.left_out = checkpoint, left_out
        self.shapes = network.parameters()
        self.origins = dict(origins)
        assert self.origins.keys() == self.shapes.keys(), self.origins.keys() ^ self.shapes.keys()
        self.updates = {} if network.adapter is None else read_updates(checkpoint, network.adapter)
        self.adapter = network.adapter
        self.quantised: dict[str, str] = {}
        for parameter, origin in (
            self.origins.items() if checkpoint.quantisation is not None else ()
        ):
            for piece in origin.pieces if origin.transpose else ():
                algorithm = prequantised.algorithm_of(checkpoint, piece.tensor)
                if algorithm is not None and origin.whole is None:
                    raise CheckpointError(
                        f"{checkpoint.path}: {piece.tensor} is quantised and only a part of {parameter}, which is "
                        "not supported. "
                        "Use the checkpoint that is not quantised."
                    )
                if algorithm is not None:
                    self.quantised[parameter] = algorithm
        self._check()

    def stored_type(self, parameter: str) -> np.dtype:
        if parameter in self.quantised or self.origins[parameter].scale != 1:
            return FP32
        types = {
            self.checkpoint.tensors[piece.tensor].dtype for piece in self.origins[parameter].pieces
        }
        return {"BF16": BFLOAT16, "F16": FP16}.get(types.pop(), FP32) if len(types) == 1 else FP32

    def _expected(self) -> dict[str, Expected]:
        """Return the types and shapes of the released tensors that the denoiser needs, by name."""
        expected: dict[str, Expected] = {}
        read: dict[
            str, list[tuple[int, int]]
        ] = {}  # for each fused tensor, the ranges of its rows that belong to a parameter
        for parameter, origin in self.origins.items():
            if parameter in self.quantised:
                assert origin.whole is not None
                inputs, outputs = self.shapes[parameter]
                expected |= prequantised.expected_tensors(
                    origin.whole, self.quantised[parameter], inputs, outputs
                )
                continue
            # The matrices of all experts have the same shape. Compute the shape once, because there
            # may be thousands of experts.
            if origin.is_stacked:
                (shape, *_) = origin.shapes(self.shapes[parameter])
                expected |= dict.fromkeys(
                    (piece.tensor for piece in origin.pieces),
                    Expected(tuple(WEIGHT_DTYPES), (shape,)),
                )
                continue
            for piece, shape in zip(
                origin.pieces, origin.shapes(self.shapes[parameter]), strict=True
            ):
                if piece.rows is not None:
                    read.setdefault(piece.tensor, []).append(piece.rows)
                    end = max(last for _, last in read[piece.tensor])
                    shape = (*shape[: piece.axis], end, *shape[piece.axis + 1 :])
                expected[piece.tensor] = Expected(tuple(WEIGHT_DTYPES), (shape,))
        for tensor, rows in read.items():
            ends = [0, *(last for _, last in sorted(set(rows)))]
            assert [first for first, _ in sorted(set(rows))] == ends[:-1], (
                f"{tensor}: rows {rows} are not read once each"
            )
        return expected

    def _check(self) -> None:
        tensors, expected = self.checkpoint.tensors, self._expected()
        missing = [
            name for name, wanted in expected.items() if wanted.is_required and name not in tensors
        ]
        cache = [
            name
            for name in tensors
            if name not in expected and name.endswith(prequantised.CACHE_SUFFIXES)
        ]
        extra = [
            name
            for name in tensors
            if name not in expected
            and name not in cache
            and not name.endswith("rotary_emb.inv_freq")
            and not name.startswith(self.left_out)
            and not any(name in (update.a, update.b) for update in self.updates.values())
        ]
        present = {
            name: (tensors[name], wanted) for name, wanted in expected.items() if name in tensors
        }
        mistyped = [
            f"{name} is {found.dtype}, expected {' or '.join(wanted.dtypes)}"
            for name, (found, wanted) in present.items()
            if found.dtype not in wanted.dtypes
        ]
        misshaped = [
            f"{name} is {list(found.shape)}, expected {' or '.join(str(list(shape)) for shape in wanted.shapes)}"
            for name, (found, wanted) in present.items()
            if found.shape not in wanted.shapes and found.dtype in wanted.dtypes
        ]
        undivided = [
            f"{self.origins[parameter].whole} has {self.shapes[parameter][0]} inputs"
            for parameter, algorithm in self.quantised.items()
            if weight_format(algorithm) == "nvfp4" and self.shapes[parameter][0] % NVFP4_GROUP_SIZE
        ]
        problems = [
            f"{len(names)} tensors {kind}: {_some(names)}"
            for kind, names in (
                ("missing", missing),
                ("not known", extra),
                ("of the wrong type", mistyped),
                ("of the wrong shape", misshaped),
                ("whose inputs are not a multiple of NVFP4's group size", undivided),
            )
            if names
        ]
        problems += [
            f"the adapter {self.adapter} changes {name}, which the denoiser does not read in full precision"
            for name in self.updates
            if name not in expected or tensors[name].dtype not in WEIGHT_DTYPES
        ]
        if problems:
            of_adapter = any(f"{DRAFT_ADAPTERS[0]}/" in problem for problem in problems)
            hint = f". {WITHOUT}" if of_adapter else ""
            raise CheckpointError(f"{self.checkpoint.path}: {'; '.join(problems)}{hint}")
        self._note(cache)

    def _note(self, cache: list[str]) -> None:
        said, used = self.checkpoint.quantisation, self._expected()
        unused = [
            name
            for name in self.checkpoint.tensors
            if name.startswith(self.left_out) and name not in used
        ]
        if unused:
            self.checkpoint.note(
                f"{len(unused)} tensors are left out, because the denoiser does not need them: {_some(unused)}"
            )
        for folder in names_of(self.checkpoint):
            adapter = None
            if any(name.startswith(f"{folder}/") for name in used):
                adapter = read_adapter(self.checkpoint, folder)
            if adapter is not None:
                self.checkpoint.note(adapter.describe())
            elif folder == self.adapter:
                self.checkpoint.note(
                    f"the adapter {folder} is merged into {len(self.updates)} matrices"
                )
            else:
                self.checkpoint.note(f"the adapter {folder} is left out")
        if cache:
            kind = f"{said.kv_cache} " if said is not None and said.kv_cache else ""
            self.checkpoint.note(
                f"{len(cache)} scales of a quantised {kind}cache are not used; keys and values stay in full precision: "
                f"{_some(cache)}"
            )
        kept = prequantised.not_excluded(
            self.checkpoint, (s.whole for s in self.origins.values() if s.transpose and s.whole)
        )
        if said is not None and kept:
            self.checkpoint.note(
                f"{len(kept)} matrices are in full precision, although {said.path.name} does not exclude them: {_some(kept)}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
