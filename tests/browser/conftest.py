"""A headless Chromium under Playwright. Where there is none, the tests are skipped, but fail in CI (`CI=true`),
unless `BROWSER_LANE=optional` says that none could be installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, found on the path."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        needs = f"needs the package playwright, and one of {', '.join(BROWSERS)} on the path"
        if os.environ.get("CI") and os.environ.get("BROWSER_LANE") != "optional":
            pytest.fail(needs)
        pytest.skip(needs)
    with sync_playwright() as playwright:
        # Chromium's sandbox cannot run as root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()
