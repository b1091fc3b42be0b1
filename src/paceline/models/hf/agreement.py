"""Compares the logits of a faster forward pass with those of transformers.

Bugs of compilers, libraries and graph captures do not show in generated text. So every faster pass
is tested on a small batch when it is created, and is not used if its logits differ.

Shape suffixes: B rows, T text, D hidden, V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from paceline.errors import SlowerWarning
from paceline.models.contract import Texts, pad

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.models.contract import ModelSession
    from paceline.models.hf.base import HfModel

AnyModel = TypeVar("AnyModel", bound="HfModel")

EXACT = 0.01
"""Tolerance for passes in float32, in standard deviations of the logits."""
ROUNDED = 0.5
"""Tolerance if a pass rounds to 16 bits; wrong tokens or positions change logits by more than 1."""


def tolerance_for(dtype: torch.dtype) -> float:
    return EXACT if dtype == torch.float32 else ROUNDED


def _trial_tokens(model: HfModel) -> list[int]:
    return [token % model.vocab_size for token in (7, 11, 5)]


@torch.inference_mode()
def plain_logits(model: HfModel) -> Tensor:
    """Logits after two trial texts, by transformers without a cache, [2, V].

    The texts of a decoder-only model have two and three tokens; those of an encoder-decoder have
    two and one, after sources of one and three tokens.
    """
    first, second, third = _trial_tokens(model)
    if model.decoder_prompt is None:
        batch = Texts(torch.tensor([[first, second, third]], device=model.device))
        logits_RV = model.plain_logits(batch)[0, 1:]
    else:
        pairs = ([first], [second, third]), ([first, second, first], [second])
        batches = [model.trial_batch(text, source) for source, text in pairs]
        logits_RV = torch.cat([model.plain_logits(batch)[0, -1:] for batch in batches])
    return logits_RV[:, : model.vocab_size].float()


def rolled_back_logits(model: HfModel, session: ModelSession) -> Tensor:
    """The same logits by a session, from two ragged rows, one of which rolls back a wrong token."""
    first, second, third = _trial_tokens(model)
    session.prefill([[first], [first, second, first]])
    newest = [[second], [third]]
    if model.decoder_prompt is not None:
        session.extend(torch.tensor(newest))
        newest = [[third], [second]]
    session.rollback([0, 1])
    return session.extend(torch.tensor(newest))[:, 0]


def difference(wanted: Tensor, got: Tensor) -> float:
    """Maximum difference in standard deviations; NaN counts as infinite.

    Tokens outside the draft vocabulary (-inf in `got`) are ignored.
    """
    known = got != -torch.inf
    largest = (wanted - got)[known].abs().max() / (wanted.std() + 1e-6)
    return float(largest.nan_to_num(nan=torch.inf))


@torch.inference_mode()
def hidden_states(model: HfModel) -> Tensor:
    """Hidden states of two encoder-decoder texts of two and one tokens, in one batch, [T, D]."""
    first, second, third = _trial_tokens(model)
    assert model.decoder_prompt is not None, "a decoder-only model has no sources"
    texts = pad([[*model.decoder_prompt, *new] for new in ([first, second], [third])])
    batch = texts._replace(source=pad([[first], [second, third, first]]))
    hidden_BTD = model.hidden(batch.to(model.device))
    kept_BT = torch.ones_like(batch.tokens_BT) if texts.attention_BT is None else texts.attention_BT
    return hidden_BTD[kept_BT.bool()].float()


def checked_or_none(model: AnyModel, name: str, tolerance: float) -> AnyModel | None:
    """Return the model if its sessions agree with its `hf`; else warn and return None.

    `name` is the name of the faster pass, for the warning.
    """
    wanted = plain_logits(model)
    kept = agrees(
        model,
        name,
        "logits",
        wanted,
        lambda: rolled_back_logits(model, model.start_session()).to(wanted.device),
        tolerance,
    )
    return model if kept else None


def agrees(
    model: HfModel,
    name: str,
    what: str,
    wanted: Tensor,
    compute: Callable[[], Tensor],
    tolerance: float,
) -> bool:
    """Whether `compute` gives the wanted values; else warn that `name`, a faster pass, is not used.

    `what` names the values.
    """
    try:
        got = compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        fault = f"failed ({str(error).strip().splitlines()[0]})"
    else:
        largest = difference(wanted, got)
        if largest <= tolerance:
            return True
        fault = (
            f"gives {what} that differ from transformers by {largest:.2g} standard deviations "
            f"(allowed {tolerance:g})"
        )
    warnings.warn(
        f"{name} {fault} for this {model.hf.config.model_type}; it is not used, and the model runs "
        "more slowly: please report this, with the output of paceline env",
        SlowerWarning,
        stacklevel=4,
    )
    return False
