"""Describes one transformer layer as plain data. This module does not import torch.

``spec`` describes a whole network, and re-exports the classes of this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlm_export.network.rope_scaling import QueryScale, RotaryTable, Scaling, scaling_from

VISIBILITIES = ("full", "block", "after-prompt", "causal", "draft", "masks-last")
SCORES = ("softmax", "sigmoid")
BIASES = (None, "choice", "weights")
ACTIVATIONS = ("silu", "gelu", "gelu-tanh", "relu")
"""Activation functions of MLPs. ``gelu`` is the exact function, computed with erf. ``gelu-tanh`` is
the approximation with tanh.
"""
NORMS = (
    "attention_norm",
    "attention_out_norm",
    "attention_sum_norm",
    "mlp_norm",
    "mlp_out_norm",
    "mlp_sum_norm",
)
"""Possible norms of a layer: before attention, after attention, after the residual sum of
attention, and the same three for the MLP. A layer that has norms only after the residual sums is
called post-norm.
"""
NORM_KINDS = ("rms", "layer", "layer-bias")
"""Kinds of norms: RMSNorm, LayerNorm without a bias, and LayerNorm with a bias."""


@dataclass(frozen=True)
class Rope:
    """Rotate-half rotary positions with base ``theta``.

    ``fraction`` is the share of a head's features that are rotated: the first features of the head.
    ``scaling`` describes how frequencies are lowered for long canvases. If ``scaling`` is ``None``,
    frequencies are not lowered. ``query_scale`` describes how queries are scaled on long canvases.
    If ``query_scale`` is ``None``, queries are not scaled. The rotated features form pairs. The
    angle of the first pairs depends on the position, and ``turning`` is their share of all pairs.
    All other pairs have the angle 0.
    """

    theta: float
    fraction: float = 1.0
    scaling: Scaling | None = None
    query_scale: QueryScale | None = None
    turning: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError if ``turning`` or, with ``scaling``, ``theta`` is out of range."""
        if not 0 < self.turning <= 1:
            raise ValueError(f"turning must be above 0 and at most 1, found {self.turning:g}")
        if self.scaling is not None and self.theta <= 1:
            raise ValueError(
                f"rope_theta must be greater than 1 if frequencies are scaled, found {self.theta:g}"
            )


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer.

    - ``rope``: rotary positions. If ``None``, attention does not depend on positions.
    - ``qk_norm``: True if an RMSNorm is applied to every query and key head before rotation.
    - ``visibility``: the keys to which a query attends. ``full`` means all keys. ``block`` means
      the keys in the query's block and in earlier blocks. A block has ``block_length`` tokens.
      ``after-prompt`` means the same, but the prompt is one block, and the other blocks start at its
      end.
      ``causal`` means the keys up to the query's position. ``draft`` means the same as ``causal``,
      except that a query of a draft pass attends to all keys. In training, a draft pass computed
      ``block_length`` tokens. ``causal`` attention with a ``block_length`` has causal draft rows
      instead. ``hiding`` in ``denoiser`` explains draft passes. ``masks-last``
      means causal attention in a sequence that starts with all decided tokens, and ends with all
      mask tokens. Decided tokens therefore do not attend to mask tokens, and a mask token attends
      to all decided tokens.
    - ``window``: if not ``None``, a query attends only to keys that are at most this many tokens
      away. With visibility ``draft``, the distance of a query of a draft pass is counted from the
      first token of the pass, and the queries of the pass attend to all keys of the pass. With
      visibility ``full``, a network with a window cannot use a cache.
    - ``scale``: the factor by which products of queries and keys are multiplied. ``None`` means
      ``head_size ** -0.5``.
    - ``has_values``: False if there is no matrix for values. A value is then the key before its
      norm and its rotation.
    - ``value_norm``: True if an RMSNorm without a weight is applied to every value head.
    """

    heads: int
    kv_heads: int
    head_size: int
    rope: Rope | None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    visibility: str = "full"
    block_length: int | None = None
    window: int | None = None
    scale: float | None = None
    has_values: bool = True
    value_norm: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if fields contradict each other."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads is not a multiple of {self.kv_heads} key and value heads"
            )
        is_known, has_block = self.visibility in VISIBILITIES, self.block_length is not None
        needs_block = self.visibility in ("block", "after-prompt", "draft")
        if not is_known or (needs_block != has_block and self.visibility != "causal"):
            raise ValueError(
                f"visibility {self.visibility} does not allow a block_length of {self.block_length}"
            )
        if self.block_length is not None and self.block_length < 1:
            raise ValueError(f"block_length is {self.block_length}; it must be at least 1")
        if self.window is not None and (
            self.visibility not in ("full", "draft") or self.window < 1
        ):
            raise ValueError(
                f"a window of {self.window} needs at least 1 token and visibility full or draft, not {self.visibility}"
            )
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}; it must be a positive number")
        if not self.has_values and self.qkv_bias:
            raise ValueError("biases of queries, keys and values need a matrix for values")
        if self.qk_norm and self.rope is not None and self.rope.query_scale is not None:
            raise ValueError("norms of queries cannot be combined with a query_scale")

    @property
    def group(self) -> int:
        """Number of queries that share a key."""
        return self.heads // self.kv_heads

    @property
    def visible_block(self) -> int | None:
        """Block length of block-causal attention. Causal attention has block length 1.

        ``None`` if every query attends to every key. Draft passes are not considered.
        """
        is_causal = self.visibility in ("causal", "draft", "masks-last")
        return 1 if is_causal else self.block_length

    @property
    def draft_block(self) -> int | None:
        """Number of tokens of a draft pass in training. ``None`` if there are no draft passes."""
        return None if self.visibility in ("block", "after-prompt") else self.block_length

    @property
    def has_causal_drafts(self) -> bool:
        """True if there are draft passes, and they are causal."""
        return self.visibility == "causal" and self.block_length is not None


@dataclass(frozen=True)
class MlpSpec:
    """An MLP with or without a gate.

    With a gate, the MLP computes ``down(activation(gate x) * up x)``. Without a gate, the MLP
    computes ``down(activation(up x))``. ``bias`` is true if all matrices have biases.
    """

    size: int
    activation: str = "silu"
    is_gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class RouterSpec:
    """Describes how a router chooses a token's experts and computes their routing weights, in fp32.

    - ``score``: the function that computes scores from the router's outputs, ``softmax`` or
      ``sigmoid``.
    - ``bias``: where a bias is added. ``choice`` means that the bias is added to the scores by
      which experts are chosen, but not to the routing weights (DeepSeek-V3, arXiv:2412.19437).
      ``weights`` means that the bias is added to the routing weights too. ``None`` means no bias.
    - ``renormalise``: True if the routing weights of the chosen experts are divided by the sum of
      these weights.
    - ``scale``: the number by which all routing weights are multiplied.
    - ``groups``, ``active_groups``: experts form ``groups`` groups, and are chosen from the best
      ``active_groups`` groups. The score of a group is the sum of the scores of the group's two
      best experts.
    - ``has_norm``: True if the router applies an RMSNorm to its input, and multiplies the result by
      ``hidden_size ** -0.5``.
    - ``has_expert_scales``: True if the routing weight of each expert is also multiplied by a
      number that was learned for this expert.
    - ``block_experts``: if it is not ``None``, all tokens of an attention block choose from the same
      ``block_experts`` experts. These are the experts with the highest scores in the block, where
      the score of an expert is its highest score for any token of the block (LLaDA2.2).
    """

    score: str = "softmax"
    bias: str | None = None
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    has_norm: bool = False
    has_expert_scales: bool = False
    block_experts: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if fields contradict each other."""
        if self.score not in SCORES or self.bias not in BIASES:
            raise ValueError(f"unknown router: score {self.score}, bias {self.bias}")
        if not 1 <= self.active_groups <= self.groups:
            raise ValueError(
                f"{self.active_groups} active groups of {self.groups} groups of experts"
            )


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts.

    Each token is routed to ``active`` of ``count`` gated MLPs. In addition, a shared MLP with
    ``shared_size`` features processes every token. If ``shared_size`` is 0, there is no shared MLP.
    If ``branch_norms`` is true, an RMSNorm is applied to the inputs and to the outputs of the
    shared MLP and of the experts, as in Gemma 4. These norms do not affect the router.
    """

    count: int
    active: int
    size: int
    shared_size: int = 0
    activation: str = "silu"
    router: RouterSpec = RouterSpec()
    branch_norms: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if fields contradict each other."""
        groups, r = self.router.groups, self.router
        if self.branch_norms and not self.shared_size:
            raise ValueError("norms of the shared MLP and of the experts need a shared MLP")
        if self.count % groups or (groups > 1 and self.count // groups < 2):
            raise ValueError(
                f"{self.count} experts cannot form {groups} equal groups of two or more"
            )
        if self.count < 2 or not 1 <= self.active <= self.count // groups * r.active_groups:
            raise ValueError(
                f"{self.active} active of {self.count} experts, with {r.active_groups} of {groups} groups active"
            )
        most = r.block_experts
        if most is not None and groups > 1:
            raise ValueError("experts of a block and groups of experts cannot both be limited")
        if most is not None and not self.active <= most <= self.count:
            raise ValueError(
                f"{self.active} active experts of the {most} that a block uses, of {self.count} experts"
            )


@dataclass(frozen=True)
class LowRankSpec:
    """A low-rank update of a matrix: a LoRA (arXiv:2106.09685).

    ``role`` is the role of the matrix in the layer: ``q``, ``k``, ``v``, ``out``, ``gate``, ``up``
    or ``down``. With the update, the weight ``[inputs, outputs]`` of the matrix is ``weight + a @
    b``. The shape of ``a`` is ``[inputs, rank]``, and the shape of ``b`` is ``[rank, outputs]``. The
    scale of a LoRA is part of ``b``.
    """

    role: str
    rank: int

    def __post_init__(self) -> None:
        """Raises ValueError if the rank is out of range."""
        if self.rank < 1:
            raise ValueError(f"an update has rank {self.rank}; the rank must be at least 1")


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer.

    ``norms`` is a subset of ``NORMS``. ``norm_eps`` and ``norm_kind`` are the epsilon and the kind
    of these norms. If ``has_scalar`` is true, the output of the layer is multiplied by a learned
    number. A layer with visibility ``draft`` has one number for draft passes, and one for all other
    passes.

    ``draft_updates`` are the low-rank updates of the layer's matrices. Only a draft pass whose
    tokens a causal pass then verifies uses them. In all other passes, the matrices have their own
    weights. With causal drafts, only draft rows use the updates.
    """

    attention: AttentionSpec
    mlp: MlpSpec | ExpertsSpec
    norm_eps: float
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")
    norm_kind: str = "rms"
    has_scalar: bool = False
    draft_updates: tuple[LowRankSpec, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError if fields contradict each other."""
        if self.block_experts is not None and (
            self.attention.visibility != "block" or self.attention.rope is None
        ):
            raise ValueError("block_experts needs block-causal attention and rotary positions")
        roles = [update.role for update in self.draft_updates]
        if not roles:
            return
        if self.attention.draft_block is None:
            raise ValueError("updates for draft passes need draft passes")
        known = {"q", "k", "out"} | ({"v"} if self.attention.has_values else set())
        if isinstance(self.mlp, MlpSpec):
            known |= {"up", "down"} | ({"gate"} if self.mlp.is_gated else set())
        if len(set(roles)) < len(roles) or not known.issuperset(roles):
            raise ValueError(
                f"updates for draft passes of {', '.join(roles)}; the layer has {', '.join(sorted(known))}"
            )

    @property
    def block_experts(self) -> int | None:
        """The number of experts from which a block chooses, or ``None``. See ``RouterSpec``."""
        return self.mlp.router.block_experts if isinstance(self.mlp, ExpertsSpec) else None

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the learned numbers that multiply the output of the layer."""
        if not self.has_scalar:
            return ()
        return ("scalar", "draft_scalar") if self.attention.visibility == "draft" else ("scalar",)


def layer_from(values: Mapping[str, Any]) -> LayerSpec:
    """Create a ``LayerSpec`` from the result of ``dataclasses.asdict``. Raises ValueError."""
    attention, mlp = dict(values["attention"]), values["mlp"]
    rope = attention.pop("rope")
    return LayerSpec(
        AttentionSpec(rope=None if rope is None else _rope_from(rope), **attention),
        ExpertsSpec(**mlp | {"router": RouterSpec(**mlp["router"])})
        if "count" in mlp
        else MlpSpec(**mlp),
        values["norm_eps"],
        tuple(values["norms"]),
        values.get("norm_kind", "rms"),  # bundles of earlier versions have RMSNorms only
        values.get("has_scalar", False),  # bundles of earlier versions have no such numbers
        # bundles of earlier versions do not have this field
        tuple(LowRankSpec(**update) for update in values.get("draft_updates", ())),
    )


def _rope_from(values: Mapping[str, Any]) -> Rope:
    scaling = values["scaling"]
    # In bundles of earlier versions, ``scaling`` is the factor of linear scaling.
    if isinstance(scaling, (int, float)):
        scaling = {"kind": "linear", "factor": scaling} if scaling > 1 else None
    query_scale = values.get("query_scale")  # bundles of earlier versions do not have this field
    return Rope(
        values["theta"],
        values["fraction"],
        None if scaling is None else scaling_from(scaling),
        None if query_scale is None else QueryScale(**query_scale),
        values.get("turning", 1.0),  # bundles of earlier versions do not have this field
    )


def has_router_bias(layer: LayerSpec) -> bool:
    return isinstance(layer.mlp, ExpertsSpec) and layer.mlp.router.bias is not None


def rotary_table(attention: AttentionSpec) -> RotaryTable | None:
    """Return the rotary table of an attention layer, or ``None`` without rotary positions."""
    if attention.rope is None:
        return None
    size = round(attention.head_size * attention.rope.fraction)
    return RotaryTable(attention.rope.theta, attention.rope.scaling, size, attention.rope.turning)
