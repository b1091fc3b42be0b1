"""Declares commands: their options come from a schema and from the function's parameters.

A `Group` is a panel of the help. `Group.verb` declares a command that builds a configuration, calls
one function of the library with it and shows the result; `Group.command` declares any other.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer
import typer.core
from rich.text import Text

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout
from paceline.cli.crash import guarded
from paceline.cli.html_report import check_html, write_html
from paceline.environment import begin
from paceline.permissions import IMPORTS, PROGRAMS, allow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from paceline.config import StrictModel
    from paceline.data.input_checks import InputChecks
    from paceline.measure.agreement import Agreement
    from paceline.measure.verdict import Verdict
    from paceline.view.page import Page

    ConfigT = TypeVar("ConfigT", bound=StrictModel)
    Shown = Generator[RenderableType, None, int | None]
    """What a command prints; returns its exit code, None for 0."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


@dataclass
class Call:
    """One call of a command: what configures it.

    Attributes:
        chosen: Values of options by key.
    """

    config: Path | None
    overrides: list[str] | None
    chosen: dict[str, Any]

    def build(
        self, cls: type[ConfigT], one_of: Sequence[str] = (), *, resume: bool = False
    ) -> ConfigT:
        """Build the configuration, to `resume` from that of the run; raises ConfigError."""
        return options.build(cls, self.config, self.overrides, one_of, self.chosen, resume=resume)

    def check(
        self,
        config: Any,
        *,
        dry_run: bool = False,
        as_json: bool = False,
        resume: bool = False,
    ) -> None:
        """End a dry run with the checks of the inputs.

        Without, the function that the command calls checks them.

        Raises:
            UsageError: an input cannot be used, or there is no run to resume.
        """
        from paceline.data.input_checks import InputChecks

        if resume:
            options.check_resumable(config.output)
        if dry_run:
            config.check(checks := InputChecks(resume=resume))
            end_dry_run(checks, as_json=as_json)


def end_dry_run(checks: InputChecks, *, as_json: bool = False) -> None:
    """Print the results of the checks, and exit."""
    if as_json:
        echo(json.dumps({"dry_run": True, "checks": checks.lines}, indent=2))
        raise typer.Exit
    for line in checks.lines:
        stdout.print(line)
    stdout.print("These checks passed. Nothing was run.")
    raise typer.Exit


