"""`make bench`: a limit that holds, and the targets last."""

import importlib
import re
import subprocess
import sys

import pytest
from training import ROOT

QUICK = """
from timing import note_target, print_row

print_row("a figure", "3", None)
print_row("fast enough", "2.00x", True, ">= 1x")
print_row("too slow", "0.50x", False, ">= 1x")
note_target("growth", "1.3", False, "<= 1.1")
"""
ENDLESS = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """The module run.py, with benchmarks of this test."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'bench'}")
    monkeypatch.delitem(sys.modules, "run", raising=False)
    module = importlib.import_module("run")
    for name, program in (("quick", QUICK), ("endless", ENDLESS), ("bad", "raise SystemExit(3)")):
        (tmp_path / f"bench_{name}.py").write_text(program)
    monkeypatch.setattr(module, "HERE", tmp_path)
    made = {name: module.Benchmark(()) for name in ("quick", "bad", "endless", "late")}
    monkeypatch.setattr(module, "BENCHMARKS", made)
    return module


def test_the_limit_holds_and_missed_targets_come_last(runner, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["run.py", "--minutes", "0.1"])
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert end.value.code == 1, "a benchmark has failed"
    out = capfd.readouterr().out
    head, _, targets = out.partition("=== Targets: 1 of 3 met")
    assert "begun" in head and "a figure" in head and "a figure" not in targets
    met, _, missed = targets.partition("missed:")
    assert "quick: fast enough" in met and "quick: too slow" in missed
    assert re.search(r"quick: growth +1\.3 +<= 1\.1\n", missed)
    *_, bad, endless, late, last = out.splitlines()
    assert bad == "bench_bad failed with status 3"
    assert endless == "bench_endless stopped: the time was over"
    assert late == "bench_late left out: the time was over"
    assert re.fullmatch(r"0\.\d minutes, 2 missed; FULL=1 measures the rest", last)


def test_make_runs_all_benchmarks_and_all_of_them_with_full(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    names = importlib.import_module("run").BENCHMARKS
    there = {path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py")}
    assert there == {f"bench_{name}" for name in names}
    for words, full in (([], False), (["FULL=1"], True)):
        said = subprocess.run(
            ["make", "-n", "bench", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert "tests/bench/run.py" in said and ("--full" in said) is full
