"""The map of the claims: every verdict leads to lines that ran, and a map that lies is caught."""

import ast
import copy
import hashlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import claims
import pytest
from claims import Place, faults, places

ROOT = Path(__file__).resolve().parent.parent
CLAIMS, NOTEBOOKS = claims.read_claims(), claims.read_notebooks()
PUBLIC = claims.public_names()


def test_the_map_has_no_fault():
    assert faults(CLAIMS, NOTEBOOKS, PUBLIC) == []


def test_every_kind_and_verdict_occurs():
    for field, allowed in (("kind", claims.KINDS), ("document", claims.DOCUMENTS)):
        assert {claim[field] for claim in CLAIMS} == {*allowed}
    assert {claim["verdict"] for claim in CLAIMS} == {*claims.VERDICTS}


def test_the_readme_links_the_claims_and_has_their_number():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(CLAIMS)} claims" in readme and "book/claims.toml" in readme


def test_tables_are_the_numbers_that_were_compared_with_the_papers():
    """All of them, when this digest was taken; a digit that changes has to be looked up again."""
    text = (ROOT / "book" / "tables.toml").read_text(encoding="utf-8")
    digest = hashlib.sha256(json.dumps(tomllib.loads(text)).encode()).hexdigest()
    assert digest[:16] == "b7bc03f3035fc5ab"


