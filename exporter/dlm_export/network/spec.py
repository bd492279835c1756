"""Describes a denoiser as plain data, layer by layer. This module does not import torch.

The adapter of a model family reads a ``NetworkSpec`` from a checkpoint. The manifest of a bundle
stores the same description (``as_dict``, ``from_dict``). The following data is derived from this
description:

- the torch modules (``denoiser``);
- the tensors that a checkpoint must contain (``parameters``);
- the matrices that can be quantised, and the parameters into which scales of their inputs can be
  folded (``linear_layers``);
- the cache (``cache_shapes``);
- the work and memory of a pass (``planning.roofline``, ``tensorrt.estimate``).

Sizes are numbers of heads, features or tokens. A description may contain features that ``Denoiser``
does not support. ``Denoiser`` then raises an error that names the feature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from dlm_export.network.layer_spec import (
    ACTIVATIONS,
    BIASES,
    NORM_KINDS,
    NORMS,
    SCORES,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    LowRankSpec,
    MlpSpec,
    Rope,
    RouterSpec,
    has_router_bias,
    layer_from,
    rotary_table,
)
from dlm_export.network.rope_scaling import RotaryTable
from dlm_runtime.policy import Policy
from dlm_runtime.precision import LayerFormat
from dlm_runtime.presets import presets_for

__all__ = [
    "ACTIVATIONS",
    "BIASES",
    "BRANCH_NORMS",
    "CONDITIONING",
    "EMBEDDING",
    "HEAD",
    "NEVER_QUANTISED",
    "NORMS",
    "NORM_KINDS",
    "SCORES",
    "STACKS",
    "TRANSFORM",
    "UPDATES",
    "AttentionSpec",
    "ConditioningSpec",
    "EmbeddingSpec",
    "ExpertsSpec",
    "Fold",
    "HeadSpec",
    "LayerSpec",
    "LinearSpec",
    "LowRankSpec",
    "MlpSpec",
    "NetworkSpec",
    "Rope",
    "RouterSpec",
    "rotary_table",
]

PASS_TOKENS = 512
"""The largest number of tokens in a pass that stores a prompt, if a network has ``cache_windows``.
runtime/native/src/decode/pass_plan.h contains the same number.
"""
BRANCH_NORMS = ("shared_norm", "shared_out_norm", "experts_norm", "experts_out_norm")
"""Norms of a mixture of experts with ``branch_norms``: before and after the shared MLP, and before
and after the experts.
"""
STACKS = ("gate", "up", "down")
"""Roles of the three matrices of a gated MLP. The stacks of experts have the same roles."""
CONDITIONING = "embed.conditioning"
"""Module path of the block for self-conditioning. Its matrices have the role ``conditioning``."""
NEVER_QUANTISED = ("router", "transform", "conditioning")
"""Roles of linear layers that a recipe cannot quantise."""
TRANSFORM = "transform"
"""Module path and role of the matrix before the head, for networks that have such a matrix."""
HEAD = "head"
"""Module path and role of the matrix that maps features to logits."""
UPDATES = "draft_updates"
"""Part of the module paths of low-rank updates, between the path of the attention or the MLP and the
role of the matrix.
"""
OPTIONAL = ("adapter", "expand_token_id", "delete_token_id", "split_token_id")
"""Fields that ``NetworkSpec.as_dict`` leaves out if they are ``None``."""
EMBEDDING = "embed.weight"
"""Name of the embedding table ``[V, hidden]``. A tied head uses this table too."""


@dataclass(frozen=True)
class Fold:
    """Says into which parameters the scales of a layer's input can be folded.

    To fold scales, each parameter in ``parameters`` is divided by the scales along its last axis.
    In grouped-query attention, several query heads use the same value head. Several inputs of the
    ``out`` matrix then depend on the same elements of the parameters, and must have the same
    scales. The inputs of each value head form ``repeats`` groups of ``run`` consecutive inputs, and
    the scales of all these groups are equal.
    """

    parameters: tuple[str, ...]
    repeats: int = 1
    run: int = 1


@dataclass(frozen=True)
class LinearSpec:
    """A multiplication by a weight matrix ``[inputs, outputs]`` of the module at ``path``.

    - ``role``: ``head``, ``transform``, ``conditioning``, or the matrix of the layer: ``q``, ``k``,
      ``v``, ``out``, ``gate``, ``up``, ``down`` or ``router``.
    - ``site``: the path of the first matrix with the same input. Matrices with equal ``site`` have
      the same input.
    - ``fold``: the parameters into which scales of the input can be folded, if there are any.
    - ``count``, ``share``: for experts, the number of matrices of this shape, and the share of
      tokens that each expert processes.
    - ``is_tied``: True for a head that multiplies by the transposed embedding table. The head and
      the table share one parameter.
    """

    path: str
    role: str
    inputs: int
    outputs: int
    site: str
    fold: Fold | None = None
    count: int = 1
    share: float = 1.0
    is_tied: bool = False

    @property
    def weight(self) -> str:
        """Name of the parameter that contains the weight."""
        return EMBEDDING if self.is_tied else f"{self.path}.weight"

    @property
    def wide_shape(self) -> tuple[int, int]:
        """The inputs and outputs of the matrix that a GPU multiplies.

        For experts, this matrix contains the matrices of all experts: side by side, or below each
        other for ``down``.
        """
        if self.role == "down":
            return self.count * self.inputs, self.outputs
        return self.inputs, self.count * self.outputs

    @property
    def is_stacked(self) -> bool:
        """True if the weight is a stack of matrices, with one matrix for each expert.

        Each token uses only a few of the matrices.
        """
        return self.count > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter: ``[inputs, outputs]``.

        For a stack of experts' matrices, the shape is ``[experts, inputs, outputs]``. The shape of
        a tied head is ``[outputs, inputs]``.
        """
        if self.is_tied:
            return (self.outputs, self.inputs)
        return (
            (self.count, self.inputs, self.outputs)
            if self.is_stacked
            else (self.inputs, self.outputs)
        )


