"""A real browser for the tests of pages."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def chromium() -> str:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        reason = "no chromium or google-chrome on PATH: install one (Debian: apt-get install chromium)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return browser
