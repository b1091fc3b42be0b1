"""Many odd inputs: never a traceback, never a verdict, one line and the right exit code."""

from pathlib import Path
from typing import Any

import pytest

from support.texts import Run, one_line, refused

# Values that some key will not take, each for every key below: 9 x 8 inputs.
ODD = (
    "-1",
    "0",
    "1e400",
    ".nan",
    "[1, {a: 2}]",
    "{a: {b: 1}}",
    "'\\ud800'",
    "''",
    "99999999999999999999",
)
KEYS = (
    "gammas",
    "sampling",
    "prompts",
    "device",
    "dtype",
    "max_new_tokens",
    "sampling.top_p",
    "seed",
)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("key", KEYS)
def test_an_odd_value_is_taken_or_refused_in_one_line(
    run: Run, tmp_path: Path, key: str, value: str
):
    """No model is there, so that what is taken ends at the missing target."""
    missing = str(tmp_path / "no-model")
    given = ("--target", missing, "--draft", missing, "--prompts", tmp_path / "no-text.txt")
    line = refused(run, "measure", *given, "--set", f"{key}={value}")
    assert key.partition(".")[0] in line or missing in line


FILES = {
    "empty": b"",
    "binary": bytes(range(256)),
    "latin": "target: déjà\n".encode("latin-1"),
    "list": b"- 1\n- 2\n",
    "scalar": b"hello\n",
    "tab": b"target:\n\t- 1\n",
    "anchor": b"target: *nothing\n",
    "loop": b"target: &a [*a]\n",
    "python": b"target: !!python/object/apply:os.system [ls]\n",
    "deep": b"[" * 2000,
    "numbers": b"1: 2\n3: 4\n",
    "null key": b"null: 1\n",
    "date": b"seed: 2024-01-01\n",
    "twice": b"seed: 1\nseed: 1\n",
    "nested twice": b"sampling:\n  top_k: 1\n  top_k: 2\n",
    "list key": b"? [1, 2]\n: 3\n",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "measure") for name in FILES),
        *(("list", "align"), ("null key", "align"), ("empty", "decode"), ("numbers", "decode")),
    ],
)
def test_an_odd_file_is_refused_in_one_line(run: Run, tmp_path: Path, name: str, kind: str):
    file = tmp_path / "odd.yaml"
    file.write_bytes(FILES[name])
    code, out, err = run("validate", kind, file)
    if (name, kind) == ("empty", "decode"):  # every key of it has a default
        assert code == 0
        return
    assert (code, out) == (2, "")
    assert one_line(err)


TEXTS = {
    "blank.txt": b"\n \n\t\n",
    "nul.jsonl": b'{"text": "a\x00"}\n{"text"\n',
    "array.jsonl": b"[1, 2]\n",
    "half.jsonl": b'{"prompt": "\\ud83d"}\n',
    "far.jsonl": b'{"tokens": [1, 99999]}\n',
    "roles.jsonl": b'{"messages": [{"role": 1}]}\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "file.csv": b"a,b\n",
    "long.txt": b"the cat " * 100,
}


@pytest.mark.parametrize("name", TEXTS)
def test_an_odd_text_is_refused_with_its_place(
    run: Run, pair_folder: Path, tmp_path: Path, name: str
):
    file = tmp_path / name
    file.write_bytes(TEXTS[name])
    given: tuple[Any, ...] = ("--target", pair_folder / "target", "--draft", pair_folder / "draft")
    assert name in refused(run, "measure", *given, "--prompts", file, "--set", "max_new_tokens=4")
