"""Paceline: draft models that keep up with their target, measured, aligned, decoded and shipped.

Importing this package costs nothing: torch is loaded by the submodules that compute.
"""

__version__ = "0.1.0"