def test_tables_are_rectangles_of_numbers():
    tables = tomllib.loads((ROOT / "book" / "tables.toml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        assert name.split(" Table ")[0] in claims.DOCUMENTS
        for row in table["rows"]:
            assert len(row) == len(table["columns"]) + 1, f"{name}: {row[0]}"
            assert all(cell == "" or isinstance(cell, int | float) for cell in row[1:])


# --- a map that lies ------------------------------------------------------------------------------


def claim_named(name):
    return next(claim for claim in CLAIMS if claim["id"] == name)


def edited(name, **fields):
    """All claims, one of them with other fields."""
    return [claim | fields if claim["id"] == name else claim for claim in CLAIMS]


def with_source(chapter, old, new, *, printed=True):
    """All notebooks, with a text exchanged in one: in its sources, and in what it prints."""
    notebooks = copy.deepcopy({chapter: NOTEBOOKS[chapter]})
    found = 0
    for cell in notebooks[chapter]["cells"]:
        text = "".join(cell["source"])
        found += text.count(old)
        cell["source"] = text.replace(old, new)
        for output in cell.get("outputs", []) if printed else []:
            if "text" in output:
                found += "".join(output["text"]).count(old)
                output["text"] = "".join(output["text"]).replace(old, new)
    assert found, f"{old!r} does not occur in chapter {chapter}"
    return NOTEBOOKS | notebooks


def says(found, *words):
    """One of the faults has all the words."""
    assert any(all(word in fault for word in words) for fault in found), (words, found)


def test_a_renamed_check_is_a_fault():
    found = faults(CLAIMS, with_source("03", "2 chunks, corrected", "2 chunks, put right"))
    says(found, "wm-listing-3-axis", "prints no line '✓ 2 chunks, corrected'")


def test_a_mistake_that_is_no_longer_caught_is_a_fault():
    """The same name, as an equality."""
    old = "✗ 2 chunks, as printed: caught  [differs by more than 0.1]"
    notebooks = with_source("03", old, "✓ 2 chunks, as printed  [float64, tolerance 1e-10]")
    says(faults(CLAIMS, notebooks), "wm-listing-3-axis", "no line '✗ 2 chunks, as printed'")


def test_the_end_of_a_line_that_has_changed_is_a_fault():
    notebooks = with_source("09", "+0.060 ± 0.008, a difference", "+0.060 ± 0.008, no difference")
    says(faults(CLAIMS, notebooks), "ch-granularity", "CDMoE less DGLU: +0.060 ± 0.008, a diff")


def test_a_check_that_is_no_longer_printed_is_a_fault():
    notebooks = copy.deepcopy(NOTEBOOKS)
    for cell in notebooks["03"]["cells"]:
        cell["outputs"] = []
    says(faults(CLAIMS, notebooks), "wm-listing-3-axis", "chapter 03", "prints nothing")


def test_a_removed_or_renamed_section_is_a_fault():
    old = "Tiled instead of interleaved groups (WM Listing 4)"
    found = faults(CLAIMS, with_source("03", old, "Tiled groups"))
    says(found, "wm-listing-4-groups", old, "is not there")
    says(found, "chapter 03", "'Tiled groups', as printed, has no entry")


def test_a_check_in_another_section_is_none():
    claim = claim_named("wm-listing-3-axis")
    evidence = [claim["evidence"][0] | {"section": "2 · The recurrence is a matrix"}]
    says(faults(edited(claim["id"], evidence=evidence), NOTEBOOKS), claim["id"], "prints no line")


def test_two_sections_of_one_name_are_a_fault():
    notebooks = with_source("03", "## Summary", "## 6 · In chunks", printed=False)
    says(faults(CLAIMS, notebooks), "chapter 03 has two sections '6 · In chunks'")


def test_an_unknown_place_in_a_chapter_is_a_fault():
    for place in ("WM eq. 6", "Ch Listing 5", "OTCE Table 10"):
        notebooks = with_source("03", "## Summary", f"## Summary\n\nBy {place} it is so.")
        says(faults(CLAIMS, notebooks), f"chapter 03 speaks of {place}, which has no entry")


def test_a_numbered_place_without_an_entry_is_a_fault():
    without = [claim for claim in CLAIMS if claim["place"] != "Listing 5"]
    found = faults(without, NOTEBOOKS, PUBLIC)
    says(found, "WM Listing 5 has no entry")
    says(found, "attention.causal_mask names WM Listing 5 as its source")
    says(found, "chapter 05 speaks of WM Listing 5")
    says(found, "erratum E7 has no entry")


def test_a_source_of_the_package_without_an_entry_is_a_fault():
    public = [claims.Public("ssd", "ssd_chunked", {Place("WM", "§", "9.9")})]
    says(faults(CLAIMS, NOTEBOOKS, public), "ssd.ssd_chunked names WM §9.9 as its source")
    public = [claims.Public("mamba", "Mamba", {Place("L22", "slide", "No such slide")})]
    says(faults(CLAIMS, NOTEBOOKS, public), "mamba.Mamba names L22 slide No such slide")


def test_a_line_beside_which_nothing_asserts_is_a_fault():
    notebooks = copy.deepcopy(NOTEBOOKS)
    for cell in notebooks["09"]["cells"]:
        cell["source"] = "".join(cell["source"]).replace("assert ", "_ = ")
    says(faults(CLAIMS, notebooks), "ch-granularity", "no assert beside the line")


def test_a_number_that_was_not_measured_is_a_fault():
    measured = claim_named("wm-listing-3-axis")["measured"]
    found = faults(edited("wm-listing-3-axis", measured=measured + " and 123.456"), NOTEBOOKS)
    assert found == [
        "wm-listing-3-axis: its evidence prints no 123.456, which is said to be measured"
    ]
    found = faults(edited("wm-listing-3-axis", measured="much"), NOTEBOOKS)
    assert found == ["wm-listing-3-axis: what is measured holds no number"]


def test_a_number_of_another_line_or_sign_was_not_measured():
    claim = claim_named("ch-granularity")
    assert faults(edited(claim["id"], measured="+0.060 ± 0.008"), NOTEBOOKS) == []
    for wrong in ("-0.060", "2.191"):  # the second stands elsewhere in the section
        says(faults(edited(claim["id"], measured=wrong), NOTEBOOKS), claim["id"], "prints no")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"verdict": "proved"}, "verdict 'proved' is none of holds, "),
        ({"kind": "formula"}, "kind 'formula' is none of equation, "),
        ({"document": "WN"}, "document 'WN' is none of WM, "),
        ({"quote": "It is so. It is not."}, "more than one sentence"),
        ({"evidence": []}, "a verdict without evidence"),
        ({"page": 3}, "fields missing or unknown: page"),
        ({"finding": " "}, "finding is empty"),
        ({"place": "Listing 9"}, "there is no WM Listing 9"),
        ({"section": "7.1"}, "there is no section '7.1' in WM"),
        ({"section": "3.5"}, "there is no section '3.5' in WM"),
        ({"errata": ["E99"]}, "erratum E99 is not known"),
    ],
)
def test_an_entry_of_another_form_is_a_fault(fields, words):
    says(faults(edited("wm-listing-3-axis", **fields), NOTEBOOKS), words)


def test_a_second_entry_of_one_name_is_a_fault():
    assert faults([*CLAIMS, CLAIMS[0]], NOTEBOOKS) == [f"{CLAIMS[0]['id']}: the id is there twice"]


def test_evidence_of_neither_kind_is_a_fault():
    evidence = [{"chapter": "03", "section": "6 · In chunks"}]
    for more, fault in (
        ({}, "neither a list of checks nor one of lines"),
        ({"checks": "✓ four steps = recurrence"}, "neither a list of checks nor one of lines"),
        ({"checks": ["four steps = recurrence"]}, "prints no line 'four steps = recurrence'"),
        ({"lines": [""]}, "prints no line ''"),
        ({"line": []}, "evidence has other fields"),
    ):
        entry = edited("wm-listing-3-rest", evidence=[evidence[0] | more])
        says(faults(entry, NOTEBOOKS), "wm-listing-3-rest", fault)
    for field in ("chapter", "section"):
        without = {k: v for k, v in evidence[0].items() if k != field}
        entry = edited("wm-listing-3-rest", evidence=[without])
        says(faults(entry, NOTEBOOKS), "evidence has other fields")


