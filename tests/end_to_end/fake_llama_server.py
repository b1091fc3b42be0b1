"""A program that takes llama-server's arguments and answers as it does, with tiny models.

`--die-after N`: it ends in the middle of its N-th answer; `--crash`: while it starts.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
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

    # here, as a server that ends before it reads its models needs none of it
    from engine_servers import llamacpp_routes, serving
    from paceline.models import load_model

    target = load_model(given.m, dtype="float32", device="cpu")
    drafts = given.md is not None and given.spec_type == "draft-simple"
    draft = load_model(given.md, dtype="float32", device="cpu") if drafts else None
    routes = llamacpp_routes(target, draft, given.spec_draft_n_max)
    complete, answered = routes["/completion"], [0]

    def counted(body):
        answered[0] += 1
        if answered[0] == given.die_after:
            sys.stderr.write("ggml_abort: no memory left\n")
            sys.stderr.flush()
            os._exit(1)
        return complete(body)

    with serving(routes | {"/completion": counted}, port=given.port):
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
