"""Every command that continues a stopped run ends with the results of a run that was not stopped.

One child process imports the libraries once and forks: every fork is the command line, and dies
before its k-th change of a file, finds the disk full or read-only from there on, or goes on to the
end.
"""

import json
import re
import signal
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from pyarrow import parquet

from paceline.cli.main import app
from paceline.records import read_jsonl
from support.data import write_lines
from support.engines import Served, serving
from support.processes import finish, run_command, start
from support.runs import QUESTIONS, write_pair

# Tests that start together stay in one worker, so the fixture makes the runs once.
pytestmark = pytest.mark.first

# argv: a JSON file of [folder, command line, what continues it, stops]; the exit codes take its
# place. The command runs in `whole`, a copy of `new`. For each stop, [share, signal], it gets the
# signal in another copy after this share of the changes that it made in `whole`, is killed after
# half of the others, and then continues to the end. A signal below 0 is the number of an error of
# the disk.
_NURSERY = textwrap.dedent("""
    import gc, json, os, shutil, signal, sys
    from contextlib import chdir
    from pathlib import Path
    from paceline.cli.main import main

    CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
    root, left, sent = "", 0, 0

    def watch(event, arguments):
        global left
        opened = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (opened or event in CHANGES) or isinstance(arguments[0], int):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if not path.startswith(root):
            return
        left -= 1
        if left <= 0 and sent < 0:
            raise OSError(-sent, os.strerror(-sent), path)
        if left == 0:
            if opened and arguments[2] & os.O_APPEND and sent == signal.SIGKILL:
                with open(path, "ab") as stream:
                    stream.write(b'{"torn')
            os.kill(os.getpid(), sent)

    def run(folder, arguments):
        sys.argv = ["paceline", *arguments]
        with chdir(folder):
            try:
                main()
            except SystemExit as end:
                return end.code

    def forked(folder, arguments, stop=0, by=signal.SIGKILL):
        global root, left, sent
        child = os.fork()
        if child == 0:
            root, left, sent = f"{folder}/out/", stop, by
            # a shell starts programs in the background with Ctrl-C ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os._exit(run(folder, arguments))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    sys.addaudithook(watch)
    plan, codes = Path(sys.argv[1]), {}
    for folder, command, added, stops in json.loads(plan.read_text()):
        new, whole = (Path(folder, name) for name in ("new", "whole"))
        shutil.copytree(new, whole, symlinks=True)
        root, left = f"{whole}/out/", 0
        # here, not in a fork: what the libraries import late is then there for all forks
        codes[f"{whole}"] = [run(whole, command)]
        count = -left
        gc.freeze()  # a collection in a fork would else copy all that the imports left
        for share, by in stops:
            place, first = f"{folder}/{share}", int(share * count)
            shutil.copytree(new, place, symlinks=True)
            continued = command + added
            codes[place] = [forked(place, command, first, by)]
            codes[place].append(forked(place, continued, (count - first) // 2))
            codes[place].append(forked(place, continued))
    plan.write_text(json.dumps(codes))
""")

