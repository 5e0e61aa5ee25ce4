"""Mistakes that the properties of test_minimal.py must catch."""

from planting import mistakes
from test_minimal import (
    is_the_package_s_model,
    starts_as_the_package_does,
    takes_adamw_s_steps,
    writes_what_is_likely,
)

from cheems_ref import minimal

ROOMS = (minimal,)
HELD = {"is_the_package_s_model, SESEIE", "starts_as_the_package_does", "takes_adamw_s_steps"}
HELD |= {"writes_what_is_likely"}

STAIRS = "for b in range(k // (a + 1))"

# fmt: off
MISTAKES = mistakes([
    (is_the_package_s_model, "SESEIE", {
        "attention looks one token ahead": [(".triu(1)", ".triu(2)")],
        "scores not scaled": [("q @ k.mT / math.sqrt(q.shape[-1])", "q @ k.mT")],
        "the state keeps its age only inside a chunk": [
            ("log_decay[:, :, -1:].exp() * state", "state")],
        "a write is not faded to the end of its chunk": [
            ("B.mT @ (to_end.exp() * X)", "B.mT @ X")],
        "the state of an earlier chunk isn't faded when it is read": [
            ("log_decay.exp() * (C @ state if y else 0)", "(C @ state if y else 0)")],
        "a chunk sees only itself": [("(C @ state if y else 0)", "0")],
        "no causal mask inside a chunk": [("M.tril() @ X", "M @ X")],
        "dt scales the decay only": [("dt[..., None] * x, dt * A", "x, dt * A")],
        "no skip": [(" + self.D[:, None, None] * x", "")],
        "rotated backwards": [
            ("cos * first - sin * second, sin * first + cos * second",
             "cos * first + sin * second, cos * second - sin * first")],
        "frequencies of the whole width": [("(x) / half)", "(x) / x.shape[-1])")],
        "B is not rotated": [("rotate(self.B_proj(u))", "self.B_proj(u)")],
        "keys are not rotated": [("rotate(heads(self.k_proj(x)))", "heads(self.k_proj(x))")],
        "heads take every fourth number": [
            ("x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)",
             "x.unflatten(-1, (-1, N_HEADS)).permute(0, 3, 1, 2)")],
        "weights of all rows": [
            ("torch.zeros_like(scores).scatter(-1, rows, best.softmax(-1))", "scores.softmax(-1)")],
        "values without x": [("heads(x) * (weights @ self.values)", "weights @ self.values")],
        "the staircase lacks its last step": [(STAIRS, "for b in range((k - 1) // (a + 1))")],
        "halves of an expert exchanged": [
            ("where[..., 0, a] * keys.shape[2] + where[..., 1, b]",
             "where[..., 1, b] * keys.shape[2] + where[..., 0, a]")],
        "the gate inside SiLU, as WM prints it": [
            ('scores.softmax(-1) * F.silu(einsum("bld,blhkd->blhk", x, self.down[experts]))',
             'F.silu(scores.softmax(-1) * einsum("bld,blhkd->blhk", x, self.down[experts]))')],
        "experts beside the MLP": [
            ("        x = self.shared", "        phi = self.shared"),
            ("return x + self.experts(x)", "return phi + self.experts(x)")],
        "the shared MLP isn't added": [("return x + self.experts(x)", "return self.experts(x)")],
        "no residual stream": [('x = x + block["layer"]', 'x = block["layer"]')],
        "no norm before a layer": [('block["norm"](x)', "x")],
        "no last norm": [("self.norm(x) @ self.embedding", "x @ self.embedding")]}),
    (starts_as_the_package_does, {
        "the embedding as torch starts it": [
            ("        nn.init.normal_(self.embedding.weight, std=0.02)\n", "")],
        "softplus(dt_bias) isn't dt": [("dt.expm1().log()", "dt.log() + 5")],
        "A is not log-uniform but log": [("uniform_(1, 16).log()", "uniform_(1, 16)")],
        "experts as loud as eight": [(" / (EXPERT_HEADS * K_EXPERTS) ** 0.5", "")]}),
    (takes_adamw_s_steps, {
        "predicts the byte it reads": [("windows[:, 1:].flatten()", "windows[:, :-1].flatten()")],
        "gradients add up over steps": [("        optimizer.zero_grad()\n", "")],
        "gradients are not clipped": [
            ("        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "")],
        "the last bytes of the text stay unread": [("len(text) - LENGTH,", "len(text) // 2,")],
        "the rate does not fall": [("steps, 1 - step / steps)", "steps, 1)")]}),
    (writes_what_is_likely, {
        "temperature multiplies": [("[0, -1] / temperature", "[0, -1] * temperature")],
        "the first byte is continued": [("[0, -1] / temperature", "[0, 0] / temperature")],
        "the whole text is read": [("ids[:, -LENGTH:]", "ids")]}),
])
# fmt: on
