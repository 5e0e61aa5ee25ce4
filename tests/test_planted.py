"""Every check can fail: each planted mistake breaks the property that its table names."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
from planting import Mistake, Stale, planted, stale

import cheems_ref.ssd as ssd
from cheems_ref import check, convolution, text

TABLES = {
    path.stem: importlib.import_module(f"planted.{path.stem}")
    for path in sorted((Path(__file__).parent / "planted").glob("*.py"))
}
ROWS = [
    (f"{name}: {mistake.asked()}", table, mistake)
    for name, table in TABLES.items()
    for mistake in table.MISTAKES
]
MISTAKES = {f"{claim}: {mistake.title}": (table, mistake) for claim, table, mistake in ROWS}
# Properties that no other test checks on the package itself.
CLAIMS = {
    claim: (table, mistake)
    for claim, table, mistake in ROWS
    if mistake.edits and mistake.asked() not in getattr(table, "HELD", ())
}


def ask(mistake, m, request):
    """Properties of what is written to files take a folder."""
    folders = "folder" in inspect.signature(mistake.has_property).parameters
    folder = dict(folder=request.getfixturevalue("tmp_path")) if folders else {}
    mistake.has_property(m, *mistake.arguments, **folder)


def is_caught(table, mistake, request):
    with pytest.MonkeyPatch.context() as patched:
        for registry in getattr(table, "REGISTRIES", ()):  # copies register themselves there
            patched.setattr(registry, "_extra_content", dict(registry._extra_content))
        mutant = planted(table.ROOMS, mistake.edits, mistake.room)
        for copy in mutant.copied.values():  # where torch.compile looks a module up
            patched.setitem(sys.modules, copy.__name__, copy)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            try:
                ask(mistake, mutant, request)
            except NameError as error:  # it speaks of a variable that has another name now
                raise Stale(str(error)) from error


def test_no_two_mistakes_bear_the_same_name():
    assert len(MISTAKES) == len(ROWS)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("table", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_planted_mistake_is_caught(table, mistake, request):
    is_caught(table, mistake, request)


@pytest.mark.parametrize(("table", "mistake"), CLAIMS.values(), ids=CLAIMS)
def test_the_package_has_the_property(table, mistake, request):
    """So that it was the mistake that was caught."""
    if getattr(table, "UNCHECKED", False):
        request.getfixturevalue("unchecked")
    ask(mistake, table.ROOMS[-1], request)


# --- the runner can fail ------------------------------------------------------------------------


class Text:
    """A table of one room."""

    ROOMS = (text,)


def is_the_room_of_texts(m):
    assert m.text_to_ids("a").tolist() == [97]


@pytest.mark.usefixtures("unchecked")
def test_a_mistake_that_breaks_nothing_or_edits_nothing_is_refused(request):
    harmless = ("import torch\n", "import  torch\n")
    for edit, error, message in (
        (harmless, pytest.fail.Exception, "DID NOT RAISE"),
        (("no such text", ""), Stale, "occurs 0 times, not 1"),
        ((*harmless, 2), Stale, "occurs 1 times, not 2"),
        (("[ids]", "[no_such_name]", 3), Stale, "occurs"),
    ):
        mistake = Mistake("none", is_the_room_of_texts, (), [edit], None)
        with pytest.raises(error, match=message):
            is_caught(Text, mistake, request)
        assert bool(stale(mistake, Text.ROOMS)) == (error is Stale)
    renamed = Mistake(
        "none", is_the_room_of_texts, (), [("bytearray(text,", "bytearray(no_such_name,")], None
    )
    with pytest.raises(Stale, match="'no_such_name' is not defined"):
        is_caught(Text, renamed, request)


def test_rooms_above_an_edited_one_see_its_copy():
    edit = ("if size is not None and size < least:", "if size is not None and size <= least:")
    m = planted((check, convolution, ssd), [edit])
    assert [*m.copied] == ["check", "convolution", "ssd"] and m.check is m.copied["check"]
    assert m.short_convolution is m.copied["convolution"].short_convolution
    assert m.short_convolution is not ssd.short_convolution
    with pytest.raises(Stale, match="occurs in 3 rooms, not in one"):
        planted((check, convolution, ssd), [("import torch\n", "")])
