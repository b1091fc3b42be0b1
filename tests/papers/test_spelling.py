"""The task of the encoder-decoders against numbers that are read back by another road."""

from papers.spelling import Spelling, plain

WORDS = dict(
    zip(
        (
            *[
                "one",
                "two",
                "three",
                "four",
                "five",
                "six",
                "seven",
                "eight",
                "nine",
                "ten",
                "eleven",
                "twelve",
                "thirteen",
            ],
            *["fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"],
            *["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"],
        ),
        [*range(1, 20), *range(20, 100, 10)],
        strict=True,
    )
)


def number_of(words: str) -> int:
    """The number that plain words spell, read from the left."""
    total = group = 0
    for word in words.split():
        match word:
            case "hundred":
                group *= 100
            case "thousand" | "million":
                total, group = total + group * {"thousand": 10**3, "million": 10**6}[word], 0
            case _:
                group += WORDS[word]
    return total + group


def test_words_are_the_number_in_the_style_of_the_text():
    examples = Spelling().examples("train", 500, 3)
    styles: set[tuple[bool, bool, bool]] = set()
    for example in examples:
        text = str(example.record.completion)
        number = int(str(example.record.text).replace(" ", "").replace(",", ""))
        assert number_of(plain(text)) == number
        styles.add((" and " in text, ", " in text, "-" in text))
        assert Spelling().score(example, text) == 1
        assert Spelling().score(example, f" {plain(text).upper()}") == 1
        assert Spelling().score(example, text + " one") == 0
    assert len(styles) == 8


def test_no_test_number_is_trained_on():
    parts = [Spelling().examples(split, 2000, 0) for split in ("train", "test")]
    train, test = ({example.record.text for example in part} for part in parts)
    assert not train & test
    assert Spelling().examples("test", 10, 5) == Spelling().examples("test", 20, 5)[:10]
