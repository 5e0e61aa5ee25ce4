"""`make test-hub` can fail: what borrowed/run.py says of outcomes."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location(
    "borrowed_run", Path(__file__).parent / "borrowed" / "run.py"
)
borrowed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(borrowed)


def test_a_case_has_failed_where_a_test_fails_or_none_passes(capsys):
    passed, skipped = ("passed", "test_a", ""), ("skipped", "test_b", "another machine")
    failed = ("failed", "test_c", "a width of 33")
    assert not borrowed.told("S", {}, [passed, skipped], 1)
    assert borrowed.told("S", {}, [skipped], 1) and borrowed.told("S", {}, [], 1)
    capsys.readouterr()
    assert borrowed.told("S", {}, [passed, skipped, failed], 1) == 1
    assert capsys.readouterr().out == (
        "\nS {}: 1 passed, 1 skipped, 1 failed in 1 s\n"
        "  failed: a width of 33\n    test_c\n  skipped: another machine\n    test_b\n"
    )
