"""A run that is killed with SIGKILL, again and again, ends with the losses of one that was not.

One child process imports the libraries once and forks: every fork is a run that dies where it is
told to, by a real SIGKILL, or goes on to the end.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.records import read_jsonl
from support.processes import finish, start
from support.runs import align_config, losses, write_corpus, write_pair

# argv: a JSON file of [config file, moments]; a moment is [place, how many times it is passed].
# A run without moments is not killed.
_NURSERY = textwrap.dedent("""
    import gc, json, os, signal, sys, time
    from pathlib import Path
    from paceline.config import load_config
    from paceline.train import AlignConfig, align, checkpoint, loop, step
    from paceline import records

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(function, times):
        def wrapped(*arguments, **options):
            nonlocal times
            times -= 1
            if times == 0:
                die()
            return function(*arguments, **options)
        return wrapped

    def tearing(function, times):
        def wrapped(path, row):
            nonlocal times
            times -= 1
            if times == 0:
                with path.open("a") as stream:
                    stream.write(json.dumps(row)[:20])
                die()
            return function(path, row)
        return wrapped

    def half_saved(optimizer, path):
        path.write_bytes(b"half")
        die()

    def arm(place, times):
        if place == "forward":
            step.DraftLoss.forward = dying(step.DraftLoss.forward, times)
        elif place == "update":
            step.Stepper._update = dying(step.Stepper._update, times)
        elif place == "metrics":
            loop.append_jsonl = tearing(loop.append_jsonl, times)
        elif place == "saving the draft":
            checkpoint.save_draft = dying(checkpoint.save_draft, times)
        elif place == "saving the optimiser":
            checkpoint._save_optimizer = half_saved
        elif place == "dropping old ones":
            checkpoint.shutil.rmtree = dying(checkpoint.shutil.rmtree, times)

    def run(config, moment, resume):
        child = os.fork()
        if child == 0:
            try:
                if moment:
                    arm(*moment)
                align(config, resume=resume)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    codes = []
    for file, moments in json.load(open(sys.argv[1])):
        config = load_config(AlignConfig, Path(file))
        if not moments:
            # here, not in a fork: what the libraries import late is then there for all forks
            align(config)
            codes.append([0])
            gc.freeze()  # a collection in a fork would else copy all that the imports left
            continue
        codes.append([run(config, moment, resume=True) for moment in [*moments, None]])
    print(json.dumps(codes))
""")

MOMENTS: dict[str, list[tuple[str, int]]] = {
    "whole": [],
    "before any checkpoint": [("forward", 2)],
    "in a pass": [("forward", 8)],
    "in an update": [("update", 6)],
    "writing a line": [("metrics", 6)],
    "in a checkpoint": [("saving the draft", 2)],
    "in the middle of a checkpoint": [("saving the optimiser", 1)],
    "between two checkpoints": [("dropping old ones", 1)],
    "again and again": [("update", 5), ("forward", 2), ("saving the draft", 2), ("metrics", 3)],
}
_SIGKILL = -9

# Tests that start together stay in one worker, so the fixture makes the runs once.
pytestmark = pytest.mark.first


# A second architecture restores its own weights and texts: wherever it was killed.
MOMENTS_OF = {
    "llama": tuple(MOMENTS),
    "t5_v1_1": ("whole", "before any checkpoint", "in a checkpoint", "again and again"),
}
CASES = [(architecture, name) for architecture, names in MOMENTS_OF.items() for name in names]
KILLED = [case for case in CASES if case[1] != "whole"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every run of MOMENTS, ended; the directories that hold them by name, by architecture."""
    folders = {name: tmp_path_factory.mktemp(f"killed-{name}") for name in MOMENTS_OF}
    # one process for both architectures, as it imports for seconds
    runs = [run for name, folder in folders.items() for run in planned(name, folder)]
    plan = folders["llama"] / "plan.json"
    plan.write_text(json.dumps([[str(file), moments] for file, moments in runs]))
    done = finish(start(_NURSERY, plan))
    assert done.returncode == 0, done.stderr
    codes = [[_SIGKILL] * len(moments) + [0] for _, moments in runs]
    assert json.loads(done.stdout) == codes, (runs, done.stderr)
    return folders


def planned(architecture: str, folder: Path) -> list[tuple[Path, list[tuple[str, int]]]]:
    """Models, texts and configurations of the runs. -> each configuration, and its moments."""
    write_pair(folder, architecture=architecture)
    encodes = architecture != "llama"
    if encodes:
        words = ["the rain", "in an inn", "another man", "a thin thread", "the tin"]
        rows = [{"prompt": word, "completion": f"{word} and {word}"} for word in words]
        write_corpus(folder / "corpus.jsonl", rows)
    corpus = str(folder / "corpus.jsonl")
    settings: dict[str, Any] = {
        "data": {"train": corpus, "held_out": corpus, "keep_states_gb": 1},
        "evaluation": {"num_prompts": 2, "max_new_tokens": 4, "gamma": 2, "every_steps": 2},
        # all three kinds of text, so that every random stream is in it
        "fixed_fraction": 0.4,
        "draft_fraction": 0.5,
        # with everything that has a random stream or a schedule of its own
        "target_rounds": {"rows": 8, "uses": 2, "train_prompts": not encodes},
        "loss_vocabulary": {"frequent": 20, "drawn": 6},
        "finish": {"objective": "negative_log_acceptance", "begin": 0.5},
        "checkpoints": {"every_steps": 3, "keep": 1},
        "num_steps": 10,
    }
    runs = []
    for name in MOMENTS_OF[architecture]:
        config = align_config(folder, folder / name, **settings)
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(config.model_dump(mode="json")))
        runs.append((file, MOMENTS[name]))
    return runs


@pytest.mark.parametrize(("architecture", "name"), KILLED)
def test_a_killed_and_resumed_run_has_the_losses_of_one_that_was_not(
    ended: dict[str, Path], architecture: str, name: str
):
    whole = losses(ended[architecture] / "whole")
    assert len(whole) == 10
    assert losses(ended[architecture] / name) == whole  # to the last bit


@pytest.mark.parametrize(("architecture", "name"), KILLED)
def test_a_killed_and_resumed_run_ends_with_the_same_draft_and_figures(
    ended: dict[str, Path], architecture: str, name: str
):
    def figures(run: Path) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(run / "metrics.jsonl") if "evaluation" in row]

    run, whole = (ended[architecture] / each for each in (name, "whole"))
    weights = "draft/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert figures(run) == figures(whole)
    after = [json.loads((each / "result.json").read_text()) for each in (run, whole)]
    assert after[0]["after"] == after[1]["after"]
    assert after[0]["before"] == after[1]["before"]


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_nothing_half_written_stays(ended: dict[str, Path], architecture: str, name: str):
    kept = (ended[architecture] / name / "checkpoints").iterdir()
    assert [path.name for path in kept] == ["step-00000010"]


@pytest.mark.parametrize("architecture", MOMENTS_OF)
def test_the_run_used_all_kinds_of_text(ended: dict[str, Path], architecture: str):
    rows = read_jsonl(ended[architecture] / "whole/metrics.jsonl")
    assert {row["origin"] for row in rows if "origin" in row} == {"fixed", "draft", "target"}
