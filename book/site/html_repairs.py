"""What Sphinx and its theme leave to be mended in finished pages, for those who cannot see them.

Most are findings of axe-core (tests/book/test_site.py), and no setting changes any of them.
"""

import re

from book.drawn_words import WORD

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
# A figure leads to its file, to be seen as large as the window, unless it already is a link.
FIGURE = re.compile(r'(<a [^>]*>\s*)?<img [^>]*src="([^"]*_images/[^"]*)"[^>]*>')
# A line drawing has a second file for the dark, made by `in_the_dark`: its ink is light and its
# ground that of the page. A pale grey or a tint is dark there, as near to the ground as before, so
# that letters on it stay legible and what is meant to be faint doesn't shine. Full colours stay.
DARK = "-dark.svg"
INKS = {"#222222": "#cfd0d0", "#000000": "#cfd0d0", "#ffffff": "#131416"}
PALE = 0x80  # a colour with so much of each channel is a tint
INKS |= {"#555555": "#b4b7ba", "#8a8a8a": "#9ca0a5"}  # greys: letters and quiet lines

# A formula in a line, with the brackets and stops beside it, between which no line is to end.
BESIDE = re.compile(
    r'\(<span class="math notranslate nohighlight">[^<]*</span>[.,;:!?)]*'
    r'|<span class="math notranslate nohighlight">[^<]*</span>[.,;:!?)]+'
)


def repair_html(page: str, widths: dict[str, int] | None = None) -> str:
    """Repair a page of the site, HTML as Sphinx writes it.

    `widths`: of a line drawing's file, the pixels across that its words need to be read.
    """
    for wrong, right in PLAIN.items():
        page = page.replace(wrong, right)
    page = BESIDE.sub(r'<span class="bound">\g<0></span>', page)
    page = TWICE.sub(r"\1", page)
    page = FIGURE.sub(lambda image: whole(image, widths or {}), page)
    return ARGUMENTS.sub(lambda found: arguments(found[1]), page)


def legible_width(svg: str) -> int:
    """How many pixels wide a drawing has to be for words of ten pixels."""
    words = [100 * float(word[5]) for word in WORD.finditer(svg)]
    width = float(re.search(r'viewBox="0 0 (\S+) ', svg)[1])
    return round(10 * width / min(words)) if words else 0


def whole(image: re.Match, widths: dict[str, int]) -> str:
    """A figure as a link to its file; a line drawing once for the light and once for the dark."""
    found, source = image[0], image[2]
    if image[1]:
        return found
    if not source.endswith(".svg"):
        return f'<a class="whole" href="{source}">{found}</a>'
    if width := widths.get(source.rpartition("/")[2]):  # on a phone, it scrolls
        found = found.replace("<img ", f'<img style="--legible: {width}px" ', 1)
    dark = source.removesuffix(".svg") + DARK
    other = found.replace(f'src="{source}"', f'src="{dark}" loading="lazy"')
    return (
        f'<a class="whole only-light" href="{source}">{found}</a>'
        f'<a class="whole only-dark" href="{dark}">{other}</a>'
    )


def in_the_dark(svg: str) -> str:
    """A line drawing with light ink on the ground of a dark page."""

    def shown(ink: re.Match) -> str:
        color = ink[0].lower()
        channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        if color in INKS or min(channels) < PALE:
            return INKS.get(color, ink[0])
        if max(channels) == min(channels):
            channels = (
                3 * [0x13 + (0xFF - channels[0]) * 2 // 3] if channels[0] > 0xA0 else channels
            )
        else:  # so much white less, so much of the ground more
            channels = [c - min(channels) * (0xFF - 0x13) // 0xFF for c in channels]
        return f"#{bytes(channels).hex()}"

    return re.sub(r"#[0-9a-f]{6}\b", shown, svg, flags=re.IGNORECASE)


def arguments(items: str) -> str:
    rows = re.sub(r"<(/?)dd>", r"<\1span>", items).replace("<span><em", '<span class="row"><em')
    return f'<span class="arguments">{rows}</span>'
