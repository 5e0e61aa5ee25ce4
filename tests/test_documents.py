"""Documents for an evaluation: what they ask stands where it should, and the same seed asks it."""

import pytest
import torch
from models import refused

from cheems_lab.evaluation import documents
from cheems_ref.tasks import NEEDLE, multi_query_recall
from cheems_ref.text import read_text

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

TEXT = "".join(f"{i} cafés on the {i * i % 97}th day; " for i in range(300))


def the_answer_goes_on_where_the_passage_stops(m):
    found = m.cloze_documents(TEXT, n_rows=30, length=60, after=20)
    assert len(found) == 30
    for one in found:
        own = one["choices"][one["answer"]]
        assert one["passage"] + own in TEXT, f"{one} does not stand in the text"
        sizes = [len(choice.encode("utf-8")) for choice in one["choices"]]
        assert min(sizes) >= 19 and max(sizes) <= 20, "a letter that is cut through is left out"
        assert 39 <= len(one["passage"].encode("utf-8")) <= 40


def other_choices_are_from_elsewhere(m):
    for text in (TEXT, TEXT[:150]):
        for one in m.cloze_documents(text, n_rows=50, length=45, after=20):
            own = one["choices"][one["answer"]]
            begins = text.index(one["passage"] + own)
            ends = begins + len(one["passage"] + own)
            rest = text[:begins] + "\0" + text[ends:]
            others = [choice for choice in one["choices"] if choice != own]
            assert all(choice in rest for choice in others), f"{one} overlaps itself"
    for one in m.cloze_documents("it says so, " * 50, n_rows=20, length=45, after=20):
        assert len({*one["choices"]}) == 4, f"a choice stands there twice: {one}"


def passages_hold_words(m):
    """Of a text that is mostly white space, at both of its ends."""
    text = " \n" * 200 + "A cat sat on the mat, and a dog lay on the log." + "\u3000\n" * 100
    try:
        found = m.cloze_documents(text, n_rows=50, length=30, after=10)
    except ValueError as error:
        pytest.fail(f"it finds none: {error}")
    assert all(one["passage"].strip() for one in found) and len(found) == 50


def no_place_is_favoured(m):
    """Each place of the answer about as often as the others, and passages from all of the text."""
    found = m.cloze_documents(TEXT, n_rows=400, length=60, after=20)
    counts = torch.bincount(torch.tensor([one["answer"] for one in found]), minlength=4)
    assert counts.min() >= 70 and counts.max() <= 130, counts
    starts = sorted(TEXT.index(one["passage"]) / len(TEXT) for one in found)
    assert starts[20] < 0.15 and starts[-20] > 0.85 and len({*starts}) > 300


def recall_asks_every_query_once(m):
    """With the rows of `tasks`: each query ends a document, whose answer is the target there."""
    options = dict(n_rows=5, length=30, n_pairs=3)
    found = m.recall_documents(**options, vocab_size=20, seed=4)
    generator = torch.Generator().manual_seed(4)
    ids, targets = multi_query_recall(5, 30, 3, 20, generator=generator)
    want = [
        ([33 + i for i in row[: place + 1].tolist()], 33 + int(answers[place]))
        for row, answers in zip(ids, targets, strict=True)
        for place in range(30)
        if answers[place] >= 0
    ]
    got = [([*one["row"].encode()], ord(one["choices"][one["answer"]])) for one in found]
    assert got == want and len(got) == 15
    for one in found:
        assert one["choices"] == [*one["row"][1:6:2]], "choices are the values of the row"
    odd = m.recall_documents(n_rows=60, length=31, n_pairs=3)
    assert max(len(one["row"]) for one in odd) <= 30, "an odd length is taken one shorter"


def needles_stand_at_every_depth(m):
    found = m.needle_documents(TEXT, n_rows=3, length=200)
    assert [one["depth"] for one in found] == [d for d in (0, 0.25, 0.5, 0.75, 1) for _ in range(3)]
    room = 200 + 1 - len(NEEDLE.format(name="name", code="code")) - len(" The code of name is code")
    for one in found:
        question = one["text"][-len(" The code of name is ") :]
        name = question.split()[-2]
        sentence = NEEDLE.format(name=name, code=one["code"])
        place = len(one["text"].partition(sentence)[0].encode("utf-8"))
        assert sentence in one["text"], f"the answer is not in {one}"
        assert abs(place - one["depth"] * room) <= 2, one
        assert 198 <= len((one["text"] + one["code"]).encode("utf-8")) <= 201
    assert len({one["code"] for one in found}) > 10


def a_seed_decides_everything(m):
    for make, words in (
        (m.cloze_documents, dict(text=TEXT, n_rows=4)),
        (m.recall_documents, dict(n_rows=2)),
        (m.needle_documents, dict(text=TEXT, n_rows=2)),
    ):
        assert make(**words) == make(**words, seed=0) != make(**words, seed=1)
    assert m.held_out_documents(TEXT) == [{"text": TEXT}]


def what_cannot_be_asked_is_refused(m):
    short = "length = 40 has no room for a passage before 40 bytes"
    refused(ValueError, short, m.cloze_documents, TEXT, length=40)
    few = "the text has 102 bytes, a passage with its end 256"
    refused(ValueError, few, m.cloze_documents, TEXT[:98])
    again = "it has no 3 other continuations of 40 bytes"
    refused(ValueError, again, m.cloze_documents, "ab" * 500)
    blank = "no passage of 216 bytes that is not white space alone"
    refused(ValueError, blank, m.cloze_documents, " \n" * 500)
    refused(ValueError, "n_rows", m.cloze_documents, TEXT, n_rows=0)
    refused(ValueError, "vocab_size = 95 is more than the 94", m.recall_documents, vocab_size=95)
    refused(ValueError, "no room for n_pairs = 8", m.recall_documents, length=31)
    refused(ValueError, "no room for sentence", m.needle_documents, TEXT, length=40)


PROPERTIES = [
    the_answer_goes_on_where_the_passage_stops,
    other_choices_are_from_elsewhere,
    passages_hold_words,
    no_place_is_favoured,
    recall_asks_every_query_once,
    needles_stand_at_every_depth,
    a_seed_decides_everything,
    what_cannot_be_asked_is_refused,
]


@pytest.mark.parametrize("has_property", PROPERTIES)
def test_documents(has_property):
    has_property(documents)


def test_python_s_manual_is_enough():
    text = read_text()
    assert len(documents.cloze_documents(text)) == 200
    assert len(documents.needle_documents(text)) == 100
