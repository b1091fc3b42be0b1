"""Grid, models, task and examples of a bench, and the cells that answer the examples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import torch
from pydantic import Field, field_validator, model_validator

from paceline.bench.answers import digest, sums_of_answer
from paceline.bench.settings import setting_of
from paceline.config import HomePath, StrictModel
from paceline.core.rule_base import Bonus
from paceline.core.sampling import SamplingParams
from paceline.decode.draft_policies import FixedLength, PolicyChoice
from paceline.decode.strategies import (
    AnyStrategy,
    Autoregressive,
    DecodingConfig,
    ResponseByResponse,
    Speculative,
)
from paceline.engines.commands import EngineChoice
from paceline.errors import PacelineError, UsageError
from paceline.extensions import RuleChoice
from paceline.measure.pair import ModelsConfig, Pair, load_models
from paceline.measure.prompt_checks import check_task
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.progress import Progress, silent
from paceline.records import SCHEMA_VERSION, RunDirectory
from paceline.results.row import Row, Source, sums_of
from paceline.tasks import TaskChoice
from paceline.tasks.base import CorpusFigures, ExamplePrompts, corpus_figures, example_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.answers import Answer
    from paceline.core.rule_base import Rule
    from paceline.core.stats import Times
    from paceline.data.input_checks import InputChecks
    from paceline.models import HfModel
    from paceline.models.contract import Tokenizer
    from paceline.tasks import Task


StrategyChoice = Annotated[AnyStrategy, Field(discriminator="strategy")]


class Grid(StrictModel):
    """Every rule with every block length, and every other strategy, at every temperature.

    A list as a parameter is expanded: `{rule: chow, alpha: [0.2, 0.5]}` gives two rules. The target
    alone is always included.

    Attributes:
        temperatures: Sampling temperatures; 0: greedy.
        num_speculative_tokens: Draft tokens per block (gamma) of the rules.
        rules: Acceptance rules; lists of parameters are expanded.
        strategies: Decoding strategies without a rule, such as `token_cascade`.
        policy: When drafting stops before the full block length.
        draft_sampling: Sampling parameters of the draft; None: those of the target.
        bonus: What bonus tokens and first tokens follow: the rule, or the target, as in vLLM.
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
    policy: PolicyChoice = FixedLength()
    draft_sampling: SamplingParams | None = None
    bonus: Bonus = "rule"
    sampling: SamplingParams = SamplingParams()

    @field_validator("rules", "strategies", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    @model_validator(mode="after")
    def _policy_has_rules(self) -> Grid:
        if self.policy != FixedLength() and not self.rules:
            raise ValueError(
                "policy is set, but rules is empty, so nothing is drafted with it; list rules, "
                "such as rules=[lossless]"
            )
        return self

    def cells(self) -> list[DecodingConfig]:
        """The distinct settings; at each temperature, the target alone comes first."""
        cells: dict[str, DecodingConfig] = {}
        for temperature in self.temperatures:
            sampling = self.sampling.model_copy(update={"temperature": temperature})
            for strategy in (Autoregressive(), *self._speculative(), *self.strategies):
                cell = DecodingConfig(strategy=strategy, sampling=sampling)
                cells.setdefault(cell.model_dump_json(), cell)
        return list(cells.values())

    def _speculative(self) -> list[Speculative]:
        return [
            Speculative(
                rule=rule,
                num_speculative_tokens=gamma,
                policy=self.policy,
                draft_sampling=self.draft_sampling,
                bonus=self.bonus,
            )
            for rule, gamma in itertools.product(self.rules, self.num_speculative_tokens)
        ]


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
        max_seconds: Start no more cells after this time; a restarted bench runs the others.
        reference: A third model, which is timed alone by turns with the others. Benches of several
            models are compared by it, because the speed of a machine changes between them.
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
    max_seconds: float | None = Field(default=None, gt=0)
    reference: str | None = Field(default=None, min_length=1)
    full_vocabulary: bool = False
    engine: EngineChoice | None = None

    @property
    def proposes_everything(self) -> bool:
        """True if the draft proposes from the full vocabulary; an engine knows no reduced one."""
        baked = self.engine is not None and is_baked(self.engine.draft or self.draft)
        return self.full_vocabulary or (self.engine is not None and not baked)

    @model_validator(mode="before")
    @classmethod
    def _bonus_of_the_engine(cls, values: Any) -> Any:
        """With an engine, the grid's bonus is `target` unless it is set."""
        if not isinstance(values, dict) or cast("dict[str, Any]", values).get("engine") is None:
            return cast("Any", values)
        grid = cast("dict[str, Any]", values).get("grid", {})
        if isinstance(grid, Grid) and "bonus" not in grid.model_fields_set:
            grid = grid.model_copy(update={"bonus": "target"})
        elif isinstance(grid, dict):
            grid = {"bonus": "target", **cast("dict[str, Any]", grid)}
        return cast("dict[str, Any]", values) | {"grid": grid}

    @model_validator(mode="after")
    def _engine_can_run_the_cells(self) -> BenchConfig:
        if self.engine is not None:
            _check_engine(self.engine, self.grid)
            if self.batch_size > 1:
                raise ValueError("an engine is asked one example at a time; leave batch_size at 1")
            if self.reference is not None:
                raise ValueError("an engine serves one target; leave reference out")
        return self

    def check(self, checks: InputChecks) -> None:
        """Check the inputs; raises UsageError."""
        RunDirectory(self.output).check_kind(self)
        checks.device(self.device)
        checks.pair(self.target, self.draft)
        if self.reference is not None:
            checks.model("reference", self.reference)
        if self.engine is not None:
            checks.engine(self.engine)
        count = self.skip_examples + self.num_examples
        check_task(checks, "task", self.task, count, self.seed)
        checks.output(self.output)


class TaskPrompts(Protocol):
    """Settings that choose examples of a task and limit their prompts and answers."""

    @property
    def task(self) -> Task: ...
    @property
    def num_examples(self) -> int: ...
    @property
    def skip_examples(self) -> int: ...
    @property
    def max_prompt_tokens(self) -> int | None: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class PromptSet(ExamplePrompts):
    """The task's examples as prompts, which all cells share.

    Attributes:
        skipped: Number of examples of the split before the first.
        timed: Indices of the examples that are timed, one by one, with the target alone.
        context: Digest of everything that all cells share.
        population: Name of the examples.
        command: What makes the rows.
    """

    max_new_tokens: int
    seed: int
    skipped: int
    timed: frozenset[int]
    context: str
    population: str = field(default="", kw_only=True)
    command: str = field(default="paceline bench", kw_only=True)

    def seed_of(self, number: int) -> int:
        """Seed of the answer to example `number`; each example of the split has its own."""
        return self.seed + self.skipped + number

    def key_of(self, cell: DecodingConfig) -> str:
        """Key of the cell's row."""
        return cell_key(self.context, cell)

    def row(self, cell: DecodingConfig, **measured: Any) -> Row:
        """A row of the cell, with these sums, totals and bounds, or with its error."""
        task, marks = self.task, {"context": self.context, "key": self.key_of(cell)}
        setting = {"task": task.task} | setting_of(cell)
        if task.metric is not None:
            setting["metric"] = task.metric
        fingerprints = marks | task.versions()
        return Row(
            population=self.population,
            setting=setting,
            source=Source.here(self.command, fingerprints=fingerprints),
            **measured,
        )


@dataclass(frozen=True)
class Workbench(PromptSet):
    """The prompts and both models.

    Attributes:
        batch_size: Number of examples without timing that are answered together.
        reference: A third model that is timed alone, if there is one.
    """

    pair: Pair
    batch_size: int
    reference: HfModel | None


def prepare(
    config: BenchConfig,
    progress: Progress = silent,
    pair: Pair | None = None,
    command: str = "paceline bench",
) -> Workbench:
    """Load the examples, and both models unless `pair` is given; `command` makes the rows.

    Raises:
        UsageError: a model or the task cannot be used, or an example does not fit the context.
    """
    progress("loading", 0, 1)
    pair = pair or load_models(config, full_vocabulary=config.proposes_everything)
    encoder = pair.target.decoder_prompt is not None
    prompts = replace(bench_prompts(config, pair.tokenizer, encoder=encoder), command=command)
    reference = _load_reference(config, pair.target)
    progress("loading", 1, 1)
    return Workbench(**vars(prompts), pair=pair, batch_size=config.batch_size, reference=reference)


def _load_reference(config: BenchConfig, target: HfModel) -> HfModel | None:
    """The reference, prepared for decoding; raises UsageError if it cannot read the prompts."""
    if config.reference is None:
        return None
    reference = load_model(config.reference, dtype=target.dtype, device=config.device)
    try:
        check_same_vocabulary(target, reference)
    except UsageError:
        raise UsageError(
            f"reference {config.reference} has another tokenizer or is of another kind than the "
            "target, whose prompts it gets; choose a model of the same kind and tokenizer"
        ) from None
    return prepare_for_decoding(reference)


def bench_prompts(config: BenchConfig, tokenizer: Tokenizer, *, encoder: bool = False) -> PromptSet:
    """The prompts of a bench; see `prompt_set`."""
    context = bench_context(config)
    # tasks of one kind may read different texts
    mark = digest(config.model_dump(mode="json")["task"], config.seed)
    prompts = prompt_set(config, tokenizer, context, config.num_timed, encoder=encoder)
    return replace(prompts, population=f"examples of {config.task.task} {mark}")


def prompt_set(
    config: TaskPrompts,
    tokenizer: Tokenizer,
    context: str = "",
    num_timed: int | None = None,
    *,
    encoder: bool = False,
) -> PromptSet:
    """The examples as prompts; `encoder`: of an encoder-decoder.

    Raises:
        UsageError: the task cannot be used, or a prompt has more than max_prompt_tokens.
    """
    prompts = example_prompts(
        config.task,
        tokenizer,
        config.num_examples,
        skip=config.skip_examples,
        seed=config.seed,
        limit=config.max_prompt_tokens,
        encoder=encoder,
    )
    count = len(prompts.prompts)
    timed = min(num_timed or count, count)
    return PromptSet(
        **vars(prompts),
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        skipped=config.skip_examples,
        timed=frozenset(number * count // timed for number in range(timed)),
        context=context,
    )


def bench_context(config: BenchConfig) -> str:
    """Digest of everything that all cells share, including sizes and times of the models' files."""
    shared = config.model_dump(mode="json", exclude={"grid", "output", "max_seconds"})
    models = [_stamps(config.target), _stamps(config.draft)]
    if config.reference is not None:
        models.append(_stamps(config.reference))
    if config.engine is not None:
        models += [_stamps(path) for path in (config.engine.target, config.engine.draft) if path]
    versions = config.task.versions()
    return digest(SCHEMA_VERSION, shared, models, versions, torch.get_num_threads())


def _stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of a file or of a directory's files; [] if it is missing."""
    place = Path(path)
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    known = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in known]


def cell_key(context: str, cell: DecodingConfig) -> str:
    """Key of a cell's row."""
    return digest(context, cell.model_dump(mode="json"))


def is_idle_in_vllm(rule: Rule, temperature: float) -> bool:
    """True if vLLM decodes losslessly with this rule."""
    return temperature == 0 and rule.uses_confidence


def _check_engine(engine: EngineChoice, grid: Grid) -> None:
    """Raise ValueError if the engine cannot run the cells of the grid."""
    if not engine.kind.runs_rules or engine.url is not None:
        what = "a running server" if engine.url is not None else engine.engine
        raise ValueError(
            f"bench sets the rule of a vLLM that it starts itself, which {what} does not allow; "
            "set engine.engine to vllm, and engine.program to its path"
        )
    if grid.strategies or grid.draft_sampling is not None or grid.policy != FixedLength():
        raise ValueError(
            "vLLM runs rules with blocks of a fixed length, and samples drafts at the temperature "
            "of the request; leave grid.strategies, grid.policy and grid.draft_sampling out"
        )
    if grid.bonus != "target":
        raise ValueError(
            "vLLM takes first and bonus tokens from the target, under every rule; leave grid.bonus "
            "out, or set it to target"
        )
    if grid.sampling.repetition_penalty != 1:
        raise ValueError("vLLM computes another penalty; leave grid.sampling.repetition_penalty 1")
    cells = itertools.product(grid.rules, grid.temperatures)
    if any(is_idle_in_vllm(rule, temperature) for rule, temperature in cells):
        raise ValueError(
            "a cascade changes nothing in vLLM at temperature 0; set grid.temperatures to others, "
            "such as [1.0], or leave cascades out of grid.rules"
        )


class Cell:
    """A cell that answers examples in any order, and stops at its first error."""

    def __init__(
        self,
        prompts: PromptSet,
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

    def set_alone(self, number: int, target: Times | None, reference: Times | None = None) -> None:
        """Add times of the target alone, and of the bench's reference, to an answered example."""
        if not self.has_failed:
            for prefix, times in (("target_", target), ("reference_", reference)):
                self._sums[number] |= {} if times is None else times.sums(prefix)

    def row(self) -> Row:
        """The result of the answered examples, or the error."""
        corpus = self._corpus_figures()
        if self.has_failed:
            return self._prompts.row(self._decoding, units=(), error=self._error)
        answered = sorted(self._sums)
        return self._prompts.row(
            self._decoding,
            units=tuple(self._prompts.skipped + number for number in answered),
            sums=sums_of([self._sums[number] for number in answered]),
            totals=corpus.scores,
            bounds=corpus.intervals,
        )

    def _corpus_figures(self) -> CorpusFigures:
        """Figures of all answers together; none if the cell failed or fails here."""
        if self.has_failed:
            return CorpusFigures({}, {})
        answered = sorted(self._tokens.items())
        answers = [self._prompts.answer(number, tokens)[1] for number, tokens in answered]
        try:
            return corpus_figures(self._prompts.task, self._prompts.examples, answers)
        except PacelineError as error:
            self.fail(error)
            return CorpusFigures({}, {})
