"""What the code gives on tiny models: written as JSON, to be compared between two commits.

Uses the public surface and the command line alone, so that it runs on either.
"""

import json
import sys
import warnings
from pathlib import Path

import paceline  # noqa: F401 - before torch, whose libraries PACELINE_CPU limits

# isort: split
import torch
from record_commands import benches, making_commands, reading_commands
from record_models import core, decoders, sessions


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = {
        "core": core,
        "sessions": sessions,
        "decoders": decoders,
        "reading": reading_commands,
        "making": making_commands,
        "benches": benches,
    }
    chosen = sys.argv[2:] or list(parts)
    out = Path(sys.argv[1])
    recorded = {name: parts[name]() for name in chosen}
    out.write_text(json.dumps(recorded, default=str), "utf-8")


if __name__ == "__main__":
    main()
