"""A library is loaded from the cache only if it is whole.

One of paceline-kernels is loaded only if it was compiled from these sources.
"""

import os
import re
import shutil
import stat
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from paceline import compilation
from paceline.errors import SlowerWarning
from paceline.native import library
from paceline.native.library import library_with
from paceline.processor import level

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@cache
def library_of(source: str) -> bytes:
    with TemporaryDirectory() as folder:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", f"{folder}/made.so"]
        subprocess.run(command, input=source, text=True, check=True)
        return Path(folder, "made.so").read_bytes()


def compile_to(path: Path, source: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(library_of(source))


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place in the cache of a library of one function, which a small compiler makes."""
    compile_to(tmp_path / "right.so", "int seven(void) { return 7; }")
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'echo made >> {tmp_path}/calls\nexec cp {tmp_path}/right.so "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(library, "_FUNCTIONS", {"seven": ("", "i")})
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "first"))
    library_with(())
    (tmp_path / "calls").unlink()
    # elsewhere, because the system loads each path once
    shutil.copytree(tmp_path / "first", tmp_path / "cache")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (entry,) = (tmp_path / "cache/native").iterdir()
    return entry


def calls(entry: Path) -> int:
    """How often the compiler was started."""
    file = entry.parents[2] / "calls"
    return file.read_text().count("made") if file.exists() else 0


def replace(entry: Path, source: str) -> None:
    entry.unlink()
    compile_to(entry, source)
    entry.chmod(0o700)


def test_a_damaged_library_is_compiled_again(entry: Path):
    entry.write_bytes(b"\x7fELF and no more")
    assert library_with(()).seven() == 7
    replace(entry, "int eight(void) { return 8; }")
    assert library_with(()).seven() == 7
    assert calls(entry) == 2


def test_nobody_else_may_write_the_library_whatever_the_umask(entry: Path):
    entry.unlink()
    before = os.umask(0)
    try:
        library_with(())
    finally:
        os.umask(before)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o700


MESSAGE_OF_GCC_11 = """\
In file included from native/divergences.c:9:
native/vectors.h: In function 'sum_lanes':
native/vectors.h:71:12: warning: implicit declaration of function '__builtin_shufflevector'
native/vectors.h:71:10: error: incompatible types when returning type 'int'
"""


def test_the_fault_that_a_compiler_names_is_told(entry: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = Path(os.environ["CC"])
    compiler.with_name("message").write_text(MESSAGE_OF_GCC_11)
    compiler.write_text(f"#!/bin/sh\ncat {compiler.with_name('message')} >&2\nexit 1\n")
    entry.unlink()
    monkeypatch.setattr(library, "kernels_library", lambda _: None)
    told = "vectors.h:71:10: error: incompatible types when returning type 'int'"
    with pytest.warns(
        SlowerWarning, match=rf"\(.*{re.escape(told)}\).* gcc 12 or later, or name one in CC"
    ):
        assert library.compiled.__wrapped__() is None


def test_a_compiler_may_have_arguments(entry: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", f"env {os.environ['CC']}")
    assert library_with(()).seven() == 7
    assert calls(entry) == 1


def test_a_library_of_these_sources_is_used_and_no_other(
    entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "site/paceline_kernels" / compilation.library_name(level())
    compile_to(path, "int seven(void) { return 8; }")
    (path.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(path.parents[1])

    def in_use() -> int:
        found = library.compiled.__wrapped__()
        assert found is not None
        return found.seven()

    assert in_use() == 8
    assert calls(entry) == 0
    shutil.copytree(compilation.SOURCES, tmp_path / "sources")
    with (tmp_path / "sources/products.c").open("a") as file:
        file.write("/* changed */\n")
    monkeypatch.setattr(compilation, "SOURCES", tmp_path / "sources")
    assert in_use() == 7
