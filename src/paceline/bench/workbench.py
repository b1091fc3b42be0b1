"""Grid, models, task and examples of a bench, and the cells that answer the examples."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from pydantic import Field, field_validator, model_validator

from paceline.bench.answers import digest, setting_of, sums_of_answer
from paceline.config import HomePath, StrictModel
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import (
    AnyStrategy,
    Autoregressive,
    DecodingConfig,
    ResponseByResponse,
    Speculative,
)
from paceline.engines.commands import EngineChoice
from paceline.errors import PacelineError
from paceline.extensions import RuleChoice
from paceline.measure.pair import ModelsConfig, Pair, check_task, load_models, show_example
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.progress import Progress, silent
from paceline.records import SCHEMA_VERSION, RunDirectory
from paceline.results.row import Row, Source, sums_of
from paceline.tasks import TaskChoice
from paceline.tasks.base import ExamplePrompts, example_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.answers import Answer
    from paceline.core.bootstrap import Interval
    from paceline.core.rule_base import Bonus
    from paceline.core.stats import Times
    from paceline.data.input_checks import InputChecks
    from paceline.models.contract import Tokenizer


StrategyChoice = Annotated[AnyStrategy, Field(discriminator="strategy")]


class Grid(StrictModel):
    """Every rule with every block length, and every other strategy, at every temperature.

    A list as a parameter is expanded: `{rule: chow, alpha: [0.2, 0.5]}` gives two rules. The target
    alone is always included.

    Attributes:
        temperatures: Sampling temperatures; 0: greedy.
        num_speculative_tokens: Draft tokens per block (gamma) of the rules.
        rules: Acceptance rules; lists of parameters are expanded.
        strategies: Other strategies, such as `token_cascade`, or `speculative` with a policy.
        sampling: Sampling parameters except the temperature, which is ignored.
    """

    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 1.0), min_length=1
    )
    num_speculative_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(4,), min_length=1
    )
    rules: tuple[RuleChoice, ...] = ()
    strategies: tuple[StrategyChoice, ...] = ()
    sampling: SamplingParams = SamplingParams()

    @field_validator("rules", "strategies", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    def cells(self, bonus: Bonus = "rule") -> list[DecodingConfig]:
        """The distinct settings; at each temperature, the target alone comes first."""
        pairs = itertools.product(self.rules, self.num_speculative_tokens)
        ruled = [
            Speculative(rule=rule, num_speculative_tokens=gamma, bonus=bonus)
            for rule, gamma in pairs
        ]
        cells: dict[str, DecodingConfig] = {}
        for temperature in self.temperatures:
            sampling = self.sampling.model_copy(update={"temperature": temperature})
            for strategy in (Autoregressive(), *ruled, *self.strategies):
                cell = DecodingConfig(strategy=strategy, sampling=sampling)
                cells.setdefault(cell.model_dump_json(), cell)
        return list(cells.values())


def expand_all(choices: Any) -> Any:
    """Expand each choice of a list; validation rejects anything else."""
    if not isinstance(choices, list | tuple):
        return choices
    return [expanded for choice in cast("list[Any]", choices) for expanded in expand(choice)]


def expand(choice: Any) -> list[Any]:
    """Expand a mapping with lists as values to all combinations of their entries."""
    if not isinstance(choice, dict):
        return [choice]
    known = cast("dict[str, Any]", choice)
    swept = {key: value for key, value in known.items() if isinstance(value, list)}
    return [
        known | dict(zip(swept, values, strict=True))
        for values in itertools.product(*swept.values())
    ]


class BenchConfig(ModelsConfig):
    """Configuration of `bench`.

    Attributes:
        output: Run directory; resumes if it exists.
        num_examples: Number of examples of the task's test split, after `skip_examples`.
        num_timed: Number of examples, evenly spaced, on which speed is measured; None: all.
        batch_size: Number of examples without timing that are answered together.
        full_vocabulary: The draft proposes from the full vocabulary, even if it has a reduced one.
        engine: Answer with this engine, which is started for each setting; None: with Paceline's
            decoder. The engine is vLLM, in whose environment Paceline is installed.
    """

    task: TaskChoice
    grid: Grid = Grid()
    output: HomePath
    num_examples: int = Field(default=64, ge=1)
    skip_examples: int = Field(default=0, ge=0)
    num_timed: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=1, ge=1)
    full_vocabulary: bool = False
    engine: EngineChoice | None = None

    @property
    def proposes_everything(self) -> bool:
        """True if the draft proposes from the full vocabulary; an engine knows no reduced one."""
        baked = self.engine is not None and is_baked(self.engine.draft or self.draft)
        return self.full_vocabulary or (self.engine is not None and not baked)

    def cells(self) -> list[DecodingConfig]:
        """The cells of the grid; an engine takes first and bonus tokens from the target."""
        return self.grid.cells("rule" if self.engine is None else "target")

    @model_validator(mode="after")
    def _engine_can_run_the_cells(self) -> BenchConfig:
        if self.engine is not None:
            _check_engine(self.engine, self.grid)
            if self.batch_size > 1:
                raise ValueError("an engine is asked one example at a time; leave batch_size at 1")
        return self

    def check(self, checks: InputChecks) -> None:
        RunDirectory(self.output).check_kind(self)
        checks.device(self.device)
        target, *_ = checks.pair(self.target, self.draft)
        if self.engine is not None:
            checks.engine(self.engine)
        count = self.skip_examples + self.num_examples
        counted = f"skip_examples {self.skip_examples} + num_examples {self.num_examples}"
        examples = check_task(checks, "task", self.task, count, self.seed, counted)
        show_example(checks, self.task, examples[self.skip_examples], target)
        checks.output(self.output)


@dataclass(frozen=True)
class Examples(ExamplePrompts):
    """The task's examples as prompts, and the models, which all cells of a bench share.

    Attributes:
        config: Of the bench.
        context: Digest of everything that all cells share.
        timed: Indices of the examples that are timed, one by one, with the target alone.
        models: Target and draft; None: an engine answers.
        command: What makes the rows.
    """

    config: BenchConfig
    context: str
    timed: frozenset[int]
    models: Pair | None
    command: str

    @property
    def pair(self) -> Pair:
        assert self.models is not None, "an engine has the models"
        return self.models

    @property
    def max_new_tokens(self) -> int:
        return self.config.max_new_tokens

    def seed_of(self, number: int) -> int:
        """Seed of the answer to example `number`; each example of the split has its own."""
        return self.config.seed + self.config.skip_examples + number

    def key_of(self, cell: DecodingConfig) -> str:
        return cell_key(self.context, cell)

    def row(self, cell: DecodingConfig, **measured: Any) -> Row:
        """A row of the cell, with these sums, totals and bounds, or with its error."""
        task = self.task
        setting = {"task": task.task} | setting_of(cell)
        if task.metric is not None:
            setting["metric"] = task.metric
        # tasks of one kind may read different texts
        mark = digest(self.config.model_dump(mode="json")["task"], self.config.seed)
        marks = {"context": self.context, "key": self.key_of(cell)} | task.versions()
        return Row(
            population=f"examples of {task.task} {mark}",
            setting=setting,
            source=Source.here(self.command, fingerprints=marks),
            **measured,
        )


def prepare(
    config: BenchConfig,
    progress: Progress = silent,
    pair: Pair | None = None,
    command: str = "paceline bench",
) -> Examples:
    """Load the examples, and both models unless `pair` is given; `command` makes the rows."""
    progress("loading", 0, 1)
    pair = pair or load_models(config, full_vocabulary=config.proposes_everything)
    found = examples_of(config, pair.tokenizer, pair, command)
    progress("loading", 1, 1)
    return found


def examples_of(
    config: BenchConfig,
    tokenizer: Tokenizer,
    pair: Pair | None = None,
    command: str = "paceline bench",
) -> Examples:
    """The examples of a bench; without `pair`, an engine answers them."""
    found = example_prompts(
        config.task,
        tokenizer,
        config.num_examples,
        skip=config.skip_examples,
        seed=config.seed,
        limit=config.max_prompt_tokens,
        encoder=pair is not None and pair.target.decoder_prompt is not None,
    )
    count = len(found.prompts)
    num_timed = min(config.num_timed or count, count)
    timed = frozenset(number * count // num_timed for number in range(num_timed))
    return Examples(
        **vars(found),
        config=config,
        context=bench_context(config),
        timed=timed,
        models=pair,
        command=command,
    )


def bench_context(config: BenchConfig) -> str:
    """Digest of everything that all cells share, including sizes and times of the models' files."""
    shared = config.model_dump(mode="json", exclude={"grid", "output"})
    models = [_stamps(config.target), _stamps(config.draft)]
    if config.engine is not None:
        models += [_stamps(path) for path in (config.engine.target, config.engine.draft) if path]
    versions = config.task.versions()
    return digest(SCHEMA_VERSION, shared, models, versions, torch.get_num_threads())


