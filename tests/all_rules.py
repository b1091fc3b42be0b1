"""The rules that tests share: one of every form, and cascades by the name of their closed form."""

from paceline.core.rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    Rule,
    TokenV1,
    TokenV2,
    TokenV3,
)

ALL_RULES: list[Rule] = [
    Lossless(),
    *(Lenient(kind, 0.4) for kind in ("linear", "square", "exponential")),
    *(Lossy(0.3), Lossy(0.3, 0.8), Lossy(0.3, "tuned"), BiLDRule(1.5), Chow(0.6), ChowLog(2.0)),
    *(Diff(0.1), DiffLog(0.3), Opt(0.4), OptLog(0.5), TokenV1(0.2), TokenV2(0.2), TokenV3(0.6)),
]
CASCADES = {
    "bild": BiLDRule,
    "chow": Chow,
    "chow_log": ChowLog,
    "diff": Diff,
    "diff_log": DiffLog,
    "opt": Opt,
    "opt_log": OptLog,
    "token_v1": TokenV1,
    "token_v2": TokenV2,
    "token_v3": TokenV3,
}
# At these, each rule defers at some contexts of the statistical tests' pair and not at others.
THRESHOLDS = {
    "bild": 1.9,
    "chow": 0.52,
    "chow_log": 1.2,
    "diff": 0.05,
    "diff_log": 0.05,
    "opt": 0.2,
    "opt_log": 0.3,
    "token_v1": 0.3,
    "token_v2": 0.3,
    "token_v3": 0.5,
    "tuned": 0.4,
}


def stating(name: str, alpha: float) -> Rule:
    """The rule whose stated distribution is `exact_cascades.AIMS[name](alpha)`."""
    return Lossy(min(alpha, 0.95), "tuned") if name == "tuned" else CASCADES[name](alpha)
