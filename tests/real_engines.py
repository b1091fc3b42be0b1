"""What the tests with real engines share: where they are, and records that can be compared."""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from paceline.cli.main import main
from paceline.data.answering import ShardStore

FOLDER = Path(os.environ.get("PACELINE_ENGINES", ".engines")).absolute()
RESULTS = Path(os.environ.get("PACELINE_ENGINE_RESULTS", "runs/engines")).absolute()
TARGET = Path(".cache/SmolLM2-135M-Instruct.Q4_1.gguf").absolute()
PROGRAMS = {"vllm": FOLDER / "vllm/bin/vllm", "llamacpp": FOLDER / "llama-server"}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SAMPLED = {"completion", "completion_tokens", "stop_reason", "top_tokens", "top_log_probs"}
MAX_NEW_TOKENS = 24


def skip_without(engine: str) -> None:
    if not PROGRAMS[engine].exists() or not TARGET.exists():
        pytest.skip(f"{engine} or the demo's model is not here; make engines sets them up")


@functools.cache
def target_of_vllm() -> Path:
    """The demo's target as vLLM loads it; made anew, as an old one may have another tokenizer."""
    model = RESULTS / "exports" / "vllm-target"
    sys.argv = ["paceline", "export", str(TARGET), "--to", "vllm", "--out", str(model)]
    sys.argv += ["--overwrite"]
    with pytest.raises(SystemExit, match="0"):
        main()
    return model


def write_prompts(path: Path, count: int) -> None:
    rows = [{"prompt": f"Item {number} of the list is"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def held(run: Path) -> int:
    """Records of a run that is not finished."""
    data = run / "data"
    files = [parquet.read_metadata(path).num_rows for path in data.glob("*.parquet")]
    return sum(files) + sum(path.read_bytes().count(b"\n") for path in data.glob(".partial/*"))


def provenance(run: Path) -> list[dict[str, Any]]:
    """All that does not depend on what the server sampled; each record is also checked alone."""
    answers = ShardStore(run / "data").read()
    for answer in answers:
        assert 0 < len(answer.completion_tokens) <= MAX_NEW_TOKENS
        assert answer.top_tokens is not None
        assert len(answer.top_tokens) == len(answer.completion_tokens)
        assert answer.server
    return [answer.model_dump(exclude=SAMPLED) for answer in answers]
