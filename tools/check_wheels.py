"""Install the wheels of a folder in an empty environment, and use them as a user who has little.

`make wheels` runs it. The commands find no compiler, start in another directory, and may write
neither to their home nor to the environment. `--over` takes all other packages from this
environment, which takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

from packaging.version import Version

from support.models import tiny_hf, tiny_tokenizer

ROOT = Path(__file__).parents[1]
SHORT = ("--max-new-tokens", "8")


class User:
    """Runs programs of an environment without a compiler and with few rights."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv/bin"
        self.work, home = folder / "work", folder / "home"
        self.work.mkdir()
        home.mkdir(mode=0o555)
        # Without variables such as CC and PACELINE_CACHE; nothing is in the only folder of PATH.
        self.env = {"HOME": str(home), "PATH": str(home), "TMPDIR": str(self.work)}
        self.env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.limit: list[str] = []
        if os.getuid() == 0:  # without capabilities, modes of files are valid for root, too
            setpriv = shutil.which("setpriv")
            assert setpriv is not None, "root needs setpriv of util-linux"
            self.limit = [setpriv, "--bounding-set=-all", "--inh-caps=-all"]

    def run(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A program of the environment; its exit code is `code`."""
        command = [*self.limit, str(self.bin / str(words[0])), *map(str, words[1:])]
        print("$", *words, flush=True)
        done = subprocess.run(
            command, cwd=self.work, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done


def install(folder: Path, wheels: list[Path], *, over: bool) -> None:
    """Install wheels, with their dependencies or above those of this environment."""
    venv.create(folder / "venv", with_pip=True)
    own = next((folder / "venv/lib").glob("python*/site-packages"))
    if over:
        (own / "over.pth").write_text(sysconfig.get_path("purelib"))
    which = ["--no-deps"] if over else ["--constraint", ROOT / "constraints.txt"]
    pip(folder, "install", "--no-compile", *which, *wheels)


def pip(folder: Path, *words: object) -> None:
    """Run pip, which reads no variable such as PYTHONPATH."""
    command = [folder / "venv/bin/python", "-I", "-m", "pip", *words, "--quiet"]
    subprocess.run(list(map(str, command)), check=True)


def newest(folder: Path, pattern: str) -> Path:
    """The wheel of the highest version."""
    return max(folder.glob(pattern), key=lambda path: Version(path.name.split("-")[1]))


def lock(folder: Path, mode: int) -> None:
    """Give or take the right to write to all directories of the environment."""
    for place, _, _ in os.walk(folder / "venv"):
        Path(place).chmod(mode)


def check(user: User) -> None:
    """The demo's steps on a tiny model, with both wheels."""
    assert "C library: paceline-kernels" in user.run("paceline", "--version").stdout
    for place in (user.env["HOME"], user.bin, user.bin.parent / "lib"):
        probe = f"import pathlib; pathlib.Path('{place}', 'file').touch()"
        assert "PermissionError" in user.run("python", "-c", probe, code=1).stderr
    found: dict[str, Any] = json.loads(user.run("paceline", "env", "--json").stdout)
    assert found["c_library"].startswith("paceline-kernels"), found
    told = user.run("paceline", "inspect", "model").stdout
    assert "the compiled pass for few tokens (C)" in told, told
    assert "paceline-kernels" in told, told
    user.run("paceline", "draft", "--target", "model", "--layers", "0,1", "--out", "draft")
    pair = ("--target", "model", "--draft", "draft")
    user.run("paceline", "verify", *pair, "--prompts", "prompts.txt", *SHORT)
    data = ("--data", "prompts.txt", "--set", "data.held_out=prompts.txt")
    user.run(
        "paceline", "align", *pair, "--config", "configs/smoke/align.yaml", "--output", "run", *data
    )
    said = user.run("paceline", "decode", *pair, "--prompt", "the", *SHORT)
    assert said.stderr.startswith("8 tokens, "), said.stderr


def main() -> None:
    """Check the wheels, then the one in pure Python alone."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--over", action="store_true", help="use the packages of this Python")
    given = arguments.parse_args()
    both = [newest(given.folder, name) for name in ("paceline-*.whl", "paceline_kernels-*.whl")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        install(folder, both, over=given.over)
        user = User(folder)
        tokenizer = tiny_tokenizer()
        tiny_hf(vocab_size=len(tokenizer)).bfloat16().save_pretrained(user.work / "model")
        tokenizer.save_pretrained(user.work / "model")
        (user.work / "prompts.txt").write_text("the cat sat on the mat and saw the dog\n" * 40)
        lock(folder, 0o555)
        check(user)
        lock(folder, 0o755)
        pip(folder, "uninstall", "--yes", "paceline-kernels")
        lock(folder, 0o555)
        said = user.run("paceline", "env", "--json")
        assert json.loads(said.stdout)["c_library"] is None
        assert said.stderr.count("\n") == 1, said.stderr
        user.run("paceline", "decode", "--target", "model", "--prompt", "the", *SHORT)
        lock(folder, 0o755)
    print("passed:", *(path.name for path in both))


if __name__ == "__main__":
    main()