# A command, or one and the name of a variant: its settings, and the shares at which it is stopped.
_CASES = """
parts:
  - &pair {target: pair/target, draft: pair/draft, device: cpu}
  - &held_out {train: pair/corpus.jsonl, held_out: pair/corpus.jsonl}
  - &few {num_prompts: 2, max_prompt_tokens: 4, max_new_tokens: 4}
  - &evaluation {<<: *few, gamma: 2, every_steps: 2}
  - &task {task: pairs, corpus: pair/questions.jsonl, metric: rouge1}
  - &steps {num_steps: 8, batch_size: 4, max_prompt_tokens: 5, max_completion_tokens: 11,
      optimizer: {kind: adamw, learning_rate: 3.0e-3}, checkpoints: {every_steps: 3, keep: 1},
      precision: float32, device: cpu}
  # all three kinds of text, and everything that has a random stream or a schedule of its own
  - &align {<<: [*pair, *steps], data: *held_out, evaluation: *evaluation,
      fixed_fraction: 0.4, draft_fraction: 0.5, loss_vocabulary: {frequent: 20, drawn: 6},
      target_rounds: {rows: 8, uses: 2, train_prompts: true},
      parallel: {num_tokens: 3, anchors: 4, kept: 0.5, mask_token: 9},
      finish: {objective: negative_log_acceptance, begin: 0.5}}
  - &prompts {target: pair/target, prompts: pair/questions.jsonl, dtype: float32, shard_size: 2,
      temperatures: [0, 1], max_prompt_tokens: 20, max_new_tokens: 8}
  - &writer {kind: openai, url: URL, concurrency: 2}
pretrain: [{model: pair/draft, data: {train: pair/corpus.jsonl}, <<: *steps}, 0.5]
align: [*align, 0.15, 0.35, 0.55, 0.75, 0.95]
align t5: [{<<: *align, target: t5/target, draft: t5/draft, target_rounds: {rows: 8, uses: 2},
  parallel: null,
  data: {train: pair/questions.jsonl, held_out: pair/questions.jsonl}}, 0.4]
generate-data: [*prompts, 0.2, 0.6]
generate-data served: [{<<: *prompts, shard_size: 5,
  writer: {<<: *writer, top_logprobs: 2}}, 0.4, 0.7]
trajectory: [{<<: *few, target: pair/target, runs: [../../align/whole/out],
  tasks: {text: pair/corpus.jsonl}, samplings: [{temperature: 0}], gammas: [1]}, 0.5]
bench: [{<<: *pair, task: *task, num_examples: 3, num_timed: 1, max_new_tokens: 6,
  grid: {rules: [{rule: lossless}], temperatures: [0], num_speculative_tokens: [1, 2]}},
  0.4, 0.7]
# one rule alone: which of several are measured rests on times of passes
tune: [{<<: *pair, task: *task, max_latency: 100, rules: [{rule: lossless}],
  num_speculative_tokens: [1], num_candidates: 1, num_examples: 3, num_confirmed: 8,
  max_new_tokens: 6}, 0.3]
score: [{task: *task, tokenizer: pair/target, writer: *writer, num_examples: 6,
  max_new_tokens: 6}, 0.3, 0.6]
follow: [{target: pair/target, draft: pair/draft, log: {path: pair/log.jsonl, time: at},
  align: {num_steps: 12, batch_size: 8, precision: float32, device: cpu,
    optimizer: {kind: adafactor, learning_rate: 3.0e-2}, checkpoints: {every_steps: 4, keep: 1}},
  store: {max_texts: 6}, serving: {to: transformers}, judging: {error_rate: 0.99},
  rounds: 3, requests_per_round: 12, least_requests: 8, num_answers: 10, batch_size: 4,
  max_prompt_tokens: 12, max_new_tokens: 10},
  0.05, 0.15, 0.25, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95]
"""
CASES: dict[str, list[Any]] = yaml.safe_load(_CASES)
del CASES["parts"]
STOPS = [(name, share) for name, (_, *shares) in CASES.items() for share in shares]
INTERRUPTED = 0.4  # at this share by Ctrl-C, else by SIGKILL
FILE = ["--config", "settings.yaml"]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore
RESUMED = [name for name in COMMANDS if any(o.name == "resume" for o in COMMANDS[name].params)]


class Ended(NamedTuple):
    """The folders of the cases, the exit codes by folder, and what the server was asked."""

    folder: Path
    codes: dict[str, list[int]]
    bodies: list[dict[str, Any]]
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    stops = {
        name: [(at, signal.SIGINT if at == INTERRUPTED else signal.SIGKILL) for at in shares]
        for name, (_, *shares) in CASES.items()
    }
    return stopped(tmp_path_factory.mktemp("stopped"), stops)


def stopped(folder: Path, stops: dict[str, list[tuple[float, int]]]) -> Ended:
    """Run all cases in a new folder, each also with these stops."""
    write_pair(folder / "pair", max_position_embeddings=160)
    write_pair(folder / "t5", architecture="t5_v1_1")
    more = [{"prompt": f"the {number}", "completion": " ran"} for number in range(3)]
    write_lines(folder / "pair/questions.jsonl", *(QUESTIONS + more))
    asked = [{"prompt": f"the {number} ran in", "at": number} for number in range(36)]
    write_lines(folder / "pair/log.jsonl", *asked)
    served = Served(folder / "pair")
    with serving(served.routes) as url:
        plan = [planned(folder / name, stops[name], url) for name in CASES]
        (folder / "plan.json").write_text(json.dumps(plan))
        done = finish(start(_NURSERY, folder / "plan.json"))
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "plan.json").read_text())
    return Ended(folder, codes, served.bodies, done.stderr)


def planned(folder: Path, stops: list[tuple[float, int]], url: str) -> list[Any]:
    """Write the inputs of a case. -> its part of the plan."""
    new, command, settings = folder / "new", folder.name.split()[0], CASES[folder.name][0]
    new.mkdir(parents=True)
    for models in ("pair", "t5"):
        (new / models).symlink_to(folder.parent / models)
    text = yaml.safe_dump({"output": "out", **settings}).replace("URL", url)
    (new / "settings.yaml").write_text(text)
    added = ["--resume"] if command in RESUMED else []
    return [str(folder), [command, *FILE], added, stops]


