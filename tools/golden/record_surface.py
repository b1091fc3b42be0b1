"""Record what users import and type: names of modules, their signatures, options of commands.

Run it after a change that is meant; the difference of the file is the change of the surface.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel

from paceline.cli.main import app

FILE = Path(__file__).parents[2] / "tests/surface/public.json"


def surface(known: dict[str, Any]) -> dict[str, Any]:
    """The surface now: names that the file has and `__all__` of its packages; all commands."""
    names = {
        module: sorted({*names, *packages_own(importlib.import_module(module))})
        for module, names in known["names"].items()
    }
    signatures = dict[str, str]()
    for module, of_module in names.items():
        for name in of_module if module != "paceline" else ():  # each is one of a module's
            found = getattr(importlib.import_module(module), name)
            signatures |= {
                f"{module}:{part}": " ".join(parameters(each)) for part, each in parts(name, found)
            }
    commands = typer.main.get_command(app).commands  # pyright: ignore
    options = {
        verb: " ".join(sorted(option for one in command.params for option in one.opts))
        for verb, command in commands.items()
    }
    return {"names": names, "signatures": signatures, "options": options}


def packages_own(module: Any) -> list[str]:
    return module.__all__ if hasattr(module, "__path__") and hasattr(module, "__all__") else []


def parts(name: str, found: Any) -> Iterator[tuple[str, Any]]:
    """A function, or a class with what decodes; the keys of a configuration may grow."""
    if inspect.isfunction(found):
        yield name, found
    elif inspect.isclass(found) and not issubclass(found, BaseModel | Exception):
        yield name, found
        for method in ("generate", "stream"):
            if hasattr(found, method):
                yield f"{name}.{method}", getattr(found, method)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names, with `=` and the default where there is one; `*`: by name only from here on."""
    written: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        default = getattr(parameter.default, "__name__", repr(parameter.default))
        has_default = parameter.default is not parameter.empty
        written.append(parameter.name + (f"={default}" if has_default else ""))
    return written


if __name__ == "__main__":
    recorded = surface(json.loads(FILE.read_text("utf-8")))
    FILE.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
