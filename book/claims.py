"""What the documents claim, and what settled each claim.

    python -m book.claims [--check] [NAME ...]

Without NAME, how many claims have which verdict. NAME is the id of a claim, whose evidence is
printed line by line, or a public name of the package (`ssd_chunked`): where it comes from, what was
found of that, and the chapters and tests that use it. `--check` names every fault of the map and
exits with 1 if there is one.

`claims.toml` holds the claims. An entry's evidence are lines that an executed notebook prints under
a heading: `checks` are lines of `verify`, ✓ or ✗ with the name; `lines` are others, whole, from
cells that also assert or check. The numbers that an entry calls measured stand in these lines. A
finding says what is wrong as printed and then, behind "Repair:", what makes it right.
"""

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from book.project import (
    ROOT,
    cells_under_headings,
    chapter_number,
    chapters,
    headings,
    text_of,
)

Claim = dict[str, Any]

DOCUMENTS = {
    "WM": "Wonderful Matrices",
    "Ch": "Cheems",
    "OTCE": "OTCE",
    "L22": "lecture 22",
}
KINDS = ("equation", "algorithm", "listing", "figure", "table", "sentence")
VERDICTS = {  # and the rule for each
    "holds": "a check confirms the claim as printed",
    "holds corrected": "it is wrong as printed, and the finding names a repair that makes it right",
    "does not hold": "a check refutes it, and no repair is known",
    "seen at small scale": "our small models or toy tasks show an effect of the claimed sign",
    "opposite at small scale": "a significant difference, or each of the runs, of the other sign",
    "not seen at small scale": "we looked, and found neither the effect nor its opposite",
    "undecided at small scale": "an interval holds claim and absence, or runs fall on both sides",
    "not independent": "the printed numbers follow from numbers printed for something else",
    "not testable here": "it needs data, weights, machines or runs we don't have, or is unclear",
}
SPREAD = r"±|between \d|(?:\d\.\d+ ){2}"  # an interval, or three runs and more
CHAPTER = re.compile(r"\b(?:chapter|lab|reference) (\d\d[a-z]?)\b", re.IGNORECASE)  # in findings
ENTRY = re.compile(r"\b(?:wm|ch|otce|l22)-[a-z0-9-]+")  # the id of another entry
EVIDENCE = {"chapter", "section", "checks", "lines"}
FIELDS = {
    *("id", "document", "place", "section", "kind", "quote", "verdict", "finding"),
    *("measured", "errata", "evidence"),
}
NUMBERED = {  # what each document numbers, up to which number; figures may claim nothing
    "WM": {"eq.": 5, "Listing": 8, "Table": 7},
    "Ch": {"eq.": 14, "Listing": 4, "Table": 3},
    "OTCE": {"eq.": 19, "Algorithm": 4, "Table": 9},
}
SECTIONS = {  # that there are, below the chapters that these numbers name
    "WM": "abstract 1 2 3.4 4.2 5 6 A B.4 C.2",
    "Ch": "abstract 1 2.6 3.4 4.2 5 A.4 B.3",
    "OTCE": "abstract 1 2.3 3.3 4.5 5 A",
}
ERRATA = [f"E{i}" for i in range(1, 51)] + [f"D{i}" for i in range(1, 13)]


class Line(NamedTuple):
    """A line that a notebook prints, the headings above it, and whether its cell asserts."""

    text: str
    headings: tuple[str, ...]
    asserted: bool

    def is_check(self, marked: str) -> bool:
        """Whether it is "✓ name  [...]" or "✗ name: caught  [...]" of a "✓ name" or "✗ name"."""
        return self.text.startswith(f"{marked}  [" if marked[0] == "✓" else f"{marked}: caught  [")


class Place(NamedTuple):
    """Where a source points to: ("WM", "eq.", "4"), ("OTCE", "§", "3.1")."""

    document: str
    kind: str
    number: str

    def __str__(self) -> str:
        gap = "" if self.kind == "§" and self.number[0].isdigit() else " "
        kind = "App." if gap and self.kind == "§" else self.kind
        return f"{self.document} {kind}{gap}{self.number}"


