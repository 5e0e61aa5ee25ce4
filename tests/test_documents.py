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
    cloze, recall, needle = documents.cloze_task, documents.recall_task, documents.needle_task
    refused(ValueError, "length = 40 has no room for a passage", cloze, text, length=40)
    refused(ValueError, "n_rows", cloze, text, n_rows=0)
    for few in ("a cat", "ab" * 500, " \n" * 500):
        (tmp_path / "few").write_text(few)
        refused(ValueError, "different continuations of 40", cloze, str(tmp_path / "few"))
    refused(ValueError, "vocab_size = 95 is more than the 94", recall, vocab_size=95)
    refused(ValueError, "no room for n_pairs = 8", recall, length=31)
    refused(ValueError, "no room for sentence", needle, text, length=40)
