"""Commands that decode, and that compare ways to decode."""

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options
from paceline.cli.command import as_json_text, command, verb
from paceline.cli.console import stderr
from paceline.errors import NOT_DONE, UsageError

if TYPE_CHECKING:
    from paceline.bench import BenchConfig
    from paceline.bench.runner import Progressed
    from paceline.bench.tune import TuneConfig, Tuned
    from paceline.cli.command import Shown
    from paceline.decode.strategies import DecodingConfig

DECODE = "Decode"  # a panel of the help


@command(DECODE, "paceline.decode.strategies:DecodingConfig")
def decode(
    decoding: "DecodingConfig",
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="Read the prompt from a file, without its last line break; -: standard input."
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask by the chat template, or continue the text; without either, by the template "
            "if the target has one.",
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft model: directory, .gguf file or hub name.")
    ] = None,
    draft_weights: Annotated[
        Literal["auto", "int8"], typer.Option(help="int8: faster draft, slightly lower acceptance.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 128,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Colour tokens by source.")] = False,
    as_json: options.Json = False,
) -> None:
    """Generate text from one prompt; --draft is optional."""
    from paceline.cli.streaming import load_decoder, read_prompt, stream_text
    from paceline.data.input_checks import InputChecks
    from paceline.view.tables import name_of

    if draft is None:
        _check_without_draft(decoding, draft_weights)
    text = read_prompt(prompt, prompt_file)
    checks = InputChecks()
    facts, *_ = checks.pair(target, draft)
    if chat is None:
        chat = facts.tokenizer is not None and bool(facts.tokenizer.chat_template)
    recorded: dict[str, Any] = {"target": target, "draft": draft}
    recorded |= {"max_new_tokens": max_new_tokens, "seed": seed}
    recorded |= {"chat": chat, "draft_weights": draft_weights}
    without = None if draft else {"strategy"}  # a default that the command refuses
    recorded["decoding"] = decoding.model_dump(mode="json", exclude=without)
    temperature = f"temperature {decoding.sampling.temperature:g}"
    stream_text(
        *load_decoder(target, draft, draft_weights, decoding),
        text,
        chat=chat,
        max_new_tokens=max_new_tokens,
        seed=seed,
        show=show,
        as_json=as_json,
        setting=f"{temperature}, {name_of(decoding)}" if draft else temperature,
        recorded=recorded,
    )


def _check_without_draft(decoding: "DecodingConfig", draft_weights: str) -> None:
    chosen = "strategy" in decoding.model_fields_set
    if (chosen and decoding.strategy.strategy != "autoregressive") or draft_weights != "auto":
        raise UsageError(
            "--gamma, --rule, --draft-temperature, --draft-weights and a strategy need a draft, "
            "but there is none; name it by --draft"
        )


@command(DECODE)
def play(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    draft: Annotated[str, typer.Option(help="Draft model: directory, .gguf file or hub name.")],
    draft_weights: Annotated[
        Literal["auto", "int8"], typer.Option(help="int8: faster draft, slightly lower acceptance.")
    ] = "auto",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")
    ] = 8642,
) -> None:
    """Decode in the browser, with and without the draft.

    Prints the address of a page, and serves it to this machine until it is interrupted.
    """
    from paceline.cli.console import echo
    from paceline.data.input_checks import InputChecks
    from paceline.models import load
    from paceline.models.loading import tokenizer_of
    from paceline.play.server import Playground

    checks = InputChecks()
    checks.pair(target, draft)
    playground = Playground(port)
    large = load(target)
    tokenizer_of(large, target)
    small = load(draft, large.dtype, str(large.device), draft_weights)
    echo(playground.address)
    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        playground.serve(large, small, f"target {target}, draft {draft}")


@verb(
    DECODE,
    "paceline.bench.tune:TuneConfig",
    "paceline.bench.tune:tune",
    json_of=as_json_text,
    page="run",
    tables=True,
)
def tune(result: "Tuned", _config: "TuneConfig") -> "Shown":
    """Find the best setting within a bound.

    Finds the fastest setting of a minimum quality, or the best quality within a latency. Predicts
    all settings, measures the best, confirms them on other examples, and writes the chosen one as a
    configuration for `decode`. It misses the bound with probability 1 - confidence or less
    (--confidence 0.95), for any number of tested settings.
    """
    from paceline.cli.result_tables import tuned_lines
    from paceline.cli.tables import Details, printed
    from paceline.view.tables import tuned_tables

    yield Details(printed(*tuned_tables(result)))
    yield from tuned_lines(result)
    yield result.statement
    yield usage(result)


def usage(result: "Tuned") -> str:
    """How to use the chosen setting."""
    from paceline.results.frontier import measure

    config, strategy = result.config, result.chosen.decoding.strategy
    if strategy.strategy == "autoregressive":
        return "next: align the draft on text like this task (paceline align)"
    weights = "" if config.draft_weights == "auto" else f" --draft-weights {config.draft_weights}"
    models = shlex.join(["--target", str(config.target), "--draft", str(config.draft)])
    file = shlex.quote(f"{config.output}/decoding.yaml")
    use = f"paceline decode {models}{weights} --config {file} --prompt TEXT"
    gamma = getattr(strategy, "num_speculative_tokens", None)
    if config.server is not None and gamma:  # engines decode without a draft by themselves
        use = f"serve it in {config.server.title} at gamma {gamma} with PACELINE_RULE={file}"
    faster = measure("speedup", result.chosen.row).low > 1
    head = "next: " if faster else "next: align the draft, or use the setting as it is: "
    return f"{head}{use}"


@verb(DECODE, "paceline.bench:BenchConfig", "paceline.bench:bench", page="run")
def bench(result: "Progressed", config: "BenchConfig") -> "Shown":
    """Compare decoding settings on a task.

    Each setting is a cell. Finished cells are kept, so a stopped bench can be resumed. Needs the
    keys task and grid; see configs/bench. `paceline report` shows the results.
    """
    errors = [row.error for row in result.rows if row.error]
    yield (
        f"{config.output}/rows.jsonl: {len(result.rows) - len(errors)} settings done, the target "
        f"alone included, {len(errors)} failed, {result.num_left} to do"
    )
    yield f"next: paceline report {shlex.quote(str(config.output))}"
    if errors:
        stderr.print(f"paceline: first failure: {errors[0]}")
    return NOT_DONE if errors else None
