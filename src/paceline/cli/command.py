"""Declares commands: their options come from a schema and from the function's parameters.

`command` declares a function as a command; if it has a schema, the function gets the built
configuration first. `verb` declares a command that calls one function of the library with the
configuration and shows the result.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import shlex
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.text import Text

from paceline.cli import options
from paceline.cli.console import echo, guarded, progress_line, say, stderr, stdout
from paceline.environment import begin
from paceline.errors import UsageError
from paceline.permissions import IMPORTS, PROGRAMS, allow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from rich.console import RenderableType

    from paceline.cli.tables import Details
    from paceline.view.page import Page

    Shown = Generator[RenderableType | Details, None, int | None]
    """What a command prints; returns its exit code, None for 0."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_SETTINGS = "Settings"  # the panel of what only --help-all shows
_FIRST = ("target", "draft", "prompts", "data__train", "task", "output")  # in the short help


def _print_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_SETTINGS] = True
        echo(context.get_help())
        raise typer.Exit


def _said(text: str, whole: bool) -> str:
    """An option's help; if not the whole, its first sentence and its default, without the key."""
    if whole:
        return text
    own = re.sub(r"^draft_[\w.]+\.\w+: ", "Of drafts: ", text)
    first = re.sub(r"^[\w.]+\.\w+: ", "", own).partition(". ")[0].removesuffix(".")
    default = re.search(r"\[default: .*\]", text)
    return f"{first} {default[0]}" if default and "{" not in default[0] else first


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", is_eager=True, callback=_print_all, help="Show all settings."),
]


def check_inputs(
    config: Any,
    *,
    dry_run: bool = False,
    as_json: bool = False,
    resume: bool = False,
    summary: str = "",
) -> None:
    """End a dry run with the checks of the inputs, and what `module:function` says of the run.

    Else the function that is called checks them.
    """
    if resume:
        options.check_resumable(config.output)
    if not dry_run:
        return
    from paceline.data.input_checks import InputChecks

    config.check(checks := InputChecks(resume=resume))
    if summary:
        checks.lines.append(pkgutil.resolve_name(summary)(config))
    if as_json:
        echo(json.dumps({"dry_run": True, "checks": checks.lines}, indent=2))
        raise typer.Exit
    for line in checks.lines:
        stdout.print(line)
    stdout.print("These checks passed. Nothing was run.")
    raise typer.Exit


def styled(text: object, exit_code: int) -> Text:
    """A text in the colour of a verdict with this exit code."""
    return Text(str(text), style={0: "bold green", 1: "bold red"}.get(exit_code, "bold yellow"))


def check_html(file: Path | None) -> None:
    """Check the file and the libraries before a long run; raises a PacelineError."""
    if file is not None:
        from paceline.data.input_checks import check_output_file
        from paceline.view import require

        require()
        check_output_file(file, "--html")


def write_html(file: Path | None, make: Callable[[], Page]) -> None:
    """Write the page, and say where it is. Call it after the result is printed."""
    if file is not None:
        from paceline.view.render import write

        write(make(), file)
        say(f"HTML report: {file}")


def as_json_text(result: Any) -> str:
    return result.model_dump_json(indent=2)


def perform(
    config: Any,
    function: str,
    show: Callable[[Any, Any], Shown],
    *,
    json_of: Callable[[Any], str] = as_json_text,
    page: str = "",
    summary: str = "",
    dry_run: bool = False,
    resume: bool = False,
    as_json: bool = False,
    table: bool = False,
    html: Path | None = None,
    rows: Path | None = None,
) -> None:
    """Call `module:function` with a configuration, and print what `show` yields of its result.

    `page`: `module:function` of the result's HTML page, "run" for that of its run directory.
    `summary`: as in `check_inputs`. The last six are as the options.
    """
    check_html(html)
    if rows is not None:
        from paceline.data.input_checks import check_output_file

        check_output_file(rows, "--rows")
    check_inputs(config, dry_run=dry_run, as_json=as_json, resume=resume, summary=summary)
    how = {"resume": True} if resume else {}
    stages = STAGES.get(function.partition(":")[2], ())
    with begin(), progress_line(stages) as progress:
        result = pkgutil.resolve_name(function)(config, progress=progress, **how)
    if as_json:
        echo(json_of(result))
    code, hidden = _print_parts(show(result, config), as_json=as_json, table=table)
    if hidden and not table and not as_json:
        again = "the same command with --table measures again, and prints"
        if page == "run":
            again = f"paceline report {shlex.quote(str(config.output))} writes a page with"
        stdout.print(f"{again} tables and the meaning of each column", style="dim")
    if rows is not None:
        from paceline.results.row import write_rows

        write_rows(rows, result.rows)
    write_html(html, lambda: _page_of(page, result, config))
    if code:
        raise typer.Exit(code)


