"""Commands that make drafts, training data and exports."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options
from paceline.cli.command import as_json_text, check_inputs, command, verb
from paceline.cli.console import stdout
from paceline.config import apply_override
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.cli.command import Shown
    from paceline.data.requests import GenerateDataConfig
    from paceline.export import ExportConfig, Exported
    from paceline.follow import FollowConfig, Round
    from paceline.models import HfModel
    from paceline.train import AlignConfig, PretrainConfig
    from paceline.train.initial_draft import DraftConfig

MAKE = "Make drafts and data"  # a panel of the help


@command(MAKE, "paceline.train.initial_draft:DraftConfig")
def draft(
    config: "DraftConfig",
    dry_run: options.DryRun = False,
) -> None:
    """Create a draft from the target's layers, or a new one."""
    from paceline.data.input_checks import checked
    from paceline.models import load_model
    from paceline.models.drafts.save import save_draft
    from paceline.models.loading import stored_dtype
    from paceline.train.initial_draft import make_draft

    check_inputs(config, dry_run=dry_run)
    checked(config)
    model = load_model(config.target)
    small = make_draft(config, model)
    save_draft(small, config.target, config.out, stored_dtype(config.target))
    stdout.print(f"{config.out}: {_description(small, config, model)}")
    if config.params is None:
        pair = shlex.join(["--target", config.target, "--draft", str(config.out)])
        align = f"paceline align --config configs/align/quick.yaml {pair}"
        if config.donor is not None:  # its embeddings are new
            align += " --set freeze_embeddings=false --set freeze_layers=0"
        if model.decoder_prompt is not None:  # there is no loss on what an encoder reads
            align += " --set target_rounds.train_prompts=false"
        stdout.print(f"next: {align} --data TEXT.jsonl --output DIR")


def _description(draft: "HfModel", config: "DraftConfig", target: "HfModel") -> str:
    from paceline.train.initial_draft import kept_layers

    origin = "new" if config.donor is None else f"{config.donor} with the target's tokens"
    if config.params is None and config.donor is None:
        origin = f"layers {' '.join(map(str, kept_layers(config, target)))} of the target"
    if config.encoder_layers is not None:
        origin += f" and encoder layers {' '.join(map(str, config.encoder_layers))}"
    share = draft.num_parameters / target.num_parameters
    limit = draft.draft_vocabulary
    proposes = "" if limit is None else f", proposes {len(limit):,} tokens"
    size = f"{draft.num_parameters:,} parameters ({share:.1%} of the target's)"
    return f"{origin}, {size}{proposes}"


@verb(MAKE, "paceline.train:PretrainConfig", "paceline.train:pretrain", page="run", resume=True)
def pretrain(folder: Path, _config: "PretrainConfig") -> "Shown":
    """Train a model on text.

    Trains a new or existing model with next-token prediction and writes it to OUTPUT/model. Needs
    the keys model, data and a budget; see configs/pretrain.
    """
    yield f"{folder / 'model'}: the model; metrics are in {folder}/result.json"


def _result_of(folder: Path) -> str:
    return (folder / "result.json").read_text("utf-8").strip()


@verb(
    MAKE,
    "paceline.data.requests:GenerateDataConfig",
    "paceline.data.distillation_data:generate_data",
    json_of=_result_of,
    resume=True,
    summary="paceline.data.distillation_data:planned",
)
def generate_data(folder: Path, config: "GenerateDataConfig") -> "Shown":
    """Generate training data with the target.

    Samples answers to prompts at several temperatures and writes them to OUTPUT/data/*.parquet.
    """
    result = json.loads(_result_of(folder))
    counts = f"{result['num_records']:,} answers, {result['num_tokens']:,} tokens, temperatures "
    counts += ", ".join(f"{each:g}" for each in config.temperatures)
    yield f"{folder / 'data'}: {counts}; figures are in {folder}/result.json"
    target, data = (shlex.quote(str(each)) for each in (config.target, folder / "data"))
    records = "--set data.recorded_states=true" if config.writer.hidden_states else ""
    if config.writer.top_logprobs:
        records = "--set objective=top_k_tail"
    lengths = f"--max-prompt-tokens {config.max_prompt_tokens}"
    lengths += f" --max-completion-tokens {config.max_new_tokens}"
    if records:
        given = f"--target {target} --data {data} --draft DRAFT --max-seconds 360 --output DIR"
        yield f"next: paceline align {given} {lengths} {records}"
    elif config.writer.kind == "model":  # else the target's probabilities are not here
        yield (
            "next, if you make a draft, let it propose the 12,288 tokens that are frequent here: "
            f"paceline draft --target {target} --vocabulary 12288 --text {data} --out DRAFT"
        )


def _rounds_as_json(rounds: "list[Round]") -> str:
    return json.dumps([found.model_dump(mode="json") for found in rounds], indent=2)


