"""Writes tests/golden/published_loops.json, which contains the passes and canvases of published
decoding loops.

The code of the published loops is not part of this repository. Download the files, and pass their
paths. The script runs the requests in the file again. If you do not pass a loop's path, the traces of
this loop do not change. To add a request, add an object without tokens and passes to the file:

    python tests/make_published_loops.py --sdar FILE --stable-diffcoder FILE

    --sdar              generate.py of github.com/JetAstra/SDAR, commit c2041a8
    --llada2            modeling_llada2_moe.py of LLaDA2.0. The copy that was used is in
                        dllm/pipelines/llada2/models of github.com/ZHZisZZ/dllm, commit 62ebe4f
    --llada2.1          modeling_llada21_moe.py of LLaDA2.1. The copy that was used is in
                        dllm/pipelines/llada21/models of the same commit
    --llada2.2          srt/dllm/algorithm/joint_threshold_indel.py of the package sglang 0.5.23,
                        alone in a folder
    --fast-dllm-v2      v2/generation_functions.py of github.com/NVlabs/Fast-dLLM, commit 8292f3c
    --rnd1              rnd/sampling.py of github.com/RadicalNumerics/RND1, commit 87d5f46
    --d3llm             d3llm_LLaDA/d3llm_llada_generate_util.py of github.com/hao-ai-lab/d3LLM,
                        commit e5bfcac
    --d3llm-cached      the same file. The script runs the loop that caches keys and values
    --d3llm-dream       d3llm_DREAM/d3llm_dream_generate_util.py of the same commit
    --wedlm             hf_compat/modeling_wedlm.py of github.com/Tencent/WeDLM, commit 0216110
    --stable-diffcoder  modeling_stable_diffcoder.py of the release Stable-DiffCoder-8B-Instruct
    --d2f               D2F-eval/eval_llada.py of github.com/zhijie-group/Discrete-Diffusion-Forcing,
                        commit 771f745. Its end token is a number that no network here predicts
    --d2f-dream         D2F-eval/eval_dream.py of the same commit

--llada2 needs transformers 4.57. The script runs the authors' loops without changes, but with a
small random network. In SDAR's loop, the most likely token replaces each random token. In the pass
after an end token is decided, d3LLM's loop may choose positions that already contain end tokens. To
prevent this, the network predicts all tokens with the same probability at decided positions.

A decision of a loop is close if two tokens or two positions have almost equal scores. The script
repeats each request with new random weights until no decision is close. Rounding errors on other
machines then cannot change a decision.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch
from published import END, MASK, REWRITING, VOCABULARY, prompt_of, random_network
from torch import Tensor

from dlm_export.network.denoiser import hiding
from dlm_export.network.pass_plan import Span

GOLDEN = Path(__file__).parent / "golden" / "published_loops.json"
MADE = ("seed", "tokens", "passes")
"""The fields of a request in the golden file that the script writes. The other fields are the request."""
CLOSE = 1e-4
"""Two logits or scores that differ by less than this are close."""


class UnsuitableError(Exception):
    """Raised if a loop's decision is close, the authors' code fails, or SDAR's sampler would replace a
    token that is already decided. The request is then repeated with new random weights.
    """


class Network:
    """A random network that records its passes. The loops of SDAR, LLaDA2 and RND1 call it."""

    device = torch.device("cpu")
    fields: Mapping[str, int] = MappingProxyType({})

    def __init__(self, block: int, shift: int, seed: int, threshold: float | None) -> None:
        self.denoiser = random_network(block, shift, seed, **self.fields)
        self.shift, self.threshold = shift, threshold
        self.passes: list[tuple[int, list[int]]] = []
        self.stored: list[tuple[Tensor, Tensor]] = []
        self.block: list[tuple[Tensor, Tensor]] = []

    def eval(self) -> Network:
        return self

    def parameters(self) -> Any:
        return self.denoiser.parameters()

    def run(self, ids: Tensor, first: int, past: list[Any]) -> tuple[Tensor, list[Any]]:
        """Run a pass over the tokens from position ``first`` on.

        Returns their logits, and their keys and values.
        """
        self.passes.append((first, ids[0].tolist()))
        positions = torch.arange(first, first + ids.shape[1])[None]
        features, present = self.denoiser.hidden(ids, positions, past or None)
        logits = self.denoiser.project(features).float()
        logits[..., MASK] = -1e4  # because this project's loops never predict the mask token
        self.check(ids[0], logits[0])
        return logits, present

    def check(self, ids: Tensor, logits: Tensor) -> None:
        """Raise UnsuitableError if a decision of the loop is close.

        This is the case if two tokens or two positions have almost equal scores, or if a score is
        almost equal to the threshold.
        """
        if self.shift:
            ids, logits = ids[1:], logits[:-1]
        probs = logits[ids == MASK].softmax(-1)
        if not len(probs):
            return
        best = probs.topk(2).values
        entropy = (probs * (probs + 1e-10).log()).sum(-1)
        for scores in (best[:, 0], entropy):
            ranked = scores.sort().values
            if len(ranked) > 1 and float(ranked.diff().min()) < CLOSE:
                raise UnsuitableError
        gaps = [float((best[:, 0] - best[:, 1]).min())]
        if self.threshold is not None:
            gaps.append(float((best[:, 0] - self.threshold).abs().min()))
        if min(gaps) < CLOSE:
            raise UnsuitableError

    def store(self, present: list[Any], kept: list[Any]) -> list[Any]:
        if not kept:
            return present
        return [
            (torch.cat((k, new_k), 2), torch.cat((v, new_v), 2))
            for (k, v), (new_k, new_v) in zip(kept, present, strict=True)
        ]

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        store_kv: bool = False,
        **_: Any,
    ) -> Any:
        first = 0 if position_ids is None else int(position_ids[0, 0])
        logits, present = self.run(input_ids, first, self.stored)
        if store_kv:
            self.stored = self.store(present, self.stored)
        return SimpleNamespace(logits=logits)


class Edited(Network):
    """A random network for LLaDA2.1's loop, which also edits decided tokens of the last block."""

    block, edit_threshold = 0, 0.0

    def check(self, ids: Tensor, logits: Tensor) -> None:
        super().check(ids, logits)
        best = logits[-self.block :].softmax(-1).topk(2).values
        gaps = torch.cat((best[:, 0] - best[:, 1], (best[:, 0] - self.edit_threshold).abs()))
        if float(gaps.min()) < CLOSE:
            raise UnsuitableError


