"""LLaDA (arXiv:2502.09992) as code that a checkpoint could contain, for tests of ``capture``.

This code was written for the tests, based on the paper and on the names of the tensors.

The code shares nothing with dlm_export: RoPE multiplies complex numbers, attention is computed step
by step, and all sizes come from config.json.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .configuration_llada import LLaDAConfig


class Norm(nn.Module):
    """x / rms(x), times a weight."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps))


def rotate(x, theta):
    """RoPE on ``[B, H, L, D]``.

    Features i and i + D/2 form one complex number, which is rotated by position / theta^(2i/D).
    """
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * speed
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


class Block(nn.Module):
    """Attention over the whole canvas, followed by a gated MLP.

    Attention and the MLP each have a norm before them. The output of each is added to its input.
    """

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.theta = c.n_heads, c.n_kv_heads, c.rope_theta
        kv = c.d_model // c.n_heads * c.n_kv_heads
        self.attn_norm, self.ff_norm = (
            Norm(c.d_model, c.rms_norm_eps),
            Norm(c.d_model, c.rms_norm_eps),
        )
        self.q_proj = nn.Linear(c.d_model, c.d_model, bias=c.include_qkv_bias)
        self.k_proj = nn.Linear(c.d_model, kv, bias=c.include_qkv_bias)
        self.v_proj = nn.Linear(c.d_model, kv, bias=c.include_qkv_bias)
        self.attn_out = nn.Linear(c.d_model, c.d_model, bias=False)
        self.ff_proj = nn.Linear(c.d_model, c.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.mlp_hidden_size, bias=False)
        self.ff_out = nn.Linear(c.mlp_hidden_size, c.d_model, bias=False)

    def forward(self, x):
        h = self.attn_norm(x)
        q, k, v = (
            each.unflatten(-1, (heads, -1)).transpose(1, 2)
            for each, heads in (
                (self.q_proj(h), self.heads),
                (self.k_proj(h), self.kv_heads),
                (self.v_proj(h), self.kv_heads),
            )
        )
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        x = x + self.attn_out((weights @ v).transpose(1, 2).flatten(2))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))


class Trunk(nn.Module):
    """The whole network with the released names: ``transformer.wte``, ``transformer.blocks.N``,
    ``transformer.ff_out``. A tied head is the embedding table, so ``ff_out`` is missing.
    """

    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c.embedding_size, c.d_model),
                "blocks": nn.ModuleList(Block(c) for _ in range(c.n_layers)),
                "ln_f": Norm(c.d_model, c.rms_norm_eps),
            }
        )
        if not c.weight_tying:
            self.transformer["ff_out"] = nn.Linear(c.d_model, c.embedding_size, bias=False)

    def forward(self, ids):
        x = self.transformer["wte"](ids)
        for block in self.transformer["blocks"]:
            x = block(x)
        head = self.transformer["ff_out" if "ff_out" in self.transformer else "wte"]
        return F.linear(self.transformer["ln_f"](x), head.weight)


class LLaDAModelLM(PreTrainedModel):
    """Computes the logits of a canvas. Every position sees all positions."""

    config_class = LLaDAConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Trunk(config)
        self.post_init()

    def _init_weights(self, module):
        """Weights come from the checkpoint."""

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        assert attention_mask is None
        assert not use_cache
        print("released code prints what it likes")
        return SimpleNamespace(logits=self.model(input_ids))
