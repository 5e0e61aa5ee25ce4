"""The site as `make book` left it: in a browser, page by page, and its links without one."""

import html
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser as chrome
import nbformat
import pytest

from book import claims
from book.project import ROOT, chapters

SITE = ROOT / "book" / "_build" / "site"
EVERY = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PAGES = [page for page in EVERY if not page.startswith("slides/")]  # these: test_slides.py
SOURCES = {path.stem: path for path in chapters()}
NUMBERED = [page for page in PAGES if page.startswith("chapters/")]
CHAPTERS = [page for page in NUMBERED if SOURCES[Path(page).stem].parent.name == "notebooks"]
TAG = re.compile(r"<[a-z][^>]*>")
ATTRIBUTE = re.compile(r'\b(id|href|src)="([^"]*)"')


@pytest.fixture(scope="module", autouse=True)
def made():
    if not EVERY:
        pytest.fail("there is no site: run make book")


@pytest.fixture(scope="module")
def address():
    with chrome.served(SITE) as where:
        yield where


def attributes(page: str) -> list[tuple[str, str]]:
    """All ids, links and sources of a page, in order; what is inside a script is none."""
    text = re.sub(r"<script.*?</script>", "", (SITE / page).read_text(encoding="utf-8"), flags=re.S)
    found = [pair for tag in TAG.findall(text) for pair in ATTRIBUTE.findall(tag)]
    return [(name, html.unescape(value)) for name, value in found]


# --- without a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anchors():
    """The ids of each page."""
    return {page: [value for name, value in attributes(page) if name == "id"] for page in EVERY}


def test_no_id_is_there_twice(anchors):
    twice = {page: {i for i in ids if ids.count(i) > 1} for page, ids in anchors.items()}
    assert {page: ids for page, ids in twice.items() if ids} == {}


def broken(page: str, anchors: dict[str, list[str]]) -> list[str]:
    """Links of a page to what is not there."""
    found = []
    for name, value in attributes(page):
        parts = urlsplit(value)
        if name == "id" or parts.scheme in ("https", "http", "mailto", "data"):
            continue
        target = SITE / page
        if parts.path:
            target = (target.parent / unquote(parts.path)).resolve()
        inner = target.relative_to(SITE).as_posix() if target.is_relative_to(SITE) else ""
        missing = parts.fragment and unquote(parts.fragment) not in anchors.get(inner, [])
        if not inner or not target.is_file() or missing:
            found.append(f"{page}: {value}")
    return found


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(anchors):
    assert [link for page in EVERY for link in broken(page, anchors)] == []
    loaded = [value for page in EVERY for name, value in attributes(page) if name == "src"]
    assert [value for value in loaded if "//" in value] == []


def test_chapters_have_their_equations_slides_and_downloads(anchors):
    """A lab has no slides; the first page leads to all of them."""
    for page in NUMBERED:
        links = [value for name, value in attributes(page) if name == "href"]
        source = SOURCES[Path(page).stem]
        numbers = re.findall(r"\\tag\{([\d.]+)\}", source.read_text(encoding="utf-8"))
        assert {f"equation-{n}" for n in numbers} <= set(anchors[page]), page
        deck = page.replace("chapters/", "slides/")
        assert (deck in anchors) == (page in CHAPTERS)
        shown = [f"../{deck}", f"../{deck}?print-pdf"] * (page in CHAPTERS)
        assert [v for v in links if deck in v] == shown
        sent = [(SITE / page).parent / unquote(v) for v in links if "_downloads" in v]
        assert sorted(path.suffix for path in sent) == [".ipynb", ".py"]
        for path in sent:
            whole = (source.parent / path.name).read_text(encoding="utf-8")
            gaps = path.read_text(encoding="utf-8").count("# YOUR CODE HERE")
            assert gaps == whole.count("### BEGIN SOLUTION"), path
    assert ("href", "slides/index.html") in attributes("index.html")


def test_students_find_no_solution_and_no_guide():
    """Chapter 00 names the marks of a solution; these stand in code, which is indented."""
    solution = re.compile(r'(^|["\n>]) *(<span class="c1">|    )### BEGIN SOLUTION|Hope for')
    texts = [path for path in SITE.rglob("*") if path.suffix in (".html", ".ipynb", ".py", ".txt")]
    assert [path for path in texts if solution.search(path.read_text("utf-8"))] == []
    assert solution.search((ROOT / "notebooks/03_state_space_duality.py").read_text("utf-8"))
    assert "students' site" in (SITE / "index.html").read_text("utf-8").replace("’", "'")


