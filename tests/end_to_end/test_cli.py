"""The command line on a tiny model: what it prints, what it returns."""

import json
import re
import socket
from pathlib import Path

import pytest

from paceline.play.server import Playground
from support.texts import Run, refused, sets, succeeded


def _pair(folder):
    return "--target", folder / "target", "--draft", folder / "draft"


MEASURE = sets(num_prompts=4, max_prompt_tokens=6, max_new_tokens=8, gammas="[1,2]", pass_repeats=1)
MEASURE += sets(timed_prompts=2)


def test_measure_prints_its_verdict_first_and_tables_if_asked(run, folder, tmp_path):
    prompts = folder / "corpus.jsonl"
    _, out, _ = run("measure", *_pair(folder), "--prompts", prompts, *MEASURE)
    assert out.startswith("TOO FEW: measured ")
    assert len(out.splitlines()) <= 5 + ("\nwarning: " in out)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt number {number}\n" for number in range(16)), "utf-8")
    many = sets(num_prompts=16, timed_prompts=16)
    given = (*_pair(folder), "--prompts", prompts, *MEASURE, *many)
    code, out, _ = run("measure", *given, "--table")
    assert "expected acceptance" in out
    assert "after the first token" in out
    found = re.findall(
        r"^(GO|NO-GO|UNDECIDED)  speedup ([\d.]+)x .*, raw prompts$", out, re.MULTILINE
    )
    ((word, speedup),) = found
    assert code == {"GO": 0, "NO-GO": 1, "UNDECIDED": 3}[word]
    assert (float(speedup) > 1) == (word == "GO") or word == "UNDECIDED"


def test_a_broken_rule_that_is_not_caught_is_undecided(run, folder):
    """A draft equal to its target has no rejections."""
    pair = ("--target", folder / "target", "--draft", folder / "target")
    given = (*pair, "--prompts", folder / "corpus.jsonl", "--self-test")
    code, out, _ = run("verify", *given)
    assert code == 3
    assert re.match(
        r"UNDECIDED  the broken rule passed, too: .*; temperature 1, gamma 4, float32, raw prompts",
        out,
    )
    code, out, _ = run("verify", *given, "--json")
    found = json.loads(out)
    assert (code, found["passed"], found["verdict"]) == (3, False, "UNDECIDED")


def test_decode_streams_the_text_on_stdout_and_remarks_on_stderr(run, folder):
    common = ("--prompt", "the cat", "--temperature", "0", "--max-new-tokens", "12")
    _, as_json, _ = run("decode", *_pair(folder), *common, "--json")
    code, out, err = run("decode", *_pair(folder), *common, "--show")
    assert code == 0
    assert out.rstrip("\n") == json.loads(as_json)["text"].rstrip("\n")
    assert "tokens per target call" in err


def test_text_is_printed_as_the_model_wrote_it(run, folder, monkeypatch):
    """What a terminal would take for a tab stop, a line end of its own or an emoji."""
    written = "\ta\r\nb :fire: [red]"
    monkeypatch.setattr("paceline.models.token_text.AnswerStream.add", lambda *_: written)
    common = ("--prompt", "the cat", "--temperature", "0", "--max-new-tokens", "3")
    out = succeeded(run, "decode", "--target", folder / "target", *common)
    assert out == written * 3 + "\n"


def test_decode_reads_how_from_a_configuration(run, folder, tmp_path):
    path = tmp_path / "decoding.yaml"
    path.write_text("strategy: {strategy: token_cascade, alpha: 1.0}\n", encoding="utf-8")
    common = ("--prompt", "the cat", "--max-new-tokens", "12", "--config", path)
    code, out, _ = run("decode", *_pair(folder), *common, "--json")
    assert code == 0
    assert json.loads(out)["stats"]["num_kept"] > 0
    assert "kept" in run("decode", *_pair(folder), *common, "--show")[2]


ANALYZE = sets(num_prompts=3, max_new_tokens=8, pass_repeats=1, gammas="[1,2]")


def test_analyze_gives_every_rule_a_row(run, folder):
    prompts = folder / "corpus.jsonl"
    out = succeeded(run, "analyze", *_pair(folder), "--prompts", prompts, *ANALYZE, "--json")
    found = json.loads(out)
    texts = {row["setting"]["label"]: row for row in found["rows"] if "gamma" not in row["setting"]}
    assert len(texts) == len(found["config"]["rules"]) > 50
    assert len(found["rows"]) == 3 * len(texts), "the text, and two block lengths"
    chosen = ("--set", "rules=[{rule: diff, alpha: 0.2}]")
    _, table, _ = run("analyze", *_pair(folder), "--prompts", prompts, *ANALYZE, *chosen)
    assert "diff 0.2" in table


