"""Convert rules to the form of rules.c."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from paceline.core.rule_base import own_native_form
from paceline.native.structures import Kind, NativeRule

if TYPE_CHECKING:
    from paceline.core.rule_base import Rule


def native_rule(rule: Rule) -> NativeRule | None:
    """The rule for rules.c; None unless the rule's own class defines `native_form`."""
    return _converted(rule) if "native_form" in vars(type(rule)) else None


@functools.lru_cache(maxsize=256)
def _converted(rule: Rule) -> NativeRule | None:
    form = own_native_form(rule)
    return None if form is None else NativeRule(Kind[form.kind], *form[1:])
