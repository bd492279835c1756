"""Writes checkpoints of antibody language models, whose tokens are residues (amino acids).

    pip install --no-deps antiberty==0.1.3 sapiens==1.0.5
    python benchmarks/residues.py antiberty|sapiens-heavy|sapiens-light CHECKPOINT

The weights come from the two PyPI packages. The repository contains no files of these packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SAPIENS_CHAINS = {"heavy": "checkpoint_vh.pt", "light": "checkpoint_vl.pt"}


def residue_tokenizer(
    names: Sequence[str], *, special: Sequence[str], unknown: str, start: str, end: str
) -> str:
    """Return the tokenizer.json of a vocabulary in which each residue is a token.

    The tokenizer adds ``start`` before a sequence and ``end`` after it.
    """
    vocab = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    around = ((end, vocab[end]), (start, vocab[start]))
    made.post_processor = processors.BertProcessing(*around)
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


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing the package."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: see the first lines of this script")
    return Path(found.submodule_search_locations[0])


def write_model(name: str, folder: Path) -> Path:
    """Write the checkpoint of the model ``name``, a key of ``MODELS``."""
    if name == "antiberty":
        return antiberty_checkpoint(package_folder(name), folder)
    package, _, chain = name.partition("-")
    return sapiens_checkpoint(package_folder(package), folder, chain)


MODELS = ("antiberty", *(f"sapiens-{chain}" for chain in SAPIENS_CHAINS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("checkpoint", type=Path)
    arguments = parser.parse_args()
    write_model(arguments.model, arguments.checkpoint)


if __name__ == "__main__":
    main()
