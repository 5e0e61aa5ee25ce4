"""Training runs in a directory: when they save, how they end, what they report."""

import math

import pytest
import torch
from training import a_model, a_text, config, content, everything, names, same, step

from cheems_lab import training
from cheems_lab.checkpoint import newest_checkpoint
from cheems_ref.train import evaluate


def test_a_run_saves_and_evaluates_when_due(tmp_path):
    """Every so many steps, and after the last one; two checkpoints are kept."""
    c, seen, saved = config(training, steps=11), [], []

    def note(run):
        seen.append([run.step, evaluate(run.model, run.ids[-20:], seq_len=8)])
        saved.append((tmp_path / step(run.step)).exists())

    how = dict(directory=tmp_path, checkpoint_every=4, progress_bar=False, after_step=note)
    run = training.train(a_model(), a_text(), c, **how)
    assert [n for n, there in enumerate(saved, 1) if there] == [4, 8, 11]
    assert run.evaluations == [pair for pair in seen if pair[0] in (3, 6, 9, 11)]
    assert names(tmp_path) == [step(8), step(11)]
    assert newest_checkpoint(tmp_path) == tmp_path / step(11)


def test_a_loss_that_is_not_finite_leaves_the_last_checkpoint(tmp_path):
    """Parameters, moments and files are those after step 6."""
    kept = []

    def overflow(run):
        if run.step == 6:
            with torch.no_grad():
                run.model.norm.weight.fill_(3e38)
            kept.append((run, everything(run), content(tmp_path)))

    options = dict(directory=tmp_path, checkpoint_every=4, progress_bar=False, after_step=overflow)
    said = r"diverged in update 7: its loss is (nan|inf), .*the loss before was 2\.\d+\); try a "
    with pytest.raises(FloatingPointError, match=said + r"smaller learning_rate than 0\.002$"):
        training.train(a_model(), a_text(), config(training), **options)
    run, before, files = kept[-1]
    after = everything(run) | {"random state": before["random state"]}  # windows were drawn
    same("after a loss that is not finite", after, before)
    assert content(tmp_path) == files and names(tmp_path) == [step(4)]


def test_a_held_out_loss_that_is_not_finite_is_not_saved(tmp_path):
    """Only the held-out text has the letters whose numbers overflow."""
    text = torch.cat([a_text(190, vocab=8), 8 + a_text(20, vocab=8)])

    def spoil(run):
        if run.step == 3:
            with torch.no_grad():
                run.model.embedding.weight[8:] = math.inf

    model = a_model(tie_embeddings=False)
    options = dict(progress_bar=False, directory=tmp_path, checkpoint_every=4, after_step=spoil)
    said = "diverged in update 5: the held-out loss before it is nan"
    with pytest.raises(FloatingPointError, match=said):
        training.train(
            model, text, config(training, evaluate_every=4, eval_fraction=20 / 210), **options
        )
    assert not names(tmp_path), "it is saved"
