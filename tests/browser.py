"""A headless Chromium for tests, driven by selenium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
WAIT_S = 30
LOCAL_SCHEMES = ("about", "blob", "chrome", "data", "devtools")
"""Addresses of these schemes are no requests to a host."""


def missing() -> str | None:
    """Return the name of a missing program or package that browser tests need, or None."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "the package selenium is not installed"
    if CHROMIUM is None:
        return "no chromium, chromium-browser or google-chrome on PATH"
    return None if DRIVER else "no chromedriver on PATH"


class Browser:
    """A window of the browser.

    ``driver`` is the object through which selenium controls the browser.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, width: int, height: int, scheme: str, is_reduced: bool = False) -> None:
        """Set the window size in CSS pixels, the colour scheme, and the reduced-motion setting."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {
                "name": "prefers-reduced-motion",
                "value": "reduce" if is_reduced else "no-preference",
            },
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> Any:
        """Return the page's first element that matches a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page, and return its value."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, WAIT_S, poll_frequency=0.02)
        return waiting.until(lambda _: self.run(f"return {script}", *arguments), script)

    def press(self, *keys: str) -> None:
        """Press keys on the keyboard, one after the other."""
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def press_together(self, modifier: str, key: str) -> None:
        """Press a key while a modifier key is down."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).key_down(modifier).send_keys(key).key_up(modifier).perform()

    def console(self) -> list[str]:
        """Return the warnings and errors that the console printed since the last call."""
        lines = self.driver.get_log("browser")
        return [each["message"] for each in lines if each["level"] != "INFO"]

    def hosts(self) -> set[str]:
        """Return the hosts (with ports) that the browser contacted since the last call."""
        found = set()
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                sent = event["params"]
                address = urlsplit(sent.get("url") or sent["request"]["url"])
                if address.scheme not in LOCAL_SCHEMES:
                    found.add(address.netloc)
        return found


@contextmanager
def browsing() -> Iterator[Browser]:
    """Open a browser without windows on the screen.

    The browser is closed when the ``with`` block ends.
    """
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
