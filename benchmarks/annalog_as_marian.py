"""Converts ANNalog, a pretrained encoder-decoder, to a Marian model for transformers.

ANNalog (https://pypi.org/project/annalog, MIT) writes molecules that are similar to a given one. It
has 4 million parameters, normalisation after each part and learned positions, and installs from
PyPI, so it is a real encoder-decoder to test decoding on without a hub. Marian computes its
positions; the converted file holds the learned ones, which transformers then reads.

    pip download annalog==1.0.6 --no-deps
    python benchmarks/annalog_as_marian.py --wheel annalog-1.0.6-py3-none-any.whl --out DIR

writes DIR/target, and prompts (molecules as SMILES) to DIR/prompts.txt. A draft and the proof:

    paceline draft --target DIR/target --layers 0 --out DIR/draft
    paceline verify --target DIR/target --draft DIR/draft --prompts DIR/prompts.txt --self-test
"""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

_TOKENS = r"\[[^\]]*\]|%\d{2}|Br|Cl|."
_RENAMED = {
    "tok_embedding": "embed_tokens",
    "pos_embedding": "embed_positions",
    "self_attention": "self_attn",
    "encoder_attention": "encoder_attn",
    "enc_attn_layer_norm": "encoder_attn_layer_norm",
    "ff_layer_norm": "final_layer_norm",
    "positionwise_feedforward.": "",
    "fc_q": "q_proj",
    "fc_k": "k_proj",
    "fc_v": "v_proj",
    "fc_o.": "out_proj.",
    "fc_1": "fc1",
    "fc_2": "fc2",
}
_MOLECULES = """\
CC(=O)Oc1ccccc1C(=O)O
CN1C=NC2=C1C(=O)N(C(=O)N2C)C
CC(C)Cc1ccc(cc1)C(C)C(=O)O
CC(=O)Nc1ccc(O)cc1
c1ccc2[nH]ccc2c1
CCN(CC)CCOC(=O)c1ccc(N)cc1
Clc1ccc(cc1)C(c1ccccc1)N1CCNCC1
COc1ccc2cc(ccc2c1)C(C)C(=O)O
CN(C)CCc1c[nH]c2ccccc12
O=C(O)Cc1ccccc1Nc1c(Cl)cccc1Cl
CC(C)NCC(O)COc1cccc2ccccc12
Nc1ncnc2c1ncn2C1CC(O)C(CO)O1
"""


def converted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under Marian's names."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name == "decoder.fc_out.weight":
            found["lm_head.weight"] = weight
        elif name == "decoder.fc_out.bias":
            found["final_logits_bias"] = weight[None]
        else:
            for old, new in _RENAMED.items():
                name = name.replace(old, new)
            found[f"model.{name}"] = weight
    return found


def tokenizer_of(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Splits SMILES into atoms and bonds; texts begin and end as in training."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(_TOKENS), "isolated")
    backend.decoder = Fuse()
    backend.post_processor = TemplateProcessing(
        single="<sos> $A <eos>",
        special_tokens=[(token, vocabulary[token]) for token in ("<sos>", "<eos>")],
    )
    special = {"unk": "<unk>", "pad": "<pad>", "bos": "<sos>", "eos": "<eos>"}
    named = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with zipfile.ZipFile(options.wheel) as wheel:
        files = "annalog/ckpt_and_vocab"
        checkpoint = io.BytesIO(wheel.read(f"{files}/Lev_extended.pt"))
        vocabulary = pickle.loads(wheel.read(f"{files}/stereo_experiment_vocab_ttf.pkl"))
    weights = converted(torch.load(checkpoint, map_location="cpu", weights_only=True))
    tokens: list[str] = vocabulary["itos"]
    places, width = weights["model.decoder.embed_positions.weight"].shape
    names = {token: number for number, token in enumerate(tokens)}
    config = MarianConfig(
        vocab_size=len(tokens),
        d_model=width,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=places,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=False,
        decoder_vocab_size=len(tokens),
        tie_word_embeddings=False,
        bos_token_id=names["<sos>"],
        eos_token_id=names["<eos>"],
        pad_token_id=names["<pad>"],
        decoder_start_token_id=names["<sos>"],
        forced_eos_token_id=None,
    )
    target = options.out / "target"
    MarianMTModel(config).save_pretrained(target)
    file = target / "model.safetensors"
    known = set(load_file(file)) | {name for name in weights if "embed_positions" in name}
    assert known == set(weights), f"names differ: {known ^ set(weights)}"
    save_file(weights, file, {"format": "pt"})
    tokenizer_of(tokens).save_pretrained(target)
    (options.out / "prompts.txt").write_text(_MOLECULES)


if __name__ == "__main__":
    main()