# --- what is written ----------------------------------------------------------------------------


def read_claims(path: Path = ROOT / "book" / "claims.toml") -> list[Claim]:
    return tomllib.loads(path.read_text(encoding="utf-8"))["claim"]


def read_notebooks(folder: Path = ROOT / "notebooks") -> dict[str, dict]:
    """The executed notebooks by number: "03" is a lecture, "03a" a lab or a reference page."""
    places = "*.ipynb", "labs/*.ipynb", "reference/*.ipynb"
    paths = [path for place in places for path in sorted(folder.glob(place))]
    return {chapter_number(path): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def printed_lines(notebook: dict) -> list[Line]:
    lines = []
    for above, cell in cells_under_headings(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        texts = [
            f"{output['ename']}: {output['evalue']}"
            if output["output_type"] == "error"
            else "".join(output.get("text", []))
            for output in cell["outputs"]
        ]
        text = [line.strip() for line in "\n".join(texts).splitlines()]
        tree = ast.parse(text_of(cell))
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
        asserts = asserts or any(line.startswith(("✓ ", "✗ ")) for line in text)
        lines += [Line(line, above, asserts) for line in text]
    return lines


def titles(notebook: dict) -> list[str]:
    """All headings, in order; one that stands there twice would make two sections one."""
    prose = [text_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return [title for text in prose for _, title in headings(text)]


def as_printed(notebook: dict) -> set[str]:
    """The parts of a section "As printed" that run something, or the section where it has none."""
    found = {
        above
        for above, cell in cells_under_headings(notebook["cells"])
        if above and above[0].endswith("As printed") and cell["cell_type"] == "code"
    }
    return {h[1] for h in found if len(h) > 1} or {h[0] for h in found}


NUMBER = r"(?:[ABC](?:\.\d)?|\d+(?:\.\d+)*[a-e]?)\b"
POINTER = re.compile(
    r"(?P<document>\b(?:WM|Ch|OTCE|L22)\b|\*Wonderful Matrices\*|\*Cheems\*)"
    r"|(?P<kind>§|App\.|Appendix|eqs?\.|Listings?|Tables?|Figures?|Figs?\.|Algorithms?)\s?"
    rf"(?P<numbers>{NUMBER}(?:(?:, (?:and )?| and | to |–){NUMBER})*)"
    r"|\b(?P<appendix>[ABC]\.\d(?:–[ABC]\.\d)?)\b"
    r'|"(?P<slide>[^"]+)"'
    r"|(?P<end>;|\.(?=\s+[A-Z(])|\(\d{4}\))"
)
KINDS_OF_PLACES = {"App.": "§", "Appendix": "§", "eqs.": "eq.", "Figs.": "Figure", "Fig.": "Figure"}


def places(text: str) -> set[Place]:
    """The places of the four documents that a text points to: numbers, sections, slides' titles.

    A document counts up to the next semicolon, full stop or year: what stands behind "Dao and Gu
    (2024)" is in another paper.
    """
    found, document = set(), None
    text = re.sub(r"\s*\n(?:> |# )?\s*", " ", text).replace("App. ", "App.")
    for match in POINTER.finditer(text):
        if match["document"]:
            names = {"*Wonderful Matrices*": "WM", "*Cheems*": "Ch"}
            document = names.get(match["document"], match["document"])
        elif match["end"]:
            document = None
        elif match["slide"]:
            found |= {Place(document, "slide", match["slide"])} if document == "L22" else set()
        elif document and document != "L22":  # whose slides have no numbers
            kind = KINDS_OF_PLACES.get(match["kind"] or "§", match["kind"] or "§")
            numbers = match["numbers"] or match["appendix"]
            for first, last in re.findall(rf"({NUMBER})(?:(?: to |–)({NUMBER}))?", numbers):
                found |= {Place(document, kind.rstrip("s"), n) for n in between(first, last)}
    return found


def between(first: str, last: str) -> list[str]:
    """The numbers of a range such as 11–14, 19a–19e, A.1–A.4; the first one where there is none."""
    if not last:
        return [first]
    stem = re.match(r"(.*?)(\d+|[a-e]|[ABC])$", first)
    end = re.match(r"(.*?)(\d+|[a-e]|[ABC])$", last)
    if stem[2].isdigit():
        span = map(str, range(int(stem[2]), int(end[2]) + 1))
    else:
        span = map(chr, range(ord(stem[2]), ord(end[2]) + 1))
    return [stem[1] + n for n in span]


def covers(claim: Claim, place: Place) -> bool:
    """Whether an entry speaks of a place: the place itself, a part of it, or a section's part."""
    if claim["document"] != place.document:
        return False
    if place.kind == "slide":  # "1D Discrete Recurrent Representation", without "SSM: "
        return re.search(rf"(?:^|: ){re.escape(place.number)}", claim["place"]) is not None
    if place.kind == "§":
        section = claim.get("section", "")
        return section == place.number or section.startswith(f"{place.number}.")
    kind, _, named = claim["place"].partition(" ")
    parts = re.split(", | and ", named)  # "eq. 2a, 2b"; and equation 19 has the parts 19a to 19e
    return kind == place.kind and any(place.number in (p, p.rstrip("abcde")) for p in parts)


# --- the package --------------------------------------------------------------------------------


class Public(NamedTuple):
    """A public function or class, and the places that its docstring names as its source."""

    room: str
    name: str
    sources: set[Place]


def sources_in(docstring: str) -> set[Place]:
    return places(docstring.partition("Source:")[2])


def public_names(package: Path = ROOT / "cheems_ref") -> list[Public]:
    """The public functions and classes, and the rooms themselves under the name ""."""
    found = []
    for path in sorted(package.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.append(Public(path.stem, "", sources_in(ast.get_docstring(tree) or "")))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                docstrings = [
                    ast.get_docstring(part) or ""
                    for part in ast.walk(node)
                    if isinstance(part, ast.FunctionDef | ast.ClassDef)
                ]
                sources = set().union(*map(sources_in, docstrings))
                found.append(Public(path.stem, node.name, sources))
    return found


def users(name: str, paths: Iterable[Path]) -> list[str]:
    """Which of some files use a name, as a word."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    return [path.stem for path in sorted(paths) if word.search(path.read_text(encoding="utf-8"))]


# --- the map is checked ---------------------------------------------------------------------------


def faults(
    claims: list[Claim], notebooks: dict[str, dict], public: Iterable[Public] = ()
) -> list[str]:
    """Everything that is wrong with the map, one line each."""
    lines = {chapter: printed_lines(notebook) for chapter, notebook in notebooks.items()}
    found = [f"{claim.get('id')}: {fault}" for claim in claims for fault in of_one(claim, lines)]
    ids = {claim.get("id") for claim in claims}
    found += [
        f"{claim.get('id')}: the finding refers to {name}, which is no entry"
        for claim in claims
        for name in ENTRY.findall(claim.get("finding", ""))
        if name not in ids
    ]
    twice = [name for name, n in Counter(claim.get("id") for claim in claims).items() if n > 1]
    found += [f"{name}: the id is there twice" for name in twice]
    for chapter, notebook in notebooks.items():
        again = [title for title, n in Counter(titles(notebook)).items() if n > 1]
        found += [f"chapter {chapter} has two sections {title!r}" for title in again]
    complete = [claim for claim in claims if claim.keys() >= {"document", "place", "evidence"}]
    return found + missing(complete, notebooks, public)


def of_one(claim: Claim, lines: dict[str, list[Line]]) -> Iterator[str]:
    """What is wrong with one entry."""
    required = FIELDS - {"section", "measured", "errata"}
    if fields := required - claim.keys() | claim.keys() - FIELDS:
        yield f"fields missing or unknown: {', '.join(sorted(fields))}"
        return
    yield from of_its_words(claim)
    named = []
    for evidence in claim["evidence"]:
        if not evidence.keys() >= {"chapter", "section"} or not evidence.keys() <= EVIDENCE:
            yield f"evidence has other fields than {', '.join(sorted(EVIDENCE))}"
            continue
        where = f"chapter {evidence['chapter']}, {evidence['section']!r}"
        here = [
            line
            for line in lines.get(evidence["chapter"], [])
            if evidence["section"] in line.headings
        ]
        if not here:
            yield f"{where} prints nothing, or is not there"
            continue
        checks, whole = evidence.get("checks", []), evidence.get("lines", [])
        if not isinstance(checks, list) or not isinstance(whole, list) or not checks + whole:
            yield f"{where}: neither a list of checks nor one of lines"
            continue
        for check in checks:
            if check[:2] not in ("✓ ", "✗ ") or not any(line.is_check(check) for line in here):
                yield f"{where} prints no line {check!r}"
        for text in whole:
            fitting = [line for line in here if line.text == text]
            if not fitting:
                yield f"{where} prints no line {text!r}"
            elif not all(line.asserted for line in fitting):
                yield f"{where}: no assert beside the line {text!r}"
        named += [*checks, *whole]
    for number in CHAPTER.findall(claim["finding"]):
        if not any(evidence.get("chapter") == number for evidence in claim["evidence"]):
            yield f"the finding speaks of {number}, but no evidence is from there"
    undecided = claim["verdict"] == "undecided at small scale"
    if undecided and not any(re.search(SPREAD, line) for line in named):
        yield "undecided, but its evidence has neither an interval nor several runs"
    measured = numbers(claim.get("measured", ""))
    if "measured" in claim and not measured:
        yield "what is measured holds no number"
    for number in measured - numbers(" ".join(named)):
        yield f"its evidence prints no {number:g}, which is said to be measured"


def of_its_words(claim: Claim) -> Iterator[str]:
    """What is wrong with what an entry says, before any notebook is looked at."""
    for field, allowed in (("document", DOCUMENTS), ("kind", KINDS), ("verdict", VERDICTS)):
        if claim[field] not in allowed:
            yield f"{field} {claim[field]!r} is none of {', '.join(allowed)}"
    for field in ("id", "place", "quote", "finding"):
        if not claim[field].strip():
            yield f"{field} is empty"
    if re.search(r"[a-z)\]][.!?] [A-Z]", claim["quote"]):
        yield "the quotation has more than one sentence"
    if claim["verdict"] == "holds corrected" and "Repair: " not in claim["finding"]:
        yield "it holds corrected, but the finding names no repair"
    if claim["verdict"] != "holds corrected" and "Repair: " in claim["finding"]:
        yield "the finding names a repair, but the verdict is another than 'holds corrected'"
    if not claim["evidence"] and claim["verdict"] != "not testable here":
        yield "a verdict without evidence"
    if claim["document"] not in NUMBERED:  # a slide is named by its title
        return
    kind, _, named = claim["place"].partition(" ")
    for number in re.findall(r"\d+", named):
        if int(number) > NUMBERED[claim["document"]].get(kind, 99):
            yield f"there is no {claim['document']} {claim['place']}"
    section = claim.get("section", "")
    if not any(is_up_to(section, last) for last in SECTIONS[claim["document"]].split()):
        yield f"there is no section {section!r} in {claim['document']}"


def is_up_to(section: str, last: str) -> bool:
    """Whether 3.2 is among the sections that "3.4" stands for: 3, 3.1 to 3.4."""
    chapter, _, number = section.partition(".")
    last_chapter, _, last_number = last.partition(".")
    return chapter == last_chapter and int(number or 0) <= int(last_number or 0)


def numbers(text: str) -> set[float]:
    """All numbers in a text, commas between thousands left out; -1 is one, the 2 of 1-2 is not."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return {float(n) for n in re.findall(r"(?:(?<![\w.])[-+])?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)}


def missing(
    claims: list[Claim], notebooks: dict[str, dict], public: Iterable[Public]
) -> Iterator[str]:
    """What ought to have an entry, and has none."""
    found = []
    for document, kinds in NUMBERED.items():
        for kind, last in kinds.items():
            for number in range(1, last + 1):
                place = Place(document, kind, str(number))
                if not any(covers(claim, place) for claim in claims):
                    found.append(f"{place} has no entry")
    known = {erratum for claim in claims for erratum in claim.get("errata", [])}
    found += [f"erratum {e} has no entry" for e in ERRATA if e not in known]
    found += [f"erratum {e} is not known" for e in sorted(known - {*ERRATA})]
    for one in public:
        name = ".".join(filter(None, one[:2]))
        found += [
            f"{name} names {place} as its source, which has no entry"
            for place in sorted(one.sources)
            if not any(covers(claim, place) for claim in claims)
        ]
    settled = {(e.get("chapter"), e.get("section")) for c in claims for e in c["evidence"]}
    for chapter, notebook in notebooks.items():
        found += [
            f"chapter {chapter}: {title!r}, as printed, has no entry"
            for title in sorted(as_printed(notebook))
            if chapter != "00" and (chapter, title) not in settled  # 00 says what the words mean
        ]
        prose = [text_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        pointed = set().union(*map(places, prose))
        found += [
            f"chapter {chapter} speaks of {place}, which has no entry"
            for place in sorted(pointed)
            if place.kind != "slide" and not any(covers(claim, place) for claim in claims)
        ]  # what stands in quotation marks behind "L22" may be a sentence of a slide
    return found


# --- both directions -----------------------------------------------------------------------------


def tell_claim(claim: Claim, notebooks: dict[str, dict]) -> str:
    section = f" (§{claim['section']})" if "section" in claim else ""
    told = [f"{claim['id']}: {claim['document']} {claim['place']}{section}: {claim['verdict']}"]
    told += [f"  {claim['quote']}", f"  {claim['finding']}"]
    for evidence in claim["evidence"]:
        told.append(f"  chapter {evidence['chapter']}, {evidence['section']}")
        for line in printed_lines(notebooks[evidence["chapter"]]):
            named = any(line.is_check(check) for check in evidence.get("checks", []))
            named = named or line.text in evidence.get("lines", [])
            if evidence["section"] in line.headings and named:
                told.append(f"    {line.text}")
    return "\n".join(told)


def tell_public(one: Public, claims: list[Claim]) -> str:
    told = [f"{one.room}.{one.name}"]
    for place in sorted(one.sources):
        told.append(f"  {place}")
        told += [f"    {c['id']}: {c['verdict']}" for c in claims if covers(c, place)]
    told.append("  chapters: " + (", ".join(users(one.name, chapters())) or "none"))
    tests = [*(ROOT / "tests").glob("*.py"), *(ROOT / "tests" / "planted").glob("*.py")]
    told.append("  tests: " + (", ".join(dict.fromkeys(users(one.name, tests))) or "none"))
    return "\n".join(told)


def tell_all(claims: list[Claim]) -> str:
    counts = Counter((claim["verdict"], claim["document"]) for claim in claims)
    told = [f"{'':24}" + "".join(f"{document:>6}" for document in DOCUMENTS)]
    for verdict in VERDICTS:
        row = "".join(f"{counts[verdict, document]:6}" for document in DOCUMENTS)
        told.append(f"{verdict:24}{row}")
    return "\n".join([*told, f"{len(claims)} claims"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m book.claims", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("name", nargs="*", help="the id of a claim, or a public name")
    parser.add_argument("--check", action="store_true", help="name what is wrong, and exit with 1")
    chosen = parser.parse_args(arguments)
    claims, notebooks, public = read_claims(), read_notebooks(), public_names()
    told = []
    for name in chosen.name:
        fitting = [tell_claim(c, notebooks) for c in claims if c["id"] == name]
        fitting += [tell_public(one, claims) for one in public if one.name == name]
        if not fitting:
            parser.error(f"{name} is neither a claim nor a public name of the package")
        told += fitting
    if not chosen.name:
        told.append(tell_all(claims))
    wrong = faults(claims, notebooks, public) if chosen.check else []
    print("\n".join(told + wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