_CLOCK = re.compile("seconds|_s$|speedup|time|cost|lower_limit|began")


def timeless(value: Any) -> Any:
    """A JSON value without its clocks."""
    if isinstance(value, dict):
        return {key: timeless(part) for key, part in value.items() if not _CLOCK.search(key)}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def contents(folder: Path) -> dict[str, Any]:
    """What the files of a run hold, by name; hidden ones are of stopped processes."""
    found: dict[str, Any] = {}
    held: Any
    for path in folder.rglob("*.*"):
        if "/." in f"/{(name := str(path.relative_to(folder)))}":
            continue
        match path.suffix:
            case ".json":
                held = timeless(json.loads(path.read_text()))
            case ".jsonl":
                held = sorted(json.dumps(timeless(row)) for row in read_jsonl(path))
            case ".parquet":
                held = parquet.read_table(path).to_pylist()
            case ".safetensors":
                held = path.read_bytes()
            case _:
                held = None
        # answers are also of cells that were not finished, and a row replaces that of the same cell
        if path.name in ("answers.jsonl", "rows.jsonl"):
            held = set(held)
        elif path.name == "metrics.jsonl" and (path.parent / "data").exists():
            held = None  # times of files, of which a stop can leave out one
        found[name] = held
    return found


def test_every_command_that_continues_is_here():
    """Those that write to `output` do, and their help says so."""
    says, writes = set[str](), set[str]()
    for name, made in COMMANDS.items():
        texts = [made.help, *(getattr(option, "help", None) for option in made.params)]
        if any(re.search("[Rr]esum", text or "") for text in texts):
            says.add(name)
        if any(option.name == "output" for option in made.params):
            writes.add(name)
    assert writes <= says == {name.split()[0] for name in CASES}


@pytest.mark.parametrize(("name", "share"), STOPS)
def test_a_stopped_command_ends_as_one_that_was_not(ended: Ended, name: str, share: float):
    folder = ended.folder / name
    stopped = 130 if share == INTERRUPTED else -signal.SIGKILL
    (code,) = ended.codes[f"{folder / 'whole'}"]
    assert ended.codes[f"{folder / str(share)}"] == [stopped, -signal.SIGKILL, code], ended.errors
    assert code == 0, ended.errors
    whole, out = contents(folder / "whole/out"), folder / str(share) / "out"
    assert whole
    assert contents(out) == whole
    half = [*out.rglob("checkpoints/.*"), *out.rglob(".writing.*")]
    assert not half, "nothing half-written stays"


def test_a_server_is_asked_for_no_answer_twice(ended: Ended):
    """But for the two in flight at each of the two stops, or the five of an incomplete file."""
    bodies = [body for body in ended.bodies if body["max_tokens"] > 1]  # others try the server
    scored = [body for body in bodies if "logprobs" not in body]
    for name, asked, count, lost in ("score", scored, 6, 2), ("generate-data served", None, 12, 5):
        asked = asked or [body for body in bodies if body.get("logprobs")]
        stops = len(CASES[name]) - 1
        assert count * (stops + 1) <= len(asked) <= count * (stops + 1) + 2 * lost * stops


def test_a_draft_that_follows_was_swapped(ended: Ended):
    files = sorted((ended.folder / "follow/whole/out/rounds").glob("*/round.json"))
    rounds = [json.loads(file.read_text()) for file in files]
    assert "swapped" in [found["decision"] for found in rounds], rounds
    link = ended.folder / "follow/whole/out/draft"
    assert link.resolve().parent.name.startswith(f"{rounds[-1]['serving']}-")
    assert rounds[-1]["serving"] != "initial"


def test_the_aligned_runs_used_all_kinds_of_text(ended: Ended):
    for name in "align", "align t5":
        rows = read_jsonl(ended.folder / name / "whole/out/metrics.jsonl")
        assert {row["origin"] for row in rows if "origin" in row} == {"fixed", "draft", "target"}


@pytest.mark.parametrize("command", RESUMED)
def test_a_finished_run_is_checked_and_left_alone(ended: Ended, command: str):
    folder = ended.folder / command / "whole"
    before = contents(folder / "out")
    done = run_command(folder, command, *FILE, "--resume", "--dry-run")
    assert (done.returncode, done.stdout.splitlines()[-1][-16:]) == (0, "Nothing was run.")
    assert run_command(folder, command, *FILE).returncode == 2, "there is a run already"
    if command == "generate-data":
        assert run_command(folder, command, *FILE, "--resume").returncode == 0
    assert contents(folder / "out") == before
