"""A draft from another family: a small model that gets the target's vocabulary.

A token of the target that the donor has keeps the donor's embedding. Another one gets the mean
of those of its pieces, the tokens that the donor reads its text as. Head and embeddings alike.
Alignment does the rest.

Shape suffixes: V vocabulary of the target, U of the donor, D hidden.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import UnsupportedModelError
from paceline.models.compatibility import written_vocabulary
from paceline.models.hf.causal import CausalModel
from paceline.models.hf.spreading import refuse_copies
from paceline.models.token_text import answer_text, following_tokens, tokens_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.models.hf.base import HfModel

_ROLES = ("eos_token_id", "bos_token_id", "unk_token_id", "pad_token_id")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def transplant(donor: HfModel, target: HfModel) -> HfModel:
    """The donor with the target's tokens.

    Raises:
        UnsupportedModelError: One of them is an encoder-decoder, or the donor is quantized.
    """
    for model in (donor, target):
        if model.decoder_prompt is not None:
            raise UnsupportedModelError(
                f"{model.hf.config.model_type} is an encoder-decoder, whose vocabulary is not "
                "transplanted; choose decoder-only models"
            )
    refuse_copies(donor.hf)
    pieces = pieces_of(target.tokenizer, donor.tokenizer)
    hf: Any = copy.deepcopy(donor.hf)
    count = target.head_weight.shape[0]
    old = [weight.detach().float().clone() for weight in _ends(hf)]
    hf.resize_token_embeddings(count, mean_resizing=False)
    with torch.no_grad():
        for weight, rows in zip(_ends(hf), old, strict=True):
            rows_UD = rows if rows.ndim > 1 else rows[:, None]  # a bias
            weight.copy_(_means(pieces, rows_UD, count).view_as(weight))
    _take_special_tokens(hf, target)
    draft = CausalModel(hf.eval(), target.tokenizer)
    draft.sessions = donor.sessions
    return draft


def pieces_of(target: Any, donor: Any) -> dict[int, Sequence[int]]:
    """The donor's tokens for each token of the target; none where its text has none."""
    roles: dict[int, int] = {}
    for name in _ROLES:  # one token may have several; the first counts
        ours, theirs = getattr(target, name), getattr(donor, name)
        if None not in (ours, theirs):
            roles.setdefault(ours, theirs)
    known: dict[str, int] = {}
    names = donor.convert_ids_to_tokens(list(range(len(donor))))
    for token, text in _texts(donor).items():
        if text and _INCOMPLETE not in text and not _BYTE.fullmatch(str(names[token])):
            known.setdefault(text, token)
    special = set(target.all_special_ids)
    raw = written_vocabulary(donor)
    named = target.convert_ids_to_tokens(list(range(len(target))))
    found: dict[int, Sequence[int]] = {}
    begun = tokens_of("\n", donor)  # most begin a text with a space
    for token, text in _texts(target).items():
        if text in known:
            found[token] = [known[text]]
        elif token in roles:
            found[token] = [roles[token]]
        elif token in special or (text and _INCOMPLETE not in text):
            found[token] = following_tokens("\n", begun, text, donor)
        else:  # bytes within a character, which both may name alike
            found[token] = [raw[named[token]]] if named[token] in raw else []
    return found


def _texts(tokenizer: Any) -> dict[int, str]:
    """The text of each token behind another one; special tokens by their names."""
    before = tokens_of("a", tokenizer)
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return {
        token: str(name)
        if token in special
        else answer_text(tokenizer, [token], before, skip_special_tokens=False)
        for token, name in enumerate(names)
    }


def _ends(hf: Any) -> list[Tensor]:
    head = hf.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return [hf.get_input_embeddings().weight, head.weight, *([] if bias is None else [bias])]


def _means(pieces: dict[int, Sequence[int]], rows_UD: Tensor, count: int) -> Tensor:
    """The mean of the rows of each token's pieces; of all rows for a token without any."""
    rows_VD = rows_UD.mean(0).expand(count, -1).clone()
    for token, each in pieces.items():
        if each and token < count:
            rows_VD[token] = rows_UD[list(each)].mean(0)
    return rows_VD


def _take_special_tokens(hf: Any, target: HfModel) -> None:
    """The ids of special tokens are the target's, for the configuration and for generation."""
    hf.generation_config = copy.deepcopy(target.hf.generation_config)
    theirs = target.hf.config.get_text_config(decoder=True)
    for config in {id(one): one for one in (hf.config, hf.config.get_text_config())}.values():
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(theirs, name, None))
        for name in ("pard_token", "ptd_token_id"):  # a token of the donor's vocabulary
            vars(config).pop(name, None)
