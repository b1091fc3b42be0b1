"""generate-data, killed by SIGKILL at ten random moments, ends with the records of one left alone.

One child process imports the libraries once and forks: every fork is a run that is killed from
outside after a random time, or goes on to the end.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.answering import ShardStore
from support.engines import Served, serving
from support.processes import finish, start
from support.runs import write_corpus, write_pair

# argv: the configuration of the whole run, that of the killed one, and what decides the moments of
# the kills: "time", or "answers", of which each run adds one to five
_NURSERY = textwrap.dedent("""
    import gc, json, os, random, signal, sys, time
    from pathlib import Path
    from pyarrow import parquet
    from paceline.config import load_config
    from paceline.data.distillation_data import generate_data
    from paceline.data.requests import GenerateDataConfig

    whole, killed = (load_config(GenerateDataConfig, Path(name)) for name in sys.argv[1:3])
    data = killed.output / "data"
    few = whole.prompts.model_copy(update={"limit": 4})  # what is imported late is then there
    first = {"prompts": few, "output": killed.output.with_name("first")}
    generate_data(whole.model_copy(update=first))
    started = time.monotonic()
    generate_data(whole)
    seconds = time.monotonic() - started
    gc.freeze()  # a collection in a fork would else copy all that the imports left

    def held():
        files = [parquet.read_metadata(path).num_rows for path in data.glob("*.parquet")]
        journals = [path.read_bytes().count(b"\\n") for path in data.glob(".partial/*")]
        return sum(files) + sum(journals)

    def some_time():
        time.sleep(rng.uniform(0.01, 0.12) * seconds)

    def some_answers():
        goal = held() + rng.randint(1, 5)
        while held() < goal:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.03))

    def run(wait):
        child = os.fork()
        if child == 0:
            try:
                generate_data(killed, resume=True)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        if wait is not None:
            wait()
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    rng = random.Random(0)
    codes = [run({"time": some_time, "answers": some_answers}[sys.argv[3]]) for _ in range(10)]
    print(json.dumps({"codes": codes, "held": held(), "last": run(None)}))
""")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_pair(tmp_path / "pair", rounded_to=torch.float32)  # slow enough to be killed
    rows = [{"prompt": f"number {number}"} for number in range(60)]
    write_corpus(folder / "prompts.jsonl", rows)
    return folder


def test_ten_kills_lose_and_repeat_nothing(folder: Path, tmp_path: Path):
    kill_ten_times(folder, tmp_path, "time", {"shard_size": 2, "batch_size": 2})
    assert len(ShardStore(tmp_path / "killed/data").read()) == 60


@pytest.mark.first
def test_ten_kills_lose_and_repeat_no_answer_of_a_server(folder: Path, tmp_path: Path):
    """In files of 20 records, which take longer than many of the runs."""
    served = Served(folder)
    with serving(served.routes) as url:
        writer = {"kind": "openai", "url": url, "concurrency": 2, "top_logprobs": 2}
        kill_ten_times(folder, tmp_path, "answers", {"shard_size": 20, "writer": writer})
    store = ShardStore(tmp_path / "killed/data")
    assert not list((store.directory / ".partial").iterdir())
    # four answers, two whole runs, and the requests in flight at ten kills; not checks of scores
    texts = [body for body in served.bodies if body["max_tokens"] > 1]
    assert 124 <= len(texts) <= 124 + 10 * 2


def kill_ten_times(folder: Path, tmp_path: Path, moments: str, changes: dict[str, Any]) -> None:
    files = []
    for name in ("whole", "killed"):
        settings = {
            "target": str(folder / "target"),
            "output": str(tmp_path / name),
            "prompts": str(folder / "prompts.jsonl"),
            "max_prompt_tokens": 16,
            "max_new_tokens": 30,
            "dtype": "float32",
            **changes,
        }
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(json.dumps(settings))
    done = finish(start(_NURSERY, *files, moments))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["codes"] == [-9] * 10, done.stderr
    assert 0 < found["held"] < 60, "some answers were there, and some were not"
    assert found["last"] == 0, done.stderr
    whole, killed = (ShardStore(tmp_path / name / "data") for name in ("whole", "killed"))
    assert killed.read() == whole.read()
    assert killed.written() == whole.written()
    assert len(killed.read()) == 60
    assert not list(killed.directory.glob(".writing.*"))
