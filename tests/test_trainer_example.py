"""examples/train_with_trainer.py: its training equals a loop without the library; it goes on after
a stop, loads as it says, and refuses what it cannot do in one line.

The properties of runs are in trainer_runs.py.
"""

import math
import re

import pytest
import torch
from trainer_runs import TEXT, by_hand, example, goes_on, trains_as_by_hand, whole, words
from transformers import AutoTokenizer

from cheems_ref.verify import check

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of runs that several tests share."""
    return tmp_path_factory.mktemp("runs")


def refuses(folder, capsys, message, *more):
    """Check that the example refuses the arguments in one line and writes nothing."""
    arguments = words(folder, *more)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        example.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line) and ended.value.code == 2
    assert sorted(folder.rglob("*")) == before, "it writes"


@pytest.mark.parametrize("has_property", [trains_as_by_hand, goes_on], ids=lambda p: p.__name__)
def test_the_example(has_property, folder):
    has_property(folder)


def test_it_says_the_loss_and_how_its_model_is_loaded(folder):
    """The lines that are printed give the model that was trained, and a tokenizer is beside it."""
    trainer, own, said = whole(folder)
    nats = by_hand()[1][-1]
    loss = f"held-out loss per byte: {nats:.3f} nats, {nats / math.log(2):.3f} bits\n"
    _, found, load = said.partition(loss)
    assert found, said
    names = {}
    exec(load, names)
    assert names["model"].config.use_cache
    ids = torch.tensor([list(TEXT[:40].encode("utf-8"))])
    with torch.no_grad():
        check("logits", names["model"](ids).logits, trainer.model.eval()(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(own / "run")
    assert tokenizer(TEXT[:40])["input_ids"] == ids[0].tolist()


def test_a_directory_of_another_run_or_of_something_else_is_left_alone(tmp_path, capsys):
    run = tmp_path / "run"
    example.newest(run, dict(pattern="SE", sharded=True))
    refuses(tmp_path, capsys, "a run with another .*pattern")
    (run / "checkpoint-3").mkdir()
    (run / "checkpoint-3" / "trainer_state.json").touch()
    with pytest.raises(ValueError, match="sharded model, which cannot go on"):
        example.newest(run, dict(pattern="SE", sharded=True))
    (run / "run.json").unlink()
    refuses(tmp_path, capsys, "run holds something else")
