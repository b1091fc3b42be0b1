"""Checks of each command's inputs before expensive work starts; `--dry-run` exits after them.

They take seconds: they read configurations, tokenizers, weight headers and texts, and test paths.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, cast

from paceline.cli.inputs import FLOAT32_BYTES, Preflight, first_records
from paceline.errors import UsageError, VocabularyMismatchError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.inspection import ModelFacts
    from paceline.tasks import Task

_TRAINED = 500  # records that are tokenised to check them


def check_measured(
    config: Any, *, dry_run: bool, as_json: bool = False, drafts: bool = False
) -> None:
    """Check the inputs of `measure`, `analyze` and, with `drafts`, `verify`."""
    found = Preflight()
    found.device(config.device)
    found.costs(config)
    models = found.pair(config.target, config.draft)
    if drafts:
        found.drafting(config.target, config.draft)
    gamma = getattr(config, "gamma", 0)
    timed = min(getattr(config, "timed_prompts", 0), config.num_prompts)
    if getattr(config, "costs", None) is not None:
        timed = 0
    # a timed request is decoded in full, and its last block needs up to gamma extra positions
    longest = config.max_new_tokens + min(getattr(config, "gammas", (0,)))
    _check_prompts(found, config, models, (timed, longest), 1 + gamma)
    found.end(dry_run=dry_run, as_json=as_json)


def check_served(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `measure --engine`."""
    from paceline.measure.engine_costs import check_replaceable

    found = Preflight()
    found.engine(config.engine)
    found.device(config.device)
    models = found.pair(config.target, config.draft)
    _check_prompts(found, config, models, (0, 0), config.max_new_tokens)
    if config.write_costs is not None:
        found.file(config.write_costs.file)
        check_replaceable(config.write_costs.file)
    found.end(dry_run=dry_run, as_json=as_json)


