"""Reads the final number of a worked answer, as GSM8K writes it: `#### 1,234`."""

from __future__ import annotations

import re

_MARK = "####"
# A minus after a digit, a letter or a bracket is a subtraction. A comma separates thousands.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def final_number(text: str) -> str | None:
    """The first number after the first `####`, or else the last number, in plain digits.

    Models without instruction tuning go on after their answer, often with another problem.
    "$1,234." becomes "1234". None if there is no number.
    """
    before, mark, marked = text.partition(_MARK)
    found = _NUMBER.findall(marked if mark else before)
    if not found:
        return None
    return re.sub(r"[,$]", "", found[0] if mark else found[-1])
