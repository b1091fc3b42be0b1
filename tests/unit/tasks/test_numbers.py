"""The final number of a worked answer."""

import re

import pytest

from paceline.tasks.math_problems import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 6 = 11\n#### 11", "11"),
        ("#### 1,234\n\nQuestion: another?\n#### 3", "1234"),
        ("#### $1,234.50.", "1234.50"),
        ("#### -7", "-7"),
        ("#### -$7", "-7"),
        ("####42 apples, not 43", "42"),
        ("The answer is 42.", "42"),
        ("It costs $2,000.", "2000"),
        ("first 1, then 2", "2"),
        ("10-5", "5"),
        ("x = -5", "-5"),
        ("(3)-4", "4"),
        ("half is .5", ".5"),
        ("1. 2. 3.", "3"),
        ("12 #### none", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_is_read(text: str, number: str | None):
    assert final_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "a\n#### 72",
        "b\n#### 1,000",
        "c\n#### -3",
        "d\n#### 0.5",
        "e\n#### 10,250,000",
        "no mark",
        "#### 1\n#### 2",
    ],
)
def test_marked_numbers_are_those_of_the_evaluation_released_with_gsm8k(text: str):
    """It searches for the mark, a space and a number, and removes commas."""
    found = re.search(r"#### (-?[0-9.,]+)", text)
    assert final_number(text) == (found[1].strip().replace(",", "") if found else None)
