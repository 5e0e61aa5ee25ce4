"""Sphinx extension: numbered equations get an anchor, and what the prose names becomes a link.

In the text of a chapter, "(3.4)", "equation 3.4", "section 6" and "chapter 03" lead to what they
name, and `cheems_ref/ssd.py` to the page of that room. Nothing is marked up for it in the sources:
an equation's number is its `\\tag`, a section's the number that its title begins with.
"""

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

TAG = re.compile(r"\\tag\{([\d.]+)\}")
# "(3.4)", "equation 3.4", "sections 3 and 4", "chapters 01, 02 and 05"
NAMED = re.compile(
    r"(?P<bracket>\(\d{1,2}\.\d{1,2}\))"
    r"|\b(?P<kind>[Ee]quation|[Ss]ection|[Cc]hapter)s? "
    r"(?P<numbers>\d+(?:\.\d+)?(?:(?:, and |, | and | to )\d+(?:\.\d+)?)*)\b(?P<elsewhere> of)?"
)
ROOM = re.compile(r"cheems_ref/(\w+)\.py")
NUMBERED = re.compile(r"(\d+) · ")

log = logging.getLogger(__name__)


def note_targets(app: Sphinx, document: nodes.document) -> None:
    """Give each numbered equation its anchor, and write down where equations and sections are."""
    name = app.env.docname
    targets = app.env.cheems_targets
    targets["chapter", name.rpartition("/")[2][:2]] = (name, "")
    for block in list(document.findall(nodes.math_block)):
        if found := TAG.search(block.astext()):
            anchor = f"equation-{found[1]}"
            if ("equation", found[1]) in targets:
                log.warning("there are two equations %s", found[1], location=block)
            block["ids"].append(anchor)
            targets["equation", found[1]] = (name, anchor)
            words = f"Link to equation {found[1]}"
            here = (
                f'<a class="headerlink" href="#{anchor}" title="{words}" aria-label="{words}">¶</a>'
            )
            at = block.parent.index(block)
            numbered = nodes.container(classes=["numbered"])
            block.parent[at] = numbered
            numbered += [block, nodes.raw("", here, format="html")]
    for section in document.findall(nodes.section):
        if found := NUMBERED.match(section.next_node(nodes.title).astext()):
            targets["section", name, found[1]] = (name, section["ids"][0])


def link_names(app: Sphinx, document: nodes.document, name: str) -> None:
    """Turn what the text of a page names into links."""
    if not name.startswith("chapters/"):
        return
    for text in list(document.findall(nodes.Text)):
        if isinstance(text.parent, nodes.literal):
            pieces = [*room_of(app, text, name)]
        elif inside(text, nodes.literal_block, nodes.reference, nodes.math, nodes.math_block,
                    nodes.raw, nodes.title, nodes.literal):  # fmt: skip
            continue
        else:
            pieces = [*linked(app, text, name)]
        if len(pieces) > 1 or not isinstance(pieces[0], nodes.Text):
            text.parent.replace(text, pieces)


def inside(node: nodes.Node, *kinds: type) -> bool:
    while node := node.parent:
        if isinstance(node, kinds):
            return True
    return False


def linked(app: Sphinx, text: nodes.Text, name: str) -> Iterator[nodes.Node]:
    """The pieces of a text, those that name an equation, a section or a chapter as links."""
    end = 0
    for found in NAMED.finditer(text):
        kind = (found["kind"] or "equation").lower()
        if kind == "section" and found["elsewhere"]:
            continue  # it is another chapter's, or a paper's
        start, stop = found.span("bracket" if found["bracket"] else "numbers")
        words = found.start()  # the first link has the word before its number as well
        for number in re.finditer(r"\d+(?:\.\d+)?", text[start:stop]):
            key = (kind, name, number[0]) if kind == "section" else (kind, number[0])
            target = app.env.cheems_targets.get(key)
            last = stop if found["bracket"] else start + number.end()
            if target is not None and target != (name, ""):
                yield nodes.Text(text[end:words])
                yield link(app, text[words:last], name, *target)
                end = last
            words = start + number.end()
            words += len(re.match(r"(?:, and |, | and | to )?", text[words:])[0])
    yield nodes.Text(text[end:])


def room_of(app: Sphinx, text: nodes.Text, name: str) -> Iterator[nodes.Node]:
    found = ROOM.fullmatch(text)
    if found and f"api/{found[1]}" in app.env.found_docs and not inside(text, nodes.reference):
        yield link(app, str(text), name, f"api/{found[1]}", "")
    else:
        yield text


def link(app: Sphinx, words: str, name: str, target: str, anchor: str) -> nodes.reference:
    address = app.builder.get_relative_uri(name, target) + (f"#{anchor}" if anchor else "")
    return nodes.reference("", words, refuri=address, internal=True)


def without_empty_heads(app: Sphinx, document: nodes.document, name: str) -> None:
    """Take away the heads of tables that have nothing in them: Markdown cannot leave them out."""
    for head in list(document.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)


def show_display_math(app: Sphinx, document: nodes.document, name: str) -> None:
    """Hand formulas to MathJax as they are written.

    Sphinx puts what holds a line break into a `split` of its own, in which no tag is allowed.
    """
    for block in document.findall(nodes.math_block):
        if r"\\" in block.astext():
            block["no-wrap"] = True
            block.children = [nodes.Text(rf"\[{block.astext()}\]")]


def setup(app: Sphinx) -> dict:
    app.connect("env-before-read-docs", lambda app, env, names: setattr(env, "cheems_targets", {}))
    app.connect("doctree-read", note_targets)
    app.connect("doctree-resolved", link_names)
    app.connect("doctree-resolved", without_empty_heads)
    app.connect("doctree-resolved", show_display_math)
    return {"parallel_read_safe": False}
