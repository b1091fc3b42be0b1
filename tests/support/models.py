"""Tiny random models and a tiny tokenizer, made in memory: tests download nothing."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from paceline.models import CausalModel, HfModel, prepare_for_decoding, wrap_model
from paceline.models.drafts.restricted_head import likeliest_tokens
from paceline.models.llama.cpu import NativeLlama, PromptPass

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
_MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("Ġ", "a"), ("e", "r"))

Settings = dict[str, Any]
_TABLES: dict[str, Settings] = yaml.safe_load(
    Path(__file__).with_name("architectures.yaml").read_text("utf-8")
)
LLAMA_LIKE, BART_LIKE = _TABLES["llama_like"], _TABLES["bart_like"]
CONFIGS, SCALED, EXPERTS, HYBRIDS, ENCODER_DECODERS = (
    _TABLES[name] for name in ("configs", "scaled", "experts_of", "hybrids", "encoder_decoders")
)
_ALL: dict[str, Settings] = CONFIGS | SCALED | EXPERTS | HYBRIDS | ENCODER_DECODERS


def tiny_hf(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random transformers model of 61 tokens and few layers; the same seed, the same weights."""
    settings = {"model_type": architecture, **deepcopy(_ALL[architecture])}
    defaults = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(**{**defaults, **settings, **overrides})
    kind = AutoModelForSeq2SeqLM if architecture in ENCODER_DECODERS else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        capped = getattr(config, "attn_logit_softcapping", None)  # SDPA drops it up to 5.20
        model = kind.from_config(config, attn_implementation="eager" if capped else None)
        if settings.get("tie_word_embeddings") is False:
            _untie_head(model)
    return model.eval()


def _untie_head(model: Any) -> None:
    """Random weights of their own: transformers ties these heads whatever the config says.

    It leaves them alone when it loads weights that differ.
    """
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.4 * torch.randn_like(head.weight))
    if hasattr(model, "final_logits_bias"):  # of BART and its relatives, with a text's end likely
        model.final_logits_bias.normal_()
        model.final_logits_bias[:, 1] = 4.5


def tiny_model(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> HfModel:
    """The same, wrapped and without a tokenizer."""
    return wrap_model(tiny_hf(architecture, seed=seed, **overrides))


def tiny_tokenizer(
    *, extra_tokens: tuple[str, ...] = (), composes: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 266 tokens that reads any text; ids 0, 1, 2 are bos, eos and pad.

    `composes` characters (NFC), as the tokenizer of Qwen 2.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in _MERGES]
    vocabulary = {token: number for number, token in enumerate([*tokens, *extra_tokens])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=list(_MERGES)))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    if composes:
        backend.normalizer = NFC()
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad
    )


def save_tiny(
    path: Path,
    architecture: str = "llama",
    tokenizer: PreTrainedTokenizerFast | None = None,
    **settings: Any,
) -> Any:
    """A random model and its tokenizer as an ordinary model directory. -> the model."""
    tokenizer = tokenizer or tiny_tokenizer(composes=architecture == "qwen2")
    hf = tiny_hf(architecture, vocab_size=len(tokenizer), **settings)
    hf.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return hf


def tiny_pair(architecture: str = "llama", **overrides: Any) -> tuple[HfModel, HfModel]:
    """Target and draft with one tokenizer: different random weights, the draft of two layers."""
    tokenizer = tiny_tokenizer(composes=architecture == "qwen2")
    width = {"vocab_size": len(tokenizer)}
    fewer = {"num_hidden_layers": 2}
    if architecture in ENCODER_DECODERS:
        known = ENCODER_DECODERS[architecture]
        fewer = {name: 2 for name in ("num_decoder_layers", "decoder_layers") if name in known}
    target = tiny_hf(architecture, seed=0, **width, **overrides)
    draft = tiny_hf(architecture, seed=1, **fewer, **width, **overrides)
    return wrap_model(target, tokenizer), wrap_model(draft, tokenizer)


def limit_vocabulary(draft: HfModel, target: HfModel, texts: list[list[int]], size: int) -> HfModel:
    """The draft, restricted to the likeliest tokens of a decoder-only target."""
    return draft.rewrap(draft.hf, likeliest_tokens(target, texts, size).to(draft.device))


def generated(hf: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The new tokens of transformers' greedy generate() for this prompt alone."""
    ids, options = torch.tensor([prompt]), {"do_sample": False, **options}
    found = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return found[0, 1 if hf.config.is_encoder_decoder else len(prompt) :].tolist()


TEXT = [7, 3, 30, 12, 9, 44, 8, 51, 2, 17, 23, 5]


def prepared(architecture: str = "llama", **overrides: Any) -> CausalModel:
    """With weights that bfloat16 holds, so that there is a compiled pass where there can be one."""
    hf = tiny_hf(architecture, **overrides).bfloat16().float()
    return prepare_for_decoding(wrap_model(hf))


@cache
def prepared_pair(num_draft_layers: int = 2) -> tuple[CausalModel, CausalModel]:
    """A target and a draft for many tests, which leave them as they are."""
    return prepared(seed=0), prepared(seed=0, num_hidden_layers=num_draft_layers)


def reader(model: CausalModel) -> NativeLlama | None:
    """Its compiled pass, or None."""
    return model.decoder.native if isinstance(model.decoder, PromptPass) else None


def read(model: CausalModel, parts: list[list[int]]) -> torch.Tensor:
    """Logits after every token of one text that is read in these parts, [N, V]."""
    session = model.start_session()
    return torch.cat([session.extend(torch.tensor([part]))[0] for part in parts])
