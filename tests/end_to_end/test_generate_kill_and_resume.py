"""generate-data, killed by SIGKILL at ten random moments, ends with the records of one left alone.

One child process imports the libraries once and forks: every fork is a run that is killed from
outside after a random time, or goes on to the end.
"""

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paceline.data.answering import ShardStore
from support.engines import Served, serving
from support.processes import finish, start
from support.runs import write_corpus, write_pair

# Tests that start together stay in one worker, so the fixture makes the runs once.
pytestmark = pytest.mark.first

KINDS = ("whole", "killed")

# argv: for each writer, the configurations of the whole run and of the killed one, and what decides
# the moments of the kills: "time", or "answers", of which each run adds one to five
_NURSERY = textwrap.dedent("""
    import gc, json, os, random, signal, sys, time
    from pathlib import Path
    from pyarrow import parquet
    from paceline.config import load_config
    from paceline.data.distillation_data import generate_data
    from paceline.data.requests import GenerateDataConfig

    def held(data):
        files = [parquet.read_metadata(path).num_rows for path in data.glob("*.parquet")]
        journals = [path.read_bytes().count(b"\\n") for path in data.glob(".partial/*")]
        return sum(files) + sum(journals)

    def run(killed, wait):
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

    def kill_ten_times(whole, killed, moments):
        data, rng = killed.output / "data", random.Random(0)
        few = whole.prompts.model_copy(update={"limit": 4})  # what is imported late is then there
        first = {"prompts": few, "output": killed.output.with_name("first")}
        generate_data(whole.model_copy(update=first))
        started = time.monotonic()
        generate_data(whole)
        seconds = time.monotonic() - started
        gc.freeze()  # a collection in a fork would else copy all that the imports left

        def wait():
            if moments == "time":
                time.sleep(rng.uniform(0.01, 0.12) * seconds)
                return
            goal = held(data) + rng.randint(1, 5)
            while held(data) < goal:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.03))

        codes = [run(killed, wait) for _ in range(10)]
        return {"codes": codes, "held": held(data), "last": run(killed, None)}

    found = []
    for *files, moments in json.loads(sys.argv[1]):
        configs = [load_config(GenerateDataConfig, Path(file)) for file in files]
        found.append(kill_ten_times(*configs, moments))
    print(json.dumps(found))
""")


class Ended(NamedTuple):
    """Directories of the runs by writer, what the nursery said of each, and the server."""

    folders: dict[str, Path]
    found: dict[str, dict[str, Any]]
    served: Served
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("model", "server")}
    pair = folders["model"] / "pair"
    write_pair(pair, rounded_to=torch.float32)  # slow enough to be killed
    rows = [{"prompt": f"number {number}"} for number in range(60)]
    prompts = write_corpus(pair / "prompts.jsonl", rows)
    served = Served(pair)
    with serving(served.routes) as url:
        writer = {"kind": "openai", "url": url, "concurrency": 2, "top_logprobs": 2}
        changes: dict[str, dict[str, Any]] = {
            "model": {"shard_size": 2, "batch_size": 2},
            # files of 20 records, which take longer than many of the runs
            "server": {"shard_size": 20, "writer": writer},
        }
        plan = []
        for name, moments in (("model", "time"), ("server", "answers")):
            files = [folders[name] / f"{kind}.yaml" for kind in KINDS]
            for file in files:
                settings = {
                    "target": str(pair / "target"),
                    "output": str(file.with_suffix("")),
                    "prompts": str(prompts),
                    "max_prompt_tokens": 16,
                    "max_new_tokens": 30,
                    "dtype": "float32",
                }
                file.write_text(json.dumps(settings | changes[name]))
            plan.append([*map(str, files), moments])
        done = finish(start(_NURSERY, json.dumps(plan)))
    assert done.returncode == 0, done.stderr
    found = dict(zip(folders, json.loads(done.stdout), strict=True))
    return Ended(folders, found, served, done.stderr)


@pytest.mark.parametrize("writer", ["model", "server"])
def test_ten_kills_lose_and_repeat_nothing(ended: Ended, writer: str):
    found = ended.found[writer]
    assert found["codes"] == [-9] * 10, ended.errors
    assert 0 < found["held"] < 60, "some answers were there, and some were not"
    assert found["last"] == 0, ended.errors
    whole, killed = (ShardStore(ended.folders[writer] / f"{kind}/data") for kind in KINDS)
    assert killed.read() == whole.read()
    assert killed.written() == whole.written()
    assert len(killed.read()) == 60
    assert not list(killed.directory.glob(".writing.*"))


def test_ten_kills_ask_a_server_for_no_answer_twice(ended: Ended):
    store = ShardStore(ended.folders["server"] / "killed/data")
    assert not list((store.directory / ".partial").iterdir())
    # four answers, two whole runs, and the requests in flight at ten kills; not checks of scores
    texts = [body for body in ended.served.bodies if body["max_tokens"] > 1]
    assert 124 <= len(texts) <= 124 + 10 * 2
