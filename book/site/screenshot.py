"""Take the picture of the first screens: the Cheems page at work, as a browser shows it.

    python -m book.site.screenshot

It needs the extra `browser` and a Chromium, and writes figures/cheems_page.png. Fonts differ from
machine to machine, so no test compares the picture's bytes.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

from book.project import ROOT
from book.site import interactive_pages

PICTURE = ROOT / "figures" / "cheems_page.png"
SIZE = (1080, 760)  # of the window, in a browser's pixels
COLORS = 96  # of the picture, so that it stays small


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        interactive_pages.make(ROOT, Path(folder) / "play")
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            page = browser.new_page(viewport=dict(width=SIZE[0], height=SIZE[1]))
            page.goto((Path(folder) / "play" / "cheems.html").as_uri())
            page.locator("#stack").focus()
            for key in ["ArrowDown"] * 18 + [
                "ArrowLeft"
            ] * 7:  # to head 4 of layer 7, at the bracket
                page.keyboard.press(key)
            page.evaluate("scrollTo(0, 0)")  # a clip counts from the page's top
            top = page.locator("#text").bounding_box()["y"] - 12
            bottom = page.locator("#stack").bounding_box()
            high = bottom["y"] + bottom["height"] + 104 - top
            page.mouse.click(5, 5)
            area = dict(x=0, y=top, width=SIZE[0], height=high)
            page.screenshot(path=str(PICTURE), clip=area, full_page=True)
    Image.open(PICTURE).convert("RGB").quantize(COLORS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
