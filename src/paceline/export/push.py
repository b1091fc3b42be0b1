"""Pushes an export to the hub as a repository of its own."""

from __future__ import annotations

from contextlib import contextmanager
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - that of the hub's own client
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)

from paceline.errors import EngineError, UsageError, first_line
from paceline.models.drafts.save import MODEL_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FORBIDDEN = {401: "the token is not valid", 403: "the token has no right to write there"}


def check_push(repository: str, *, private: bool) -> str:
    """Check the token, and an existing repository, before an export. -> the account's name.

    Raises:
        UsageError: There is no valid token, the name is none, or a private export would go into a
            public repository.
        EngineError: The hub cannot be reached.
    """
    api = HfApi()
    with _one_line(repository):
        account = str(api.whoami()["name"])
        try:
            known: Any = api.model_info(
                repository if "/" in repository else f"{account}/{repository}"
            )
        except RepositoryNotFoundError:
            return account
    if private and not known.private:
        raise UsageError(
            f"{known.id} exists on the hub and is public; choose another name for --push, or give "
            "--no-private"
        )
    return account


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Create the repository if there is none, and commit the files of a folder. -> its address.

    Files of another model at the repository's root are removed, unless the folder holds a GGUF
    file: models are read with all that lies beside them.

    Raises:
        UsageError: The token has no right to write there.
        EngineError: The hub cannot be reached, or refuses the files. The folder is unchanged.
    """
    api = HfApi()
    with _one_line(repository, f"; the export is in {folder}"):
        made = api.create_repo(repository, private=private, exist_ok=True)
        older = [] if any(folder.glob("*.gguf")) else api.list_repo_files(made.repo_id)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="Export by Paceline",
            delete_patterns=[name for name in older if _is_of_a_model(name)] or None,
        )
    return str(made)


def _is_of_a_model(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in MODEL_FILES)


@contextmanager
def _one_line(repository: str, also: str = "") -> Iterator[None]:
    """Errors of the hub as one line that says what to do."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise UsageError(
            f"--push {repository} needs a token of the hub; run hf auth login, or set "
            f"HF_TOKEN{also}"
        ) from None
    except HFValidationError as error:
        raise UsageError(f"--push {repository} names no repository: {first_line(error)}") from None
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in _FORBIDDEN:
            raise UsageError(
                f"--push {repository}: {_FORBIDDEN[code]} (status {code}); give a token that may "
                f"write to it in HF_TOKEN{also}"
            ) from None
        raise EngineError(f"--push {repository}: {first_line(error)}{also}") from None
    except (HTTPError, OSError) as error:
        raise EngineError(
            f"--push {repository}: the hub cannot be reached ({first_line(error)}); check the "
            f"network and HF_ENDPOINT{also}"
        ) from None
    except ValueError as error:
        said = " ".join(str(error).split())
        raise EngineError(
            f"--push {repository}: the hub does not take it ({said}); if that is about README.md, "
            f"correct it and send the export with hf upload{also}"
        ) from None
