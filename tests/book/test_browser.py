"""Each function that examines a page in the browser finds its mistake."""

import browser as chrome
import pytest

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A page</title>
<meta name="viewport" content="width=device-width"></head>
<body><main><h1>A page</h1><p>Words, <code>$HOME</code>.</p>{}</main></body></html>"""
BOX = '<div style="overflow-x: auto" tabindex="0"><p style="width: 900px">wide</p></div>'

# Contents of a page, and the functions that complain about it.
CONTENTS = {
    BOX: "",
    "<p>where $x$ is</p>": "raw_math",
    '<img src="data:,">': "without_alt axe",
    '<p style="width: 900px">wide</p>': "too_wide",
    '<p style="color: #999; background: #fff">pale</p>': "axe",
    '<script>console.error("oh")</script>': "problems",
    '<script src="https://example.org/b.js"></script>': "problems",
}


@pytest.mark.parametrize(("content", "questions"), CONTENTS.items())
def test_a_mistake_is_seen_by_the_questions_for_it(browser, tmp_path, content, questions):
    (tmp_path / "index.html").write_text(PAGE.format(content), encoding="utf-8")
    asked = (chrome.raw_math, chrome.without_alt, chrome.too_wide, chrome.axe)
    with (
        chrome.served(tmp_path) as address,
        chrome.visit(browser, f"{address}/index.html", size=chrome.PHONE) as page,
    ):
        answers = {question.__name__: question(page) for question in asked}
        answers["problems"] = page.problems
    assert [name for name, answer in answers.items() if answer] == questions.split()
