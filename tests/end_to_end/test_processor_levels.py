"""The kernels, sessions, writing and alignment, under every level below this machine's own.

A processor without AMX or AVX-512 takes other code paths, in the C sources and in the libraries
below torch. The limit holds for a whole process, so each level has one of its own. The products of
every level are tested in one process by tests/unit/native/test_products.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import processor

TESTS = Path(__file__).parents[1]
FILES = [
    # kernels
    "unit/native/test_divergence_kernels.py",
    "unit/native/test_kernels.py",
    "unit/core/test_rules_in_blocks.py",
    "unit/models/llama/test_int8.py",
    # the compiled pass and copies that write
    "property/test_session.py",
    "unit/models/llama/test_cpu.py",
    "unit/models/admission/test_faster.py",
    "unit/models/llama/test_bfloat16.py",
    "unit/data/test_sources.py",
]
# at the lowest level alone: the tests above run the kernels of these at every level
LOWEST = ["unit/core/test_fused.py", "equivalence/test_align_equivalence.py"]
# What runs through torch alone, what starts its own processes, architectures without a fast path,
# rules that the compiled calls do not tell apart, and tests of alignment whose kernels the other
# tests run too.
LEFT_OUT = (
    "any_session or rooms_of or the_fake or [torch or -torch] or recorded or stale_window "
    "or without_a_compiler or compiled_once or deprecation "
    "or bloom or gpt_neox or gemma3_text or t5 or bart or marian or pegasus or under_every_rule "
    "or two_processes or parts_of_a_step or seq_kd or the_finish or means_over"
)
LOWER = processor.usable_levels()[:-1] if not os.environ.get(processor.VARIABLE) else ()


@pytest.mark.first
@pytest.mark.skipif(not LOWER, reason="a processor of the lowest level, or one that is limited")
@pytest.mark.parametrize("level", LOWER)
def test_the_fast_paths_are_right_on_older_processors(level: str, tmp_path: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-k", f"not ({LEFT_OUT})"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(tmp_path / "tests")]
    files = [*FILES, *(LOWEST if level == LOWER[0] else ())]
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in files)],
        cwd=TESTS.parent,
        env={
            **os.environ,
            processor.VARIABLE: level,
            "PACELINE_PRECISION": "bfloat16" if level == "avx512_bf16" else "float32",
            "PACELINE_TEST_CACHE": os.environ["PACELINE_CACHE"],
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