def _print_parts(shown: Shown, *, as_json: bool, table: bool) -> tuple[int | None, bool]:
    """Print the parts of a result. -> The exit code, and whether there were details.

    With JSON, they are for a person: on stderr, without the details.
    """
    from paceline.cli.tables import Details

    hidden, console = False, stderr if as_json else stdout
    while True:
        try:
            part = next(shown)
        except StopIteration as end:
            return end.value, hidden
        details = isinstance(part, Details)
        hidden = hidden or details
        if not details or (table and not as_json):
            console.print(part.shown if isinstance(part, Details) else part)


def _page_of(page: str, result: Any, config: Any) -> Page:
    if page == "run":
        from paceline.view.read import read_page

        return read_page(config.output).page
    return pkgutil.resolve_name(page)(result)


_MEASURED = ("loading", "sampling text", "scoring", "timing passes")
STAGES = {
    "measure": (*_MEASURED, "choosing gamma", "timing requests"),
    "analyze": ("loading", "sampling text", "timing passes", "analyzing rules"),
    "verify_losslessness": ("greedy texts", "sampled texts", "sampled texts of a broken rule"),
    "align": ("loading", "held-out text", "training", "evaluating"),
    "tune": (
        *("the target alone", "the draft alone", "analyzing rules"),
        *("choosing examples", "confirming examples"),
    ),
}
"""The stages of long functions, in the order of their progress; others are not numbered."""

COMMANDS: dict[str, Command] = {}
"""All commands by name, in the order of the help."""


