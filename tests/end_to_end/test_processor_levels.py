"""The kernels, sessions, writing and alignment, under every level below this machine's own.

A processor without AMX or AVX-512 takes other code paths, in the C sources and in the libraries below
torch. The limit holds for a whole process, so each group of tests runs in one of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import processor

TESTS = Path(__file__).parents[1]
GROUPS = {
    "kernels": [
        "unit/test_native_divergences.py",
        "unit/test_native_rules.py",
        "unit/test_native_verification.py",
        "unit/test_models_kernels.py",
        "unit/test_models_int8.py",
    ],
    "sessions": [
        "property/test_session.py",
        "unit/test_models_native_llama.py",
        "unit/test_models_agreement.py",
        "unit/test_decode_batches.py",
    ],
    "writing and alignment": [
        "unit/test_models_bfloat16.py",
        "unit/test_data_generation.py",
        "unit/test_core_fused.py",
        "equivalence/test_align_equivalence.py",
    ],
}
LOWER = processor.usable_levels()[:-1] if not os.environ.get(processor.VARIABLE) else ()


@pytest.mark.skipif(not LOWER, reason="a processor of the lowest level, or one that is limited")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("level", LOWER)
def test_the_fast_paths_are_right_on_older_processors(level: str, group: str, tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += ["--no-header", "--basetemp", str(tmp_path / "tests")]
    # two processes compute as one under every level, and cost the most
    command += ["-k", "not two_processes and not without_a_compiler and not compiled_once"]
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in GROUPS[group])],
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
