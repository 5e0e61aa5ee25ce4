"""The map of the claims: every verdict leads to lines that ran, and a map that lies is caught."""

import copy
import re
import tomllib

import pytest

from book import claims
from book.claims import places
from book.project import ROOT

CLAIMS, NOTEBOOKS = claims.read_claims(), claims.read_notebooks()


def test_the_map_has_no_fault_and_the_counts_of_readme_and_chapter_12_are_its_own(capsys):
    assert claims.main(["--check"]) == 0, capsys.readouterr().out
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(CLAIMS)} claims" in readme and "book/claims.toml" in readme
    rows = [re.split(r"\s{2,}", line.text) for line in claims.printed_lines(NOTEBOOKS["12"])]
    given = [(claim["verdict"], claim["document"]) for claim in CLAIMS]
    for verdict in claims.VERDICTS:
        counts = [given.count((verdict, document)) for document in claims.DOCUMENTS]
        assert [verdict, *map(str, [*counts, sum(counts)])] in rows, verdict


def test_output_is_folded_only_where_a_claim_quotes_it():
    """Of a cell tagged `quoted`, which is a guard: nobody else is to miss what it prints."""
    evidence = [one for claim in CLAIMS for one in claim["evidence"]]
    for number, notebook in NOTEBOOKS.items():
        lines = [
            line
            for one in evidence
            if one["chapter"] == number
            for line in one.get("lines", []) + one.get("checks", [])
        ]
        for cell in notebook["cells"]:
            tags = cell["metadata"].get("tags", [])
            if "quoted" in tags:
                printed = "".join(text for out in cell["outputs"] for text in out["text"])
                assert "guard" in tags and any(line in printed for line in lines), printed


def test_tables_of_the_papers_have_a_number_for_every_column():
    tables = tomllib.loads((ROOT / "book" / "tables.toml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        assert name.split(" Table ")[0] in claims.DOCUMENTS
        for row in table["rows"]:
            assert len(row) == len(table["columns"]) + 1, f"{name}: {row[0]}"


def test_a_map_that_lies_is_refused(monkeypatch, capsys):
    """One mistake per entry, chapter or docstring; the report names every one."""
    listed = copy.deepcopy(CLAIMS)
    proved, bare, check, section, measured, *_ = (
        claim for claim in listed if any("checks" in one for one in claim["evidence"])
    )
    proved["verdict"], bare["evidence"], measured["measured"] = "proved", [], "123.456"
    check["evidence"][0]["checks"] = ["✓ no such check"]
    section["evidence"][0]["section"] = "No such section"
    (stated, *_) = (claim for claim in listed if any("lines" in one for one in claim["evidence"]))
    corrected = next(claim for claim in listed[50:] if claim["verdict"] == "holds corrected")
    corrected["finding"] = corrected["finding"].partition("Repair: ")[0]
    repaired = next(claim for claim in listed[50:] if claim["verdict"] == "not seen at small scale")
    repaired["finding"] += " Repair: none."
    open_ = next(claim for claim in listed[50:] if claim["verdict"] == "undecided at small scale")
    open_["evidence"][0] |= {"checks": ["✓ no interval"], "lines": ["5 runs of 5, 3 of 5"]}
    nowhere_run, misnamed, *_ = (c for c in listed[50:] if c["verdict"] == "not independent")
    nowhere_run["finding"] += " It was tried in lab 09z."
    misnamed["finding"] += " (See wm-no-such-claim.)"
    listed = [claim for claim in listed if claim["place"] != "Listing 5"] + [listed[0]]
    notebooks = copy.deepcopy(NOTEBOOKS)
    for notebook in notebooks.values():
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"]).replace("assert ", "_ = ")
    notebooks["03"]["cells"][0]["source"] += "\n\nBy WM eq. 6 it is so."
    monkeypatch.setattr(claims, "read_claims", lambda: listed)
    monkeypatch.setattr(claims, "read_notebooks", lambda: notebooks)
    nowhere = claims.Public("ssd", "ssd", {claims.Place("WM", "§", "9.9")})
    monkeypatch.setattr(claims, "public_names", lambda: [nowhere])
    assert claims.main(["--check"]) == 1
    told = capsys.readouterr().out
    for name, fault in (
        (proved, r"verdict 'proved' is none of holds"),
        (bare, r"a verdict without evidence"),
        (measured, r"its evidence prints no 123\.456"),
        (check, r"chapter .* prints no line '✓ no such check'"),
        (section, r"chapter .*, 'No such section' prints nothing, or is not there"),
        (stated, r"chapter .*: no assert beside the line"),
        (listed[0], r"the id is there twice"),
        (corrected, r"it holds corrected, but the finding names no repair"),
        (repaired, r"the finding names a repair, but the verdict is another"),
        (nowhere_run, r"the finding speaks of 09z, but no evidence is from there"),
        (misnamed, r"the finding refers to wm-no-such-claim, which is no entry"),
        (open_, r"undecided, but its evidence has neither an interval nor several runs"),
    ):
        assert re.search(rf"^{name['id']}: {fault}", told, re.MULTILINE), fault
    for fault in (
        "WM Listing 5 has no entry",
        "ssd.ssd names WM §9.9 as its source",
        "chapter 03 speaks of WM eq. 6, which has no entry",
    ):
        assert fault in told


def test_places_are_read():
    for text, *found in (
        ("WM §3.2 and Listing 5, with the offset", "WM Listing 5", "WM §3.2"),
        ("WM Tables 2 and 7; OTCE Tables 1", "OTCE Table 1", "WM Table 2", "WM Table 7"),
        ("Ch A.4; WM App. A, B.2", "Ch App. A.4", "WM App. A", "WM App. B.2"),
        ("OTCE §2.1; Gu and Dao (2023), Mamba, §3.4", "OTCE §2.1"),
        ("L22 \"S4 Model\", and 'WM'", "L22 slide S4 Model"),
        ("OTCE eqs. 19a–19c", "OTCE eq. 19a", "OTCE eq. 19b", "OTCE eq. 19c"),
        ("*Wonderful Matrices* (2024), Listings 2–3; *Cheems* §3.2", "Ch §3.2"),
        ("equation 3.4 of chapter 3, Listing 5",),
    ):
        assert sorted(map(str, places(text))) == found


def test_the_command_tells_both_directions(capsys):
    (claim, *_) = (claim for claim in CLAIMS if any("checks" in one for one in claim["evidence"]))
    assert claims.main([claim["id"], "ssd_chunked"]) == 0
    told = capsys.readouterr().out
    assert claim["finding"] in told and claim["evidence"][0]["checks"][0] in told
    assert "03_state_space_duality" in told and "test_operators" in told
    with pytest.raises(SystemExit):
        claims.main(["no-such-name"])
