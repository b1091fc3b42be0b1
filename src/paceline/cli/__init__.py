"""The command line: parse, load the configuration, call the library, say where the result is.

One file a command. torch is imported inside commands, so that `--help` answers at once.
"""
