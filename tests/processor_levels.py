"""Compiler flags for each level that this machine can run, and for a processor without AVX."""

import platform

from paceline.processor import GENERIC, compile_flags, machine_level, usable_levels

LEVEL_FLAGS = {level: compile_flags(level) for level in usable_levels()}
LEVEL_FLAGS.setdefault(machine_level(), ())
if platform.machine() in ("x86_64", "AMD64"):
    LEVEL_FLAGS[GENERIC] = ("-march=x86-64", "-Wno-psabi")