def test_students_see_no_output_below_a_gap():
    """Neither on a page nor in a notebook to download."""
    for page in CHAPTERS[1:]:  # 00 has no exercises
        whole = nbformat.read(SOURCES[Path(page).stem].with_suffix(".ipynb"), as_version=4)
        checks = [cell for cell in whole.cells if "check" in cell.metadata.get("tags", [])]
        [sent] = (SITE / "_downloads").glob(f"*/{Path(page).stem}.ipynb")
        given = {cell.id: cell for cell in nbformat.read(sent, as_version=4).cells}
        assert len(checks) == 5 and all(cell.outputs for cell in checks)
        assert [given[cell.id].outputs for cell in checks] == [[]] * 5
        text = (SITE / page).read_text(encoding="utf-8")
        below = re.split(r"YOUR CODE HERE", text)[1:]
        assert len(below) == 5
        for part in below:  # the rest of the gap, then the check, then the next text
            assert "cell_output" not in part.partition("</section>")[0].partition("<p>")[0], page


def test_the_table_is_that_of_claims_toml():
    """Every claim has its row: what it says, its verdict, what the filter asks, its evidence."""
    text = (SITE / "claims.html").read_text(encoding="utf-8")
    found = re.findall(r'<tr class="([^"]*)" id="([^"]*)">(.*?)</tr>', text, re.DOTALL)
    listed = claims.read_claims()
    assert [name for _, name, _ in found] == [claim["id"] for claim in listed]
    for claim, (classes, name, row) in zip(listed, found, strict=True):
        kinds = [f"{kind} {claim[kind]}" for kind in ("document", "kind", "verdict")]
        assert {kind.lower().replace(" ", "-") for kind in kinds} <= {*classes.split()}, name
        words = html.unescape(re.sub(r"<[^>]*>", "", row))
        for field in ("quote", "verdict", "finding", "measured", "place"):
            assert claim.get(field, "") in words, (name, field)
        assert row.count('href="chapters/') == len(claim["evidence"]), name


# --- in a browser ---------------------------------------------------------------------------------


# One of each kind. Colours, regions and sizes are those of style sheets and templates, the same on
# all pages of a kind; the others are asked what depends on their own content.
CONTENT = ["button-name", "duplicate-id-aria", "empty-heading", "frame-title", "heading-order"]
CONTENT += ["image-alt", "image-redundant-alt", "label", "link-name", "list", "listitem"]
CONTENT += ["page-has-heading-one", "svg-img-alt", "table-duplicate-name", "th-has-data-cells"]
KINDS = ["index.html", CHAPTERS[3] if CHAPTERS else "", "claims.html", "api/ssd.html"]


def shorten(page):
    """Of 422 rows of claims, which differ in their words, every twentieth stays for axe."""
    gone = "all => all.forEach((row, i) => i % 20 && row.remove())"
    page.locator("tbody tr").evaluate_all(gone)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_it_should_be(browser, address, page):
    """Loads whole, shows its formulas, has words for its figures, suits a phone, passes axe."""
    with chrome.visit(browser, f"{address}/{page}") as opened:
        assert opened.problems == []
        assert chrome.raw_math(opened) == []
        assert chrome.without_alt(opened) == []
        if page in CHAPTERS:  # it opens with its picture, with no line of code above
            top = "all => Math.min(...all.map(one => one.getBoundingClientRect().top))"
            picture = opened.locator("article img").evaluate_all(top)
            assert picture < opened.locator("article .cell_input").evaluate_all(top)
            assert picture < opened.locator("article details").evaluate_all(top)
        assert chrome.too_wide(opened) == []
        opened.set_viewport_size({"width": chrome.PHONE[0], "height": chrome.PHONE[1]})
        assert chrome.too_wide(opened) == []
        opened.set_viewport_size({"width": chrome.DESKTOP[0], "height": chrome.DESKTOP[1]})
        if page == "claims.html":
            shorten(opened)
        assert chrome.axe(opened, None if page in KINDS else CONTENT) == []
        assert opened.problems == []


@pytest.mark.parametrize("page", KINDS)
def test_a_page_opens_from_the_folder_and_in_the_dark(browser, page):
    with chrome.visit(browser, (SITE / page).as_uri(), dark=True) as opened:
        if page == "claims.html":
            shorten(opened)
        assert chrome.axe(opened, ["color-contrast"]) == []
        assert opened.problems == [] and chrome.raw_math(opened) == []
        if page.startswith("chapters/"):
            assert opened.locator("mjx-container").count() > 100


@pytest.mark.parametrize("where", ["server", "folder"])
def test_the_search_finds(browser, address, where):
    start = address if where == "server" else SITE.as_uri()
    with chrome.visit(browser, f"{start}/search.html?q=semiseparable") as page:
        page.wait_for_selector("#search-results li a", timeout=20_000)
        links = page.locator("#search-results li a").evaluate_all("all => all.map(a => a.href)")
        assert any("03_state_space_duality" in link for link in links)
        assert "/chapters/" in links[0]  # lessons come before the reference
        if where == "server":
            page.wait_for_function(
                "document.querySelector('#search-results li').innerText.length > 100"
            )
        assert page.problems == [] and chrome.raw_math(page) == []


