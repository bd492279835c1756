"""SmolLM2 as a few functions of torch tensors, in bf16, and its LoRA.

The code is separate from transformers so that one pass can use the keys and values of another, and
so that each row can see different keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

# Projections that read the same states are computed as one matrix product.
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LONGEST = 2048  # positions for which there are angles
RANK, ALPHA = 12, 24
LAYER = "base_model.model.model.layers"  # in the names of the LoRA

# Takes the number of the layer, queries [B, H, T, D], and keys and values [B, KV, T, D] of the new
# rows. Returns [B, H, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Layer = dict[str, Tensor]
# The LoRA of a layer: for each group, A [rank, in] and B [out, rank]. B includes the scale.
Adapted = dict[str, tuple[Tensor, Tensor]]


class Llama:
    """The base weights of a checkpoint folder, which are never trained."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        tensors = {k: v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_size = self.config["hidden_size"] // self.heads
        self.eps = self.config["rms_norm_eps"]
        self.embedding = tensors["model.embed_tokens.weight"]  # [V, hidden], also the head
        self.final_norm = tensors["model.norm.weight"]
        self.layers: list[Layer] = []
        for i in range(self.config["num_hidden_layers"]):
            named = {
                group: torch.cat([tensors[f"model.layers.{i}.{m}.weight"] for m in modules])
                for group, modules in GROUPS.items()
            }
            for norm in ("input_layernorm", "post_attention_layernorm"):
                named[norm] = tensors[f"model.layers.{i}.{norm}.weight"]
            self.layers.append(named)
        powers = torch.arange(0, self.head_size, 2) / self.head_size
        angles = torch.arange(LONGEST)[:, None] * self.config["rope_theta"] ** -powers
        self.cos = torch.cat([angles.cos()] * 2, -1).bfloat16()  # [position, D]
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).bfloat16()
        # Used for passes that have a gradient, so that they alone can be compiled.
        self.trained = self.before, self.after

    def compile(self) -> None:
        """Compile the passes that have a gradient. The first one then takes some minutes."""
        self.trained = (
            torch.compile(self.before, dynamic=False),
            torch.compile(self.after, dynamic=False),
        )

    def states(
        self, ids: Tensor, positions: Tensor, attend: Attend, lora: Sequence[Adapted] | None = None
    ) -> Tensor:
        """Return the states ``[B, T, hidden]`` that the head reads, of ``ids`` ``[B, T]``.

        ``positions`` is ``[T]`` or ``[B, T]``. ``attend`` does the attention, so it decides which
        keys a row sees. If ``lora`` is given, every row uses it in every projection.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        hidden = F.embedding(ids, self.embedding)
        before, after = self.before, self.after
        if lora is not None and torch.is_grad_enabled():
            hidden.requires_grad_()  # all the layers are then compiled as one
            before, after = self.trained
        for i, layer in enumerate(self.layers):
            adapted = {} if lora is None else lora[i]
            q, k, v = before(hidden, layer, adapted, cos, sin)
            hidden = after(hidden, attend(i, q, k, v), layer, adapted)
        return F.rms_norm(hidden, hidden.shape[-1:], self.final_norm, self.eps)

    def before(
        self, hidden: Tensor, layer: Layer, adapted: Adapted, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated queries and keys, and the values, of a layer."""
        x = F.rms_norm(hidden, hidden.shape[-1:], layer["input_layernorm"], self.eps)
        x = _project(x, layer, adapted, "qkv").unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], 1)

        def rotate(x: Tensor) -> Tensor:
            return x * cos + x.roll(self.head_size // 2, -1) * sin

        return rotate(q), rotate(k), v

    def after(self, hidden: Tensor, attended: Tensor, layer: Layer, adapted: Adapted) -> Tensor:
        """Return the states after a layer. ``attended`` is what its attention returned."""
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + _project(attended, layer, adapted, "out")
        x = F.rms_norm(hidden, hidden.shape[-1:], layer["post_attention_layernorm"], self.eps)
        gate, up = _project(x, layer, adapted, "gate_up").chunk(2, -1)
        return hidden + _project(F.silu(gate) * up, layer, adapted, "down")


def _project(x: Tensor, layer: Layer, adapted: Adapted, group: str) -> Tensor:
    found = F.linear(x, layer[group])
    if group not in adapted:
        return found
    a, b = adapted[group]
    return found + F.linear(F.linear(x, a), b)


class Adapter:
    """A LoRA in fp32 for every projection. Its tensors have PEFT's names."""

    def __init__(self, llama: Llama, generator: torch.Generator) -> None:
        self.tensors: dict[str, Tensor] = {}  # A and B take turns
        self.layers = len(llama.layers)
        kv_size = llama.kv_heads * llama.head_size
        for i, layer in enumerate(llama.layers):
            for group, modules in GROUPS.items():
                out, inputs = layer[group].shape
                outs = [out // len(modules)] * len(modules)
                if group == "qkv":
                    outs = [out - 2 * kv_size, kv_size, kv_size]
                for module, rows in zip(modules, outs, strict=True):
                    a = torch.empty(RANK, inputs)
                    a.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
                    self.tensors[f"{LAYER}.{i}.{module}.lora_A.weight"] = a.requires_grad_()
                    b = torch.zeros(rows, RANK, requires_grad=True)
                    self.tensors[f"{LAYER}.{i}.{module}.lora_B.weight"] = b

    def lora(self) -> list[Adapted]:
        """Return the matrices of each group in bf16."""
        found = []
        for i in range(self.layers):
            layer = {}
            for group, modules in GROUPS.items():
                names = [f"{LAYER}.{i}.{module}" for module in modules]
                a = torch.cat([self.tensors[f"{name}.lora_A.weight"] for name in names])
                b = torch.block_diag(*(self.tensors[f"{name}.lora_B.weight"] for name in names))
                layer[group] = (a.bfloat16(), (b * (ALPHA / RANK)).bfloat16())
            found.append(layer)
        return found

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the tensors that ``save`` wrote."""
        for name, value in load_file(folder / "adapter_model.safetensors").items():
            self.tensors[name].copy_(value)

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's layout, in fp16."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": RANK,
            "target_modules": [m.split(".")[1] for modules in GROUPS.values() for m in modules],
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        partial = folder / "adapter_model.partial"
        halves = {name: value.detach().half() for name, value in self.tensors.items()}
        save_file(halves, partial, {"format": "pt"})
        partial.rename(folder / "adapter_model.safetensors")
