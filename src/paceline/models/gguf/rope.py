"""Rotary positions of a GGUF file as transformers' `rope_parameters`."""

# R frequencies of a head
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.models.gguf.fields import GgufFile

_FACTORS, _LONG, _SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
ROPE_TENSORS = (_FACTORS, _LONG, _SHORT)
_TOLERANCE = 1e-5  # of a frequency; the file stores float32


def rope_parameters(file: GgufFile, width: int) -> dict[str, Any]:
    """The settings for heads with `width` rotated values; raises ModelLoadError without any."""
    theta = float(file.own("rope.freq_base", 10_000.0))
    basic: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, factor = _scaling(file)
    original = file.own("rope.scaling.original_context_length")
    attention = float(file.own("rope.scaling.attn_factor", 1.0))
    if kind == "longrope" or _LONG in file.tensors:
        return basic | _longrope(file, original, attention)
    if kind == "yarn":
        return basic | _yarn(file, factor, original, attention)
    if attention != 1.0:
        raise file.error(f"has rope.scaling.attn_factor = {attention:g} without YaRN")
    if _FACTORS in file.tensors:
        if factor != 1.0:
            raise file.error(f"has both {_FACTORS} and rope.scaling.factor = {factor:g}")
        return basic | _by_factors(file, theta, width)
    return basic if factor == 1.0 else basic | {"rope_type": "linear", "factor": factor}


def check_frequencies(file: GgufFile, hf: Any) -> None:
    """Raise if transformers' rotary positions are not those of the file."""
    kind, factor = _scaling(file)
    modules = [each for name, each in hf.named_modules() if name.endswith("rotary_emb")]
    if not modules or kind in ("yarn", "longrope") or _LONG in file.tensors:
        return
    built = type(modules[0])(hf.config)  # the model itself is on the meta device
    found = {name: each for name, each in built.named_buffers() if name.endswith("inv_freq")}
    found_R = found.get("full_attention_inv_freq", found.get("inv_freq"))
    if found_R is None:
        raise file.error("has rotary positions that transformers computes in a way not known here")
    theta, width = float(file.own("rope.freq_base", 10_000.0)), 2 * len(found_R)
    wanted_R = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width) / factor
    if _FACTORS in file.tensors:
        wanted_R = wanted_R / _factors(file, _FACTORS)
    if not torch.allclose(found_R.double(), wanted_R, rtol=_TOLERANCE, atol=0):
        raise file.error("has rotary positions that transformers does not compute")


def _scaling(file: GgufFile) -> tuple[str, float]:
    """Type and factor, with llama.cpp's defaults."""
    kind = file.own("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.error(f"has rope.scaling.type = {kind}, which is not supported")
    older = float(file.own("rope.scale_linear", 0.0))
    factor = float(file.own("rope.scaling.factor", older)) or 1.0
    return kind, 1.0 if kind == "none" else factor


def _factors(file: GgufFile, name: str) -> Tensor:
    return torch.from_numpy(file.tensors[name].data.astype("float64").reshape(-1).copy())


def _yarn(file: GgufFile, factor: float, original: int | None, attention: float) -> dict[str, Any]:
    usual = 1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0
    if original is None:
        original = file.required("context_length")
    # transformers' attention_factor: the whole factor; converters store it, llama.cpp mostly
    # ignores it
    stored = float(file.own("rope.scaling.yarn_attn_factor", usual))
    if not math.isclose(stored, usual, rel_tol=1e-5):
        raise file.error(f"has rope.scaling.yarn_attn_factor = {stored:g}, which is not supported")
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        value = float(file.own(f"rope.scaling.yarn_{key}", default))
        if value != default:
            raise file.error(
                f"has rope.scaling.yarn_{key} = {value:g}, for which llama.cpp takes {default:g}"
            )
    if attention != 1.0:
        found["attention_factor"] = usual * attention
    return found


def _longrope(file: GgufFile, original: int | None, attention: float) -> dict[str, Any]:
    if original is None or _LONG not in file.tensors or _SHORT not in file.tensors:
        raise file.error("has long rotary positions without their factors or original length")
    return {
        "rope_type": "longrope",
        "short_factor": _factors(file, _SHORT).tolist(),
        "long_factor": _factors(file, _LONG).tolist(),
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def _by_factors(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """Llama 3's settings if they give these factors, else the factors themselves."""
    factors_R = _factors(file, _FACTORS)
    if len(factors_R) != width // 2:
        raise file.error(f"has {len(factors_R)} values in {_FACTORS}, not {width // 2}")
    if bool((factors_R == 1.0).all()):
        return {}
    turns_R = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)
    found = _llama3(factors_R, turns_R)
    if found is not None:
        return found
    original = file.required("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": factors_R.tolist(),
        "long_factor": factors_R.tolist(),
        "original_max_position_embeddings": original,
        "attention_factor": 1.0,
    }


def _llama3(factors_R: Tensor, turns_R: Tensor) -> dict[str, Any] | None:
    """Solve transformers' formula for its parameters.

    With t turns per position, a factor is F where t < low / original, 1 where t > high / original,
    and between them 1 / factor = (1 - s) / F + s, s = (original t - low) / (high - low): a line in
    t, of which only original / low and high / low are determined. low is 1, as for all models.
    """
    factor = float(factors_R.max())
    shares_R = (1 / factors_R - 1 / factor) / (1 - 1 / factor) if factor > 1 else factors_R
    between_R = (shares_R > 1e-6) & (shares_R < 1 - 1e-6)
    candidates: list[tuple[float, float]] = []  # original, high
    if int(between_R.sum()) >= 2:
        turns, shares = turns_R[between_R], shares_R[between_R]
        slope = float((shares[0] - shares[-1]) / (turns[0] - turns[-1]))
        offset = slope * float(turns[0]) - float(shares[0])
        if slope > 0 and offset > 0:
            candidates.append((slope / offset, 1 + 1 / offset))
    if bool(between_R.any()):
        turn, share = float(turns_R[between_R][0]), float(shares_R[between_R][0])
        candidates.append(((1 + 3 * share) / turn, 4.0))
    else:
        candidates += [(2.0**power, 4.0) for power in range(4, 24)]
    for original, high in candidates:
        for rounded in ((round(original), round(high)), (round(original), high)):
            if _agrees(factors_R, turns_R, factor, *rounded):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": float(rounded[1]),
                    "original_max_position_embeddings": rounded[0],
                }
    return None


def _agrees(factors_R: Tensor, turns_R: Tensor, factor: float, original: int, high: float) -> bool:
    if high <= 1.0 or original < 1:
        return False
    share_R = ((original * turns_R - 1) / (high - 1)).clamp(0, 1)
    wanted_R = 1 / ((1 - share_R) / factor + share_R)
    return torch.allclose(wanted_R, factors_R, rtol=_TOLERANCE, atol=0)
