"""A headless Chromium for tests of pages, where one is installed: `apt-get install chromium chromium-driver`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0  # for a page or a script, on a busy machine


def need_browser() -> tuple[str, str]:
    """Paths of a browser and its driver; skips the test where selenium or either is missing."""
    pytest.importorskip("selenium", reason="pages are tested with selenium: pip install selenium")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "chromium" if browser is None else "chromedriver"
        pytest.skip(f"no {missing} is installed: apt-get install chromium chromium-driver")
    return browser, driver


class Browser:
    """A window. `open` shows a file; `run` runs JavaScript; `problems` are what the console or the network saw."""

    def __init__(self, window: Any) -> None:
        self._window = window
        self._path = Path()

    def open(self, path: Path, *, width: int = 1280) -> None:
        self._path = path
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)  # windows have a least width
        self._window.get("about:blank")
        self._logs()
        self._window.get(path.as_uri())
        end = time.monotonic() + SECONDS
        while self.run("return document.readyState") != "complete":  # on a busy machine the driver is early at times
            assert time.monotonic() < end, f"{path} does not finish loading"
            time.sleep(0.05)

    def run(self, script: str, *args: object) -> Any:
        """What `return` gives; a promise is waited for."""
        return self._window.execute_script(script, *args)

    def problems(self) -> list[str]:
        """Messages of the console, and requests for anything but the page, since the page was opened."""
        messages, requests = self._logs()
        own = self._path.as_uri()
        return messages + [url for url in requests if url.partition("#")[0] != own]

    def _logs(self) -> tuple[list[str], list[str]]:
        messages = [entry["message"] for entry in self._window.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self._window.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return messages, [request["request"]["url"] for request in sent]


@contextmanager
def browser(*, script: bool = True, dark: bool = False) -> Iterator[Browser]:
    """A window; with `script=False` pages run no JavaScript (the tests' own still runs)."""
    path, driver = need_browser()
    from selenium import webdriver  # optional
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = path
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    if not script:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        window.set_page_load_timeout(SECONDS)
        window.set_script_timeout(SECONDS)
        yield Browser(window)
    finally:
        window.quit()
