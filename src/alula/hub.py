"""The Hugging Face hub: without a connection, cached files are used and a missing one raises at once."""

import os
import sys
from functools import cache

TIMEOUT = 5.0
"""Seconds in which the hub must answer."""


@cache
def offline_if_unreachable() -> None:
    """Switch the hub's client to offline mode if the hub does not answer. Otherwise every file is tried six times, with
    23 seconds between the tries. Call it before a file of the hub is read."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # of the HTTP client, which differs between versions
        print(f"alula: no connection to {constants.ENDPOINT}; using cached files only.", file=sys.stderr)
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for `datasets`, if imported later, and for child processes
        if datasets := sys.modules.get("datasets"):
            datasets.config.HF_HUB_OFFLINE = True