def test_the_counts_of_chapter_11_are_those_of_the_list():
    lines = [line.text for line in claims.printed_lines(NOTEBOOKS["11"])]
    for verdict in claims.VERDICTS:
        counts = [
            sum((c["verdict"], c["document"]) == (verdict, d) for c in CLAIMS)
            for d in claims.DOCUMENTS
        ]
        row = [verdict, *map(str, [*counts, sum(counts)])]
        assert any(re.split(r"\s{2,}", line) == row for line in lines), row


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("WM §3.2 and Listing 5, with the offset", ["WM Listing 5", "WM §3.2"]),
        ("Ch eqs. 11–13 and Listing 4", ["Ch Listing 4", "Ch eq. 11", "Ch eq. 12", "Ch eq. 13"]),
        ("WM Tables 2 and 7; OTCE Tables 1, 5 and 8", ["OTCE Table 1", "OTCE Table 5",
         "OTCE Table 8", "WM Table 2", "WM Table 7"]),
        ("OTCE eqs. 2a, 2b", ["OTCE eq. 2a", "OTCE eq. 2b"]),
        ("Ch A.4; WM App. A, B.2", ["Ch App. A.4", "WM App. A", "WM App. B.2"]),
        ("OTCE §2.1; Gu and Dao (2023), Mamba, §3.4", ["OTCE §2.1"]),
        ("WM App. C.2 says 360M. Table 7 does not", ["WM App. C.2"]),
        ("L22 \"S4 Model\", and 'WM'", ["L22 slide S4 Model"]),
        ("OTCE eqs. 19a–19c, WM §3.1–3.2", ["OTCE eq. 19a", "OTCE eq. 19b", "OTCE eq. 19c",
         "WM §3.1", "WM §3.2"]),
        ("OTCE Fig. 10 (needle), Tables 2 to 4", ["OTCE Figure 10", "OTCE Table 2", "OTCE Table 3",
         "OTCE Table 4"]),
        ("*Wonderful Matrices* (2024), Listings 2–3; *Cheems* §3.2", ["Ch §3.2"]),
        ("*Wonderful Matrices*, Listings 2–3", ["WM Listing 2", "WM Listing 3"]),
        ("equation 3.4 of chapter 3, Listing 5", []),
    ],
)  # fmt: skip
def test_places_are_read(text, found):
    assert sorted(map(str, places(text))) == sorted(found)


def test_the_package_names_places_that_are_read():
    """Of each docstring with a source in the documents something is understood."""
    named = {one.name for one in PUBLIC if one.sources}
    assert len(named) > 50 and {"ssd_chunked", "GateMask", "S4D", "CDMoE"} <= named


# --- the command ----------------------------------------------------------------------------------


def test_the_command_tells_both_directions(capsys):
    assert claims.main(["wm-listing-3-axis", "ssd_chunked"]) == 0
    told = capsys.readouterr().out
    assert "✗ 2 chunks, as printed: caught" in told and "chapter 03" in told
    assert "wm-listing-3-axis: holds corrected" in told and "test_ssd" in told
    assert "03_state_space_duality" in told


def test_the_command_counts_and_checks(capsys):
    assert claims.main(["--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(CLAIMS)} claims"
    with pytest.raises(SystemExit):
        claims.main(["no-such-name"])


def test_a_fault_makes_the_command_fail(monkeypatch, capsys):
    monkeypatch.setattr(claims, "read_claims", lambda: [*CLAIMS, CLAIMS[0]])
    assert claims.main(["--check"]) == 1
    assert "the id is there twice" in capsys.readouterr().out


# --- what chapter 11 stands on --------------------------------------------------------------------


def test_mamba_ssm_takes_the_arguments_that_chapter_11_says():
    found = importlib.util.find_spec("mamba_ssm")
    if found is None:
        pytest.skip("mamba-ssm is not installed")
    [folder] = found.submodule_search_locations
    source = Path(folder, "ops", "triton", "ssd_combined.py").read_text(encoding="utf-8")
    [function] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "mamba_chunk_scan_combined"
    ]
    names = [argument.arg for argument in function.args.args]
    assert names[:6] == ["x", "dt", "A", "B", "C", "chunk_size"]
