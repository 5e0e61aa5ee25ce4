"""Documents for an evaluation: what they ask stands where it should, and the same seed asks it."""

import pytest
import torch
from models import refused

from cheems_lab.evaluation import documents
from cheems_ref.tasks import NEEDLE, multi_query_recall

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it
pytest.importorskip("datasets", reason="the documents are a data set of the extra `evaluate`")

TEXT = "".join(f"{i} cafés on the {i * i % 97}th day; " for i in range(300))


@pytest.fixture
def text(tmp_path):
    """The path of a text."""
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "text")


def listed(task):
    return task["test"].to_list()


def test_the_answer_goes_on_where_the_passage_stops(text):
    found = listed(documents.cloze_task(text, n_rows=30, length=60, after=20))
    assert len(found) == 30
    for one in found:
        own = one["choices"][one["answer"]]
        assert one["passage"] + own in TEXT and len({*one["choices"]}) == 4
        assert 59 <= len((one["passage"] + own).encode("utf-8")) <= 60
        assert all(len(choice) == 20 for choice in one["choices"])
    assert {one["answer"] for one in found} == {0, 1, 2, 3}, "a place is favoured"


def test_recall_asks_every_query_once():
    """With the rows of `tasks`: each query ends a document, whose answer is the target there."""
    found = listed(documents.recall_task(n_rows=5, length=30, n_pairs=3, vocab_size=20, seed=4))
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
    odd = listed(documents.recall_task(n_rows=60, length=31, n_pairs=3))
    assert max(len(one["row"]) for one in odd) <= 30, "an odd length is taken one shorter"


def test_needles_are_planted_at_every_depth(text):
    found = listed(documents.needle_task(text, n_rows=3, length=200))
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


def test_a_seed_decides_everything(text):
    for make, options in (
        (documents.cloze_task, dict(text=text, n_rows=4)),
        (documents.recall_task, dict(n_rows=2)),
        (documents.needle_task, dict(text=text, n_rows=2)),
    ):
        first, again, other = (listed(make(**options, seed=seed)) for seed in (0, 0, 1))
        assert first == again != other
    assert listed(documents.held_out_task(text)) == [{"text": TEXT}]


def test_impossible_documents_are_rejected(text, tmp_path):
    few, words = tmp_path / "few", "different continuations of 40"
    few.write_text("ab" * 500)
    refused(ValueError, words, documents.cloze_task, str(few))
    for task, message, options in (
        (documents.cloze_task, "length = 40 has no room for a passage", dict(text=text, length=40)),
        (documents.cloze_task, "n_rows", dict(text=text, n_rows=0)),
        (documents.recall_task, "vocab_size = 95 is more than the 94", dict(vocab_size=95)),
        (documents.recall_task, "no room for n_pairs = 8", dict(length=31)),
        (documents.needle_task, "no room for sentence", dict(text=text, length=40)),
    ):
        refused(ValueError, message, task, **options)
