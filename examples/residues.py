"""Writes checkpoints of antibody and T-cell receptor language models, whose tokens are residues.

    pip install --no-deps antiberty==0.1.3 sapiens==1.0.5 sceptr==1.2.0
    python examples/residues.py antiberty|sapiens-heavy|sapiens-light|sceptr CHECKPOINT
    python examples/residues.py sceptr-tiny CHECKPOINT --loops CDR3A:14,CDR3B:15

The weights come from the three PyPI packages. The repository contains no files of these packages.

The input of SCEPTR is the residues of the loops (CDRs) of a receptor. The embedding of a residue
depends on the loop, on the length of the loop, and on the residue's position in the loop. For this
reason, a checkpoint of SCEPTR works only for loops of fixed lengths. The option ``--loops`` lists
the loops and their lengths, in the order of the package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SAPIENS_CHAINS = {"heavy": "checkpoint_vh.pt", "light": "checkpoint_vl.pt"}


def residue_tokenizer(
    names: Sequence[str], *, special: Sequence[str], unknown: str, start: str, end: str | None
) -> str:
    """Return the tokenizer.json of a vocabulary in which each residue is a token.

    The tokenizer adds ``start`` before a sequence and ``end``, if it is not None, after it.
    """
    vocab = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    made.post_processor = processors.TemplateProcessing(
        single=f"{start} $A" + (f" {end}" if end else ""),
        special_tokens=[(name, vocab[name]) for name in (start, end) if name],
    )
    return str(made.to_str(pretty=True))


def write(folder: Path, config: dict[str, Any], state: dict[str, Any], tokenizer: str) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(tokenizer)
    kept = {name: value.contiguous().clone() for name, value in state.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def antiberty_checkpoint(package: Path, folder: Path) -> Path:
    """Convert AntiBERTy, a BERT of 26 M parameters.

    The heads that predict the species, the chain and grafting are left out.
    """
    trained = package / "trained_models"
    source = trained / "AntiBERTy_md_smooth"
    config = json.loads((source / "config.json").read_text())
    state = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    others = ("cls.species.", "cls.chain.", "cls.graft.", "bert.embeddings.position_ids")
    state = {name: value for name, value in state.items() if not name.startswith(others)}
    names = (trained / "vocab.txt").read_text().split()
    tokenizer = residue_tokenizer(
        names, special=names[:5], unknown="[UNK]", start="[CLS]", end="[SEP]"
    )
    return write(folder, config | {"architectures": ["BertForMaskedLM"]}, state, tokenizer)


def sapiens_checkpoint(package: Path, folder: Path, chain: str) -> Path:
    """Convert a RoBERTa of Sapiens, for heavy or light chains, from its fairseq files."""
    source = package / "models" / "v1"
    with torch.serialization.safe_globals([argparse.Namespace]):
        stored = torch.load(source / SAPIENS_CHAINS[chain], map_location="cpu", weights_only=True)
    args, state, made = vars(stored["args"]), stored["model"], {}
    assert torch.equal(state.pop("decoder.lm_head.weight"), _table(state)), "the head is not tied"
    for name, value in state.items():
        for theirs, ours in _FAIRSEQ.items():
            name = name.replace(theirs, ours)
        made[name] = value
    # In contrast to fairseq's RoBERTa, the RoBERTa of transformers has an embedding of token types.
    # An embedding of zeros does not change the results.
    hidden = args["encoder_embed_dim"]
    made["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, hidden)
    residues = [line.split()[0] for line in (source / "dict.txt").read_text().splitlines()]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names = [*special[:4], *residues, "<mask>"]
    config = {
        "architectures": ["RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": len(names),
        "hidden_size": hidden,
        "num_hidden_layers": args["encoder_layers"],
        "num_attention_heads": args["encoder_attention_heads"],
        "intermediate_size": args["encoder_ffn_embed_dim"],
        "max_position_embeddings": args["max_positions"] + 2,
        "type_vocab_size": 1,
        "hidden_act": args["activation_fn"],
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }
    tokenizer = residue_tokenizer(names, special=special, unknown="<unk>", start="<s>", end="</s>")
    return write(folder, config, made, tokenizer)


def _table(state: dict[str, Any]) -> torch.Tensor:
    table: torch.Tensor = state["decoder.sentence_encoder.embed_tokens.weight"]
    return table


# Maps the names of parameters in fairseq to the names in transformers.
_FAIRSEQ = {
    "decoder.lm_head.": "lm_head.",
    "decoder.sentence_encoder.": "roberta.",
    "roberta.embed_tokens": "roberta.embeddings.word_embeddings",
    "roberta.embed_positions": "roberta.embeddings.position_embeddings",
    "roberta.emb_layer_norm": "roberta.embeddings.LayerNorm",
    "roberta.layers.": "roberta.encoder.layer.",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}


def sceptr_checkpoint(package: Path, folder: Path, variant: str, loops: Mapping[str, int]) -> Path:
    """Convert a variant of SCEPTR, such as SCEPTR_tiny, for loops with the given lengths.

    Each component of an embedding is a row of a table, or depends only on the position. The sum of
    the components is therefore the sum of two rows: a row of a table of tokens, and a row of a
    table of positions.
    """
    source = package / "_model_saves" / variant
    model = json.loads((source / "config.json").read_text())["model"]
    stored = torch.load(source / "state_dict.pt", map_location="cpu", weights_only=True)
    embedder, made = model["token_embedder"]["class"], {}
    places = [(name, at, length) for name, length in loops.items() for at in range(length)]
    chosen = torch.tensor([0, *(loop_index(embedder, name) for name, _, _ in places)])
    parts = {
        name.removeprefix("_token_embedder."): value
        for name, value in stored.items()
        if name.startswith("_token_embedder.")
    }
    if embedder == "CdrEmbedder":  # a sum of learned vectors
        tokens = parts["token_embedding.weight"]
        rows = parts["position_embedding.position_embedding_matrix"]
        own = rows[torch.tensor([0, *(at + 1 for _, at, _ in places)])]
        own = own + parts["compartment_embedding.weight"][chosen]
        tokens, own = (math.sqrt(tokens.shape[1]) * table for table in (tokens, own))
    else:  # components side by side, multiplied by a matrix
        table = parts.get("_token_embedding._token_embeddings")
        if table is None:
            table = parts["_blosum_embedding._blosum_embeddings"].clone()
            special = parts["_blosum_embedding._special_token_embeddings.weight"]
            table[: len(special)] += special
        shares = [0.0, *(at / (length - 1) if length > 1 else 0.5 for _, at, length in places)]
        loop = parts["_compartment_embedding._token_embeddings"][chosen]
        matrix = stored["_self_attention_stack._initial_projector.weight"].T
        tokens = table @ matrix[: table.shape[1]]
        own = torch.cat([torch.tensor(shares)[:, None], loop], 1) @ matrix[table.shape[1] :]
    made = {"embed.weight": tokens, "positions.weight": own}
    for name, value in stored.items():
        if "_self_attention_stack.layers." in name:
            made["encoder.layers." + name.partition("_self_attention_stack.layers.")[2]] = value
    # The package predicts only residues. For other tokens, the bias makes the probability zero.
    head = "_mlm_token_prediction_projector.projector."
    other, hidden = len(tokens) - len(RECEPTOR_RESIDUES), tokens.shape[1]
    made["head.weight"] = torch.cat([torch.zeros(other, hidden), stored[f"{head}weight"]])
    made["head.bias"] = torch.cat([torch.full((other,), -40.0), stored[f"{head}bias"]])
    config = {
        "architectures": ["TransformerEncoderForMaskedLM"],
        "d_model": hidden,
        "nhead": model["self_attention_stack"]["initargs"]["nhead"],
        "num_layers": model["self_attention_stack"]["initargs"]["num_layers"],
        "dim_feedforward": 4 * hidden,
        "vocab_size": len(tokens),
        "max_position_embeddings": len(own),
        "pad_token_id": 0,
    }
    names = ["[PAD]", "[MASK]", "[CLS]", *RECEPTOR_RESIDUES]
    tokenizer = residue_tokenizer(
        names, special=names[:3], unknown="[PAD]", start="[CLS]", end=None
    )
    return write(folder, config, made, tokenizer)


def loop_index(embedder: str, loop: str) -> int:
    """Return the index of a loop, such as CDR3B, in the table of loops of an embedder."""
    number, chain = int(loop[3]), loop[4]
    if embedder.startswith("SingleChain"):
        return number
    return {"A": 1, "B": 2}[chain] if embedder.startswith("Cdr3") else number + 3 * (chain == "B")


RECEPTOR_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
# The most common lengths of the loops of a human beta chain.
BETA_LOOPS = {"CDR1B": 5, "CDR2B": 6, "CDR3B": 15}


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing the package."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: see the first lines of this script")
    return Path(found.submodule_search_locations[0])


def write_model(name: str, folder: Path, loops: Mapping[str, int] = BETA_LOOPS) -> Path:
    """Write the checkpoint of a model. Only SCEPTR uses ``loops``."""
    package, _, variant = name.partition("-")
    source = package_folder(package)
    if package == "antiberty":
        return antiberty_checkpoint(source, folder)
    if package == "sapiens":
        return sapiens_checkpoint(source, folder, variant)
    return sceptr_checkpoint(source, folder, "_".join(filter(None, ("SCEPTR", variant))), loops)


ANTIBODY_MODELS = ("antiberty", *(f"sapiens-{chain}" for chain in SAPIENS_CHAINS))


def parse_loops(text: str) -> dict[str, int]:
    """Parse the lengths of loops, such as ``CDR3A:14,CDR3B:15``."""
    parts = [part.split(":") for part in text.split(",")]
    return {name: int(length) for name, length in parts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help="antiberty, sapiens-heavy, sapiens-light, sceptr or sceptr-VARIANT"
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--loops", type=parse_loops, default=BETA_LOOPS)
    arguments = parser.parse_args()
    write_model(arguments.model, arguments.checkpoint, arguments.loops)


if __name__ == "__main__":
    main()
