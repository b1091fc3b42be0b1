"""Runs of align on two processes, as torchrun starts them."""

import json
import socket
import textwrap
from collections.abc import Sequence
from pathlib import Path

from forked import Program
from paceline.train import AlignConfig

# argv: configurations. Each process leaves the bytes that it holds beside each: of the target's
# weights, of the draft's, and of the moments.
_PROCESS = textwrap.dedent("""
    import json, os, sys
    from pathlib import Path
    from torch.distributed.tensor import DTensor
    from paceline.config import load_config
    from paceline.train import AlignConfig, align
    from paceline.train.step import Stepper

    def num_bytes(tensors):
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    def counting(step, file):
        def counted(self, *arguments):
            figures = step(self, *arguments)
            models = (self.target, self.model)
            of_models = ([*m.hf.parameters()] if m else [] for m in models)
            weights = ({id(w): w for w in each}.values() for each in of_models)
            states = self.optimizer.state.values()
            moments = [m for state in states for m in state.values() if m.dim()]
            file.write_text(json.dumps([*map(num_bytes, weights), num_bytes(moments)]))
            return figures
        return counted

    plain = Stepper.step
    for config in map(Path, sys.argv[1:]):
        Stepper.step = counting(plain, config.with_suffix(f".{os.environ['RANK']}"))
        align(load_config(AlignConfig, config), resume=True)
""")


def two_processes(configs: Sequence[AlignConfig], folder: Path) -> list[list[list[int]]]:
    """Run each on the same two processes, started as torchrun would.

    -> for each run: the bytes of target, draft and moments on each process.
    """
    files = [folder / f"config-{number}.json" for number in range(len(configs))]
    for file, config in zip(files, configs, strict=True):
        file.write_text(json.dumps(config.model_dump(mode="json")))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    # what torchrun sets, without its start-up time
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    ranks = [
        Program(_PROCESS, files, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    for process in ranks:
        done = process.wait()
        assert done.returncode == 0, done.stderr
    return [
        [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(2)]
        for file in files
    ]
