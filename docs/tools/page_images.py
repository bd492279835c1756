"""Draw docs/images/page-*.webp: the server's page while an answer is generated.

make demo && PYTHONPATH=tests python docs/tools/page_images.py

The script needs Chromium with its driver, and the packages selenium and Pillow.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from browser import Browser, browsing
from PIL import Image
from serving_process import serving

ROOT = Path(__file__).parents[2]

PROMPT = (
    "hey remind me on friday at quarter to nine in the evening to ask brunoltha about the kayak"
)
PASSES, SHOWN_PASS = 6, 4
SCREENS = {"desktop": (1120, 640), "phone": (390, 700)}  # width and height in pixels
MOST_BYTES = 120_000


def draw(browser: Browser, url: str, screen: str, scheme: str) -> bytes:
    """Draw an image in WebP: the page after one of the passes of an answer."""
    browser.show(*SCREENS[screen], scheme)
    browser.driver.get("about:blank")
    browser.driver.get(url)
    browser.wait("document.getElementById('model').options.length")
    browser.run("document.getElementById('passes').value = arguments[0]", PASSES)
    browser.find("#message").send_keys(PROMPT + "\n")
    browser.wait("document.querySelector('.timeline:not([hidden])')")
    browser.run(
        "const range = document.querySelector('.timeline input'); range.value = arguments[0];"
        "range.dispatchEvent(new Event('input')); document.activeElement.blur(); scrollTo(0, 0)",
        SHOWN_PASS,
    )
    picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    out = io.BytesIO()
    picture.save(out, "WEBP", quality=82, method=6)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    with serving(arguments.bundle, "--no-log") as served, browsing() as browser:
        for screen in SCREENS:
            for scheme in ("light", "dark"):
                content = draw(browser, f"{served.url}/", screen, scheme)
                assert len(content) <= MOST_BYTES
                path = arguments.out / f"page-{screen}-{scheme}.webp"
                path.write_bytes(content)
                print(path, len(content))


if __name__ == "__main__":
    main()
