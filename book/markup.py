"""What Sphinx and its theme leave to be mended in finished pages, for those who cannot see them.

Each is a finding of axe-core (tests/book/test_site.py) that no setting changes.
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
    # a page without a title: that of the search
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
}
# The theme wraps what may be too wide, and gives the wrapper a name that its content has, too.
TWICE = re.compile(
    r'(<div class="math-wrapper[^>]* id="([^"]+)">\s*<div class="math[^>]*?) id="\2"'
)


def mended(page: str) -> str:
    """A page of the site, HTML as Sphinx writes it, without what is wrong with all of them."""
    for wrong, right in PLAIN.items():
        page = page.replace(wrong, right)
    page = TWICE.sub(r"\1", page)
    return ARGUMENTS.sub(lambda found: arguments(found[1]), page)


def arguments(items: str) -> str:
    rows = re.sub(r"<(/?)dd>", r"<\1span>", items).replace("<span><em", '<span class="row"><em')
    return f'<span class="arguments">{rows}</span>'
