"""The corpus: always the same order, lossless as bytes, and a way out where it is missing."""

import os
import sys

import pytest
import torch

from cheems_ref.text import ids_to_text, read_corpus, read_ids, read_text, text_to_ids
from cheems_ref.train import split_text


def test_corpus_is_real_sorted_and_lossless():
    from pydoc_data.topics import topics

    text = read_text()
    assert len(text) > 300_000 and text.startswith(topics[min(topics)])
    ids = text_to_ids(text)
    assert ids.dtype == torch.int64 and ids.min() >= 0 and ids.max() < 256
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert ids_to_text(ids) == text
    for text in ("Möwe ≠ 鴎", ""):
        ids = text_to_ids(text, dtype=torch.uint8)
        assert ids.dtype == torch.uint8 and ids.tolist() == [*text.encode()]
        assert ids_to_text(ids) == text


def test_bad_files_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        read_text(tmp_path / "missing")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty is empty"):
        read_text(tmp_path / "empty")
    (tmp_path / "latin").write_bytes("Möwe".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8 text: byte 1"):
        read_text(tmp_path / "latin")
    with pytest.raises(NotADirectoryError, match="missing is not a directory"):
        read_corpus(tmp_path / "missing")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has 0 texts to train on and 0 to hold out"):
        read_corpus(tmp_path / "none")


def test_missing_corpus_names_the_way_out(monkeypatch):
    for name in ("pydoc_data", "pydoc_data.topics"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=r"read_text\(path\), --text FILE"):
        read_text()


# --- a corpus of many texts ---------------------------------------------------------------------


def folder_of(folder, count=60):
    """Texts "0", "1", ... each in a file of its own, some of them in folders below."""
    for i in range(count):
        path = folder / ("deep" if i % 3 else ".") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {i} " * 5)
    return folder


def sides(corpus):
    """The texts on either side, as `train` cuts them."""
    parts = split_text(corpus.ids, corpus.eval_fraction)
    return [bytes(part.tolist()).decode().split("\n\n") for part in parts]


def every_text_is_on_one_side(m, folder):
    kept, apart = sides(m.read_corpus(folder_of(folder), eval_fraction=0.3))
    assert sorted(kept + apart) == sorted(f"text {i} " * 5 for i in range(60))
    assert 8 <= len(apart) <= 28


def a_copy_is_on_the_side_of_its_text(m, folder):
    for i in range(40):
        (folder / f"{i}").write_text(f"{i % 20} and so on")
    kept, apart = sides(m.read_corpus(folder, eval_fraction=0.5))
    assert apart and not set(kept) & set(apart) and len(kept) + len(apart) == 40


def test_a_text_stays_on_its_side(tmp_path):
    """Whatever texts come to it, and whatever their names; only texts are read."""
    kept, _ = sides(read_corpus(folder_of(tmp_path, 30), eval_fraction=0.3))
    more, _ = sides(read_corpus(folder_of(tmp_path), eval_fraction=0.3))
    assert set(kept) < set(more)
    for path in sorted(tmp_path.rglob("*.txt")):
        path.rename(path.with_name(f"other_{path.name}"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "zeros").write_bytes(b"a\0b")
    (tmp_path / "empty").write_text("  \n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not this")
    kept, apart = sides(read_corpus(tmp_path, eval_fraction=0.3))
    assert set(kept) == set(more) and len(kept + apart) == 60


def test_the_standard_library_is_a_corpus():
    corpus = read_corpus()
    kept, apart = split_text(corpus.ids, corpus.eval_fraction)
    assert len(corpus.ids) > 3_000_000 and min(corpus.texts) > 10
    assert 0.05 < len(apart) / len(corpus.ids) < 0.2
    text = ids_to_text(kept)
    assert "def " in text and read_text()[:2000].partition("\n\n")[0] in text + ids_to_text(apart)
    assert corpus.ids.dtype == torch.uint8


def test_a_text_is_read_alike_by_every_reader(tmp_path):
    """Without the mark that some editors put first, and also where a letter is cut by a piece."""
    long = "é" * 2**20  # of two bytes each, so that pieces of a mebibyte end inside a letter
    for i, text in enumerate(("Möwe ≠ 鴎", "x" + long)):
        for mark in (b"", b"\xef\xbb\xbf"):
            (tmp_path / f"{i}").write_bytes(mark + text.encode())
            assert read_text(tmp_path / f"{i}") == text
            ids = read_ids(tmp_path / f"{i}")
            assert ids.dtype == torch.uint8 and bytes(ids.numpy()) == text.encode()
    assert torch.equal(read_ids(), text_to_ids(read_text(), dtype=torch.uint8))


def test_a_copy_with_a_byte_order_mark_is_on_the_side_of_its_text(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}").write_bytes(
            (b"\xef\xbb\xbf" if i < 20 else b"") + b"text %d" % (i % 20)
        )
    (tmp_path / "mark").write_bytes(b"\xef\xbb\xbf")
    kept, apart = sides(read_corpus(tmp_path, eval_fraction=0.5))
    assert not {*kept} & {*apart} and {*kept} | {*apart} == {f"text {i}" for i in range(20)}
    assert len(kept + apart) == 40, "a file with nothing but the mark is a text"


NO_TEXTS = {
    "utf16": (
        "hello, you".encode("utf-16-le"),
        "utf16 is not UTF-8 text: byte 1 is 0, as in binary",
    ),
    "utf16-mark": ("hello".encode("utf-16"), "utf16-mark is not UTF-8 text: byte 3 is 0"),
    "binary": (b"ELF" + b"x" * 2**20 + b"\0", f"binary is not UTF-8 text: byte {2**20 + 3} is 0"),
    "cut": (("é" * 9).encode()[:-1], "cut is not UTF-8 text: byte 16 is invalid"),
    "far": (b"x" * (2**20 - 1) + b"\xc3x", f"far is not UTF-8 text: byte {2**20 - 1} is invalid"),
}


def test_what_is_no_text_is_refused_by_every_reader_and_skipped_by_a_corpus(tmp_path):
    for name, (data, message) in NO_TEXTS.items():
        (tmp_path / name).write_bytes(data)
        for read in (read_text, read_ids):
            with pytest.raises(ValueError, match=message):
                read(tmp_path / name)
    with pytest.raises(ValueError, match="has 0 texts to train on and 0 to hold out"):
        read_corpus(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no endless file")
def test_an_endless_binary_file_is_refused_at_its_first_byte():
    with pytest.raises(ValueError, match="/dev/zero is not UTF-8 text: byte 0 is 0"):
        read_text("/dev/zero")


@pytest.mark.usefixtures("unchecked")
def test_bytes_are_refused_a_dtype_that_cannot_hold_them():
    for dtype in (torch.int8, torch.bool, torch.float16):
        with pytest.raises(ValueError, match=f"dtype must be one of torch.uint8.*got {dtype}"):
            text_to_ids("é", dtype=dtype)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert text_to_ids("é", dtype=dtype).tolist() == [0xC3, 0xA9]
