"""The command line, one file per group of commands. Commands import torch lazily to keep `--help` fast."""
