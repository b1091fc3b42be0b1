"""Measures how a transformers model makes logits from its final hidden states.

Some models scale hidden states or logits (T5, MiniCPM, Granite, Cohere); some bound their logits
(Gemma 2). Their configs name this differently, so the model itself is measured: in one pass, known
numbers replace the output of the head, and the logits show what the model does with them.

Shape suffixes: B batch, R rows of a ramp, T text, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from paceline.core.fused import Head
from paceline.errors import UnsupportedModelError
from paceline.models.hf.architectures import decoder_body, is_encoder_decoder

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

# Largest numbers of the ramps: 0 shows the bias, the others slope, bend and bound.
_RAMPS = (0.0, 2.0**-8, 2.0**6, 2.0**13)
_TOLERANCE = 0.01  # relative to the largest value; bfloat16 rounds to 0.004


class LogitMap(NamedTuple):
    """logits = cap * tanh(x / cap), x = output_scale * (input_scale * hidden @ weight^T + bias)."""

    input_scale: float = 1.0
    output_scale: float = 1.0
    cap: float | None = None

    def scaled(self, hidden_BTD: Tensor) -> Tensor:
        """The hidden states that `head` reads: times both scales."""
        scale = self.input_scale * self.output_scale
        return hidden_BTD if scale == 1 else scale * hidden_BTD

    def head(self, weight_VD: Tensor, bias_V: Tensor | None) -> Head:
        """The head for scaled hidden states."""
        if bias_V is not None and self.output_scale != 1:
            bias_V = self.output_scale * bias_V
        return Head(weight_VD, bias_V, self.cap)


def logit_map(hf: PreTrainedModel) -> LogitMap:
    """The map of this model, measured once. It does not depend on weights."""
    if hf not in _MEASURED:
        _MEASURED[hf] = _measured(hf)
    return _MEASURED[hf]


def unknown_map(hf: PreTrainedModel) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{hf.config.model_type} computes logits from hidden states in an unknown way, which only "
        "decoding supports; choose another model to train or score"
    )


_MEASURED: WeakKeyDictionary[PreTrainedModel, LogitMap] = WeakKeyDictionary()


@torch.inference_mode()
def _measured(hf: PreTrainedModel) -> LogitMap:
    seen: dict[str, Tensor] = {}
    head: Any = hf.get_output_embeddings()

    def keep_states(_body: nn.Module, _inputs: Any, output: Any) -> None:
        seen["states"] = output.last_hidden_state

    def replace(_head: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        seen["inputs"] = inputs[0]
        line_V = torch.linspace(-1, 1, output.shape[-1], device=output.device)
        seen["ramps"] = line_V * torch.tensor(_RAMPS, device=output.device)[:, None]
        return seen["ramps"].expand_as(output)

    # several tokens: the embedding of one, such as the padding, may be zero
    ids = [token % head.weight.shape[0] for token in range(3, 3 + len(_RAMPS))]
    tokens = {"input_ids": torch.tensor([ids], device=hf.device)}
    if is_encoder_decoder(hf.config):
        tokens["decoder_input_ids"] = tokens["input_ids"]
    hooks = decoder_body(hf).register_forward_hook(keep_states), head.register_forward_hook(replace)
    with hooks[0], hooks[1], torch.autocast(hf.device.type, enabled=False):
        logits_RV = hf(**tokens, use_cache=False).logits[0].double().cpu()
    if not {"states", "inputs"} <= seen.keys():
        raise unknown_map(hf)
    output_scale, cap = _fitted(seen["ramps"].double().cpu()[1:], logits_RV[1:] - logits_RV[0], hf)
    input_scale = _ratio(seen["states"], seen["inputs"], hf)
    return LogitMap(input_scale, output_scale, cap)


def _fitted(given_RV: Tensor, found_RV: Tensor, hf: PreTrainedModel) -> tuple[float, float | None]:
    """Scale and cap of the function from given to found numbers."""
    scale = _snapped(float((given_RV[0] * found_RV[0]).sum() / given_RV[0].square().sum()), 1.0)
    bound = float(found_RV[-1].abs().max())
    cap = None if bound > 0.99 * abs(scale) * _RAMPS[-1] else bound
    expected_RV = Head.capped(scale * given_RV, cap)
    limit_R = _TOLERANCE * found_RV.abs().amax(-1)
    if not bool(((expected_RV - found_RV).abs().amax(-1) <= limit_R).all()):
        raise unknown_map(hf)
    return scale, cap


def _ratio(states_BTD: Tensor, inputs_BTD: Tensor, hf: PreTrainedModel) -> float:
    """The head's inputs divided by the hidden states."""
    if states_BTD.shape != inputs_BTD.shape:
        raise unknown_map(hf)
    states_BTD, inputs_BTD = states_BTD.double(), inputs_BTD.double()
    found = float((states_BTD * inputs_BTD).sum() / states_BTD.square().sum())
    differences = (found * states_BTD - inputs_BTD).abs()
    if not float(differences.max()) <= _TOLERANCE * float(inputs_BTD.abs().max()):
        raise unknown_map(hf)
    return _snapped(found, 1.0, states_BTD.shape[-1] ** -0.5)


def _snapped(found: float, *candidates: float) -> float:
    """The candidate that was found but for rounding, else the number itself."""
    return next((each for each in candidates if abs(found - each) <= 1e-3 * each), found)
