"""Run the common tests of `transformers` itself on the models of `cheems_lab.hub`.

They are in the source distribution on PyPI, of exactly the version that constraints.txt pins, and
nowhere in this repository:

    make test-hub                                       every case, two minutes
    .venv/bin/python tests/borrowed/run.py --case S     one of them
    .venv/bin/python tests/borrowed/run.py --sdist FILE.tar.gz          without the network

pytest says which tests were skipped and why, and which failed; the program ends with status 1 if
any did, or if none was found. At the end it deletes the download.

The distribution lacks the tests of generate(). If you add tests/generation/test_utils.py from
transformers' repository to FILE.tar.gz, the program runs these tests too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = {
    "S": dict(pattern="SE"),
    "A": dict(pattern="AM"),
    "hybrid": dict(pattern="SI"),
    "I of states": dict(pattern="IE", inner="ssd"),
}
# Modules that test_modeling_common.py imports and the distribution leaves out.
STUBS = {
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": (
        "config_common_kwargs = dict(return_dict=False, output_hidden_states=True,\n"
        "    tie_word_embeddings=False, chunk_size_feed_forward=5, dtype='float16',\n"
        "    bos_token_id=1, pad_token_id=2, eos_token_id=3)\n"
    ),
}


def downloaded(folder):
    """The source distribution, of the version that constraints.txt names."""
    pin = re.search(r"^transformers==\S+", (ROOT / "constraints.txt").read_text(), re.M)[0]
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "download", *options, pin], check=True)
    return next(folder.glob("transformers-*.tar.gz"))


def unpacked(sdist, folder):
    """Their tests with what is missing there, and ours among them."""
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].partition("/")[0]
        members = [m for m in archive.getmembers() if m.name.startswith(f"{top}/tests/")]
        safely = dict(filter="data") if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(folder, members, **safely)
    tests = folder / top / "tests"
    for name, text in STUBS.items():
        path = tests / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(text)
    (tests / "__init__.py").touch()
    (tests / "test_cheems.py").write_text((Path(__file__).parent / "suite.py").read_text())
    (tests.parent / "none.ini").write_text("[pytest]\n")
    return tests.parent


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append", help="one of the cases")
    parser.add_argument("--sdist", type=Path, help="the source distribution, if it is there")
    arguments = parser.parse_args(words)
    options = ["-q", "-rfEs", "-c", "none.ini", "-p", "no:cacheprovider", "-p", "no:nbval"]
    command = [sys.executable, "-m", "pytest", *options, "-W", "ignore", "tests/test_cheems.py"]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        theirs = unpacked(arguments.sdist or downloaded(folder), folder)
        for name in arguments.case or CASES:
            print(f"\n{name} {CASES[name]}", flush=True)
            environment = os.environ | dict(
                CHEEMS_CASE=json.dumps(CASES[name]),
                HF_HUB_OFFLINE="1",
                OMP_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join([str(theirs), str(ROOT)]),
            )
            if subprocess.run(command, cwd=theirs, env=environment).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "every case passes")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
