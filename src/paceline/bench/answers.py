"""Answers of a cell, the files that keep them, and the names of its settings.

    rows.jsonl      a result row per cell, finished or failed; of several, the last one counts
    answers.jsonl   the tokens of each finished cell's answers, by its key

A row's `source.fingerprints` have two digests. `context`: of everything that the cells of a bench
share: models, task, examples, seed. `key`: of the context and the decoding; it tells which cells
are finished.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.config import fields_of
from paceline.core.rules import Lossless
from paceline.core.stats import TimedAnswer
from paceline.decode.draft_policies import FixedLength
from paceline.decode.strategies import DecodingConfig, Oracle, Speculative
from paceline.errors import UsageError
from paceline.extensions import IMPORT
from paceline.fingerprints import short_hash
from paceline.records import append_jsonl, read_jsonl
from paceline.results import row as row_file
from paceline.results.frontier import LOSSLESS, TARGET_ALONE, family_of, with_target_scores

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from paceline.core.rule_base import Rule
    from paceline.decode import Generation
    from paceline.results.row import Label, Row

    Answer = Generation | TimedAnswer
    """An answer of a cell; one that was made with others is not timed."""
    Texts = list[list[int]]

ROWS, ANSWERS = "rows.jsonl", "answers.jsonl"
SAMPLED = ("temperature", "top_p", "top_k", "repetition_penalty")


def sums_of_answer(answer: Answer, score: float | None) -> dict[str, float]:
    """Sums of an answer by name. `score`: None if the task has no metric."""
    sums: dict[str, float] = {} if score is None else {"score": score}
    sums |= {"tokens": len(answer.tokens), **answer.stats.sums}
    return sums | answer.times.sums() if isinstance(answer, TimedAnswer) else sums


def digest(*parts: Any) -> str:
    """Digest of JSON values, 16 hexadecimal digits."""
    return short_hash([json.dumps(parts, sort_keys=True)])


def key_of(row: Row) -> str:
    return row.source.fingerprints["key"]


def context_of(row: Row) -> str:
    """Digest of what the row shares with the others of its bench."""
    return row.source.fingerprints["context"]


def read_rows(folder: Path, context: str | None = None) -> list[Row]:
    """The rows of each cell with this context; None: the context of the last row."""
    rows = _read(folder)
    if context is None and rows:
        context = context_of(rows[-1])
    return [row for row in rows if context_of(row) == context]


def keep(folder: Path, rows: Iterable[Row], texts: Mapping[str, Texts] | None = None) -> None:
    """Add rows, which replace earlier ones of the same cells, and texts of answers by key."""
    for key, tokens in (texts or {}).items():  # first, so that a finished row has its texts
        append_jsonl(folder / ANSWERS, {"key": key, "tokens": tokens})
    for row in rows:
        append_jsonl(folder / ROWS, row_file.as_values(row))


def complete(folder: Path) -> None:
    """Write the file of rows again: a row per cell, with the target's score of each example."""
    rows = _read(folder)

    def shared(row: Row) -> tuple[str, tuple[Any, ...]]:
        return context_of(row), tuple(row.setting.get(name) for name in SAMPLED)

    alone = {shared(row): row for row in rows if family_of(row) == TARGET_ALONE and not row.error}
    row_file.write_rows(
        folder / ROWS,
        [
            with_target_scores(row, alone[shared(row)]) if shared(row) in alone else row
            for row in rows
        ],
    )


def _read(folder: Path) -> list[Row]:
    path = folder / ROWS
    rows = row_file.read_rows(path) if path.exists() else []
    if any(not {"context", "key"} <= row.source.fingerprints.keys() for row in rows):
        raise UsageError(f"{path} has a row that no bench wrote; choose another directory")
    return rows


def read_texts(folder: Path) -> dict[str, Texts]:
    """Tokens of the answers of each cell, by its key."""
    return {values["key"]: values["tokens"] for values in read_jsonl(folder / ANSWERS)}


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
        names.append(f"drafts at {strategy.draft_sampling.name}")
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
