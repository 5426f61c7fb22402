"""Take docs/pictures/report.png, the picture in the README, from the report page of the demo.

    python docs/picture.py [DEMO]    # DEMO is the folder of `make demo`, by default ./demo

If the page, Chromium or playwright is missing, the picture stays as it is, and a message names what is missing.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "report.png"
# The width of a laptop window, and the height that shows the first pair of target and context.
SIZE = {"width": 1200, "height": 560}
# Images below the window load only when they are scrolled to.
LOAD_IMAGES = "document.querySelectorAll('img').forEach((image) => { image.loading = 'eager'; })"
IMAGES_LOADED = "[...document.images].every((image) => image.complete)"


def main(demo: Path) -> None:
    """Replace the picture, or print why it stays as it is."""
    page_file = demo / "run" / "report.html"
    chromium = shutil.which("chromium")
    present = {
        str(page_file): page_file.exists(), "chromium": chromium is not None,
        "the package playwright": importlib.util.find_spec("playwright") is not None,
    }  # fmt: skip
    missing = [name for name, found in present.items() if not found]
    if missing:
        print(f"{PICTURE.name} stays as it is, without {', '.join(missing)}")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As in tests/browser: without a display, and as root in a container.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(page_file.resolve().as_uri())
        page.evaluate(LOAD_IMAGES)
        page.wait_for_function(IMAGES_LOADED)
        page.evaluate("document.getElementById('listening').scrollIntoView()")
        page.screenshot(path=PICTURE)
        browser.close()
    print(f"{PICTURE} shows {page_file}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