@dataclass(frozen=True)
class EmbeddingSpec:
    """Describes how the input of the first layer is computed from the embeddings of the tokens.

    - ``positions``: number of rows of the table of learned positions. If 0, there is no such table.
    - ``first_position``: the row of that table for position 0 of a canvas. RoBERTa does not use the
      rows before it.
    - ``padding``: the padding token, if positions count only other tokens. ``None`` if they count
      all tokens.
    - ``token_types``: number of rows of the table of token types. If 0, there is no such table. All
      tokens of a canvas have type 0.
    - ``norm``: True if a norm is applied to the sum of all embeddings of a token.
    - ``scale``: the number by which the embeddings of tokens are multiplied.
    """

    positions: int = 0
    first_position: int = 0
    token_types: int = 0
    norm: bool = False
    scale: float = 1.0
    padding: int | None = None


@dataclass(frozen=True)
class HeadSpec:
    """Describes how the logits are computed from the output of the last layer.

    - ``final_norm``: True if a norm is applied to the features of the last layer.
    - ``transform``: the name of an activation function. Some networks multiply by a matrix, apply
      this function and apply a norm before the head. ``None`` for all other networks.
    - ``transform_bias``: True if the matrix of this transform has a bias.
    - ``bias``: True if the head has a bias.
    - ``softcap``: if not ``None``, a logit ``x`` is replaced by ``softcap * tanh(x / softcap)``.
    """

    final_norm: bool = True
    transform: str | None = None
    transform_bias: bool = False
    bias: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class ConditioningSpec:
    """Describes self-conditioning: a draft pass uses the predictions of the previous draft pass.

    From the predictions for a position, the network computes a *soft embedding*: the mean of the
    embeddings of all tokens, weighted with the predicted probabilities. The input of a gated MLP
    with ``size`` features is the normalised soft embedding. The output of the MLP is added to the
    embedding of the token, and an RMSNorm without a weight is applied to the sum. In the first
    draft pass over a block, the soft embedding is 0.
    """

    size: int
    activation: str = "silu"