def check_bounds(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `bounds`."""
    found = Preflight()
    found.device(config.device)
    models = found.pair(config.target, config.draft)
    if config.truth is not None:
        models.append(_truth(found, config.truth, models[0]))
    _check_prompts(found, config, models, (0, 0), 1, skip=config.skip_prompts)
    found.output(config.output)
    found.end(dry_run=dry_run, as_json=as_json)


def _truth(found: Preflight, path: str, target: ModelFacts) -> ModelFacts:
    """Check the truth, and that it shares the target's tokenizer."""
    from paceline.models.compatibility import check_same_vocabulary

    truth = found.model("truth", path)
    if target.tokenizer is not None and truth.tokenizer is not None:
        try:
            check_same_vocabulary(*cast("Any", (target, truth)))
        except VocabularyMismatchError:  # it would call the truth a draft
            raise UsageError(
                f"the truth {path} has another vocabulary than the target; choose a model with the "
                "target's tokenizer"
            ) from None
    return truth


def _check_prompts(
    found: Preflight,
    config: Any,
    models: list[ModelFacts],
    first: tuple[int, int],
    rest: int,
    skip: int = 0,
) -> None:
    """`first`: number of prompts after `skip`, and new tokens of each; `rest`: of all others."""
    count, longest = first
    found.prompts(
        config.prompts,
        models,
        count=config.num_prompts,
        max_tokens=config.max_prompt_tokens,
        new_tokens=itertools.chain(itertools.repeat(longest, count), itertools.repeat(rest)),
        skip=skip,
    )


def check_align(config: Any, *, resume: bool, dry_run: bool) -> None:
    """Check the inputs of `align`."""
    from paceline.models.loading import tokenizer_alone
    from paceline.records import RunDirectory
    from paceline.train.checkpoint import check_run_directory

    found = Preflight()
    check_run_directory(RunDirectory(config.output), config, resume=resume)
    found.key(config.writer)
    target = None
    if config.loads_target:
        if tokenizer_alone(config.target):
            raise UsageError(
                f"{config.target} holds a tokenizer and no model, but {config.target_readers[0]} "
                "needs the target; without it use the objective top_k_tail on recorded text, and "
                "no evaluation"
            )
        target, draft = found.pair(config.target, config.draft)
        tokenizer = target.tokenizer
    else:
        tokenizer = found.tokenizer("target", config.target)
        draft = found.model("draft", config.draft)
    _check_texts(found, "data", config.data, ("train", "held_out", "pretraining"))
    _check_trained(found, config, tokenizer, target or draft, dry_run=dry_run)
    found.training_output(config, draft)
    found.end(dry_run=dry_run)


def _check_texts(found: Preflight, section: str, config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        text = getattr(config, name, None)
        if text is not None:
            found.text(f"{section}.{name}", text)


def _check_trained(
    found: Preflight, config: Any, tokenizer: Any, model: ModelFacts, *, dry_run: bool
) -> None:
    """Check the first training texts as the run checks all: templates, tokens and completions."""
    from paceline.data.examples import Lengths, build_examples
    from paceline.data.sources import ExampleStream, FixedText
    from paceline.train.objectives import reads_top

    if tokenizer is None or getattr(config.data, "streaming", False):
        return
    records = list(first_records(config.data.train, _TRAINED))
    with warnings.catch_warnings():
        if not dry_run:
            warnings.simplefilter("ignore")  # the run counts what it truncates
        examples = build_examples(
            records,
            tokenizer,
            Lengths(config.max_prompt_tokens, config.max_completion_tokens),
            eos_token_id=tokenizer.eos_token_id,
            eos_token_ids=model.eos_token_ids,
            decoder_prompt=model.decoder_prompt,
            recorded_states=getattr(config.data, "recorded_states", False),
        )
    found.training_text(examples, tokenizer)
    if getattr(config, "fixed_fraction", 1) > 0:
        terms = getattr(config, "terms", ())
        FixedText(ExampleStream(examples, 1, seed=0)).check(recorded=reads_top(terms))


def check_sweep(config: Any, *, dry_run: bool) -> None:
    """Check the inputs of `sweep`, those of all runs once."""
    from paceline.train.sweep import cells_of

    found = Preflight()
    for cell in cells_of(config):
        target, _ = found.pair(cell.config.target, cell.config.draft)
        for text in (cell.config.data.train, cell.config.data.held_out):
            if text is not None:
                found.text("text", text)
        _check_trained(found, cell.config, target.tokenizer, target, dry_run=dry_run)
    found.output(config.output)
    found.end(dry_run=dry_run)


def check_pretrain(config: Any, *, resume: bool, dry_run: bool) -> None:
    """Check the inputs of `pretrain`."""
    from paceline.records import RunDirectory
    from paceline.train.checkpoint import check_run_directory

    found = Preflight()
    check_run_directory(RunDirectory(config.output), config, resume=resume)
    start = found.model("model", config.model) if isinstance(config.model, str) else None
    if start is None and isinstance(config.tokenizer, str):
        found.model("tokenizer", config.tokenizer)
    _check_texts(found, "data", config.data, ("train", "held_out"))
    if start is not None:
        _check_trained(found, config, start.tokenizer, start, dry_run=dry_run)
    found.training_output(config, start)
    found.end(dry_run=dry_run)


def check_generate_data(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `generate-data`."""
    from paceline.engines.texts import EngineWriter, OpenAIWriter
    from paceline.models.compatibility import check_fits

    found = Preflight()
    models: list[Any] = []
    match config.writer:
        case OpenAIWriter() as writer:
            found.tokenizer("target", config.target)
            found.key(writer)
        case EngineWriter(engine=choice):
            found.tokenizer("target", config.target)
            found.engine(choice)
        case _:
            models = found.pair(config.target, config.draft)
            if config.draft is not None:
                found.drafting(config.target, config.draft)
    found.text("prompts", config.prompts)
    lengths = config.max_prompt_tokens, config.max_new_tokens
    for model in models:
        check_fits(model, *lengths, ("max_prompt_tokens", "max_new_tokens"), model.path)
    found.output(config.output)
    found.end(dry_run=dry_run, as_json=as_json)


def check_score(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `score`."""
    found = Preflight()
    found.tokenizer("tokenizer", config.tokenizer)
    found.key(config.writer)
    config.task.versions()
    found.output(config.output)
    found.end(dry_run=dry_run, as_json=as_json)


def check_bench(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `bench` and `tune`."""
    from paceline.decode.strategies import DecodingConfig

    found = Preflight()
    found.device(config.device)
    found.costs(config)
    found.pair(config.target, config.draft)
    cells = config.grid.cells() if hasattr(config, "grid") else [DecodingConfig()]
    here = getattr(config, "engine", None) is None
    if here and any(cell.needs_rollback for cell in cells):
        found.drafting(config.target, config.draft)
    if getattr(config, "reference", None) is not None:
        found.model("reference", config.reference)
    if getattr(config, "engine", None) is not None:
        found.engine(config.engine)
    _check_task(found, "task", config.task, config.num_examples, config.seed)
    found.output(config.output)
    found.end(dry_run=dry_run, as_json=as_json)


def _check_task(found: Preflight, name: str, task: Task, count: int, seed: int) -> None:
    """Check the texts of a task, and that its scoring library is installed."""
    from paceline.tasks import Code
    from paceline.tasks.row_task import RowTask

    task.versions()
    if isinstance(task, RowTask | Code):  # read columns that other commands do not accept
        task.examples("test", count, seed)
    else:
        _check_texts(found, name, task, ("corpus", "train_corpus"))


def check_perplexity(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `perplexity`."""
    found = Preflight()
    found.device(config.device)
    found.model("model", config.model)
    found.text("text", config.text)
    found.end(dry_run=dry_run, as_json=as_json)


def check_trajectory(config: Any, *, dry_run: bool) -> None:
    """Check the inputs of `trajectory`."""
    from paceline.measure.training_stops import all_runs, stops_of

    found = Preflight()
    for run in all_runs(config.runs):
        list(stops_of(run))
    found.model("target", config.target)
    for name, task in config.tasks.items():
        found.text(name, task)
    for name, task in config.scored_tasks.items():
        count = config.skip_prompts + config.num_prompts
        _check_task(found, name, task, count, config.seed)
    found.output(config.output)
    found.end(dry_run=dry_run)


def check_draft(config: Any, *, dry_run: bool) -> None:
    """Check the inputs of `draft`."""
    from paceline.models.drafts.layers import check_layers
    from paceline.train.initial_draft import check_place

    check_place(config)
    found = Preflight()
    target = found.model("target", config.target)
    if config.layers is not None:
        check_layers(config.layers, target.num_layers)
    if config.encoder_layers is not None and target.num_encoder_layers:
        check_layers(config.encoder_layers, target.num_encoder_layers)
    if config.text is not None:
        found.text("text", config.text)
    found.output(config.out)
    found.end(dry_run=dry_run)


def check_export(config: Any, *, dry_run: bool, as_json: bool = False) -> None:
    """Check the inputs of `export`."""
    from paceline.engines.commands import EngineChoice
    from paceline.export.export import check_place
    from paceline.models.compatibility import check_block

    check_place(config)
    found = Preflight()
    if config.check_engine:
        found.engine(config.engine or EngineChoice(engine=config.to))
    model = found.model("model", config.model)
    models = [model]
    if config.target is not None:
        models.append(found.model("target", config.target))
    for one in models:
        check_block(config.num_speculative_tokens or 1, one.max_length)
    found.output(config.out, FLOAT32_BYTES * model.num_parameters)
    found.end(dry_run=dry_run, as_json=as_json)


def check_demo(target: str, out: Path, layers: list[int], *, dry_run: bool) -> None:
    """Check the inputs of `demo`."""
    from paceline.models.drafts.layers import check_layers

    found = Preflight()
    facts = found.model("target", target)
    found.drafting(target)
    check_layers(layers, facts.num_layers)
    found.output(out)
    found.end(dry_run=dry_run)


def check_decode(target: str, draft: str | None, decoding: Any) -> None:
    """Check the inputs of `decode`."""
    found = Preflight()
    found.pair(target, draft)
    if draft is not None and decoding.needs_rollback:
        found.drafting(target, draft)
