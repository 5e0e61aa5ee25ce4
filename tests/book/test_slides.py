"""The slides as `make slides` left them, in a browser: every slide of every deck."""

import re
from pathlib import Path

import browser as chrome
import pytest

SLIDES = Path(__file__).parents[2] / "book" / "_build" / "slides"
DECKS = sorted(path.name for path in SLIDES.glob("[0-9]*.html"))
SIZE = (1280, 720)

# Parts of the current slide that stick out of its page, and whether the page fills the window.
STICKS_OUT = """() => {
    const page = Reveal.getCurrentSlide().querySelector(".page");
    const {left, top, width, height} = page.getBoundingClientRect();
    const place = [left, top, width, height].map(Math.round).join();
    const found = place === "0,0,1280,720" ? [] : [`the page lies at ${place}`];
    const aside = ".corner, .corner *, .links, .links *, svg *";
    const spoken = "mjx-assistive-mml, mjx-assistive-mml *";
    for (const part of page.querySelectorAll(`*:not(${aside}, ${spoken})`)) {
        const box = part.getBoundingClientRect();
        const outside = box.left < -1 || box.top < -1 || box.right > 1281 || box.bottom > 700;
        const cut = part.scrollWidth > part.clientWidth + 1 && part.matches("pre, h2");
        if (box.width && (outside || cut)) found.push(part.outerHTML.slice(0, 100));
    }
    const here = Reveal.getIndices();
    return found.map(what => `slide ${here.h}/${here.v}: ${what}`);
}"""

# On paper: slides that are longer than their page, and stages that are not there.
LACKING = """() => [
    ...[...document.querySelectorAll(".page")]
        .filter(p => p.scrollHeight > p.clientHeight || p.scrollWidth > p.clientWidth),
    ...[...document.querySelectorAll(".fragment")]
        .filter(f => !f.checkVisibility({opacityProperty: true, visibilityProperty: true})),
].map(element => element.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module", autouse=True)
def made():
    if not DECKS:
        pytest.fail("there are no slides: run make slides")


def visit(browser, name: str):
    return chrome.visit(browser, f"{SLIDES.as_uri()}/{name}", size=SIZE)


@pytest.mark.parametrize("name", DECKS)
def test_every_slide_fits(browser, name):
    """From a folder: nothing fails or sticks out, formulas are set, pictures have words."""
    with visit(browser, name) as page:
        slides = page.evaluate("Reveal.getSlides().map(s => Reveal.getIndices(s))")
        assert len(slides) > 20
        for place in slides:
            page.evaluate("([h, v]) => Reveal.slide(h, v, 99)", [place["h"], place["v"]])  # whole
            page.problems += page.evaluate(STICKS_OUT)
        assert page.problems == []
        assert chrome.raw_math(page) == []
        assert chrome.without_alt(page) == []
        assert page.locator("mjx-container").count() > 0


@pytest.mark.parametrize("name", DECKS[:2] + DECKS[3::3])
def test_paper_has_a_page_for_every_slide(browser, name):
    """And what axe-core says to all slides at once, in the colours that they have on a screen. The
    theme sets these, so two decks are asked for them. Six decks are printed: what depends on a
    deck's words is asked of its slides on a screen, of all decks.
    """
    slides = (SLIDES / name).read_text(encoding="utf-8").count('<div class="page"')
    with visit(browser, f"{name}?print-pdf") as page:
        page.wait_for_function(f"document.querySelectorAll('.pdf-page .page').length >= {slides}")
        assert page.locator(".pdf-page").count() == page.locator(".page").count() == slides
        assert page.problems + page.evaluate(LACKING) == []
        rules = ["image-alt", "svg-img-alt", "list"] + ["color-contrast"] * (name in DECKS[:2])
        assert chrome.axe(page, rules) == []
        pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == slides


def test_index(browser):
    with visit(browser, "index.html") as page:
        links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.href)")
        addresses = [(SLIDES / name).as_uri() for name in DECKS]
        assert links == [link for a in addresses for link in (a, f"{a}?print-pdf")]
        assert page.problems == [] and chrome.axe(page) == []


FIRST_WITH_A_FORMULA = """() => {  // in its notes
  const has = slide => slide.querySelector(".notes svg");
  const { h, v } = Reveal.getIndices(Reveal.getSlides().find(has));
  Reveal.slide(h, v);
}"""


def test_the_speaker_has_notes(browser):
    """A second window shows the notes of the current slide, with formulas."""
    with chrome.served(SLIDES) as address, chrome.visit(browser, f"{address}/{DECKS[3]}") as page:
        page.evaluate(FIRST_WITH_A_FORMULA)
        with page.expect_popup() as opened:
            page.keyboard.press("s")
        notes = opened.value.locator(".speaker-controls-notes .value")
        notes.locator("svg").first.wait_for()
        wanted = page.evaluate("Reveal.getCurrentSlide().querySelector('.notes').textContent")
        assert wanted and notes.text_content() == wanted
