"""Paceline: draft models that keep up with their target, measured, aligned, decoded and shipped.

Importing this package does not load torch; the submodules that compute do.
"""

from paceline.processor import limit_libraries

limit_libraries()

__version__ = "0.1.0"
