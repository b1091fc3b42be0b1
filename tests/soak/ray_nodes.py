"""generate-data on two local nodes of Ray: one is killed and another one added, under the work.

    PYTHONPATH=tests .venv/bin/python -m soak.ray_nodes

The records are compared with those of one process.
"""

from __future__ import annotations

import tempfile
import threading
import warnings
from pathlib import Path

from ray.cluster_utils import Cluster

from paceline.data.distillation_data import generate_data
from paceline.processes import connect_to_ray
from support.data import answers, generation, write_lines
from support.runs import write_pair

COUNT = 2000


def soak(folder: Path) -> int:
    """Records that both runs have."""
    write_pair(folder)
    write_lines(folder / "prompts.jsonl", *[{"prompt": f"number {n}"} for n in range(COUNT)])
    changes = {"temperatures": [1], "num_per_prompt": 1, "shard_size": 16, "dtype": "float32"}
    changes |= {"max_prompt_tokens": 16}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    connect_to_ray(address=cluster.address)
    events: list[str] = []
    reached = threading.Event()

    def lose_and_add() -> None:
        reached.wait()
        cluster.remove_node(second, allow_graceful=False)
        events.append("a node was killed")
        cluster.add_node(num_cpus=1)
        events.append("a node was added")

    thread = threading.Thread(target=lose_and_add)
    thread.start()

    def progress(stage: str, done: float, total: float, note: str = "") -> None:
        del stage, note
        print(f"\r{done:,.0f} of {total:,.0f} {events}", end="", flush=True)  # noqa: T201
        if done > total / 4:
            reached.set()

    config = generation(folder, folder / "ray", pool="ray", workers=2, **changes)
    generate_data(config, progress=progress)
    thread.join()
    cluster.shutdown()
    generate_data(generation(folder, folder / "one", **changes))
    found, wanted = answers(folder / "ray"), answers(folder / "one")
    assert len(found) == COUNT
    assert found == wanted, "the records of one process"
    return len(found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        print("\n", soak(Path(place) / "pair"), "records, all equal")  # noqa: T201
