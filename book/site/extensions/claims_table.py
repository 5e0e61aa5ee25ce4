"""Sphinx extension: the directive `claims`, which shows claims.toml as one table.

All of it stands in the page, to be read without a script and found by the search; the script
claims.js adds the filter. What a row is filtered by stands in its classes.
"""

import re
from collections import Counter
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from book.claims import DOCUMENTS, VERDICTS, Claim, read_claims
from book.project import anchor, chapter_number, chapters

COLUMNS = {"place": 14, "what it says": 36, "verdict": 12, "what was found, and where": 38}


def as_class(kind: str, value: str) -> str:
    return f"{kind}-{value.lower().replace(' ', '-')}"


def entry(*parts: nodes.Node) -> nodes.entry:
    return nodes.entry("", *parts)


def paragraph(text: str, *more: nodes.Node, name: str = "") -> nodes.paragraph:
    return nodes.paragraph("", text, *more, classes=[name] if name else [])


def evidence_links(claim: Claim) -> nodes.paragraph:
    names = {chapter_number(path): path.stem for path in chapters()}
    shown = nodes.paragraph(classes=["evidence"])
    for i, evidence in enumerate(claim["evidence"]):
        chapter, section = evidence["chapter"], evidence["section"]
        address = f"chapters/{names[chapter]}.html#{anchor(section)}"
        words = f"{chapter} · {re.sub(r'[`*$]', '', section)}"
        shown += [nodes.Text("; ")] if i else []
        shown += nodes.reference("", words, refuri=address, internal=True)
    return shown


def claim_row(claim: Claim) -> nodes.row:
    section = f", §{claim['section']}" if claim.get("section", "")[:1].isdigit() else ""
    section = section or (f", {claim['section']}" if "section" in claim else "")
    place = f"{claim['document']} {claim['place']}{section}"
    found = [paragraph(claim["finding"])]
    if "measured" in claim:
        found.append(paragraph(f"measured: {claim['measured']}", name="measured"))
    here = nodes.reference("", claim["id"], refuri=f"#{claim['id']}", internal=True)
    row = nodes.row(
        "",
        entry(paragraph(place), nodes.paragraph("", "", here, classes=["claim-id"])),
        entry(paragraph(claim["quote"])),
        entry(paragraph(claim["verdict"])),
        entry(*found, *([evidence_links(claim)] if claim["evidence"] else [])),
        ids=[claim["id"]],
        classes=[as_class(kind, claim[kind]) for kind in ("document", "kind", "verdict")],
    )
    return row


def table(heads: dict[str, int], rows: list[nodes.row], name: str) -> nodes.table:
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in heads.values()]
    group += nodes.thead("", nodes.row("", *(entry(paragraph(head)) for head in heads)))
    group += nodes.tbody("", *rows)
    return nodes.table("", group, classes=[name])


def counts(claims: list[Claim]) -> nodes.table:
    """How many claims of each document have which verdict."""
    found = Counter((claim["verdict"], claim["document"]) for claim in claims)
    rows = []
    for verdict in VERDICTS:
        numbers = [found[verdict, document] for document in DOCUMENTS]
        cells = [verdict, *map(str, [*numbers, sum(numbers)])]
        rows.append(nodes.row("", *(entry(paragraph(cell)) for cell in cells)))
    heads = dict.fromkeys(["verdict", *DOCUMENTS, "all"], 10)
    return table(heads, rows, "claim-counts")


class ClaimsTable(Directive):
    """The counts, and below them every claim with its verdict and the sections that settled it."""

    def run(self) -> list[nodes.Node]:
        claims = read_claims()
        names = ", ".join(f"{short}: {name}" for short, name in DOCUMENTS.items())
        told = f"{len(claims)} claims of four documents. {names}."
        rows = [claim_row(claim) for claim in claims]
        rules = nodes.bullet_list("")
        for verdict, rule in VERDICTS.items():
            rules += nodes.list_item(
                "", paragraph("", nodes.strong("", verdict), nodes.Text(f": {rule}"))
            )
        return [paragraph(told), rules, counts(claims), table(COLUMNS, rows, "claims")]


def setup(app: Sphinx) -> dict:
    app.add_directive("claims", ClaimsTable)
    static = Path(__file__).parents[1] / "static" / "claims.js"
    assert static.exists()
    app.connect(
        "html-page-context",
        lambda app, page, *_: app.add_js_file("claims.js") if page == "claims" else None,
    )
    return {"parallel_read_safe": True}
