"""The command line, one file per group of commands, which import torch lazily: `--help` is fast."""