class Rewritten(Edited):
    """A random network for LLaDA2.2's loop, which also deletes and inserts tokens."""

    fields = REWRITING

    @property
    def added(self) -> int:
        """The number of passes after which a block has more mask tokens than before."""
        seen = [ids for _, ids in self.passes]
        return sum(
            len(a) == len(b) and a.count(MASK) < b.count(MASK) for a, b in itertools.pairwise(seen)
        )


class KeysAndValues(list[Any]):
    """A cache with the attributes that Fast-dLLM v2's loop reads after an end token."""

    @property
    def key_cache(self) -> list[Tensor]:
        return [keys for keys, _ in self]

    @property
    def value_cache(self) -> list[Tensor]:
        return [values for _, values in self]


class KeptRows(list[Any]):
    """The cache that d3LLM's loop fills after a pass over the whole canvas."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        assert layer == len(self)
        self.append((keys, values))


class BlockCached(Network):
    """A network with the interface that Fast-dLLM v2's loop calls.

    The loop keeps the caches and passes them to each call.
    """

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: KeysAndValues | None = None,
        update_past_key_values: bool = False,
        block_past_key_values: list[Any] | None = None,
        replace_position: int = 0,
        **_: Any,
    ) -> Any:
        past = past_key_values
        start = past[0][0].shape[2] if past else 0
        last = replace_position + input_ids.shape[1]
        around: list[Any] = past or []
        if block_past_key_values is not None:
            others = [
                (
                    torch.cat((k[:, :, :replace_position], k[:, :, last:]), 2),
                    torch.cat((v[:, :, :replace_position], v[:, :, last:]), 2),
                )
                for k, v in block_past_key_values
            ]
            around = self.store(others, around)
        logits, present = self.run(input_ids, start + replace_position, around)
        return SimpleNamespace(
            logits=logits,
            past_key_values=(
                KeysAndValues(self.store(present, past or [])) if update_past_key_values else past
            ),
            block_past_key_values=present,
        )

    def sample_with_top_p(self, logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Choose the most likely token, as the released model does at temperature 0."""
        probs = logits.softmax(-1)
        return probs.argmax(-1), probs


