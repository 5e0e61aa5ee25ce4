"""The corpus: always the same order, lossless as bytes, and a way out where it is missing."""

import importlib
import sys
from importlib.abc import MetaPathFinder

import pytest
import torch

from cheems_ref.text import ids_to_text, read_text, text_to_ids


def test_corpus_is_real_sorted_and_lossless():
    from pydoc_data.topics import topics

    text = read_text()
    assert len(text) > 300_000 and text.startswith(topics[min(topics)])
    ids = text_to_ids(text)
    assert ids.dtype == torch.int64 and ids.min() >= 0 and ids.max() < 256
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert ids_to_text(ids) == text


def test_any_utf8_file_will_do(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text("Möwe ≠ 鴎\n", encoding="utf-8")
    assert read_text(path) == read_text(str(path)) == "Möwe ≠ 鴎\n"


def test_bad_files_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        read_text(tmp_path / "missing")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty is empty"):
        read_text(tmp_path / "empty")
    (tmp_path / "latin").write_bytes("Möwe".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8 text: byte 1"):
        read_text(tmp_path / "latin")


def test_cut_characters_and_wrong_ids():
    ids = text_to_ids("ö")
    assert ids.tolist() == [195, 182] and ids_to_text(ids[:1]) == "\N{REPLACEMENT CHARACTER}"
    assert ids_to_text(text_to_ids("")) == ""
    with pytest.raises(ValueError, match="256"):
        ids_to_text(torch.tensor([256]))


class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("pydoc_data"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_missing_corpus_names_the_way_out(monkeypatch):
    for name in ("pydoc_data", "pydoc_data.topics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=r"read_text\(path\), --text FILE") as caught:
        read_text()
    assert caught.value.name.startswith("pydoc_data")
