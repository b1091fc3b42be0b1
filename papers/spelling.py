"""The task of the encoder-decoders: spell a number in English words.

    prompt "4 0 2 , 1 1 7", answer "four hundred and two thousand, one hundred seventeen"

Each text draws its style: "and" after hundreds, commas after groups, hyphens in tens. So the target
has a distribution over right answers, and an answer counts whatever its style.
"""

from __future__ import annotations

import random
from functools import cache

from paceline.data.prompts import Record
from paceline.tasks.base import OwnTask, Split, TaskExample

_UNITS = (
    *("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_GROUPS = ("", "thousand", "million")
_EVERY = 11  # a number in eleven is a test number


class Spelling(OwnTask):
    """Numbers of four to nine digits, spelled in English words.

    Attributes:
        min_digits: Minimum digits of a number.
        max_digits: Maximum digits of a number.
    """

    min_digits: int = 4
    max_digits: int = 9

    @property
    def metric(self) -> str:
        return "accuracy"

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Numbers whose digits' count is uniform; those of the two splits are disjoint."""
        rng = random.Random(f"{split} {seed}")
        examples: list[TaskExample] = []
        while len(examples) < count:
            digits = rng.randint(self.min_digits, self.max_digits)
            number = rng.randrange(10 ** (digits - 1), 10**digits)
            if (number % _EVERY == 0) is not (split == "test"):
                continue
            words = spelled(number, rng)
            record = Record(
                f"spelling {split} example {len(examples)}",
                "prompt",
                text=" ".join(f"{number:,}"),
                completion=words,
            )
            examples.append(TaskExample(record, reference=plain(words)))
        return examples

    def score(self, example: TaskExample, answer: str) -> float:
        """1 if the answer is the number in any style, else 0."""
        return float(plain(answer) == example.reference)


def spelled(number: int, rng: random.Random) -> str:
    """The number in words, in a style of its own."""
    join, comma, hyphen = (
        rng.choice([" and ", " "]),
        rng.choice([", ", " "]),
        rng.choice(["-", " "]),
    )
    parts = [
        f"{_group(number // 1000**place % 1000, join, hyphen)} {_GROUPS[place]}".strip()
        for place in (2, 1, 0)
        if number // 1000**place % 1000
    ]
    return comma.join(parts)


def _group(number: int, join: str, hyphen: str) -> str:
    hundreds, rest = divmod(number, 100)
    words = (
        _UNITS[rest]
        if rest < 20
        else hyphen.join(filter(None, (_TENS[rest // 10], _UNITS[rest % 10])))
    )
    return join.join(filter(None, (f"{_UNITS[hundreds]} hundred" if hundreds else "", words)))


@cache
def plain(words: str) -> str:
    """The words without "and", commas and hyphens."""
    bare = words.lower().replace(",", " ").replace("-", " ").split()
    return " ".join(word for word in bare if word != "and")
