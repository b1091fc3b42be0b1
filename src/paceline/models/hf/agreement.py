"""Whether a fast way to read a model gives what transformers gives.

Compilers, libraries and graph captures have faults that nobody sees in fluent text. So every fast
path reads a first block when it is made, and is dropped if its logits are not those of the model.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from paceline.errors import SlowerWarning

if TYPE_CHECKING:
    from paceline.models.contract import ModelSession
    from paceline.models.hf.base import HfModel

AnyModel = TypeVar("AnyModel", bound="HfModel")

EXACT = 0.01
"""Largest difference of a logit, in standard deviations of the logits, where both compute in float32."""
ROUNDED = 0.5
"""The same where one of them rounds to 16 bits. A misread token or position moves logits by more than 1."""


def tolerance_for(dtype: torch.dtype) -> float:
    """How far logits of a model in this dtype may be apart, in standard deviations."""
    return EXACT if dtype == torch.float32 else ROUNDED


def trial_tokens(model: HfModel) -> list[int]:
    """Three tokens that a model is tried on."""
    return [token % model.vocab_size for token in (7, 11, 5)]


@torch.inference_mode()
def plain_logits(model: HfModel) -> Tensor:
    """Logits after two and after three trial tokens, by transformers and without a cache, [2, V]."""
    tokens = torch.tensor([trial_tokens(model)], device=model.device)
    logits = model.hf(input_ids=tokens, use_cache=False).logits
    return logits[0, 1:, : model.vocab_size].float()


def rolled_back_logits(model: HfModel, session: ModelSession) -> Tensor:
    """The same logits, each from a row of a ragged batch; one row has read a wrong token before."""
    first, second, third = trial_tokens(model)
    session.prefill([[first], [first, second, first]])
    session.rollback([0, 1])
    return session.extend(torch.tensor([[second], [third]]))[:, 0]


def difference(wanted: Tensor, got: Tensor) -> float:
    """The largest distance of two logits, in standard deviations; NaN and infinity count as infinite.

    Tokens outside of a draft vocabulary, -inf in `got`, are left out.
    """
    known = got != -torch.inf
    apart = (wanted - got)[known].abs().max() / (wanted.std() + 1e-6)
    return float(apart.nan_to_num(nan=torch.inf))


def unless_wrong(model: AnyModel, name: str, tolerance: float) -> AnyModel | None:
    """The model, if the sessions that it starts read as its `hf` does; else None, and one warning.

    Args:
        model: Prepared with a fast path.
        name: Of that path, for the warning.
        tolerance: See `EXACT` and `ROUNDED`.
    """
    wanted = plain_logits(model)
    try:
        got = rolled_back_logits(model, model.start_session()).to(wanted.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        fault = f"failed ({str(error).strip().splitlines()[0]})"
    else:
        apart = difference(wanted, got)
        if apart <= tolerance:
            return model
        fault = f"gives other logits (by {apart:.2g} standard deviations, allowed {tolerance:g})"
    warnings.warn(
        f"{name} {fault} than transformers for this {model.hf.config.model_type}; it is not used, and "
        "the model runs more slowly: please report this, with the output of paceline env",
        SlowerWarning,
        stacklevel=3,
    )
    return None
