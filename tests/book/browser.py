"""A headless Chromium for the tests of the site and of the slides, and what they ask of a page.

    with served(folder) as address, chromium() as browser:
        with visit(browser, f"{address}/index.html", dark=True) as page:
            assert not page.problems and not axe(page)

Playwright drives the Chromium that the machine has; it downloads no browser. The headless shell
(Debian: apt-get install chromium-headless-shell) takes two thirds of a whole Chromium's time.
axe-core, which judges accessibility, comes with axe-playwright-python. Nothing a page asks for may
lie outside the place it was opened from: such a request is refused, and named among the page's
problems, as are failed ones and errors on its console.
"""

import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path

from playwright.sync_api import Browser, Page, Request, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NAMES += ("google-chrome-stable", "chrome")
NO_BROWSER = "no Chromium on this machine's path (Debian: apt-get install chromium-headless-shell)"
DESKTOP, PHONE = (1280, 800), (375, 700)

# Typesetting goes on after a page has loaded. MathJax 2 has a queue, later ones a promise.
SETTLED = """() => new Promise(done => {
    const math = window.MathJax;
    if (math?.Hub) math.Hub.Queue(() => done());
    else if (math?.startup?.promise) math.startup.promise.then(() => done());
    else done();
})"""

# Text that was meant as mathematics: not in code, nor in MathJax's sources.
RAW_MATH = r"""() => {
    const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const parent = walk.currentNode.parentElement, text = walk.currentNode.data;
        if (parent.closest("pre, code, script, style, svg, math, mjx-container")) continue;
        if (/\$|\\[()\[\]]|\\[a-z]{2,}/.test(text)) found.push(text.trim());
    }
    const failed = ".MathJax_Error, mjx-merror, [data-mml-node=merror]";
    for (const one of document.querySelectorAll(failed)) found.push("MathJax: " + one.textContent);
    return found;
}"""

WITHOUT_ALT = """() => [...document.querySelectorAll("img, svg[role=img], object")]
    .filter(image => !image.closest("[aria-hidden=true], mjx-container, .MathJax_SVG"))
    .filter(image => !(image.getAttribute("alt") || image.getAttribute("aria-label") || "").trim())
    .map(image => image.outerHTML.slice(0, 120))"""

# The elements that stick out where the page, or a part that holds its title, scrolls sideways.
# Elements inside a smaller box with its own scroll bar don't count.
TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth, root = document.scrollingElement;
    const whole = [];
    for (let p = document.querySelector("h1"); p; p = p.parentElement) whole.push(p);
    const scrolls = p => p === root || /auto|scroll/.test(getComputedStyle(p).overflowX);
    if (!whole.some(p => scrolls(p) && p.scrollWidth > p.clientWidth)) return [];
    return [...document.body.querySelectorAll("*")]
        .filter(e => e.getBoundingClientRect().right + root.scrollLeft > width + 1)
        .filter(e => {
            for (let p = e.parentElement; p && !whole.includes(p); p = p.parentElement)
                if (getComputedStyle(p).overflowX !== "visible") return false;
            return true;
        })
        .map(e => e.outerHTML.slice(0, 120))
        .concat(`the page is ${root.scrollWidth} pixels wide, the window ${width}`);
}"""

AXE = """async rules => {
    const options = rules ? {runOnly: rules} : {};
    const {violations} = await axe.run({exclude: [["mjx-container"]]}, options);
    const say = (id, node) => `${id}: ${node.html.slice(0, 160)} ${node.failureSummary}`;
    return violations.flatMap(({id, nodes}) => nodes.map(node => say(id, node)));
}"""


def find_browser() -> str | None:
    """The path of this machine's Chromium, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the machine's Chromium without a window.

    Raises:
        FileNotFoundError: there is none.
    """
    path = find_browser()
    if path is None:
        raise FileNotFoundError(NO_BROWSER)
    with sync_playwright() as playwright:
        # As root, in a container, Chromium has no sandbox; what it opens here is ours alone.
        # Without hinting, the headless shell's letters are as wide as a whole Chromium's.
        options = ["--no-sandbox", "--disable-background-networking", "--font-render-hinting=none"]
        with playwright.chromium.launch(executable_path=path, args=options) as browser:
            yield browser


class _Quiet(http.server.SimpleHTTPRequestHandler):
    not_found: str | None = None

    def log_message(self, *arguments):
        """Say nothing."""

    def send_error(self, code, message=None, explain=None):
        """Where nothing is found, send the page for that, if there is one."""
        if code != 404 or self.not_found is None:
            super().send_error(code, message, explain)
            return
        page = Path(self.directory, self.not_found).read_bytes()
        self.send_response(code, message)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


@contextmanager
def served(folder: Path, missing: str | None = None) -> Iterator[str]:
    """Serve a folder to this machine; yields its address, without a slash at the end.

    Where `missing` is given, the server sends that file of the folder for what isn't there.
    """

    class Handler(_Quiet):
        not_found = missing

    handler = partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def visit(
    browser: Browser, address: str, *, size: tuple[int, int] = DESKTOP, dark: bool = False
) -> Iterator[Page]:
    """Open a page as a new reader would, and wait until its mathematics is set.

    Args:
        browser: of `chromium`.
        address: http://... of `served`, or file://... of a path.
        size: width and height of the window.
        dark: whether the reader's system prefers dark colours.

    Yields:
        Playwright's page, with a list `problems`: one line for each error on the console, each
        request that failed, and each that went elsewhere.
    """
    scheme, _, rest = address.partition("://")
    home = "file://" if scheme == "file" else f"{scheme}://{rest.partition('/')[0]}/"
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
    )
    try:
        page = context.new_page()
        page.problems = []

        def elsewhere(url: str) -> bool:
            return not url.startswith((home, "data:", "blob:", "about:"))

        def refuse(route, request: Request) -> None:
            page.problems.append(f"asks for {request.url}")
            route.abort()

        def failed(request: Request) -> None:
            if not elsewhere(request.url):
                page.problems.append(f"failed: {request.url} ({request.failure})")

        def wrong(response) -> None:
            if response.status >= 400:
                page.problems.append(f"{response.status}: {response.url}")

        page.route(elsewhere, refuse)
        page.on("requestfailed", failed)
        page.on("response", wrong)
        page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
        page.on(
            "console",
            lambda said: said.type == "error" and page.problems.append(f"console: {said.text}"),
        )
        page.goto(address, wait_until="load")
        page.evaluate(SETTLED)
        yield page
    finally:
        context.close()


def raw_math(page: Page) -> list[str]:
    """Texts that show TeX, such as a dollar sign, and formulas that MathJax could not read."""
    return page.evaluate(RAW_MATH)


def without_alt(page: Page) -> list[str]:
    """Images without an alt text."""
    return page.evaluate(WITHOUT_ALT)


def too_wide(page: Page) -> list[str]:
    """The elements that make the page scroll sideways, if it does."""
    return page.evaluate(TOO_WIDE)


def axe(page: Page, rules: list[str] | None = None) -> list[str]:
    """The violations that axe-core finds outside of formulas, by some of its rules or by all.

    On a long page all take six seconds; that of contrast takes half of them.
    """
    script = files("axe_playwright_python") / "axe.min.js"
    page.evaluate(script.read_text(encoding="utf-8"))
    return page.evaluate(AXE, rules)
