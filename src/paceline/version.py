"""Version of Paceline, also for a source tree that is not installed."""

__version__ = "0.1.0"
