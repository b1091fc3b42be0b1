"""Rules as the C library knows them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from paceline.core.cascade_rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Opt,
    OptLog,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.core.rules import Lenient, Lossless, Lossy
from paceline.native.verification import Kind, NativeRule

if TYPE_CHECKING:
    from paceline.core.rule import Rule

_LENIENT = {
    "linear": Kind.LENIENT_LINEAR,
    "square": Kind.LENIENT_SQUARE,
    "exponential": Kind.LENIENT_EXPONENTIAL,
}
_BY_ALPHA = {
    Chow: Kind.CHOW,
    ChowLog: Kind.CHOW_LOG,
    Diff: Kind.DIFF,
    DiffLog: Kind.DIFF_LOG,
    Opt: Kind.OPT,
    OptLog: Kind.OPT_LOG,
    TokenV1: Kind.TOKEN_V1,
    TokenV2: Kind.TOKEN_V2,
    TokenV3: Kind.TOKEN_V3,
}
_KNOWN = frozenset({Lossless, Lenient, Lossy, BiLDRule, *_BY_ALPHA})


def native_rule(rule: Rule) -> NativeRule | None:
    """This rule in C; None for any other, and for what stems from one of ours: that may differ."""
    return _translated(rule) if type(rule) in _KNOWN else None


@functools.cache
def _translated(rule: Rule) -> NativeRule:
    match rule:
        case Lenient():
            return NativeRule(_LENIENT[rule.kind], rule.epsilon)
        case Lossy(beta="tuned"):
            return NativeRule(Kind.LOSSY_TUNED, rule.alpha)
        case Lossy():
            return NativeRule(Kind.LOSSY, rule.alpha, rule.beta)
        case BiLDRule():
            return NativeRule(Kind.BILD, rule.threshold)
        case Chow() | ChowLog() | Diff() | DiffLog() | Opt() | OptLog():
            return NativeRule(_BY_ALPHA[type(rule)], rule.alpha)
        case TokenV1() | TokenV2() | TokenV3():
            return NativeRule(_BY_ALPHA[type(rule)], rule.alpha)
        case _:
            return NativeRule(Kind.LOSSLESS)
