"""Take the picture of the page that the README shows.

    python tools/take_screenshot.py HOST:PORT [--out docs/page.png] [--scheme dark] [--width 1100] [--height 640]

HOST:PORT is a server's HTTP address, or its metrics address for the page without the prompt. Give the server
something to do before. On the HTTP port the page asks for a story. Needs chromium.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import browser  # noqa: E402  the checkout's root is no package path

INTERVAL_S = 8
PICTURE_S = 0.1
"""Seconds of the schedule in the picture: few enough steps to tell them apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/page.png")
    parser.add_argument("--scheme", choices=("dark", "light"), default="dark")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=640, help="at most so much of the page, from its top")
    options = parser.parse_args()
    if browser.EXECUTABLE is None:
        raise SystemExit("needs chromium")
    with browser.chromium() as page:
        # Low at first: a document is at least as high as its window.
        page.resize(options.width, 300, phone=options.width < 600)
        page.prefer(options.scheme)
        page.open(f"http://{options.address}/")
        # The bars then stand for a stretch of time, and not for all since the start.
        page.wait_for(f"readings.length > {INTERVAL_S}")
        if page.evaluate("Boolean(ASKS)"):
            page.evaluate("document.querySelector('input[value=text]').click(); byId('send').click()")
            page.wait_for("byId('schedule-text').textContent.includes('with your request')")
        page.evaluate(f"byId('window').value = '{PICTURE_S}'; windowChosen = true; byId('pause').click()")
        height = min(options.height, page.evaluate("document.documentElement.scrollHeight"))
        page.resize(options.width, height, phone=options.width < 600)
        # Two frames later the new size has been drawn.
        page.wait_for("new Promise((ok) => requestAnimationFrame(() => requestAnimationFrame(() => ok(true))))")
        options.out.write_bytes(page.screenshot())
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
