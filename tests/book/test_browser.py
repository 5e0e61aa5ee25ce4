"""What the browser is asked of a page: each question sees the mistake that it is for."""

import browser as chrome
import pytest

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A page</title>
<meta name="viewport" content="width=device-width"></head>
<body><main><h1>A page</h1>{}</main></body></html>"""
FINE = '<p>Words, <code>$HOME</code>.</p><img alt="A curve." src="a.svg"><pre>\\(not TeX\\)</pre>'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'

MISTAKES = {
    "raw $": ("<p>where $x$ is</p>", "raw_math"),
    "no alt": ('<img src="a.svg">', "without_alt axe"),
    "too wide": ('<p style="width: 900px">wide</p>', "too_wide"),
    "contrast": ('<p style="color: #999; background: #fff">pale</p>', "axe"),
}


@pytest.fixture
def look(browser, tmp_path):
    """Shows a page with this in it to all questions; returns the answers by their names."""

    def ask(content):
        (tmp_path / "index.html").write_text(PAGE.format(content), encoding="utf-8")
        (tmp_path / "a.svg").write_text(SVG, encoding="utf-8")
        asked = (chrome.raw_math, chrome.without_alt, chrome.too_wide, chrome.axe)
        with (
            chrome.served(tmp_path) as address,
            chrome.visit(browser, f"{address}/index.html", size=chrome.PHONE) as page,
        ):
            answers = {question.__name__: question(page) for question in asked}
            return answers | {"problems": page.problems}

    return ask


def test_a_page_without_a_mistake_passes(look):
    assert {name: answer for name, answer in look(FINE).items() if answer} == {}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen_by_the_questions_for_it(look, mistake):
    content, questions = MISTAKES[mistake]
    assert [name for name, answer in look(FINE + content).items() if answer] == questions.split()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('<script>console.error("oh")</script>', "console: oh"),
        ('<img alt="A curve." src="b.svg">', "404: "),
        ('<img alt="A curve." src="https://example.org/b.svg">', "asks for https://example.org"),
    ],
)
def test_a_problem_is_named(look, content, said):
    assert any(said in problem for problem in look(FINE + content)["problems"])
