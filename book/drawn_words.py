"""The colours of words in drawings: dark enough to read from the back row, or light in the dark.

A line or a box needs less contrast than a word. So figures draw both in one colour of
`plotting.COLORS`, and slides and site darken the words: all have a contrast of 7 to their ground.
"""

import re

# A word of matplotlib's: where it stands, how it is turned, its size, and its letters.
WORD = re.compile(
    r'(<g [^>]*?transform=)"translate\((\S+) (\S+)\)(?: rotate\((\S+)\))? scale\((\S+) -[\d.]+\)"'
    r"(.*?</g>)",
    re.DOTALL,
)
FILL = re.compile(r"(?<=fill: )#[0-9a-f]{6}")

ON_WHITE = {  # the colours of plotting.COLORS, and greys
    "#0072b2": "#005d91",
    "#d55e00": "#9f3000",  # redder, too: browns are hard to tell apart
    "#009e73": "#006549",
    "#cc79a7": "#913769",
    "#e69f00": "#765100",
    "#56b4e9": "#2a5c79",
    "#8a8a8a": "#585858",
    "#777777": "#585858",
    "#666666": "#585858",
    "#8a6000": "#765100",
}
IN_THE_DARK = {
    "#0072b2": "#45b0f5",
    "#d55e00": "#ff7a10",
    "#009e73": "#00b886",
    "#cc79a7": "#d38bb3",
    "#131416": "#ffffff",  # white words, turned dark with the ground: they stand on blue
}


def with_words(svg: str, colors: dict[str, str]) -> str:
    """A line drawing whose words have other colours; lines and grounds keep theirs."""

    def colored(word: re.Match) -> str:
        group, rest = word[1], word[0][len(word[1]) :]
        return FILL.sub(lambda fill: colors.get(fill[0], fill[0]), group) + rest

    return WORD.sub(colored, svg)