@verb(
    MAKE, "paceline.train:AlignConfig", "paceline.train:align", page="run", resume=True, tables=True
)
def align(folder: Path, config: "AlignConfig") -> "Shown":
    """Train a draft to match its target.

    Needs text and a budget: --config configs/align/quick.yaml, or --data FILE
    --max-seconds 360. Writes the aligned draft to OUTPUT/draft, and its figures to OUTPUT.
    """
    from paceline.cli.result_tables import alignment_lines, alignment_table
    from paceline.cli.tables import Details
    from paceline.records import RunDirectory

    yield f"{folder / 'draft'}: the aligned draft; figures are in {folder}/result.json"
    result = RunDirectory(folder).read_result()
    if result is not None and result["after"] is not None:
        yield Details(alignment_table(result, config.evaluation))
        yield from alignment_lines(result, config)
    elif not config.loads_target:
        yield "no evaluation, which needs the target: measure the draft on its server"
    else:
        yield "no evaluation: set data.held_out or data.held_out_from_train to compare drafts"


@verb(MAKE, "paceline.follow:FollowConfig", "paceline.follow:follow", json_of=_rounds_as_json)
def follow(rounds: "list[Round]", config: "FollowConfig") -> "Shown":
    """Keep a served draft aligned with its traffic.

    One round: reads new requests of a log, judges the draft of the last round on the target's
    answers to them, serves it from OUTPUT/draft if it saves target calls, and trains the next one.
    Run it again for the next round, as by cron. Exit code 1: an alarm.
    """
    from paceline.cli.result_tables import round_lines

    for found in rounds:
        yield from round_lines(found)
    if not rounds:
        wanted = f"{config.least_requests} different new prompts (least_requests)"
        yield f"nothing was done: {config.log.path} has fewer than {wanted}"
    return int(any(found.alarms for found in rounds))


@verb(MAKE, "paceline.export:ExportConfig", "paceline.export:export", json_of=as_json_text)
def export(result: "Exported", _config: "ExportConfig") -> "Shown":
    """Export a draft for an engine.

    Loads the export again and compares its logits with the draft's. Exit code 1: they differ.
    """
    checks = result.checks
    yield (
        f"{result.path}: read back; in float32 its logits at {checks.num_positions} positions "
        f"differ from the draft's by at most {checks.largest_difference:.1e} of the largest, and "
        f"the most likely token is the same at {checks.agreement:.1%}"
    )
    if checks.stored is not None:
        yield (
            f"in {checks.stored}, as it is stored: logits are finite, and the most likely token is "
            f"that of float32 at {checks.stored_agreement:.1%}"
        )
    for note in result.notes:
        yield f"note: {note}"
    if result.command is not None:
        yield f"next:\n{result.command}"


@command(MAKE)
def task(
    name: Annotated[str, typer.Argument(help="Task, such as arithmetic or translation.")],
    out: Annotated[Path, typer.Option(help="Output file (.jsonl).")],
    split: Annotated[
        Literal["train", "test"], typer.Option(help="train or test; the two are disjoint.")
    ] = "train",
    count: Annotated[int, typer.Option(help="Number of examples.")] = 1000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    overrides: options.Overrides = None,
) -> None:
    """Write a task's examples to a file.

    Each line holds a prompt and its reference answer, as `pretrain` and `align` read them.
    """
    from paceline.data.input_checks import check_output_file
    from paceline.tasks import build_task, write_examples

    check_output_file(out)
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already; choose another file or add --overwrite")
    values: dict[str, Any] = {"task": name}
    for override in overrides or ():
        apply_override(values, override)
    num_distinct = write_examples(build_task(values), split, count, out, seed)
    repeats = "" if num_distinct == count else f", {num_distinct} distinct"
    stdout.print(f"{out}: {count} examples{repeats}")


@command(MAKE)
def corpus(
    out: Annotated[Path, typer.Option(help="Directory to write the files to.")],
    package: Annotated[
        list[str] | None, typer.Option(help="Add docstrings of this installed package; repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write Python's documentation as training text.

    Also writes held-out text and prompts, and questions and source code as other domains.
    """
    from paceline.data.input_checks import check_output_directory
    from paceline.data.python_docs import PythonDocs, write_python_docs

    check_output_directory(out)  # first, as the rest takes seconds
    written = [path for name in PythonDocs._fields if (path := out / f"{name}.jsonl").exists()]
    if written and not overwrite:
        raise UsageError(
            f"{written[0]} exists already; choose another directory or add --overwrite"
        )
    for name, path in write_python_docs(out, package or ())._asdict().items():
        with path.open(encoding="utf-8") as stream:
            stdout.print(f"{path}: {sum(1 for _ in stream):,} documents, {name}")
