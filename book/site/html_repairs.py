"""What Sphinx and its theme leave to be mended in finished pages, for those who cannot see them.

Most are findings of axe-core (tests/book/test_site.py), and no setting changes any of them.
"""

import re

# A list of the arguments without a term is no list of definitions.
ARGUMENTS = re.compile(r"<dl>((?:\s*<dd>(?:(?!<d[dlt]\b).)*?</dd>)+)\s*</dl>", re.DOTALL)
PLAIN = {
    # the level of a heading that is none
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    # two landmarks of one kind
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
    # the head of a column without one
    '<th class="head"><p></p></th>': "<td></td>",
    # a name for all folded cells that is not what they say
    '<summary aria-label="Toggle hidden content">': "<summary>",
    # a page without a title: that of the search
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
}
# The theme wraps what may be too wide, and gives the wrapper a name that its content has, too.
TWICE = re.compile(
    r'(<div class="math-wrapper[^>]* id="([^"]+)">\s*<div class="math[^>]*?) id="\2"'
)
# A figure leads to its file, to be seen as large as the window.
FIGURE = re.compile(r'<img [^>]*src="([^"]*_images/[^"]*)"[^>]*>')

# A formula in a line, with the brackets and stops beside it, between which no line is to end.
BESIDE = re.compile(
    r'\(<span class="math notranslate nohighlight">[^<]*</span>[.,;:!?)]*'
    r'|<span class="math notranslate nohighlight">[^<]*</span>[.,;:!?)]+'
)


def repair_html(page: str) -> str:
    """Repair a page of the site, HTML as Sphinx writes it."""
    for wrong, right in PLAIN.items():
        page = page.replace(wrong, right)
    page = BESIDE.sub(r'<span class="bound">\g<0></span>', page)
    page = TWICE.sub(r"\1", page)
    page = FIGURE.sub(r'<a class="whole" href="\1">\g<0></a>', page)
    return ARGUMENTS.sub(lambda found: arguments(found[1]), page)


def arguments(items: str) -> str:
    rows = re.sub(r"<(/?)dd>", r"<\1span>", items).replace("<span><em", '<span class="row"><em')
    return f'<span class="arguments">{rows}</span>'
