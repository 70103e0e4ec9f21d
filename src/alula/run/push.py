"""Uploads a trained model to the Hugging Face hub with the hub's own client. Nothing is uploaded unless asked for."""

from pathlib import Path

import alula
from alula.errors import RunFailed, SettingError, first_line


def check_push(repo: str) -> None:
    """Raise before the work starts if `repo` is no hub id, or nobody is logged in."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise SettingError(f"--push-to-hub {repo}: not the name of a repository; write USER/NAME.") from None
    if get_token() is None:
        raise SettingError(f"--push-to-hub {repo}: not logged in; use `hf auth login`, or set HF_TOKEN.")
    try:
        HfApi().whoami()
    except Exception as error:  # a token that is not valid, no network, offline mode
        raise SettingError(
            f"--push-to-hub {repo}: the hub did not confirm the login ({first_line(error)}); check the connection, or "
            "log in again with `hf auth login`."
        ) from None


def push(folder: Path, repo: str, private: bool) -> str:
    """Upload the files of `folder` as one commit to `repo`, which is created if needed. Returns its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        message = f"Trained with Alula {alula.__version__}"
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:
        raise RunFailed(
            f"--push-to-hub {repo}: the upload failed ({first_line(error)}). The model is in {folder}; "
            f"upload it with `hf upload {repo} {folder}`."
        ) from error
    return str(address)
