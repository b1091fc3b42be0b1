"""What rounds decide, and that the draft to serve is always a whole one."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from paceline.engines.contract import BlockCounts
from paceline.errors import ConfigError, EngineError, PromptError
from paceline.follow import FollowConfig, Round, follow, rounds
from paceline.follow import serving as serving_of
from paceline.permissions import PROGRAMS, allow
from paceline.results import Row
from paceline.results.row import Source
from support.data import write_lines
from support.engines import serving
from support.processes import run_command
from support.runs import write_pair

NEW, ANSWERS = 8, 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pair(tmp_path)
    write_lines(tmp_path / "log.jsonl", *[{"prompt": f"the {n} ran"} for n in range(ANSWERS * 6)])
    return tmp_path


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    align = {"num_steps": 1, "batch_size": 4, "precision": "float32", "device": "cpu"}
    return {
        **{name: str(folder / name) for name in ("target", "draft")},
        "log": {"path": str(folder / "log.jsonl")},
        "output": str(folder / "out"),
        "align": align,
        "serving": {"to": "transformers"},
        "requests_per_round": ANSWERS,
        "num_answers": ANSWERS,
        "least_requests": 8,
        "max_new_tokens": NEW,
        "max_prompt_tokens": 12,
    } | changes


def run(folder: Path, count: int = 1, **changes: Any) -> list[Round]:
    return follow(FollowConfig(**settings(folder, rounds=count, **changes)))


class Drafts:
    """Blocks of each draft on a text, by its name, instead of those of its weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **blocks: float) -> None:
        self.blocks = blocks
        monkeypatch.setattr(rounds.Follower, "_row", self.row)

    def row(self, judge: Any, name: str, at: int, count: int) -> Row:
        del judge, at, count
        blocks = self.blocks.get(f"d{name.lstrip('0')}", self.blocks.get(name, 4.0))
        each = {"emitted": 7.0, "calls": blocks, "drafted": 12.0, "accepted": 7.0 - blocks}
        return Row(
            population="answers",
            units=tuple(range(ANSWERS)),
            setting={"draft": name},
            sums={key: (value,) * ANSWERS for key, value in each.items()},
            source=Source(command="a test"),
        )


def served_name(folder: Path) -> str:
    return (folder / "out/draft").resolve().parent.name.partition("-")[0]


def decisions(found: list[Round]) -> list[str]:
    return [f"{one.decision} {one.serving.lstrip('0')}" for one in found]


def test_a_better_draft_is_swapped_and_one_that_turns_out_worse_is_brought_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    drafts = Drafts(monkeypatch, initial=4.0, d1=2.0)
    assert decisions(run(folder, 2)) == ["first initial", "swapped 1"]
    assert served_name(folder) == "000001"
    drafts.blocks |= {"d1": 6.0}  # the traffic changes
    assert decisions(run(folder, 2)) == ["brought back initial", "waiting initial"]
    assert (folder / "out/draft").resolve() == folder / "out/served/initial-transformers-3/draft"
    run(folder, judging={"num_speculative_tokens": 4})
    exported = folder / "out/served/initial-transformers-4/draft"
    assert (folder / "out/draft").resolve() == exported, "the export has the number of tokens"


def test_drafts_that_are_no_better_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """One that costs calls, and one that changes nothing, from which the next one starts."""
    Drafts(monkeypatch, initial=4.0, d1=6.0, d3=4.0)
    found = run(folder, 5)
    words = ["first", "waiting", "dropped", "waiting", "dropped"]
    assert decisions(found) == [f"{word} initial" for word in words]
    assert [one.start for one in found] == ["initial"] * 4 + ["000003"]
    kept = sorted(path.name for path in (folder / "out/drafts").iterdir())
    assert kept == ["000003", "000005"], "the start of the next, and the one on trial"


