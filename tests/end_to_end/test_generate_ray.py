"""generate-data on a Ray cluster of this machine: the records that one process writes."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.config import to_yaml
from paceline.data.distillation_data import generate_data
from support.data import answers, generation, write_lines
from support.runs import write_pair

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

# its own process: Ray leaves warnings and threads behind
_SCRIPT = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from paceline.config import load_config
    from paceline.data import distillation_data
    from paceline.data.distillation_data import generate_data
    from paceline.data.requests import GenerateDataConfig
    from paceline.errors import ContextLengthError, GenerationError
    from paceline.processes import connect_to_ray

    class Dying:  # in the place of the writer, and without its imports
        def __init__(self, *_):
            pass

        def __call__(self, shard):
            os._exit(7)

    class Refusing(Dying):
        def __call__(self, shard):
            raise ContextLengthError(f"{shard.name} is too long")

    ray = connect_to_ray(num_cpus=2, include_dashboard=False)
    config = load_config(GenerateDataConfig, Path(sys.argv[1]))
    generate_data(config)
    distillation_data.MOST_DEATHS = 1  # each actor starts for seconds
    for writer in (Refusing, Dying):
        distillation_data.ShardWriter = writer
        output = config.output.with_name(writer.__name__)
        try:
            generate_data(config.model_copy(update={"output": output, "workers": 1}))
        except (ContextLengthError, GenerationError) as error:
            print(error)
    ray.shutdown()
""")


@pytest.mark.first
def test_two_workers_of_ray_write_what_one_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_pair(tmp_path / "pair")
    monkeypatch.chdir(tmp_path)  # models may be named from where the command is given
    marker = tmp_path / "marker"
    for shadowed in ("yaml", "safetensors"):  # workers import the installed ones
        (tmp_path / f"{shadowed}.py").write_text(f"open({str(marker)!r}, 'w')")
    rows = [{"prompt": f"number {number}"} for number in range(8)]
    write_lines(folder / "prompts.jsonl", *rows)
    changes = {"target": "pair/target", "dtype": "float32", "activations": "float32"}
    changes |= {"max_prompt_tokens": 16, "max_new_tokens": 8, "shard_size": 1}
    changes |= {"temperatures": [1], "num_per_prompt": 1}
    generate_data(generation(folder, tmp_path / "one", **changes))
    two = generation(folder, tmp_path / "two", pool="ray", workers=2, **changes)
    file = tmp_path / "two.yaml"
    file.write_text(to_yaml(two))
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SCRIPT, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
    assert ".parquet is too long\n" in done.stdout, "as one process says it"
    assert "Ray failed: " in done.stdout, "actors that always die end the run"
    one, other = (answers(tmp_path / name) for name in ("one", "two"))
    assert len(one) == 8
    assert other == one
