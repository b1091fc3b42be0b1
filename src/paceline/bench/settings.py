"""Names of decoding settings, as rows and tables have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.config import fields_of
from paceline.core.rules import Lossless
from paceline.decode.draft_policies import FixedLength
from paceline.decode.strategies import DecodingConfig, Oracle, Speculative
from paceline.extensions import IMPORT
from paceline.results.frontier import LOSSLESS

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.results.row import Label


def setting_of(decoding: DecodingConfig) -> dict[str, Label]:
    """Setting of a cell's row: names of its curve and place, then sampling and parameters."""
    strategy = decoding.strategy
    found: dict[str, Label] = {"family": family(decoding)}
    if words := setting(decoding):
        found["setting"] = words
    found |= decoding.sampling.setting | {"strategy": strategy.strategy}
    if not isinstance(strategy, Speculative | Oracle):
        return found | _labels(strategy)
    found |= {"rule": _name(strategy.rule)} | _labels(strategy.rule)
    if isinstance(strategy, Speculative):
        found["gamma"] = strategy.num_speculative_tokens
        if strategy.policy != FixedLength():
            found["policy"] = _name(strategy.policy)
            found |= {f"policy_{key}": value for key, value in _labels(strategy.policy).items()}
        if strategy.draft_sampling is not None:
            drawn = strategy.draft_sampling.setting
            found |= {f"draft_{key}": value for key, value in drawn.items()}
        if strategy.bonus == "target":
            found["bonus"] = strategy.bonus
        if isinstance(strategy.rule, Lossless):
            found["lossless"] = LOSSLESS
    return found


def family(decoding: DecodingConfig) -> str:
    """Name of the cell's curve in a frontier plot: everything but threshold and block length."""
    strategy = decoding.strategy
    if isinstance(strategy, Oracle):
        return " ".join([strategy.strategy, *_details(strategy.rule)])
    if not isinstance(strategy, Speculative):
        normalised = getattr(strategy, "normalise", False)
        return f"{strategy.strategy} normalised" if normalised else strategy.strategy
    names = _details(strategy.rule)
    if (policy := _name(strategy.policy)) != "fixed":
        names.append(policy)
    if strategy.draft_sampling is not None:
        names.append(_drawn(strategy.draft_sampling))
    if strategy.bonus == "target":
        names.append("target bonus")
    return " ".join(names)


def setting(decoding: DecodingConfig) -> str:
    """Position of the cell on its curve, such as `alpha 0.2, gamma 4`."""
    strategy = decoding.strategy
    if isinstance(strategy, Speculative | Oracle):
        threshold = threshold_of(strategy.rule)
        parts = [] if threshold is None else _numbers(strategy.rule, threshold)
    else:
        parts = _numbers(strategy)
    if isinstance(strategy, Speculative):
        parts.insert(1, f"gamma {strategy.num_speculative_tokens}")
        parts += _numbers(strategy.policy)
    return ", ".join(parts)


def threshold_of(rule: Rule) -> str | None:
    """The swept parameter: the first that is a number."""
    return next((key for key, value in parameters_of(rule).items() if _is_number(value)), None)


def parameters_of(variant: Any) -> dict[str, Any]:
    """Parameters of a rule, a policy or a strategy, in order, without its tag."""
    if isinstance(variant, dict):
        return {key: value for key, value in variant.items() if key != IMPORT}
    tags = ("rule", "policy", "strategy")
    return {key: getattr(variant, key) for key in fields_of(type(variant)) if key not in tags}


def _name(variant: Any) -> str:
    """Name of a rule or a policy; one that results name, and that is not imported, is a dict."""
    return variant[IMPORT].rpartition(":")[2] if isinstance(variant, dict) else variant.name


def _labels(variant: Any) -> dict[str, Label]:
    return {
        key: value if isinstance(value, str) or _is_number(value) else str(value)
        for key, value in parameters_of(variant).items()
    }


def _details(rule: Rule) -> list[str]:
    """The rule's name, and its parameters without the swept one."""
    rest = {key: v for key, v in parameters_of(rule).items() if key != threshold_of(rule)}
    parts = (str(v) if key == "kind" else f"{_words(key)} {v}" for key, v in rest.items())
    return [_name(rule), *parts]


def _numbers(variant: Any, *names: str) -> list[str]:
    """The named numeric parameters; without names, those that differ from their defaults."""
    fields = {} if isinstance(variant, dict) else fields_of(type(variant))
    return [
        f"{_words(key)} {value:g}"
        for key, value in parameters_of(variant).items()
        if _is_number(value)
        and (key in names if names else key not in fields or value != fields[key].default)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _drawn(draft: SamplingParams) -> str:
    """Name of the draft's sampling, such as `drafts at T=0.6 top-p 0.9`."""
    parts = [f"drafts at T={draft.temperature:g}"]
    if draft.top_k:
        parts.append(f"top-k {draft.top_k}")
    if draft.top_p < 1:
        parts.append(f"top-p {draft.top_p:g}")
    return " ".join(parts)
