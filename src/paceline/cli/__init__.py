"""The command line, one file per command. Commands import torch lazily to keep `--help` fast."""
