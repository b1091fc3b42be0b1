"""The exception tree. Every message is one line: what came, what was wanted, what to do.

Members are standard exceptions too, so that a caller who knows nothing of Paceline can catch them.
`exit_code` is what the command line returns:

2  wrong usage: an option, a configuration, a file or a model that cannot be used
1  a verdict: NO-GO, a check that failed, a bound that nothing meets
3  the work could not be done: training failed, the disk is full, memory ran out, a crash
130  the user interrupted it

Only a verdict may return 1, so that a script can tell "no" from "I do not know".
"""

VERDICT, USAGE, NOT_DONE, INTERRUPTED = 1, 2, 3, 130


class PacelineError(Exception):
    """Anything Paceline raises on purpose."""

    exit_code = NOT_DONE


class UsageError(PacelineError, ValueError):
    """What the user gave cannot be used."""

    exit_code = USAGE


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


class StoppedError(TrainingError):
    """The user asked a run to stop, and what it has so far is saved."""

    exit_code = INTERRUPTED


class GenerationError(PacelineError, RuntimeError):
    """Writing distillation data cannot go on."""


class EngineError(PacelineError, RuntimeError):
    """An engine that serves models did not do what was asked of it."""


class NotReachedError(PacelineError, RuntimeError):
    """Nothing that was measured meets what was asked for."""

    exit_code = VERDICT


class ExportError(PacelineError, RuntimeError):
    """An export that does not give what was exported; it is not kept."""

    exit_code = VERDICT


class StorageError(PacelineError, OSError):
    """Writing failed: the disk is full or the place cannot be written."""


class CrashError(PacelineError, RuntimeError):
    """A fault that no other class describes; the message names a log file with the traceback."""


class SlowerWarning(UserWarning):
    """A fast code path cannot be used; the result is the same, and takes longer."""