def _stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a file or of a directory's files; [] if it is missing."""
    place = Path(path).expanduser()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    known = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in known]


def cell_key(context: str, cell: DecodingConfig) -> str:
    return digest(context, cell.model_dump(mode="json"))


def _check_engine(engine: EngineChoice, grid: Grid) -> None:
    """Raise ValueError if the engine cannot run the cells of the grid."""
    if not engine.kind.runs_rules or engine.url is not None:
        what = "a running server" if engine.url is not None else engine.engine
        raise ValueError(
            f"bench sets the rule of a vLLM that it starts itself, which {what} does not allow; "
            "set engine.engine to vllm, and engine.program to its path"
        )
    if grid.strategies or grid.sampling.repetition_penalty != 1:
        raise ValueError(
            "vLLM runs rules alone, and computes another penalty; leave grid.strategies and "
            "grid.sampling.repetition_penalty out"
        )


class Cell:
    """A cell that answers examples in any order, and stops at its first error."""

    def __init__(
        self,
        prompts: Examples,
        decoding: DecodingConfig,
        answer: Callable[[Sequence[int]], Sequence[Answer]],
    ) -> None:
        """`answer`: answers the examples with these indices."""
        self._prompts = prompts
        self._decoding = decoding
        self._answer = answer
        self._tokens: dict[int, list[int]] = {}
        self._sums: dict[int, dict[str, float]] = {}
        self._error = ""

    @property
    def has_failed(self) -> bool:
        """True after its first error."""
        return bool(self._error)

    @property
    def texts(self) -> dict[str, list[list[int]]]:
        """Tokens of the answers, by the cell's key; none if it failed."""
        if self.has_failed:
            return {}
        answered = [self._tokens[number] for number in sorted(self._tokens)]
        return {self._prompts.key_of(self._decoding): answered}

    def fail(self, error: Exception) -> None:
        """Record an error, in one line."""
        self._error = " ".join(str(error).split()) or type(error).__name__

    def answer(self, *numbers: int) -> None:
        """Answer these examples together, unless an earlier one failed."""
        if self.has_failed:
            return
        try:
            for number, answer in zip(numbers, self._answer(numbers), strict=True):
                score = self._prompts.score(number, answer.tokens)
                self._sums[number] = sums = sums_of_answer(answer, score)
                if isinstance(self._decoding.strategy, ResponseByResponse):
                    # comes at once: there is no time after its first token
                    sums.pop("first_seconds", None)
                    sums.pop("first_tokens", None)
                self._tokens[number] = answer.tokens
        except (PacelineError, RuntimeError, AssertionError) as error:
            self.fail(error)

    def set_alone(self, number: int, target: Times | None) -> None:
        """Add times of the target alone to an answered example."""
        if target is not None and not self.has_failed:
            self._sums[number] |= target.sums("target_")

    def row(self) -> Row:
        """The result of the answered examples, or the error."""
        corpus = self._corpus_scores()
        if self.has_failed:
            return self._prompts.row(self._decoding, units=(), error=self._error)
        answered = sorted(self._sums)
        skipped = self._prompts.config.skip_examples
        known = {name: one for name, one in corpus.items() if not math.isnan(one.low)}
        return self._prompts.row(
            self._decoding,
            units=tuple(skipped + number for number in answered),
            sums=sums_of([self._sums[number] for number in answered]),
            totals={name: one.value for name, one in corpus.items()},
            bounds={name: (one.low, one.high) for name, one in known.items()},
        )

    def _corpus_scores(self) -> dict[str, Interval]:
        """Figures of all answers together; none if the cell failed or fails here."""
        if self.has_failed:
            return {}
        answered = sorted(self._tokens.items())
        answers = [self._prompts.answer(number, tokens)[1] for number, tokens in answered]
        try:
            return self._prompts.task.corpus_scores(self._prompts.examples, answers)
        except PacelineError as error:
            self.fail(error)
            return {}
