"""`minimal` is the model of the package in one file, and chapter 00 is made of it."""

import ast
from pathlib import Path

import pytest
import torch

from book.notebooks.build_notebooks import read_source
from cheems_ref import minimal
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.verify import check

CHAPTER = Path(__file__).parents[1] / "notebooks/00_cheems_in_one_sitting.py"
PATTERNS = {"SESEIE": 151, "ISES": 65}  # and a length: part of a third chunk, one token of a second


def awake(model):
    """Move every weight from where it starts: a norm at 1 or a D at 1 would hide a missing one.

    States fade slowly, so that they outlive a chunk.
    """
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        scale = 0.3 if weight.ndim < 2 else 0.3 * weight.data.std()
        weight.data += scale * torch.randn(weight.shape, generator=generator).to(weight)
        if name.endswith("A_log"):
            weight.data -= 3
    return model


def pair(m, pattern):
    """Minimal's model and the package's in float64, with the same weights."""
    torch.manual_seed(0)
    mine, theirs = m.Cheems(pattern).double(), CausalLM(ModelConfig(pattern=pattern)).double()
    awake(mine)
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


def ids(length):
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(length))


def is_the_package_s_model(m, pattern):
    """Logits, and the gradient of every parameter, for a whole text and a short one."""
    mine, theirs = pair(m, pattern)
    for length in (1, 7, PATTERNS[pattern]):
        logits, (expected, _) = mine(ids(length)), theirs(ids(length))
        check(f"{pattern}: logits of {length} tokens", logits, expected, tol=1e-12)
        for model, y in ((mine, logits), (theirs, expected)):
            model.zero_grad()
            (y * torch.linspace(-1, 1, y.numel()).view_as(y).double().sin()).sum().backward()
        for name, weight in theirs.named_parameters():
            gradient = mine.get_parameter(name).grad  # with one token, that of a query is zero
            check(f"gradient of {name}", gradient, weight.grad, tol=1e-10, atol=1e-12)


def starts_as_the_package_does(m):
    """The same parameters, drawn from distributions of the same mean and spread."""
    torch.manual_seed(0)
    mine, theirs = m.Cheems("SEIE" * 8), CausalLM(ModelConfig(pattern="SEIE" * 8))
    groups = {}
    for model in (mine, theirs):
        for name, weight in model.named_parameters():
            kind = name.partition("layer.")[2] or name.rpartition(".")[2]
            groups.setdefault(kind, {}).setdefault(model, []).append(weight.detach().flatten())
    for kind, (a, b) in ((kind, map(torch.cat, group.values())) for kind, group in groups.items()):
        spread = b.std().clamp(min=1e-3)
        assert abs(a.mean() - b.mean()) < 4 * spread * (2 / len(b)) ** 0.5, kind
        assert 0.6 < a.std().clamp(min=1e-3) / spread < 1.6, kind


def takes_adamw_s_steps(m):
    """Four steps on a text whose second half is another: the losses of a loop written out."""
    text = torch.cat([torch.arange(500) % 3, torch.arange(500) % 7 + 40])
    torch.manual_seed(0)
    model, plain = m.Cheems("SE").double(), m.Cheems("SE").double()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    losses = list(m.train(model, text, 4, peak=0.02))
    torch.manual_seed(1)
    optimizer, expected = torch.optim.AdamW(plain.parameters()), []
    for share in (1, 0.75, 0.5, 0.25):  # warm-up is over after the first of four steps
        starts = torch.randint(len(text) - m.LENGTH, (m.BATCH, 1)).flatten().tolist()
        windows = torch.stack([text[i : i + m.LENGTH + 1] for i in starts])
        log_p = plain(windows)[:, :-1].log_softmax(-1)
        loss = -log_p.gather(-1, windows[:, 1:, None]).mean()
        gradients = torch.autograd.grad(loss, [*plain.parameters()])
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for weight, gradient in zip(plain.parameters(), gradients, strict=True):
            weight.grad = gradient / norm.clamp(min=1)
        optimizer.param_groups[0]["lr"] = 0.02 * share
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0] - 0.5
    check("losses of four steps", torch.tensor(losses), torch.tensor(expected), tol=1e-5)


def writes_what_is_likely(m):
    """A model that is sure of the next letter of the alphabet, and reads one window at most."""

    def model(ids):
        assert ids.shape[1] <= m.LENGTH
        return 5.0 * torch.nn.functional.one_hot((ids + 1) % 256, 256)

    assert m.write(model, "ab", 5, temperature=0.1) == "abcdefg"
    assert m.write(model, "a" * 300, 2, temperature=0.1) == "a" * 300 + "bc"
    torch.manual_seed(0)
    written = "".join(m.write(model, "a", 1, temperature=2.0)[1:] for _ in range(200))
    assert written.count("b") < 60  # softmax(5 / 2): 0.046


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_loads_the_package_s_weights_and_computes_the_same(pattern):
    is_the_package_s_model(minimal, pattern)
    mine, theirs = pair(minimal, pattern)
    fresh = minimal.Cheems(pattern).double()
    fresh.load_state_dict(theirs.state_dict())  # and the other way round
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), mine.parameters(), strict=True)
    )


def test_it_starts_as_the_package_does():
    starts_as_the_package_does(minimal)


def test_it_trains():
    takes_adamw_s_steps(minimal)


def test_it_writes():
    writes_what_is_likely(minimal)


def parts(source):
    """Functions, classes and constants at the top of a source, by name, as written."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node)
    return found


def different(file, cells):
    """The parts of the file that no cell has, or that a cell has in other words."""
    written = {}
    for cell in cells:
        written |= parts(cell)
    return [name for name, text in parts(file).items() if written.get(name) != text]


def test_the_cells_of_chapter_00_are_the_file():
    file = Path(minimal.__file__).read_text()
    cells = [c.source for c in read_source(CHAPTER).cells if c.cell_type == "code"]
    assert len(parts(file)) > 15
    assert different(file, cells) == []
    edited = [cell.replace("log_decay.mT).tril()", "log_decay.mT)") for cell in cells]
    assert different(file, edited) == ["ssd"]  # the comparison can fail
    assert different(file, [cell for cell in cells if "class PEER" not in cell]) == ["PEER"]
