"""The exception tree. Every message is one line: what came, what was wanted, what to do.

Members are standard exceptions too, so that a caller who knows nothing of Paceline can catch them.
`exit_code` is what the command line returns: 2 for wrong usage, 1 for work that failed.
"""


class PacelineError(Exception):
    """Anything Paceline raises on purpose."""

    exit_code = 1


class UsageError(PacelineError, ValueError):
    """What the user gave cannot be used."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file, key or value is wrong."""


class PromptError(UsageError):
    """A file of prompts or documents is empty or malformed; the message names the line."""


class ModelLoadError(UsageError):
    """A model or tokenizer cannot be read from the place that was named."""


class UnsupportedModelError(UsageError):
    """The architecture cannot do what is asked of it, such as rolling its cache back."""


class VocabularyMismatchError(UsageError):
    """Target and draft do not share one tokenizer."""


class ContextLengthError(UsageError):
    """A prompt, or a prompt with what is to be generated, is longer than the model's context."""


class TrainingError(PacelineError, RuntimeError):
    """Training cannot go on: a loss that is not finite or that exploded."""


class DivergedError(TrainingError):
    """Training made the model worse and worse, or not a number."""


class GenerationError(PacelineError, RuntimeError):
    """Writing distillation data cannot go on."""


class NotReachedError(PacelineError, RuntimeError):
    """Nothing that was measured meets what was asked for."""


class StorageError(PacelineError, OSError):
    """Writing failed: the disk is full or the place cannot be written."""


class SlowerWarning(UserWarning):
    """A fast code path cannot be used; the result is the same, and takes longer."""
