"""Exception classes; each has a standard base class and the exit code of the command line.

1    negative result: NO-GO, a failed check, an alarm, or no measurement meets a bound
2    usage error: an option, a configuration, a file or a model cannot be used
3    failure: training failed, the disk is full, memory ran out, a crash
130  interrupted by the user

Only a negative result returns 1, so scripts can tell it from a failure.
"""

import errno

VERDICT, USAGE, NOT_DONE, INTERRUPTED = 1, 2, 3, 130


class PacelineError(Exception):
    """Base class of all errors raised by Paceline."""

    exit_code = NOT_DONE


class UsageError(PacelineError, ValueError):
    """An argument, configuration, file or model cannot be used."""

    exit_code = USAGE


class ConfigError(UsageError):
    """A configuration file, key or value is wrong."""


class PromptError(UsageError):
    """A file of prompts or documents is empty or malformed."""


class EmptyTextError(PromptError):
    """A row has no text, or a chat without messages or an answer without text."""


class ModelLoadError(UsageError):
    """A model or tokenizer cannot be loaded from the given path."""


class UnsupportedModelError(UsageError):
    """The architecture lacks a required feature, such as a cache per layer."""


class VocabularyMismatchError(UsageError):
    """Target and draft do not share a tokenizer."""


class ContextLengthError(UsageError):
    """A prompt, or a prompt plus the new tokens, exceeds the model's context length."""


class TrainingError(PacelineError, RuntimeError):
    """Training failed: the loss exploded or is not finite."""


class StoppedError(TrainingError):
    """The user stopped a run; its state is saved."""

    exit_code = INTERRUPTED


class GenerationError(PacelineError, RuntimeError):
    """Generation of distillation data failed."""


class EngineError(PacelineError, RuntimeError):
    """A serving engine failed."""


class NotReachedError(PacelineError, RuntimeError):
    """No measurement meets the requested bound."""

    exit_code = VERDICT


class ExportError(PacelineError, RuntimeError):
    """An export failed its checks and was removed."""

    exit_code = VERDICT


class StorageError(PacelineError, OSError):
    """A file cannot be written: the disk is full or the path is not writable."""


class InputNote(UserWarning):
    """Inputs that can be used, but may not be what the user meant."""


class SlowerWarning(UserWarning):
    """A fast code path is not available: same results, more time."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch and CUDA say so in a plain RuntimeError, too."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    marks = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shorten(text: str, width: int = 60) -> str:
    """The text, cut to a width for a message."""
    return text if len(text) <= width else text[: width - 1] + "…"
