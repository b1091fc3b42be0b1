"""Result rows of studies."""

from __future__ import annotations

from paceline.results.row import Row as StudyRow

__all__ = ["StudyRow"]