def test_a_watch_is_a_new_test_every_two_rounds(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a draft that was better for long could not be found to be worse for as long."""
    Drafts(monkeypatch, initial=4.0, d1=2.0, d2=2.0, d4=2.0)
    found = run(folder, 5)
    assert [one.watch and (one.watch.number, one.watch.rounds) for one in found] == [
        *(None, (2, 0), (2, 1)),
        *((4, 0), (4, 1)),
    ]


def counted(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Counters of an engine that accepts these shares of 10,000 drafted tokens between rounds."""
    totals, readings = BlockCounts(), [BlockCounts()]
    for share in shares:
        drafted, accepted = totals.num_drafted + 10_000, totals.num_accepted + int(10_000 * share)
        totals = BlockCounts(num_drafted=drafted, num_accepted=accepted)
        readings.append(totals)
    left = iter([one for one in readings for _ in range(2)])  # before and after a round
    monkeypatch.setattr(rounds, "counts", lambda _: next(left))


def test_a_draft_whose_served_acceptance_falls_is_brought_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The texts say that it is better; what is served may be something else."""
    Drafts(monkeypatch, initial=4.0, d1=2.0)
    counted(monkeypatch, 0.3, 0.2)
    found = run(folder, 3)
    assert decisions(found) == ["first initial", "swapped 1", "brought back initial"]
    (alarm,) = found[-1].alarms
    assert alarm.startswith("the engine accepts 0.200 of the drafted tokens, 0.417 are expected")


def test_an_alarm_when_the_served_acceptance_falls(folder: Path, monkeypatch: pytest.MonkeyPatch):
    Drafts(monkeypatch, initial=4.0)
    counted(monkeypatch, 0.25, 0.24, 0.2)
    found = run(folder, 4)
    assert [len(one.alarms) for one in found] == [0, 0, 0, 2]
    assert found[-1].alarms[0] == "the engine accepts 0.200 of the drafted tokens, 0.250 before"


def test_counters_of_an_engine_that_was_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    Drafts(monkeypatch)
    readings = [(10_000, 9_000), (11_000, 5_000), (11_100, 5_005)]
    counts = [BlockCounts(num_drafted=d, num_accepted=a) for d, a in readings]
    left = iter([one for one in counts for _ in range(2)])
    monkeypatch.setattr(rounds, "counts", lambda _: next(left))
    rates = [one.acceptance_rate for one in run(folder, 3)]
    assert rates == [None, pytest.approx(5 / 11), None], "the last is of 100 tokens"


def test_the_engine_is_told_of_a_swap(folder: Path, monkeypatch: pytest.MonkeyPatch):
    Drafts(monkeypatch, initial=4.0, d1=2.0)
    told: list[Any] = []

    def page(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        told.append((body["method"], Path(body["args"][0]).resolve().parent.name[:6]))
        return 200, {"results": [None]}

    with serving({"/collective_rpc": page}) as url:
        run(folder, 2, serving={"to": "transformers", "reload_url": url})
    assert told == [("reload_draft", "000001")]


def test_a_round_that_is_stopped_behind_a_swap_leaves_the_new_draft_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    Drafts(monkeypatch, initial=4.0, d1=2.0)
    told: list[Path] = []
    monkeypatch.setattr(serving_of, "_tell", lambda _, link: told.append(link.resolve()))
    run(folder)
    trained = rounds.Follower._trained
    monkeypatch.setattr(rounds.Follower, "_trained", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(folder)
    monkeypatch.setattr(rounds.Follower, "_trained", trained)
    assert decisions(run(folder)) == ["swapped 1"]
    assert [path.parent.name[:6] for path in told] == ["000001"]


def test_a_restart_that_fails_is_one_line_and_the_same_command_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    Drafts(monkeypatch, initial=4.0, d1=2.0)
    monkeypatch.setenv(PROGRAMS, "")
    monkeypatch.setattr(serving_of, "_RESTART_S", 30)
    program = """
        import pathlib, subprocess, sys
        subprocess.Popen(["sleep", "60"])  # a server keeps what it inherits
        sys.exit(pathlib.Path("broken").exists() and "no engine")
    """
    program = textwrap.dedent(program)
    told = {"to": "transformers", "restart": [sys.executable, "-c", program]}
    with pytest.raises(ConfigError, match=r"a file may not start .*--allow-program"):
        run(folder, 1, serving=told)
    allow(PROGRAMS, sys.executable)
    monkeypatch.chdir(folder)
    run(folder, 1, serving=told)
    (folder / "broken").touch()
    with pytest.raises(EngineError, match=r"ended with code 1 \(no engine\)"):
        run(folder, 1, serving=told)
    assert served_name(folder) == "000001", "the link names the new draft"
    (folder / "broken").unlink()
    assert decisions(run(folder, 1, serving=told)) == ["swapped 1"]


def test_a_round_begins_when_there_are_enough_requests(folder: Path):
    write_lines(folder / "log.jsonl", *[{"prompt": f"the {n}"} for n in range(7)])
    assert run(folder) == []
    assert (folder / "out/draft/model.safetensors").exists(), "there is a draft to serve"
    with (folder / "log.jsonl").open("a") as stream:
        stream.write(json.dumps({"prompt": "one more"}) + "\n")
    with pytest.raises(ConfigError, match="draft"):  # the engine serves the first one
        run(folder, draft=str(folder / "target"))
    assert [one.num_requests for one in run(folder)] == [8]


def test_a_log_of_which_little_can_be_asked_is_an_error(folder: Path):
    write_lines(folder / "log.jsonl", *[{"question": f"the {n}"} for n in range(40)])
    with pytest.raises(PromptError, match=r"40 requests of .*log.jsonl cannot be asked: .*log"):
        run(folder)


def test_settings_may_change_between_rounds_but_not_the_first_draft(folder: Path):
    run(folder)
    assert len(run(folder, 1, max_new_tokens=6)) == 1
    with pytest.raises(ConfigError, match="another draft"):
        run(folder, 1, draft=str(folder / "target"))
    assert [path.name for path in sorted((folder / "out/rounds").iterdir())] == ["000001", "000002"]


def test_the_command_says_what_was_decided_and_ends_with_1_at_an_alarm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    Drafts(monkeypatch, initial=4.0, d1=2.0)
    counted(monkeypatch, 0.1, 0.3)
    (folder / "follow.yaml").write_text(json.dumps(settings(folder)))
    command = ("follow", "--config", "follow.yaml", "--rounds", "2")
    done = run_command(folder, *command)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "round 1: 40 requests, 40 answered again; 1.75 tokens per target call with initial",
        "  first, serving initial",
        "round 2: 40 requests, 40 answered again; 1.75 tokens per target call with initial",
        "  000001: 3.50, gain 2.000x (2.000 to 2.000)",
        "  swapped, serving 000001; evidence 6.4 of 3.7",
        "  alarm: the engine accepts 0.100 of the drafted tokens, 0.250 are expected: it may serve "
        "another draft, target or temperature",
    ]
    (again,) = json.loads(run_command(folder, *command[:3], "--json").stdout)
    assert (again["number"], again["serving"]) == (3, "000001")