class Ahead(Network):
    """A network with full attention and with the interface that d3LLM's loops call.

    The threshold is compared with entropies.
    """

    def __init__(self, _: int, shift: int, seed: int, threshold: float | None) -> None:
        super().__init__(0, shift, seed, None)
        self.bound = threshold

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Any:
        logits, _ = self.run(input_ids, 0, [])
        self.flatten(logits, input_ids)
        return SimpleNamespace(logits=logits)

    def flatten(self, logits: Tensor, input_ids: Tensor) -> None:
        """Give all tokens the same probability at decided positions.

        Raises UnsuitableError if the entropy of another position is close to the threshold.
        """
        scored = logits[0, :-1] if self.shift else logits[0]
        ids = input_ids[0, self.shift :]
        probs = scored[ids == MASK].softmax(-1)
        entropy = -(probs * (probs + 1e-10).log()).sum(-1)
        if (
            self.bound is not None
            and len(probs)
            and float((entropy - self.bound).abs().min()) < CLOSE
        ):
            raise UnsuitableError
        scored[ids != MASK] = 0


class AheadCached(Ahead):
    """A network with the interface that d3LLM's loop with a cache calls."""

    def __call__(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = False,
        update_kvcache: int | None = None,
        cache_position: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Store the keys and values of the first ``update_kvcache`` tokens.

        With ``use_cache`` and without ``update_kvcache``, all keys and values are stored.
        """
        first = 0 if cache_position is None else int(cache_position[0])
        past = [] if past_key_values is None else list(past_key_values)
        logits, present = self.run(input_ids, first, past)
        self.flatten(logits, input_ids)
        count = update_kvcache if use_cache else 0
        new = [(k[:, :, :count], v[:, :, :count]) for k, v in present]
        return SimpleNamespace(logits=logits, past_key_values=self.store(new, past))


class Moved(Network):
    """A network with the interface that WeDLM's loop calls.

    The loop moves mask tokens to the end of the sequence. ``passes`` records the tokens in the
    order of their positions.
    """

    def __init__(self, _: int, shift: int, seed: int, threshold: float | None) -> None:
        super().__init__(0, shift, seed, threshold)
        self.denoiser = random_network(0, shift, seed, has_masks_last=True)

    def model(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        self.passes.append((0, input_ids[0, position_ids[0].argsort()].tolist()))
        features, _present = self.denoiser.hidden(input_ids, position_ids)
        logits = self.denoiser.project(features).float()
        logits[..., MASK] = -1e4
        self.check(input_ids[0], logits[0])
        return SimpleNamespace(last_hidden_state=logits)

    def lm_head(self, features: Tensor) -> Tensor:
        return features


class Cropped(Network):
    """A network with the interface that Stable-DiffCoder's loop calls.

    A call computes the tokens from its first position on. It discards stored keys and values from
    this position on, and stores the new keys and values.
    """

    def __call__(self, input_ids: Tensor, *_: Any, **options: Any) -> Any:
        first = int(options["cache_position"][0])
        past = [(keys[:, :, :first], values[:, :, :first]) for keys, values in self.stored]
        logits, present = self.run(input_ids, first, past if first else [])
        self.stored = self.store(present, past)
        return SimpleNamespace(logits=logits)


class Rows(list[Any]):
    """A cache with the method that D2F's loop for Dream calls."""

    def get_seq_length(self) -> int:
        return int(self[0][0].shape[2])


class AfterPrompt(Network):
    """A network with the interface that D2F's loops call. They pass the attention mask."""

    prompt = 0

    def __init__(self, block: int, shift: int, seed: int, threshold: float | None) -> None:
        super().__init__(block, shift, seed, threshold)
        self.denoiser = random_network(block, shift, seed, visibility="after-prompt")
        self.last: tuple[Tensor, Tensor] | None = None  # the last cached token and its logits

    def __call__(
        self,
        input_ids: Tensor,
        past_key_values: Rows | None = None,
        update_kvcache: int = 0,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Store the keys and values of the first rows.

        The loop for LLaDA passes the number of all rows to keep, and that for Dream the number of
        new rows.
        """
        network = self.denoiser.network
        past = past_key_values or Rows()
        first = past.get_seq_length() if past else 0
        ids = torch.from_numpy(
            Span(first, first + input_ids.shape[1], "drop", prompt=self.prompt).ids(network)
        )[None]
        given = attention_bias if attention_mask is None else attention_mask
        attention, longest = network.layers[0].attention, network.max_canvas_length
        hidden = hiding(attention, ids, first, torch.float32, longest)
        assert hidden is not None
        assert given is not None
        assert torch.equal(given == 0, hidden == 0)
        self.passes.append((first, input_ids[0].tolist()))
        features, present = self.denoiser.hidden(input_ids, ids, past or None)
        logits = self.denoiser.project(features).float()
        logits[..., MASK] = -1e4
        tokens, rows = input_ids[0], logits[0]
        if self.last is not None and self.shift:
            tokens, rows = (torch.cat(each) for each in zip(self.last, (tokens, rows), strict=True))
        self.check(tokens, rows)
        count = update_kvcache - (0 if attention_bias is None else first)
        if count:
            self.last = input_ids[0, count - 1 : count], logits[0, count - 1 : count]
        new = [(keys[:, :, :count], values[:, :, :count]) for keys, values in present]
        return SimpleNamespace(logits=logits, past_key_values=Rows(self.store(new, past)))


Run = Callable[[ModuleType, Network, list[int], int, dict[str, Any]], list[int]]


def run_sdar(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    drawn, topk = torch.multinomial, torch.topk

    def checked(values: Tensor, count: Any) -> Any:
        found = topk(values, int(count))
        if bool(found.values.isneginf().any()):
            raise UnsuitableError
        return found

    torch.multinomial = lambda probs, num_samples: probs.argmax(-1, keepdim=True)
    torch.topk = checked
    try:
        out = code.block_diffusion_generate(
            network,
            {"input_ids": torch.tensor([prompt])},
            MASK,
            gen_length=new,
            block_length=options["block"],
            denoising_steps=options["steps"],
            remasking_strategy=options["strategy"],
            confidence_threshold=options["threshold"],
            stopping_criteria_idx=[END],
        )
    finally:
        torch.multinomial, torch.topk = drawn, topk
    found: list[int] = out[0].tolist()
    return found


def run_llada2(
    code: ModuleType,
    network: Network,
    prompt: list[int],
    new: int,
    options: dict[str, Any],
    **edits: Any,
) -> list[int]:
    released = code.LLaDA2MoeModelLM
    for name in ("_top_k_logits", "_top_p_logits", "_get_num_transfer_tokens"):
        setattr(network, name, getattr(released, name))
    network._sample_with_temperature_topk_topp = (
        released._sample_with_temperature_topk_topp.__get__(network)
    )
    network.forward = network.__call__
    out = released.generate(
        network,
        torch.tensor([prompt]),
        block_length=options["block"],
        steps=options.get("steps", 32),
        gen_length=new,
        threshold=options["threshold"],
        eos_id=END,
        mask_id=MASK,
        **edits,
    )
    return [*prompt, *out[0].tolist()]


def run_llada21(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    assert isinstance(network, Edited)
    network.block, network.edit_threshold = options["block"], options["edit_threshold"]
    return run_llada2(
        code,
        network,
        prompt,
        new,
        options,
        editing_threshold=options["edit_threshold"],
        max_post_steps=options["edit_passes"],
        eos_early_stop=options.get("stop", "eos") == "eos",
    )


def run_llada22(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    """SGLang also runs a pass that stores the keys and values of a finished block."""
    assert isinstance(network, Rewritten)
    block = options["block"]
    network.block, network.edit_threshold = block, options["edit_threshold"]
    algorithm = code.JointThresholdInDel(
        SimpleNamespace(
            block_size=block,
            mask_id=MASK,
            first_done_first_out_mode=False,
            algorithm_config={
                "threshold": options["threshold"],
                "edit_threshold": options["edit_threshold"],
                "max_post_edit_steps": options["edit_passes"],
            },
            **REWRITING,
        )
    )
    canvas = torch.tensor([[*prompt, *[MASK] * new]])
    for start in range(len(prompt) // block * block, canvas.shape[1], block):
        end = start + block
        batch = SimpleNamespace(batch_size=1, input_ids=canvas[0, start:end], dllm_prompt_mask=None)
        (state,) = algorithm.init_step_state(batch)
        while not state["finished"]:
            logits, _ = network.run(canvas[:, :end], 0, [])
            algorithm.step(batch, logits[0, start:], [state])
        if END in canvas[0, max(start, len(prompt)) : end]:
            break
    found: list[int] = canvas[0, :end].tolist()
    return found


def run_fast_dllm_v2(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    try:
        out = code.Fast_dLLM_QwenForCausalLM.batch_sample(
            network,
            torch.tensor([prompt]),
            SimpleNamespace(pad_token_id=END),
            options["block"],
            new,
            options["sub_block"],
            len(prompt),
            torch.tensor([len(prompt)]),
            mask_id=MASK,
            threshold=options["threshold"],
            stop_token=END,
            use_block_cache=options["block_cache"],
        )
    except TypeError as err:  # raised if the text ends before a block is stored
        raise UnsuitableError from err
    found: list[int] = out[0].tolist()
    return found


def run_rnd1(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    out = code.diffusion_sample(
        network,
        seq_len=len(prompt) + new,
        num_steps=options["steps"],
        mask_token_id=MASK,
        prefix_ids=torch.tensor(prompt),
        eos_token_id=END,
        pad_token_id=options["pad"],
        add_eos_at_end=options["end"],
    )
    found: list[int] = out[0].tolist()
    return found


def run_wedlm(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    released = code.WeDLMForCausalLM
    network._generate_one_block = released._generate_one_block.__get__(network)
    network._efficient_reorder_sequence = released._efficient_reorder_sequence.__get__(network)
    out = released.generate_wedlm(
        network,
        torch.tensor([prompt]),
        max_new_tokens=new,
        block_size=options["block"],
        mask_token_id=MASK,
        confidence_threshold=options["threshold"],
        pad_token_id=VOCABULARY,  # not a token id, so the loop keeps all prompt tokens
        return_stats=False,
    )
    found: list[int] = out[0].tolist()
    return found


def run_stable_diffcoder(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    released = code.StableDiffcoderForCausalLM
    network._get_num_transfer_tokens = released._get_num_transfer_tokens.__get__(network)
    network._make_block_causal_mask = released._make_block_causal_mask.__get__(network)
    network._get_transfer_index = released._get_transfer_index.__get__(network)
    out, _ = released.generate_block(
        network,
        torch.tensor([prompt]),
        steps=options["steps"] * (new // options["block"]),
        gen_length=new,
        block_length=options["block"],
        mask_id=MASK,
        threshold=options["threshold"],
        eos_id=END,
    )
    found: list[int] = out[0].tolist()
    return found


def run_d3llm(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    out, _ = code.generate_multi_block(
        network,
        torch.tensor([prompt]),
        max_new_tokens=new,
        block_size=options["block"],
        mask_id=MASK,
        threshold=options["threshold"],
        block_add_threshold=options["next_block"],
        decoded_token_threshold=0.95,
        eos_token_id=END,
        early_stop=True,
    )
    found: list[int] = out[0].tolist()
    return found


def run_d3llm_cached(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    code.DynamicCache = KeptRows
    out, _ = code.generate_multi_block_kv_cache(
        network,
        torch.tensor([prompt]),
        max_new_tokens=new,
        block_size=options["block"],
        mask_id=MASK,
        threshold=options["threshold"],
        block_add_threshold=options["next_block"],
        decoded_token_threshold=0.95,
        cache_delay_iter=options["delay"],
        refresh_interval=options["interval"] or 10000,
        eos_token_id=END,
        early_stop=True,
    )
    found: list[int] = out[0].tolist()
    return found


def run_d3llm_dream(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    (mixin,) = (kind for kind in vars(code).values() if hasattr(kind, "_sample_multi_block"))
    config = SimpleNamespace(
        return_dict_in_generate=False,
        max_length=len(prompt) + new,
        mask_token_id=MASK,
        temperature=0.0,
        alg="entropy_threshold",
        eos_token_id=END,
    )
    out, _ = mixin._sample_multi_block(
        network,
        torch.tensor([prompt]),
        None,
        config,
        threshold=options["threshold"],
        block_size=options["block"],
        block_add_threshold=options["next_block"],
        decoded_token_threshold=0.95,
        early_stop=True,
    )
    found: list[int] = out[0].tolist()
    return found


def run_d2f(
    code: ModuleType, network: Network, prompt: list[int], new: int, options: dict[str, Any]
) -> list[int]:
    assert isinstance(network, AfterPrompt)
    network.prompt, made = len(prompt), list[list[int]]()
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "", eos_token="</s>", eos_token_id=END)
    loop = SimpleNamespace(
        model=network,
        tokenizer=tokenizer,
        device=network.device,
        target_dtype=torch.float32,
        mask_token_id=MASK,
        max_length=len(prompt) + new,
        max_new_tokens=new,
        block_size=options["block"],
        block_add_threshold=options["next_block"],
        decoded_token_threshold=options["force_next"],
        skip_threshold=options["threshold"],
        temperature=0.0,
        top_p=None,
        top_k=None,
        sampling_strategy="default",
        _count_non_eos_tokens_before_truncation=lambda tokens, _: made.append(tokens) or 0,
    )
    released = code.DreamLoRA
    for name in ("_update_block_completion_states", "_shift_logits"):
        if hasattr(released, name):
            setattr(loop, name, getattr(released, name).__get__(loop))
    out = released._generate_block_single(loop, torch.tensor([prompt]))
    return made[0] if made else [*prompt, *out]


RUNS: dict[str, tuple[type[Network], Run]] = {
    "sdar": (Network, run_sdar),
    "llada2": (Network, run_llada2),
    "llada2.1": (Edited, run_llada21),
    "llada2.2": (Rewritten, run_llada22),
    "fast-dllm-v2": (BlockCached, run_fast_dllm_v2),
    "rnd1": (Network, run_rnd1),
    "stable-diffcoder": (Cropped, run_stable_diffcoder),
    "wedlm": (Moved, run_wedlm),
    "d3llm": (Ahead, run_d3llm),
    "d3llm-cached": (AheadCached, run_d3llm_cached),
    "d3llm-dream": (Ahead, run_d3llm_dream),
    "d2f": (AfterPrompt, run_d2f),
    "d2f-dream": (AfterPrompt, run_d2f),
}
UNUSED = (
    "utils.utils_LLaDA.model.modeling_llada",
    *("lm_eval.api.instance", "lm_eval.api.model", "lm_eval.api.registry", "lm_eval.models.utils"),
    *("lm_eval.__main__", "accelerate", "datasets", "peft"),
    *("model_cache.llada.modeling_llada", "model_cache.llada.configuration_llada"),
    *("sglang.srt.dllm.algorithm.base", "sglang.srt.dllm.config"),
    "sglang.srt.model_executor.forward_batch_info",
)
"""Modules that the files import, but whose classes and functions the loops do not use."""


class Unused:
    """Stands for the classes, the functions and the decorators of such a module."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, decorated: Any) -> Any:
        return decorated


class SglangAlgorithm:
    """The base class of SGLang's loops, without what runs their passes."""

    def __init__(self, config: Any) -> None:
        self.block_size, self.mask_id = config.block_size, config.mask_id


def load(path: Path) -> ModuleType:
    """Import a Python file as part of a package, so that it can import other files of its folder."""
    transformers = importlib.import_module("transformers")  # it looks for some of these modules
    assert transformers.PreTrainedModel
    assert transformers.AutoTokenizer
    for unused in UNUSED:
        for count in range(unused.count("."), -1, -1):
            module = ModuleType(unused.rsplit(".", count)[0])
            module.__getattr__ = lambda _: Unused  # type: ignore[method-assign, assignment]
            sys.modules.setdefault(module.__name__, module)
    sys.modules["sglang.srt.dllm.algorithm.base"].DllmAlgorithm = SglangAlgorithm  # type: ignore[attr-defined]
    sys.path.insert(0, str(path.resolve().parent.parent))
    return importlib.import_module(f"{path.resolve().parent.name}.{path.stem}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for family in RUNS:
        parser.add_argument(f"--{family}", dest=family, type=Path, metavar="FILE")
    paths = vars(parser.parse_args())
    traces = [
        trace if paths[trace["family"]] is None else made(trace, load(paths[trace["family"]]))
        for trace in json.loads(GOLDEN.read_text())
    ]
    lines = ",\n".join(json.dumps(trace, separators=(",", ":")) for trace in traces)
    GOLDEN.write_text(f"[\n{lines}\n]\n")
    print(f"{len(traces)} requests, {GOLDEN.stat().st_size} bytes")


def made(request: dict[str, Any], code: ModuleType) -> dict[str, Any]:
    """Run a request of the golden file again. Returns it with its seed, tokens and passes."""
    options = {name: value for name, value in request.items() if name not in MADE}
    family, length, new = (options.pop(name) for name in ("family", "prompt", "new"))
    make, run = RUNS[family]
    for seed in range(200):
        shift = int(family in ("fast-dllm-v2", "rnd1", "d3llm-dream", "d2f-dream"))
        network = make(options.get("block", 0), shift, seed, options.get("threshold"))
        prompt = prompt_of(length, seed)
        try:
            with torch.no_grad():
                tokens = run(code, network, prompt, new, options)
        except UnsuitableError:
            continue
        if options.get("ends") and END not in tokens[length : length + new - options["block"]]:
            continue
        if isinstance(network, Rewritten) and network.added == 0:
            continue
        trace = {"family": family, "prompt": length, "new": new, "seed": seed} | options
        return trace | {"tokens": tokens, "passes": network.passes}
    raise SystemExit(f"every seed is close: {request}")


if __name__ == "__main__":
    main()
