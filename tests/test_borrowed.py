"""`make test-hub` can fail: what borrowed/run.py says of tests that are made up here."""

import importlib.util
import io
import re
import tarfile
import textwrap
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "borrowed_run", Path(__file__).parent / "borrowed" / "run.py"
)
borrowed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(borrowed)

# In the place of the library's: as much as borrowed/suite.py takes from it.
MADE_UP = {
    "test_configuration_common.py": """
        class ConfigTester:
            def __init__(self, test, config_class, common_properties, **sizes):
                self.config = config_class(**sizes)

            def run_common_tests(self):
                assert self.config.pattern == "AM"
    """,
    "test_modeling_common.py": """
        import torch
        from .exporters.test_export import ExportTesterMixin
        from .generation.test_utils import GenerationTesterMixin
        from .utils.test_configuration_utils import config_common_kwargs

        MODEL_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = {}, {}

        def ids_tensor(shape, vocab_size):
            return torch.randint(vocab_size, shape)

        def random_attention_mask(shape):
            return torch.ones(shape)

        class ModelTesterMixin(ExportTesterMixin):
            def test_logits(self):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                for kind in self.all_model_classes:
                    assert kind(config)(**inputs)[0].shape[:2] == (3, 7)

            def test_width(self):
                assert self.model_tester.get_config().hidden_size == 33, "a width of 33"

            def test_elsewhere(self):
                self.skipTest("needs another machine")
    """,
}


@pytest.fixture
def sdist(tmp_path):
    """A source distribution."""
    path = tmp_path / "transformers-0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in MADE_UP.items():
            data = textwrap.dedent(text).encode()
            member = tarfile.TarInfo(f"transformers-0/tests/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_what_fails_is_reported_and_so_is_what_is_skipped_and_why(sdist, capsys):
    assert borrowed.main(["--case", "A", "--sdist", str(sdist)]) == 1
    said = capsys.readouterr().out
    assert "A {'pattern': 'AM'}: 2 passed, 1 skipped, 1 failed in " in said, said
    assert re.search(r"  failed: .*a width of 33.*\n    test_width\n", said), said
    assert "  skipped: needs another machine\n    test_elsewhere\n" in said, said


def test_a_case_of_which_no_test_passes_has_failed():
    passed, skipped = ("passed", "test_a", ""), ("skipped", "test_b", "why")
    assert not borrowed.told("S", {}, [passed, skipped], 1)
    assert borrowed.told("S", {}, [skipped], 1) and borrowed.told("S", {}, [], 1)


def test_a_suite_that_cannot_be_imported_has_failed(sdist, tmp_path):
    theirs = borrowed.unpacked(sdist, tmp_path)
    (theirs / "tests/test_configuration_common.py").write_text("")
    ((outcome, _, reason),) = borrowed.results(theirs, {})
    assert outcome == "failed" and "collection failure" in reason
    (theirs / "none.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    with pytest.raises(RuntimeError, match="no-such-option"):
        [*borrowed.results(theirs, {})]


def test_what_is_asked_for_is_the_pinned_version(tmp_path, monkeypatch):
    asked = []
    (tmp_path / "transformers-0.tar.gz").touch()
    monkeypatch.setattr(borrowed.subprocess, "run", lambda command, **_: asked.extend(command))
    assert borrowed.downloaded(tmp_path).parent == tmp_path
    pins = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    assert asked[-1] in pins and asked[-1].startswith("transformers==")