def reflowed(documented: Callable[..., Any]) -> str:
    """A docstring with a line per paragraph, which the terminal wraps."""
    paragraphs = (inspect.getdoc(documented) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def show(shown: Shown, *, quiet: bool = False) -> int:
    """Print what a command shows, unless `quiet`. -> its exit code."""
    while True:
        try:
            part = next(shown)
        except StopIteration as end:
            return end.value or 0
        if not quiet:
            stdout.print(part)


def styled(verdict: Verdict | Agreement, before: str = "") -> Text:
    """A verdict in its colour, after a text."""
    from paceline.cli.result_tables import verdict_style

    return Text(f"{before}{verdict}", style=verdict_style(verdict))


def _as_json(result: Any) -> str:
    if isinstance(result, list):  # rows
        return json.dumps([row.model_dump(mode="json") for row in result], indent=2)
    return result.model_dump_json(indent=2)


class Verb(NamedTuple):
    """A command that calls one function with a configuration.

    Attributes:
        schema: `module:Class` of the configuration.
        function: `module:function`, called with the configuration and the progress.
        show: What it prints of the result and the configuration.
        as_json: The JSON of the result; None: there is no --json.
        page: `module:function` of the result's HTML page, "run" for that of its run directory.
        is_verdict: The exit code is a verdict, which a failure to write HTML does not change.
        resume: The function can resume a run.
        one_of: Keys of which an option replaces all.
    """

    schema: str
    function: str
    show: Callable[[Any, Any], Shown]
    as_json: Callable[[Any], str] | None = _as_json
    page: str = ""
    is_verdict: bool = False
    resume: bool = False
    one_of: Sequence[str] = ()

    def __call__(
        self,
        call: Call,
        dry_run: options.DryRun = False,
        resume: options.Resume = False,
        as_json: options.Json = False,
        html: options.Html = None,
        rows: options.Rows = None,
    ) -> None:
        """Run the command."""
        check_html(html)
        if rows is not None:
            from paceline.data.input_checks import check_output_file

            check_output_file(rows, "--rows")
        config = call.build(pkgutil.resolve_name(self.schema), self.one_of, resume=resume)
        call.check(config, dry_run=dry_run, as_json=as_json, resume=resume)
        how = {"resume": True} if resume else {}
        with begin(), progress_bars() as progress:
            result = pkgutil.resolve_name(self.function)(config, progress=progress, **how)
        if as_json and self.as_json is not None:
            echo(self.as_json(result))
        code = show(self.show(result, config), quiet=as_json)
        if rows is not None:
            from paceline.results.row import write_rows

            write_rows(rows, result.rows)
        write_html(html, lambda: self._page_of(result, config), is_verdict=self.is_verdict)
        if code:
            raise typer.Exit(code)

    def _page_of(self, result: Any, config: Any) -> Page:
        if self.page == "run":
            from paceline.view.read import read_page

            return read_page(config.output).page
        return pkgutil.resolve_name(self.page)(result)

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The options that do not set keys."""
        offered = {"dry_run": True, "resume": self.resume, "html": bool(self.page)}
        offered["as_json"] = self.as_json is not None
        return [each for each in _parameters(self.__call__) if offered.get(each.name)]


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


class Command(typer.core.TyperCommand):
    """A command whose options are made when they are first needed: schemas import PyTorch.

    Attributes:
        schemas: `module:Class` of its configuration, and of another by the option that selects it,
            such as ` --engine`; empty: it has none.
    """

    def __init__(
        self,
        named: Callable[..., Any],
        panel: str,
        schemas: dict[str, str],
        function: Callable[..., None],
        own: Sequence[inspect.Parameter],
    ) -> None:
        """`named` has the name and the help; `function` gets a `Call` if there is a schema."""
        self.schemas = schemas
        self._function, self._own = function, own
        super().__init__(
            named.__name__.rstrip("_").replace("_", "-"),
            help=reflowed(named),
            rich_help_panel=panel,
            rich_markup_mode=None,
            context_settings=HELP_OPTIONS,
            callback=lambda **values: self._made.callback(**values),
        )

    @property
    def params(self) -> Any:
        """The options and arguments."""
        return self._made.params

    @params.setter
    def params(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Set by the base class, to none."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the options in panels; errors stay plain."""
        print_help(self, ctx)

    @cached_property
    def _made(self) -> Any:
        """The command as Typer makes it; imports the schemas unless they are cached."""
        settings: dict[str, tuple[options.Setting, inspect.Parameter]] = {}
        for option, schema in self.schemas.items():
            panel = f"Settings with{option}" if option else "Settings"
            for setting in options.settings_of(schema):
                settings.setdefault(setting.parameter, (setting, setting.as_parameter(panel)))

        def run(**values: Any) -> None:
            allow(IMPORTS, *(values.pop("allow_import", None) or ()))
            allow(PROGRAMS, *(values.pop("allow_program", None) or ()))
            if values.pop("no_compile", False):
                os.environ["PACELINE_COMPILE"] = "0"  # also for processes that this one starts
            if not self.schemas:
                self._function(**values)
                return
            chosen = {
                setting.key: setting.value(value)
                for name, (setting, _) in settings.items()
                if (value := values.pop(name)) not in (None, [])
            }
            call = Call(values.pop("config", None), values.pop("overrides"), chosen)
            self._function(call, **values)

        parameters = [parameter for _, parameter in settings.values()]
        if self.schemas:
            parameters += _keywords(config=options.ConfigFile, overrides=options.Overrides)
        parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in self._own]
        names = {parameter.name for parameter in parameters}
        if names & {"target", "device"}:
            parameters += _keywords(no_compile=options.NoCompile)
        if "overrides" in names:
            parameters += _keywords(
                allow_import=options.AllowImport, allow_program=options.AllowProgram
            )
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        program = typer.Typer(add_completion=False, rich_markup_mode=None)
        program.command(self.name)(guarded(run))
        return typer.main.get_command(program)


def _keywords(**annotations: Any) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def print_help(command: Any, context: Any) -> None:
    """Print the help of a command with panels, which Typer's errors would have too."""
    from typer import rich_utils

    rich_utils.rich_format_help(obj=command, ctx=context, markup_mode="rich")


@dataclass
class Group:
    """Commands that the help shows in one panel."""

    panel: str
    commands: list[Command] = field(default_factory=list)

    def command(
        self, schema: str = "", **by_option: str
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Declare a command by a function, whose docstring is its help.

        With a schema, the function gets a `Call` first. `by_option` are schemas that take its place
        with an option, such as `engine`.
        """
        schemas = {"": schema} if schema else {}
        schemas |= {f" --{option}": of for option, of in by_option.items()}

        def declare(function: Callable[..., None]) -> Callable[..., None]:
            self._add(function, schemas, function, _parameters(function)[bool(schemas) :])
            return function

        return declare

    def verb(
        self,
        schema: str,
        function: str,
        *,
        as_json: bool | Callable[[Any], str] = False,
        **how: Any,
    ) -> Callable[[Callable[[Any, Any], Shown]], Verb]:
        """Declare a `Verb` by the function that shows its result; its docstring is the help."""

        def declare(show: Callable[[Any, Any], Shown]) -> Verb:
            json_of = _as_json if as_json is True else as_json or None
            verb = Verb(schema, function, show, json_of, **how)
            self._add(show, {"": schema}, verb, verb.parameters)
            return verb

        return declare

    def _add(self, named: Callable[..., Any], schemas: dict[str, str], *how: Any) -> None:
        command = Command(named, self.panel, schemas, *how)
        options.SCHEMAS.update(
            {f"{command.name}{option.replace(' --', '-')}": of for option, of in schemas.items()}
        )
        self.commands.append(command)