def test_the_filter_of_the_claims(browser, address):
    """By document, kind, verdict and words, alone and together, as counted from claims.toml."""
    listed = claims.read_claims()

    def shown(page):
        visible = page.locator("table.claims tbody tr:visible")
        return visible.evaluate_all("all => all.map(r => r.id)")

    with chrome.visit(browser, f"{address}/claims.html") as page:
        choose = page.locator(".claims-filter select")
        choose.nth(0).select_option("document-otce")
        assert shown(page) == [c["id"] for c in listed if c["document"] == "OTCE"]
        choose.nth(2).select_option("verdict-holds-corrected")
        wanted = [c for c in listed if (c["document"], c["verdict"]) == ("OTCE", "holds corrected")]
        assert shown(page) == [c["id"] for c in wanted] and wanted
        page.locator(".claims-filter input").fill("bilinear MATRIX")
        few = shown(page)
        assert 0 < len(few) < len(wanted) or not few
        assert page.locator(".claims-filter output").inner_text().startswith(f"{len(few)} of ")


def test_folded_cells_open(browser, address):
    with chrome.visit(browser, f"{address}/{CHAPTERS[3]}") as page:
        told = page.locator("details summary").all_inner_texts()
        assert {"Show set-up", "Show the code of this figure"} <= set(told)
        first = page.locator("details.hide").first
        assert not first.locator("pre").first.is_visible()
        first.locator("summary").click()
        assert first.locator("pre").first.is_visible()


def test_code_can_be_copied(browser, address):
    """With a clipboard, and without one, as where a site is served without https."""
    with chrome.visit(browser, f"{address}/{CHAPTERS[3]}") as page:
        listing = page.locator(".cell_input div.highlight").filter(has_text="def by_pencil")
        assert page.locator(".cell_output button.copy").count() == 0
        for gone in (False, True):
            page.evaluate(
                """gone => {
                    window.text = null;
                    const clipboard = {writeText: async text => { window.text = text; }};
                    const value = gone ? undefined : clipboard;
                    Object.defineProperty(navigator, "clipboard", {value, configurable: true});
                    document.execCommand = () => {
                        window.text = String(getSelection());
                        return true;
                    };
                }""",
                gone,
            )
            listing.hover()
            listing.locator("button.copy").click()
            page.wait_for_function("window.text !== null")
            assert (
                page.evaluate("window.text").strip() == listing.locator("pre").inner_text().strip()
            )
            page.wait_for_function(
                "[...document.querySelectorAll('button.copy')].some(b => b.textContent == 'Copied')"
            )


def test_paper_has_no_buttons_and_cuts_no_line(browser, address):
    """On a sheet of A4, in CSS's pixels."""
    with chrome.visit(browser, f"{address}/{CHAPTERS[3]}", size=(794, 1123)) as page:
        assert page.locator("pre").count() > 40
        page.emulate_media(media="print")
        for one in (".skip-to-content", "button.copy", ".back-to-top"):
            assert page.locator(f"{one}:visible").count() == 0, one
        cut = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert page.locator("pre:visible").evaluate_all(cut) == 0


@pytest.mark.parametrize("asked", ["nowhere.html", "chapters/99_nowhere.html", "api/a/b.html"])
def test_what_is_not_there_has_a_page_that_leads_back(browser, tmp_path, asked):
    """On a server that shows 404.html, with the site in a folder of its own, as on a forge."""
    (tmp_path / "course").symlink_to(SITE)
    with (
        chrome.served(tmp_path, missing="course/404.html") as where,
        chrome.visit(browser, f"{where}/course/{asked}") as page,
    ):
        assert page.problems[0] == f"404: {where}/course/{asked}"
        # Chromium also tries what the page names before it knows the folder; what counts is loaded.
        sheets = page.evaluate(
            "[...document.styleSheets].map(one => [one.href, one.cssRules.length])"
        )
        assert len(sheets) > 3 and all(rules for _, rules in sheets)
        assert all(href.startswith(f"{where}/course/_static/") for href, _ in sheets if href)
        assert page.locator("h1").inner_text() == "There is no such page"
        page.get_by_role("link", name="the first page").click()
        page.wait_for_url(f"{where}/course/index.html")


def test_every_page_has_the_icon():
    for page in EVERY:
        text = (SITE / page).read_text(encoding="utf-8")
        icon = re.search(r'<link rel="(?:shortcut )?icon" href="([^"]*favicon.svg)"', text)
        assert icon and (SITE / page).parent.joinpath(icon[1]).exists(), page
