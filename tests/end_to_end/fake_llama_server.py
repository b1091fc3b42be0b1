"""A program that takes llama-server's arguments and answers as it does, with tiny models.

Its first argument is the URL of a server of the test, which has the models; what that answers
under /load is where this program's answers come from. `--die-after N`: it ends in the middle of
its N-th answer; `--crash`: while it starts.
"""

import argparse
import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from relay import ask, relay


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models")
    parser.add_argument("-m", required=True)
    parser.add_argument("-md")
    parser.add_argument("-c", type=int)
    parser.add_argument("-np", type=int)
    parser.add_argument("-ctk")
    parser.add_argument("-ctv")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--spec-type", default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--crash", action="store_true")
    given = parser.parse_args()
    if given.crash:
        os.kill(os.getpid(), signal.SIGSEGV)

    drafts = given.md is not None and given.spec_type == "draft-simple"
    wanted = {
        "target": given.m,
        "draft": given.md if drafts else None,
        "gamma": given.spec_draft_n_max,
    }
    _, loaded = ask(urlsplit(given.models).netloc, "/load", json.dumps(wanted).encode())
    answers = count(1)

    def count_answers(path: str) -> None:
        if path == "/completion" and next(answers) == given.die_after:
            sys.stderr.write("ggml_abort: no memory left\n")
            sys.stderr.flush()
            os._exit(1)

    relay(json.loads(loaded)["url"], given.port, count_answers)


if __name__ == "__main__":
    main()