class Command(typer.core.TyperCommand):
    """A command whose options are made when they are first needed: schemas import PyTorch.

    Attributes:
        schemas: `module:Class` of its configuration, and of another by the option that selects it,
            such as `engine`; empty: it has none.
    """

    def __init__(
        self,
        named: Callable[..., Any],
        panel: str,
        schemas: dict[str, str],
        function: Callable[..., None],
        own: list[inspect.Parameter],
    ) -> None:
        """`named` has the name and the help; `function` gets a configuration if it has a schema."""
        self.schemas = schemas
        self._function, self._own = function, own
        # a line per paragraph, which the terminal wraps
        paragraphs = (inspect.getdoc(named) or "").split("\n\n")
        super().__init__(
            named.__name__.rstrip("_").replace("_", "-"),
            help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
            rich_help_panel=panel,
            rich_markup_mode=None,
            context_settings=HELP_OPTIONS,
            callback=lambda **values: self._made.callback(**values),
        )
        COMMANDS[str(self.name)] = self
        for option, schema in schemas.items():
            options.SCHEMAS[f"{self.name}-{option}".rstrip("-")] = schema

    @property
    def params(self) -> Any:
        return self._made.params

    @params.setter
    def params(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Set by the base class, to none."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show what most users need, each in a sentence; --help-all shows all of all settings."""
        whole = ctx.meta.get(_SETTINGS) or not self.schemas
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(self.help)
        panels: dict[str, list[Any]] = {}
        for one in self.get_params(ctx):
            panels.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(one)
        for panel, shown in panels.items():
            if not whole and panel.startswith(_SETTINGS):
                continue
            names = [", ".join(sorted(one.opts, key=len) + one.secondary_opts) for one in shown]
            order = sorted(range(len(shown)), key=lambda at: (shown[at].name not in _FIRST, at))
            with formatter.section(panel):
                formatter.write_dl([(names[at], _said(shown[at].help, whole)) for at in order])

    @cached_property
    def _made(self) -> Any:
        """The command as Typer makes it; imports the schemas unless they are cached."""
        settings = {option: options.settings_of(of) for option, of in self.schemas.items()}
        known: dict[str, options.Setting] = {}  # as offered
        parameters: dict[str, inspect.Parameter] = {}
        for option, found in settings.items():
            panel = f"{_SETTINGS} with --{option}" if option else _SETTINGS
            for setting in found:
                known.setdefault(setting.parameter, setting)
                parameters.setdefault(setting.parameter, setting.as_parameter(panel))

        def run(**values: Any) -> None:
            values.pop("help_all", None)
            allow(IMPORTS, *(values.pop("allow_import", None) or ()))
            allow(PROGRAMS, *(values.pop("allow_program", None) or ()))
            if not self.schemas:
                self._function(**values)
                return
            given = {name: values.pop(name) for name in known}
            given = {name: value for name, value in given.items() if value not in (None, [])}
            names = {option: option.replace("-", "_") for option in self.schemas if option}
            selected = [at for at, name in names.items() if {name, f"{name}__{name}"} & set(given)]
            option = selected[0] if selected else ""
            taken = {setting.parameter for setting in settings[option]}
            if others := [name for name in given if name not in taken]:
                takers = [at for at, found in settings.items() if others[0] in _names(found)]
                raise UsageError(f"{known[others[0]].names[0]} {_misplaced(option, takers)}")
            chosen = {known[name].key: known[name].value(value) for name, value in given.items()}
            if isinstance(drafts := chosen.get("draft"), list):
                if option and len(drafts) > 1:
                    raise UsageError(f"--{option} serves one draft; give one --draft")
                chosen["draft"] = drafts[0]
                chosen |= {"other_drafts": drafts[1:]} if drafts[1:] else {}
            cls = pkgutil.resolve_name(self.schemas[option])
            file, overrides = values.pop("config"), values.pop("overrides")
            resume = bool(values.get("resume"))
            self._function(options.build(cls, file, overrides, chosen, resume=resume), **values)

        if self.schemas:
            parameters |= _keywords(config=options.ConfigFile, overrides=options.Overrides)
            parameters |= _keywords(help_all=HelpAll)
        parameters |= {own.name: own.replace(kind=own.KEYWORD_ONLY) for own in self._own}
        if "overrides" in parameters:
            parameters |= _keywords(
                allow_import=options.AllowImport, allow_program=options.AllowProgram
            )
        run.__signature__ = inspect.Signature(list(parameters.values()))  # pyright: ignore
        run.__annotations__ = {name: found.annotation for name, found in parameters.items()}
        program = typer.Typer(add_completion=False, rich_markup_mode="rich")
        program.command(self.name)(guarded(run))
        return typer.main.get_command(program)


def _names(settings: Iterable[Any]) -> set[str]:
    return {one.parameter for one in settings}


def _misplaced(option: str, takers: Iterable[str]) -> str:
    """What is wrong with an option that these schemas take, and that of `option` does not."""
    needs = " or ".join(f"--{at}" for at in reversed(list(takers)) if at)
    if not option:
        return f"needs {needs}"
    return f"cannot be used with --{option}" + (f": it needs {needs}" if needs else "")


def _keywords(**annotations: Any) -> dict[str, inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    }


def command(
    panel: str, schema: str = "", **by_option: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command by a function, whose docstring is its help; `panel` of the help shows it.

    With a schema, the function gets the configuration first. `by_option` are schemas that take its
    place with an option, such as `engine`.
    """
    schemas = {"": schema, **by_option} if schema else {}

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function).parameters.values())
        Command(function, panel, schemas, function, own[bool(schemas) :])
        return function

    return declare


def verb(
    panel: str,
    schema: str,
    function: str,
    *,
    json_of: Callable[[Any], str] | None = None,
    page: str = "",
    resume: bool = False,
    summary: str = "",
    tables: bool = False,
) -> Callable[[Callable[[Any, Any], Shown]], Callable[[Any, Any], Shown]]:
    """Declare a command by the function that shows its result; its docstring is the help.

    It has --json if there is `json_of`, --html if there is a `page`, and --table if there are
    `tables`. Others: as in `perform`.
    """

    def declare(show: Callable[[Any, Any], Shown]) -> Callable[[Any, Any], Shown]:
        def run(config: Any, **how: Any) -> None:
            done: dict[str, Any] = {"json_of": json_of} if json_of else {}
            done |= {"page": page, "summary": summary}
            perform(config, function, show, **done, **how)

        offered = {"dry_run": options.DryRun}
        offered |= {"resume": options.Resume} if resume else {}
        offered |= {"as_json": options.Json} if json_of else {}
        offered |= {"table": options.Tables} if tables else {}
        offered |= {"html": options.Html} if page else {}
        Command(show, panel, {"": schema}, run, list(_keywords(**offered).values()))
        return show

    return declare
