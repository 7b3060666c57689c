"""`ds4jax download`: a weights file from Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def download(
    repo: Annotated[str, typer.Argument(help="Repository, OWNER/NAME.")],
    file: Annotated[str, typer.Argument(help="File in it, such as model-q2.gguf.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to put it. Default: Hugging Face's own cache.")] = None,
) -> None:
    """Download a file and print its path. An interrupted download goes on where it stopped."""
    print(fetch(repo, file, revision, folder))


def fetch(repo: str, file: str, revision: str | None = None, folder: Path | None = None) -> Path:
    """Return the local path of a file, after downloading it if need be.

    Raises ModelFileError that says what failed and what to try.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    from ds4jax.errors import ModelFileError

    try:
        return Path(hf_hub_download(repo, file, revision=revision, local_dir=folder))
    except HFValidationError as error:
        raise ModelFileError(f"{repo}: not a repository name; expected OWNER/NAME") from error
    except RepositoryNotFoundError as error:
        raise ModelFileError(f"{repo}: no such repository, or it is private; check the name, or log in with `hf auth login`") from error
    except LocalEntryNotFoundError as error:  # before its base class: no connection, and nothing in the cache
        raise ModelFileError(f"{repo}/{file}: cannot reach Hugging Face; check the connection, or copy the file here by hand") from error
    except EntryNotFoundError as error:
        raise ModelFileError(f"{repo}: has no file {file}; look at the repository's file list for the exact name") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelFileError(f"{repo}/{file}: the download failed ({error}); run the command again to go on where it stopped") from error
