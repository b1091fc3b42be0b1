"""Methods of speculative decoding in vLLM, side by side at several numbers of concurrent requests.

Every method answers the same requests, in groups of as many as are asked at once, and so does the
target alone. A group is a unit: the speedup is its seconds per token without / with the method.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from paceline.config import Options, Result
from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.data.input_checks import checked
from paceline.engines.commands import EngineChoice, check_permitted
from paceline.engines.contract import BlockCounts, Request, Served, Setup
from paceline.engines.process import started
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.engine_costs import over_starts
from paceline.measure.pair import PairConfig
from paceline.measure.served import Answers, speedup_by_start
from paceline.measure.verdict import Verdict, best_code, decide_served
from paceline.models.inspection import inspect_model
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.progress import Progress, silent
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source, sums_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from pydantic import ValidationInfo

    from paceline.data.input_checks import InputChecks
    from paceline.engines.contract import Engine

NONE = "none"
"""The name of the target alone."""
_OF_CODE = "custom_class"  # a method that imports a module
_MOST_REQUESTS = 1_000_000  # more than any batch


class SpeculatorsConfig(PairConfig):
    """Configuration of `measure --speculative-config`.

    Attributes:
        engine: vLLM, by name or with its settings; it is started once for each method and start.
        draft: A draft model to compare, too; empty: none.
        speculative_config: vLLM's configuration of a method as JSON, such as `{"method": "ngram",
            "num_speculative_tokens": 4, "prompt_lookup_max": 4}`; of several, each is measured.
        num_prompts: Number of requests.
        num_speculative_tokens: Draft tokens per block of `draft`.
        loads: Numbers of requests that are asked at once.
        starts: As in `measure --engine`.
    """

    engine: Annotated[EngineChoice, Options("engine")]
    draft: str = ""
    speculative_config: Annotated[tuple[str, ...], Options(several=True)] = Field(min_length=1)
    num_prompts: Annotated[int, Options()] = Field(default=64, ge=1)
    max_new_tokens: Annotated[int, Options()] = Field(default=64, ge=3)
    num_speculative_tokens: Annotated[int, Options()] = Field(default=3, ge=1)
    loads: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Options()] = Field(
        default=(1, 8), min_length=1
    )
    starts: int = Field(default=2, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _permitted(cls, values: Any, info: ValidationInfo) -> Any:
        known, key = cast("dict[str, Any]", values), "speculative_config"
        texts = known.get(key) or ()
        for text in (texts,) if isinstance(texts, str) else texts:
            if _settings(text)["method"] == _OF_CODE:
                check_permitted(known.get("engine"), key, text, info)
        return known

    @model_validator(mode="after")
    def _can_be_measured(self) -> SpeculatorsConfig:
        if self.engine.engine != "vllm" or self.engine.url is not None:
            raise ValueError("speculative_config is of a vLLM that is started here: --engine vllm")
        own = self.draft_sampling is not None or self.draft_weights != "auto"
        if own or self.sampling.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty, draft_sampling and draft_weights do not apply to engines; "
                "leave them out"
            )
        self.check_groups(self.num_prompts)
        return self

    def check_groups(self, num_prompts: int) -> None:
        """Raise a ValueError if so many prompts make too few groups of the largest load."""
        load, least = max(self.loads), max(LEAST_UNITS, self.starts)
        if num_prompts // load < least:
            raise ValueError(
                f"{num_prompts} prompts are {num_prompts // load} groups of {load} requests, but a "
                f"verdict needs {least}; give {least * load} prompts, and set num_prompts to that"
            )

    @property
    def methods(self) -> dict[str, str]:
        """The JSON of each method by its name; empty of the target alone."""
        texts = list(self.speculative_config)
        if self.draft:
            own = {"method": "draft_model", "model": self.draft}
            texts.append(json.dumps(own | {"num_speculative_tokens": self.num_speculative_tokens}))
        found = {NONE: ""}
        for text in texts:
            settings = _settings(text)
            model = Path(str(settings.get("model") or "")).name
            name = f"{settings['method']} {model}".strip()
            number = sum(other.partition(" #")[0] == name for other in found)
            found[f"{name} #{number + 1}" if number else name] = text
        return found

    def check(self, checks: InputChecks) -> None:
        checks.engine(self.engine)
        models = checks.pair(self.target, self.draft or None)
        self.note_defaults(checks)
        count = self.check_prompts(checks, models, new_tokens=self.max_new_tokens)
        try:
            self.check_groups(count)
        except ValueError as error:
            raise UsageError(str(error)) from None


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"speculative_config is not JSON ({error}): {text}") from None
    known = cast("dict[str, Any]", found if isinstance(found, dict) else {})
    named = isinstance(known.get("method"), str)
    if not named or not isinstance(known.get("num_speculative_tokens"), int):
        raise ValueError(
            "speculative_config needs the keys method, a text, and num_speculative_tokens, a "
            f"number: {text}"
        )
    return known


def _num_drafted(text: str) -> int:
    """Draft tokens per block of a method; 0 of the target alone."""
    return int(_settings(text)["num_speculative_tokens"]) if text else 0


class Cell(NamedTuple):
    """A method at a number of concurrent requests; `speedup` and `verdict` None of the target."""

    row: Row
    speedup: Interval | None
    verdict: Verdict | None


class SpeculatorTable(Result):
    """What each method gives at each number of concurrent requests.

    Attributes:
        rows: With the settings `method` and `concurrency`; the units are groups of requests.
        by_start: Speedups of each start of each row; with 3 or more, intervals are over them.
    """

    schema_version: Literal[1] = 1
    kind: Literal["measure --speculative-config"] = "measure --speculative-config"
    computed: ClassVar = ("cells", "best")
    config: SpeculatorsConfig
    engine_version: str
    rows: list[Row]
    by_start: list[list[float]]
    environment: dict[str, object]

    @model_serializer(mode="wrap")
    def _with_cells(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        cells = [
            {name: cell.row.setting[name] for name in ("method", "concurrency")}
            | {"speedup": cell.speedup and cell.speedup.as_object()}
            | {"verdict": cell.verdict and cell.verdict.word}
            for cell in self.cells()
        ]
        return fields(self) | {"cells": cells, "best": self.best()}

    @property
    def summary(self) -> str:
        """The best method at each number of requests."""
        return ", ".join(f"{count} at once: {name}" for count, name in self.best().items())

    def cells(self) -> list[Cell]:
        """All rows with their speedups and verdicts."""
        return [_cell(row, starts) for row, starts in zip(self.rows, self.by_start, strict=True)]

    def best(self) -> dict[int, str]:
        """The fastest method with GO at each number of concurrent requests; else the target."""
        found = dict.fromkeys(self.config.loads, NONE)
        cells = sorted(self.cells(), key=lambda cell: cell.speedup.value if cell.speedup else 1.0)
        for cell in cells:
            if cell.verdict is not None and cell.verdict.go:
                found[int(cell.row.setting["concurrency"])] = str(cell.row.setting["method"])
        return found

    def served(self, method: str) -> dict[str, Any]:
        """vLLM's configuration of a method that drafts where it has GO, and not above."""
        settings = _settings(self.config.methods[method])
        ranges: list[list[int]] = []
        for cell in self.cells():
            if cell.row.has(method=method) and cell.verdict is not None:
                last = ranges[-1][1] if ranges else 0
                tokens = settings["num_speculative_tokens"] if cell.verdict.go else 0
                ranges.append([last + 1, int(cell.row.setting["concurrency"]), tokens])
        if ranges and ranges[-1][2]:  # vLLM carries the last number on
            ranges.append([ranges[-1][1] + 1, _MOST_REQUESTS, 0])
        return settings | {"num_speculative_tokens_per_batch_size": ranges}

    @property
    def exit_code(self) -> int:
        """0 if any verdict is GO, 1 if all are NO-GO, else 3."""
        verdicts = [cell.verdict for cell in self.cells() if cell.verdict is not None]
        return best_code([verdict.exit_code for verdict in verdicts])


def _cell(row: Row, by_start: Sequence[float]) -> Cell:
    if row.has(method=NONE):
        return Cell(row, None, None)
    speedup = over_starts(FIGURES["speedup"].measure(row), by_start)
    return Cell(row, speedup, decide_served(speedup, row, "vllm"))


def _sums(answer: Served, load: int, gamma: int) -> dict[str, float]:
    """Sums of a group of answers.

    A call of the target gives its accepted tokens and one more; first tokens are apart. vLLM counts
    accepted tokens behind the end, too; no call gives more than gamma + 1.
    """
    blocks, emitted = answer.blocks or BlockCounts(), len(answer.tokens) - load
    return {
        "seconds": answer.seconds,
        "tokens": len(answer.tokens),
        "emitted": emitted,
        "calls": max(emitted - blocks.num_accepted, emitted / (gamma + 1)),
        "accepted": blocks.num_accepted,
        "drafted": blocks.num_drafted,
    }


def measure_speculators(config: SpeculatorsConfig, progress: Progress = silent) -> SpeculatorTable:
    """Start vLLM with each method and without any, and time the same requests.

    Raises:
        UsageError: A model, a prompt file or the engine's program cannot be used.
        EngineError: The engine did not start with a method, or did not answer.
    """
    checked(config)
    if config.draft and config.parallel and inspect_model(config.draft).mask_token is not None:
        own = {"method": "draft_model", "model": config.draft, "parallel_drafting": True}
        own |= {"num_speculative_tokens": config.num_speculative_tokens}
        methods = (*config.speculative_config, json.dumps(own))
        config = config.model_copy(update={"draft": "", "speculative_config": methods})
    config, prompts = config.read_prompts(load_tokenizer(config.target))
    requests = [
        Request(prompt, config.max_new_tokens, config.sampling, config.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    loads = sorted(set(config.loads))
    groups = {
        load: [requests[at : at + load] for at in range(0, len(requests) - load + 1, load)]
        for load in loads
    }
    timed: dict[tuple[str, int], Answers] = {}
    version = ""
    for start in range(config.starts):
        for method, text in config.methods.items():
            with _server(config, text, prompts, progress) as engine:
                version = engine.version
                for load in loads:
                    _asked(engine, groups[load][0])  # warms up
                    own = range(start, len(groups[load]), config.starts)
                    found = {number: _asked(engine, groups[load][number]) for number in own}
                    timed.setdefault((method, load), Answers(engine, [])).by_start.append(found)
                    progress(f"{method}, {load} at once", start + 1, config.starts)
    cells = [(method, load) for load in loads for method in config.methods]
    return SpeculatorTable(
        config=config.model_copy(update={"loads": tuple(loads)}),
        engine_version=version,
        rows=[_row(config, cell, timed) for cell in cells],
        by_start=[speedup_by_start(timed[NONE, cell[1]], timed[cell]) for cell in cells],
        environment=environment(),
    )


def _server(
    config: SpeculatorsConfig, text: str, prompts: Sequence[Sequence[int]], progress: Progress
) -> AbstractContextManager[Engine]:
    """vLLM with a method; empty: with the target alone."""
    choice = config.engine
    # each load asks the same prompts; options of the user come last, and win
    options = ("--no-enable-prefix-caching", *choice.options)
    options += ("--speculative-config", text) if text else ()
    choice = choice.model_copy(update={"options": options})
    drafted = [_num_drafted(other) for other in config.methods.values()]
    longest = max(map(len, prompts)) + config.max_new_tokens + max(drafted) + 1
    limit = inspect_model(config.target).max_length
    length = longest if limit is None else min(longest, limit)
    target, size = choice.target or config.target, max(config.loads)
    return started(choice, Setup(target, None, length, config.dtype, batch_size=size), progress)


def _asked(engine: Engine, group: Sequence[Request]) -> Served:
    """The answers of requests that are asked at once, in wall seconds."""
    served = engine.serve_together(group, len(group))
    return served._replace(seconds=served.wall_s)


def _row(
    config: SpeculatorsConfig, cell: tuple[str, int], timed: dict[tuple[str, int], Answers]
) -> Row:
    method, load = cell
    own, plain = (timed[name, load].served for name in (method, NONE))
    gamma = _num_drafted(config.methods[method])
    units = [
        _sums(answer, load, gamma)
        | {"target_seconds": alone.seconds, "target_tokens": len(alone.tokens)}
        for answer, alone in zip(own, plain, strict=True)
    ]
    setting = {"method": method, "concurrency": load, "gamma": gamma, **config.sampling.setting}
    return Row(
        population=f"groups of {load} prompts of {config.prompts.path}",
        units=tuple(range(len(own))),
        setting=setting | {"engine": config.engine.engine},
        sums=sums_of(units),
        source=Source.here(
            "measure --speculative-config", fingerprints={"target": fingerprint(config.target)}
        ),
    )
