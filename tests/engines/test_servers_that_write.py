"""generate-data through real servers: kills of the client and of a server, and one that joins.

A whole run, then one whose client is killed ten times. Of its two servers, one starts late and
the other is killed and started again. Both runs have the same records but for what is sampled.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import (
    PROGRAMS,
    TARGET,
    held,
    provenance,
    skip_without,
    target_of_vllm,
    write_prompts,
)
from support.real_servers import AT_ONCE, client, run_to_the_end, servers, wait_for

pytestmark = pytest.mark.engines

NUM_PROMPTS, NUM_KILLS = 150, 10
NUM_RECORDS = 2 * NUM_PROMPTS  # at two temperatures


@pytest.fixture(params=["vllm", "llamacpp"])
def command(request: pytest.FixtureRequest) -> Callable[[int], list[str]]:
    """The command that starts a server at a port."""
    engine = request.param
    skip_without(engine)
    if engine == "llamacpp":
        size = ("-c", str(128 * AT_ONCE), "-np", str(AT_ONCE), "-t", "1")
        return lambda port: [str(PROGRAMS[engine]), "-m", str(TARGET), *size, "--port", str(port)]
    named = (str(target_of_vllm()), "--served-model-name", "target")
    options = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", str(AT_ONCE))
    start = [str(PROGRAMS[engine]), "serve", *named, *options]
    return lambda port: [*start, "--host", "127.0.0.1", "--port", str(port)]


def test_kills_lose_nothing_and_a_second_server_joins(command: Any, tmp_path: Path):
    write_prompts(tmp_path / "prompts.jsonl", NUM_PROMPTS)
    run = tmp_path / "killed"
    rng = random.Random(0)
    with servers(command) as (first, second):
        first.start()
        first.wait()
        run_to_the_end(client(tmp_path, "whole", first.url))
        for number in range(NUM_KILLS):
            process = client(tmp_path, "killed", first.url, second.url)
            wait_for(process, run, held(run) + rng.randint(1, 4))
            if number == 3:  # the client goes on when the server is back
                first.kill()
                time.sleep(2)
                before = held(run)
                first.start()
                wait_for(process, run, before + 4)
            if number == 6:  # what comes now is the second server's
                first.kill()
                before = held(run)
                second.start()
                wait_for(process, run, before + AT_ONCE + 1)
                first.start()
            process.kill()
            process.communicate()
        assert held(run) < NUM_RECORDS, "there is something left for the last run"
        run_to_the_end(client(tmp_path, "killed", first.url, second.url))
    kept, expected = (provenance(tmp_path / name) for name in ("killed", "whole"))
    assert len(kept) == NUM_RECORDS
    assert kept == expected
