"""Scores the answers of a model behind a URL on a task; answers are kept as they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.config import HomePath, Options, StrictModel
from paceline.core.bootstrap import Interval
from paceline.core.sampling import SamplingParams
from paceline.data.input_checks import InputChecks, checked
from paceline.engines.contract import Request
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import MAY_CHANGE, OpenAIWriter
from paceline.models.loading import load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, append_jsonl, read_jsonl
from paceline.tasks import TaskChoice
from paceline.tasks.base import example_prompts
from paceline.tasks.scoring import mean_score

if TYPE_CHECKING:
    from paceline.engines.answers import Written
    from paceline.tasks.base import ExamplePrompts

_MAY_CHANGE = {"output", *MAY_CHANGE}


class ScoreConfig(StrictModel):
    """Configuration of `score`.

    Attributes:
        tokenizer: Hub id or directory of the served model's tokenizer.
        writer: Servers of the model.
        output: Run directory; resumes if it exists.
        num_examples: Number of examples of the task's test split, after `skip_examples`.
        max_prompt_tokens: Longer prompts are an error.
        max_new_tokens: Maximum number of tokens per answer.
    """

    task: TaskChoice
    tokenizer: str = Field(min_length=1)
    writer: Annotated[OpenAIWriter, Options("url")]
    sampling: Annotated[SamplingParams, Options("temperature")] = SamplingParams()
    output: HomePath
    num_examples: int = Field(default=64, ge=1)
    skip_examples: int = Field(default=0, ge=0)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _has_no_penalty(self) -> ScoreConfig:
        if self.sampling.repetition_penalty != 1:
            raise ValueError("servers compute other penalties; leave sampling.repetition_penalty 1")
        return self

    def check(self, checks: InputChecks) -> None:
        checks.tokenizer("tokenizer", self.tokenizer)
        checks.key(self.writer)
        self.task.versions()
        checks.output(self.output)


class Score(StrictModel):
    """Quality of a served model on a task.

    Attributes:
        score: Mean score with its 95% interval over examples; None if the task has no metric.
        corpus_scores: Figures of all answers together, such as corpus BLEU.
        signatures: What the scores depend on.
    """

    schema_version: Literal[1] = 1
    config: ScoreConfig
    metric: str | None
    num_examples: int
    num_tokens: int
    num_cut: int
    """Answers that ended at max_new_tokens."""
    score: Interval | None
    corpus_scores: dict[str, Interval]
    signatures: dict[str, str]
    servers: list[str]


def score(config: ScoreConfig, progress: Progress = silent) -> Score:
    """Ask for the answers that are missing, and score all.

    Raises:
        UsageError: The task, the tokenizer or a server cannot be used.
        EngineError: No server answers; answers so far are kept.
        StorageError: Answers cannot be written.
    """
    checked(config)
    run = RunDirectory(config.output)
    inputs = {"task": str(sorted(config.task.versions().items()))}
    begun = run.metrics.exists()
    run.check(config, begun=begun, resume=True, may_change=_MAY_CHANGE, inputs=inputs)
    with run.alone():
        prompts = example_prompts(
            config.task,
            load_tokenizer(config.tokenizer, alone=True),
            config.num_examples,
            skip=config.skip_examples,
            seed=config.seed,
            limit=config.max_prompt_tokens,
        )
        run.write_manifest(config, **inputs)
        _ask(config, prompts, run, progress)
        result = _summary(config, prompts, _rows(run))
        run.write_result(result.model_dump(mode="json"))
    return result


def _rows(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """The answers by the index of their example."""
    return {row["number"]: row for row in read_jsonl(run.metrics)}


def _ask(
    config: ScoreConfig, prompts: ExamplePrompts, run: RunDirectory, progress: Progress
) -> None:
    """Ask for the missing answers."""
    done = _rows(run)
    missing = [number for number in range(len(prompts.prompts)) if number not in done]
    if not missing:
        return

    def tokenize(text: str) -> list[int]:
        return prompts.tokenizer(text, add_special_tokens=False)["input_ids"]

    seed = config.seed + config.skip_examples
    requests = [
        Request(prompts.prompts[n], config.max_new_tokens, config.sampling, seed + n)
        for n in missing
    ]

    def keep(index: int, written: Written) -> None:
        tokens = tokenize(written.text) if written.tokens is None else written.tokens
        number = missing[index]
        given = written.text if written.tokens is None else tokens
        thoughts, text = prompts.answer(number, given)
        done[number] = {
            "number": number,
            "thoughts": thoughts,
            "text": text,
            "num_tokens": len(tokens),
            "stop_reason": written.stop_reason,
            "score": prompts.score(number, given),
            "server": written.server,
        }
        append_jsonl(run.metrics, done[number])
        progress("answers", len(done), len(prompts.prompts))

    TextServers(config.writer, tokenize).write(requests, keep)


def _summary(
    config: ScoreConfig, prompts: ExamplePrompts, rows: dict[int, dict[str, Any]]
) -> Score:
    ordered = [rows[number] for number in range(len(prompts.prompts))]
    known = [row["score"] for row in ordered if row["score"] is not None]
    task = config.task
    return Score(
        config=config,
        metric=task.metric,
        num_examples=len(ordered),
        num_tokens=sum(row["num_tokens"] for row in ordered),
        num_cut=sum(row["stop_reason"] == "length" for row in ordered),
        score=mean_score(known) if known else None,
        corpus_scores=task.corpus_scores(prompts.examples, [row["text"] for row in ordered]),
        signatures=task.versions(),
        servers=sorted({row["server"] for row in ordered}),
    )