@dataclass(frozen=True)
class NetworkSpec:
    """The description of a denoiser, as read from its checkpoint.

    ``norm_eps`` and ``norm_kind`` are the epsilon and the kind of the norms outside layers. With
    ``shift`` 1, the logits of row i predict the token at position i + 1. ``noise`` says what
    training replaced tokens with. ``absorbing`` means the mask token. ``uniform`` means random
    tokens. A network with uniform noise has no mask token, and its ``mask_token_id`` is
    ``vocab_size``, which is not a token. ``conditioning`` describes self-conditioning, or is
    ``None``. ``unused_tokens`` contains ranges ``(first, last)`` of the ids in ``[first, last)``
    that the tokenizer does not know, because the vocabulary is padded or has gaps. They are never
    predicted. ``adapter`` is the name of the adapter that is merged into the checkpoint's weights.
    ``expand_token_id`` and ``delete_token_id`` are tokens that change the length of a canvas: two mask
    tokens replace a decided expand token, and a decided delete token is removed. Both are ``None`` if
    there are no such tokens. With ``split_token_id``, passes rewrite their block: a predicted split
    token inserts a mask token, and a predicted ``delete_token_id`` removes its position.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    max_canvas_length: int
    shift: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    noise: str = "absorbing"
    norm_kind: str = "rms"
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    conditioning: ConditioningSpec | None = None
    unused_tokens: tuple[tuple[int, int], ...] = ()
    adapter: str | None = None
    expand_token_id: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    @property
    def resizes(self) -> bool:
        """True if the decoding loop changes the length of canvases."""
        return self.expand_token_id is not None

    @property
    def rewrites(self) -> bool:
        """True if the decoding loop deletes and inserts tokens inside a block (LLaDA2.2)."""
        return self.split_token_id is not None

    @property
    def has_mask_token(self) -> bool:
        """True if a token represents undecided positions. ``mask_token_id`` is this token."""
        return self.mask_token_id < self.vocab_size

    @property
    def is_verifying(self) -> bool:
        """True if the denoiser can verify drafts in causal passes (self-speculation).

        Such a denoiser has draft passes and a mask token, or draft passes that are causal. With
        ``has_shifted_drafts``, no pass verifies drafts.
        """
        has_drafts = self.has_mask_token and not self.has_shifted_drafts
        return self.draft_block is not None and (has_drafts or self.has_causal_drafts)

    @property
    def end_token_id(self) -> int | None:
        """The token that ends a completion, and fills the rest of the completion's last block.

        ``None`` if the denoiser has no end token.
        """
        return next(iter(self.eos_token_ids), None)

    def difference(self, other: NetworkSpec, but: Sequence[str] = ()) -> str | None:
        """Describe the first field that differs from ``other``, or return ``None``.

        The fields in ``but`` are not compared.
        """
        names = [field.name for field in fields(self) if field.name not in but]
        return next(
            filter(
                None,
                (_difference(name, getattr(self, name), getattr(other, name)) for name in names),
            ),
            None,
        )

    # ---- Derived: tensors ----

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Map the name of each parameter of ``Denoiser`` to its shape, layer by layer.

        A tied head has no entry, because the head uses the embedding table.
        """
        return dict(self._parameters)

    @functools.cached_property
    def _parameters(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for name, rows in (
            ("positions", self.embedding.positions),
            ("types", self.embedding.token_types),
        ):
            if rows:
                shapes[f"embed.{name}.weight"] = (rows, self.hidden_size)
        if self.embedding.norm:
            shapes |= self._norm("embed.norm", self.norm_kind)
        if self.conditioning is not None:
            shapes |= self._norm(f"{CONDITIONING}.norm", "rms")
            shapes |= {linear.weight: linear.shape for linear in self._conditioning_layers()}
        for i, layer in enumerate(self.layers):
            block, attention = f"blocks.{i}.", layer.attention
            biased = ("q", "k", "v") * attention.qkv_bias + ("out",) * attention.out_bias
            if isinstance(layer.mlp, MlpSpec) and layer.mlp.bias:
                biased += STACKS
            for name in layer.norms:
                shapes |= self._norm(f"{block}{name}", layer.norm_kind)
            shapes |= dict.fromkeys((f"{block}{name}" for name in layer.scalars), (1,))
            if isinstance(layer.mlp, ExpertsSpec):
                shapes |= self._mixture_vectors(f"{block}mlp.", layer.mlp)
            for linear in self._linear_layers_of(f"blocks.{i}", layer):
                shapes[linear.weight] = linear.shape
                if linear.role in biased or (linear.role == "router" and has_router_bias(layer)):
                    shapes[f"{linear.path}.bias"] = (linear.outputs,)
            for path, (linear, update) in self._draft_updates_of(i, layer).items():
                shapes[f"{path}.a"] = (linear.inputs, update.rank)
                shapes[f"{path}.b"] = (update.rank, linear.outputs)
            if attention.qk_norm:
                shapes |= {
                    f"{block}attention.{name}.weight": (attention.head_size,)
                    for name in ("q_norm", "k_norm")
                }
        if self.head.final_norm:
            shapes |= self._norm("final_norm", self.norm_kind)
        if self.head.transform is not None:
            shapes[f"{TRANSFORM}.weight"] = (self.hidden_size, self.hidden_size)
            if self.head.transform_bias:
                shapes[f"{TRANSFORM}.bias"] = (self.hidden_size,)
            shapes |= self._norm(f"{TRANSFORM}.norm", self.norm_kind)
        if not self.tied_head:
            shapes["head.weight"] = (self.hidden_size, self.vocab_size)
        if self.head.bias:
            shapes["head.bias"] = (self.vocab_size,)
        return shapes

    def _mixture_vectors(self, mixture: str, experts: ExpertsSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the norms and expert scales of a mixture of experts."""
        shapes: dict[str, tuple[int, ...]] = {}
        if experts.branch_norms:
            for name in BRANCH_NORMS:
                shapes |= self._norm(f"{mixture}{name}", "rms")
        if experts.router.has_norm:
            shapes |= self._norm(f"{mixture}router.norm", "rms")
        if experts.router.has_expert_scales:
            shapes[f"{mixture}router.expert_scales"] = (experts.count,)
        return shapes

    def _norm(self, path: str, kind: str) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(_norm_parameters(path, kind), (self.hidden_size,))

    def parameter_count(self) -> int:
        """Return the number of parameters. A tied head and the embedding are counted once."""
        return sum(math.prod(shape) for shape in self._parameters.values())

    def active_parameter_count(self) -> int:
        """Return the number of parameters that a pass uses for one token.

        Only the experts that the router chooses for the token are counted.
        """
        idle = (
            round(math.prod(linear.shape) * (1 - linear.share)) for linear in self.linear_layers()
        )
        return self.parameter_count() - sum(idle)

    @functools.cached_property
    def vector_elements(self) -> int:
        """Number of elements of all norms and biases."""
        return sum(math.prod(shape) for shape in self._parameters.values() if len(shape) == 1)

    # ---- Derived: matrices ----

    def largest_matrix(self) -> int:
        """Return the number of elements of the largest matrix except the head."""
        return max(
            linear.inputs * linear.outputs
            for linear in self.linear_layers()
            if linear.role != "head"
        )

    def linear_layers(self) -> tuple[LinearSpec, ...]:
        """Return every multiplication by a weight matrix, in the order of computation."""
        return self._linear_layers

    @functools.cached_property
    def _linear_layers(self) -> tuple[LinearSpec, ...]:
        found = self._conditioning_layers()
        found += [
            linear
            for i, layer in enumerate(self.layers)
            for linear in self._linear_layers_of(f"blocks.{i}", layer)
        ]
        before = "final_norm" if self.head.final_norm else None
        if self.head.transform is not None:
            size, before = self.hidden_size, f"{TRANSFORM}.norm"
            found.append(LinearSpec(TRANSFORM, TRANSFORM, size, size, TRANSFORM))
        # Scales of a tied head's input cannot be folded, because the embedding uses the same
        # matrix.
        fold = None
        if before is not None and not self.tied_head:
            fold = Fold(_norm_parameters(before, self.norm_kind))
        found.append(
            LinearSpec(
                HEAD, HEAD, self.hidden_size, self.vocab_size, HEAD, fold, is_tied=self.tied_head
            )
        )
        return tuple(found)

    def _conditioning_layers(self) -> list[LinearSpec]:
        if self.conditioning is None:
            return []
        layers = self._gated(CONDITIONING, self.conditioning.size, f"{CONDITIONING}.gate", None)
        return [replace(layer, role="conditioning", fold=None) for layer in layers]

    def _linear_layers_of(self, block: str, layer: LayerSpec) -> list[LinearSpec]:
        a, hidden = layer.attention, self.hidden_size

        def norm(name: str) -> Fold | None:
            if name not in layer.norms:
                return None
            return Fold(_norm_parameters(f"{block}.{name}", layer.norm_kind))

        site, fold = f"{block}.attention.q", norm("attention_norm")
        heads = {"q": a.heads, "k": a.kv_heads} | ({"v": a.kv_heads} if a.has_values else {})
        found = [
            LinearSpec(f"{block}.attention.{role}", role, hidden, count * a.head_size, site, fold)
            for role, count in heads.items()
        ]
        out, value = f"{block}.attention.out", f"{block}.attention.v"
        # Scales cannot be folded into the value matrix if values are normed, or if keys and values
        # have the same matrix.
        values = None
        if a.has_values and not a.value_norm:
            values = Fold(
                (f"{value}.weight", *((f"{value}.bias",) if a.qkv_bias else ())),
                repeats=a.group,
                run=a.head_size,
            )
        found.append(LinearSpec(out, "out", a.heads * a.head_size, hidden, out, values))
        fold = norm("mlp_norm")
        if isinstance(layer.mlp, MlpSpec):
            return found + self._mlp(f"{block}.mlp", layer.mlp, fold)
        experts, mixture = layer.mlp, f"{block}.mlp"
        router = experts_site = shared_site = f"{mixture}.router"
        of_router = of_experts = of_shared = fold
        if experts.router.has_norm:
            of_router = Fold((f"{router}.norm.weight",))
        if experts.branch_norms:
            experts_site, shared_site = f"{mixture}.experts.gate", f"{mixture}.shared.gate"
            of_experts = Fold((f"{mixture}.experts_norm.weight",))
            of_shared = Fold((f"{mixture}.shared_norm.weight",))
        found.append(LinearSpec(router, "router", hidden, experts.count, router, of_router))
        share = experts.active / experts.count
        found += self._gated(
            f"{mixture}.experts", experts.size, experts_site, of_experts, experts.count, share
        )
        if experts.shared_size:
            found += self._gated(f"{mixture}.shared", experts.shared_size, shared_site, of_shared)
        return found

    def _mlp(self, module: str, mlp: MlpSpec, fold: Fold | None) -> list[LinearSpec]:
        up, down = f"{module}.up", f"{module}.down"
        if mlp.is_gated:
            found = self._gated(module, mlp.size, f"{module}.gate", fold)
            if mlp.bias:
                found[-1] = replace(found[-1], fold=Fold((f"{up}.weight", f"{up}.bias")))
            return found
        # Scales of the down matrix's input cannot be folded into the up matrix, because the
        # activation function is between the two matrices.
        return [
            LinearSpec(up, "up", self.hidden_size, mlp.size, up, fold),
            LinearSpec(down, "down", mlp.size, self.hidden_size, down),
        ]

    def _gated(
        self,
        module: str,
        size: int,
        site: str,
        fold: Fold | None,
        count: int = 1,
        share: float = 1.0,
    ) -> list[LinearSpec]:
        down, hidden = f"{module}.down", self.hidden_size
        return [
            LinearSpec(f"{module}.gate", "gate", hidden, size, site, fold, count, share),
            LinearSpec(f"{module}.up", "up", hidden, size, site, fold, count, share),
            LinearSpec(
                down, "down", size, hidden, down, Fold((f"{module}.up.weight",)), count, share
            ),
        ]

    @property
    def has_draft_updates(self) -> bool:
        """True if any layer has low-rank updates for draft passes."""
        return any(layer.draft_updates for layer in self.layers)

    def draft_updates(self) -> dict[str, tuple[LinearSpec, LowRankSpec]]:
        """Map the module path of each low-rank update to the updated matrix and the update.

        The parameters of the update are the path plus ``.a``, and the path plus ``.b``.
        """
        return {
            path: found
            for i, layer in enumerate(self.layers)
            for path, found in self._draft_updates_of(i, layer).items()
        }

    def _draft_updates_of(
        self, i: int, layer: LayerSpec
    ) -> dict[str, tuple[LinearSpec, LowRankSpec]]:
        if not layer.draft_updates:
            return {}
        by_role = {linear.role: linear for linear in self._linear_layers_of(f"blocks.{i}", layer)}
        found = {}
        for update in layer.draft_updates:
            linear = by_role[update.role]
            part, _, role = linear.path.rpartition(".")
            found[f"{part}.{UPDATES}.{role}"] = linear, update
        return found

    def mixtures(self) -> list[tuple[LinearSpec, LinearSpec, LinearSpec]]:
        """Return the gate, up and down matrices (stacks) of every mixture of experts."""
        stacks = [layer for layer in self.linear_layers() if layer.is_stacked]
        return list(zip(stacks[::3], stacks[1::3], stacks[2::3], strict=True))

    @property
    def suits_moe(self) -> bool:
        """True if ONNX Runtime's operators MoE and QMoE can compute all mixtures of experts.

        ``graph.cuda_experts`` names the sources. The operators have silu-gated experts, but none
        that are gated by gelu-tanh. Kernels for INT4 and INT8 weights read 64 inputs at once. The
        routing weights must be positive, because MoE gets their logarithms.
        """
        mixtures = [each.mlp for each in self.layers if isinstance(each.mlp, ExpertsSpec)]
        return all(
            spec.activation == "silu"
            and spec.router.bias != "weights"
            and not spec.router.has_expert_scales
            and spec.size % 64 == self.hidden_size % 64 == 0
            for spec in mixtures
        )

    def joins_experts(self, form: str) -> bool:
        """Return whether a graph with quantised experts joins the matrices of all experts.

        Such a graph computes all experts for every token. ``form`` is a ``graph.quantise.Form``.
        """
        return form == "tensorrt" or (form == "cuda" and not self.suits_moe)

    def slow_on_cuda(self, layer: LinearSpec, chosen: LayerFormat) -> str | None:
        """See ``LayerFormat.slow_on_cuda``. QMoE has fast kernels for experts in all formats."""
        if layer.is_stacked and self.suits_moe:
            return None
        return chosen.slow_on_cuda(*layer.wide_shape)

    def quantisable(self) -> dict[str, LinearSpec]:
        """Return the linear layers that a recipe may quantise. The keys are their paths.

        With self-conditioning, a recipe cannot quantise a tied head, because the soft embeddings
        are also computed from the embedding table.
        """
        return {
            layer.path: layer
            for layer in self.linear_layers()
            if layer.role not in NEVER_QUANTISED
            and not (layer.is_tied and self.conditioning is not None)
        }

    def units(self) -> dict[str, tuple[LinearSpec, ...]]:
        """Return the groups of layers that must have the same format. The keys are their paths.

        A group is one quantisable layer, or all matrices of a mixture of experts. The groups are in
        the order in which a pass computes them.
        """
        found: dict[str, tuple[LinearSpec, ...]] = {}
        for path, layer in self.quantisable().items():
            unit = path.removesuffix(f".{layer.role}") if layer.is_stacked else path
            found[unit] = (*found.get(unit, ()), layer)
        return found

    # ---- Derived: cache and positions ----

    @property
    def visible_block(self) -> int | None:
        """The smallest block length with which no query attends to a key of a later block.

        The block length is the same for all layers, and the first block starts at position 0, or
        at the end of the prompt (see ``blocks_after_prompt``). The value is ``None`` if any layer
        has full attention.
        """
        visible = [layer.attention.visible_block for layer in self.layers]
        return None if None in visible else math.lcm(*(n for n in visible if n is not None))

    @property
    def draft_block(self) -> int | None:
        """Number of tokens of a draft pass in training. ``None`` if the network has no draft passes.

        All layers have the same kind of draft passes.
        """
        drafts = {layer.attention.draft_block for layer in self.layers}
        return drafts.pop() if len(drafts) == 1 else None

    @property
    def block_experts(self) -> int | None:
        """The largest number of experts that a block of a layer uses, or ``None`` for no limit."""
        limits = [
            layer.block_experts for layer in self.layers if isinstance(layer.mlp, ExpertsSpec)
        ]
        known = [limit for limit in limits if limit is not None]
        return max(known) if known and len(known) == len(limits) else None

    @property
    def has_causal_drafts(self) -> bool:
        """True if the network is autoregressive, and drafts tokens in causal passes.

        A pass may end with draft rows, which contain mask tokens, or random tokens if there is no
        mask token. They use the network's low-rank updates, if there are any. Each row of any pass
        predicts the next position. See Uno (arXiv:2609.04010) and I-DLM (arXiv:2604.11035).
        """
        return all(layer.attention.has_causal_drafts for layer in self.layers)

    @property
    def has_shifted_drafts(self) -> bool:
        """True if the rows of a draft pass attend to each other, and predict the next positions.

        The first token of a draft pass is the last decided token, and all others are mask tokens.
        Draft passes decide the text, and causal rows only store keys and values (SDLM,
        arXiv:2509.24007).
        """
        return self.draft_block is not None and self.shift == 1 and not self.has_causal_drafts

    def presets(self) -> dict[str, Policy]:
        """Return the presets for this network. If it cannot use a cache, no preset uses one."""
        own = {
            "dreamon": self.resizes,
            "sdlm": self.has_shifted_drafts,
            "d2f": self.blocks_after_prompt,
            "llada2.2": self.rewrites,
        }
        name = next((name for name, is_its in own.items() if is_its), None)
        found = presets_for(self.visible_block, self.shift, self.draft_block, self.noise, name)
        if not self.needs_whole_canvas:
            return found
        return {name: policy.with_fields({"cache": "none"}) for name, policy in found.items()}

    @property
    def blocks_after_prompt(self) -> bool:
        """True if the prompt is one attention block, and the other blocks start at its end (D2F).

        The block length is then ``visible_block``.
        """
        return all(layer.attention.visibility == "after-prompt" for layer in self.layers)

    @property
    def has_masks_last(self) -> bool:
        """True if every layer has visibility ``masks-last``.

        Inside the network, ``max_canvas_length`` is added to the positions of mask tokens. In
        causal attention, mask tokens then come after all decided tokens. The rotary tables contain
        each position twice.
        """
        return all(layer.attention.visibility == "masks-last" for layer in self.layers)

    @property
    def rotary_copies(self) -> int:
        """How many times a rotary table contains each position."""
        return 2 if self.has_masks_last else 1

    @property
    def needs_whole_canvas(self) -> bool:
        """True if every pass must contain the whole canvas, so that the network cannot use a cache.

        This is the case if positions do not count padding tokens, or if any layer has full attention
        in a window.
        """
        return self.embedding.padding is not None or any(
            layer.attention.window is not None and layer.attention.visibility == "full"
            for layer in self.layers
        )

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """``(kv_heads, head_size)`` of the keys of each layer. The values have the same shape."""
        return tuple((layer.attention.kv_heads, layer.attention.head_size) for layer in self.layers)

    def cache_windows(self) -> tuple[int | None, ...]:
        """For each layer, how many positions before a pass the cache keeps, or ``None`` for all.

        A network with draft passes drops the keys and values that no later pass sees. All layers
        with a window keep as many positions as the largest window. At least one layer keeps all
        positions. Other networks drop no keys and values.
        """
        windows = [layer.attention.window for layer in self.layers]
        largest = max((window for window in windows if window is not None), default=None)
        if self.draft_block is None or None not in windows:
            return (None,) * len(windows)
        return tuple(None if window is None else largest for window in windows)

    @property
    def cache_window(self) -> int | None:
        """The window of all layers that have one in ``cache_windows``, or ``None``."""
        return next((window for window in self.cache_windows() if window is not None), None)

    @property
    def prompt_pass_tokens(self) -> int | None:
        """The largest number of tokens in a pass that stores a prompt, or ``None`` for no limit."""
        return None if self.cache_window is None else PASS_TOKENS

    @property
    def window_tokens(self) -> int | None:
        """The largest number of tokens that layers in ``cache_windows`` with a window store.

        The value is ``None`` if no layer has a window. A pass adds a part of the prompt or one block
        to the tokens in the window.
        """
        if self.cache_window is None:
            return None
        return self.cache_window + max(PASS_TOKENS, self.draft_block or 0)

    def cache_bytes(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of one token's keys and values in all layers.

        ``scale_bytes`` is the size of the scale of a cached row (see ``dlm_runtime.cache_dtypes.CACHE_ROWS``). A row is the
        key or value of one head.
        """
        return self.cache_bytes_of(1, 1, element_bytes, scale_bytes)

    def cache_bytes_of(
        self, tokens: int, window_tokens: int, element_bytes: int, scale_bytes: int = 0
    ) -> int:
        """Return the bytes of the keys and values of several tokens.

        Layers with a window (see ``cache_windows``) store ``window_tokens`` tokens, and all other
        layers store ``tokens`` tokens. ``cache_bytes`` explains the other arguments.
        """
        return 2 * sum(
            (tokens if window is None else window_tokens)
            * kv_heads
            * (head_size * element_bytes + scale_bytes)
            for (kv_heads, head_size), window in zip(
                self.cache_shapes(), self.cache_windows(), strict=True
            )
        )

    def canvas_bytes(self, tokens: int, element_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of the keys and values of a canvas with ``tokens`` cached tokens.

        Layers with a window store the tokens of the window and of one pass.
        """
        most = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return self.cache_bytes_of(tokens, most, element_bytes, scale_bytes)

    def rotary_tables(self) -> tuple[RotaryTable, ...]:
        """Return the distinct rotary tables that layers use."""
        return tuple(
            dict.fromkeys(
                table
                for layer in self.layers
                if (table := rotary_table(layer.attention)) is not None
            )
        )

    # ---- Conversion to and from plain values ----

    def as_dict(self) -> dict[str, Any]:
        """Return fields and derived values, for the manifest and for ``inspect --json``."""
        values = asdict(self)
        for name in OPTIONAL:
            if values[name] is None:
                del values[name]
        values |= {
            "eos_token_ids": list(self.eos_token_ids),
            "unused_tokens": [list(unused) for unused in self.unused_tokens],
            "layers": [_layer_values(layer) for layer in self.layers],
            "parameters": self.parameter_count(),
            "active_parameters": self.active_parameter_count(),
            "linear_layers": [asdict(linear) for linear in self.linear_layers()],
        }
        for linear in values["linear_layers"]:
            if linear["fold"] is not None:
                linear["fold"]["parameters"] = list(linear["fold"]["parameters"])
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NetworkSpec:
        """Make a description from the values that ``as_dict`` returned. Raises ValueError.

        Derived values are ignored.
        """
        # Bundles of earlier versions lack the fields that have defaults.
        chosen = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        chosen["layers"] = tuple(layer_from(layer) for layer in chosen["layers"])
        chosen["eos_token_ids"] = tuple(chosen["eos_token_ids"])
        chosen["unused_tokens"] = tuple(map(tuple, chosen.get("unused_tokens", ())))
        for name, kind in (
            ("embedding", EmbeddingSpec),
            ("head", HeadSpec),
            ("conditioning", ConditioningSpec),
        ):
            if chosen.get(name) is not None:
                chosen[name] = kind(**chosen[name])
        return cls(**chosen)


def _layer_values(layer: LayerSpec) -> dict[str, Any]:
    """Return the fields of a layer. A layer without low-rank updates has no such field."""
    values = asdict(layer) | {"norms": list(layer.norms)}
    updates = values.pop("draft_updates")
    return values | ({"draft_updates": list(updates)} if updates else {})


def _difference(name: str, mine: Any, theirs: Any) -> str | None:
    """Describe the first difference between two values. Layers are compared field by field."""
    if mine == theirs:
        return None
    if name == "layers" and len(mine) != len(theirs):
        name, mine, theirs = "number of layers", len(mine), len(theirs)
    elif name == "layers":
        pairs = zip(mine, theirs, strict=True)
        return next(
            filter(None, (_difference(f"layer {i}", *pair) for i, pair in enumerate(pairs)))
        )
    elif is_dataclass(mine) and type(mine) is type(theirs):
        parts = (
            (f"{name} {field.name}", getattr(mine, field.name), getattr(theirs, field.name))
            for field in fields(mine)
        )
        return next(filter(None, (_difference(*part) for part in parts)))
    return f"its {name} is {mine}, the other's {theirs}"


def _norm_parameters(path: str, kind: str) -> tuple[str, ...]:
    return (f"{path}.weight", f"{path}.bias") if kind == "layer-bias" else (f"{path}.weight",)