def test_a_draft_of_few_tokens_leaves_the_text_the_targets(run, folder, tmp_path):
    out, target, corpus = tmp_path / "few", folder / "target", folder / "corpus.jsonl"
    make = ("draft", "--target", target, "--layers", "0,1", "--out", out)
    text = succeeded(run, *make, "--vocabulary", "20", "--text", corpus)
    assert "proposes 20 tokens" in text
    common = ("--prompt", "the model", "--max-new-tokens", 20, "--temperature", 0, "--json")
    _, alone, _ = run("decode", "--target", target, *common)
    _, drafted, _ = run("decode", "--target", target, "--draft", out, *common)
    assert json.loads(drafted)["tokens"] == json.loads(alone)["tokens"]
    assert json.loads(drafted)["stats"]["num_drafted"] > 0


def test_validate_prints_a_configuration_that_validates_again(run, tmp_path):
    first = tmp_path / "a.yaml"
    first.write_text("target: t\ndraft: d\nprompts: p.txt\n")
    _, resolved, _ = run("validate", "measure", first, "--set", "sampling.temperature=0.5")
    second = tmp_path / "b.yaml"
    second.write_text(resolved)
    assert run("validate", "measure", second)[1] == resolved
    assert "temperature: 0.5" in resolved


def _no_constant(name: str) -> float:
    pytest.fail(f"{name} is not JSON")


def test_a_result_may_begin_with_a_byte_order_mark_and_an_unknown_bound_is_null(
    run: Run, folder: Path, tmp_path: Path
):
    given = (*_pair(folder), "--prompts", folder / "corpus.jsonl", *MEASURE, "--json")
    _, out, err = run("measure", *given, *sets(timed_prompts=1))
    assert re.findall(r"^(TOO FEW|acceptance|\{)", err, re.MULTILINE) == ["TOO FEW", "acceptance"]
    speedup = json.loads(out, parse_constant=_no_constant)["figures"][-1]["speedup"]
    assert (speedup["low"], speedup["high"]) == (0, None)
    file = tmp_path / "measured.json"
    file.write_text("\ufeff" + out, encoding="utf-8")
    assert run("report", file)[0] == 0
    given = ("--target", folder / "target", "--to", "vllm", "--measurement", file)
    assert run("export", folder / "draft", *given, "--out", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("name", ["manifest.json", "result.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_damaged_file_of_a_run_is_named(
    run: Run, folder: Path, tmp_path: Path, name: str, text: str
):
    made = tmp_path / "run"
    made.mkdir()
    whole = {"kind": "Align", "config": {"draft": str(folder / "draft")}}
    (made / "manifest.json").write_text(json.dumps(whole))
    (made / "result.json").write_text("{}")
    (made / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    given = ("--target", folder / "target", "--output", tmp_path / "out")
    corpus = f"tasks.docs={folder / 'corpus.jsonl'}"
    assert str(made / name) in refused(run, "trajectory", *given, "--run", made, "--set", corpus)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "options"), [("measure", MEASURE), ("verify", [])])
def test_a_command_writes_the_page_that_report_makes_of_its_output(
    command: str, options: list[str], run: Run, folder: Path, tmp_path: Path
):
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    prompts = ("--prompts", folder / "corpus.jsonl")
    given = (*_pair(folder), *prompts, *options, "--json", "--html", page)
    code, out, err = run(command, *given)
    assert code == (3 if command == "measure" else 0)  # too few requests for a verdict
    assert f"HTML report: {page}" in err
    result.write_text(out, encoding="utf-8")
    succeeded(run, "report", result)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert (tmp_path / "result.html").read_text(encoding="utf-8") == text


def test_the_address_is_printed_and_served_until_the_user_interrupts(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    hosts: list[str] = []

    def interrupted(playground: Playground) -> None:
        hosts.append("{}:{}".format(*playground.socket.getsockname()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Playground, "serve_forever", interrupted)
    code, out, _ = run("play", *_pair(folder), "--port", "0")
    assert (code, out) == (0, f"http://{hosts[0]}/\n")


def test_a_port_in_use_is_one_line(run: Run, folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(run, "play", *_pair(folder), "--port", port)
    assert f"cannot listen at port {port} (Address already in use)" in line
    assert "choose another" in line
    code, _, err = run("play", *_pair(folder), "--port", "70000")
    assert (code, "65535" in err) == (2, True)
