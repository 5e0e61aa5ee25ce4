"""Mistakes that the properties of test_state_space.py must catch."""

from planting import mistakes
from test_state_space import (
    bilinear_is_its_formula,
    bilinear_is_of_second_order,
    convolution_is_the_recurrence,
    convolution_is_the_sum,
    hippo_is_its_formula,
    kernel_is_the_loop,
    memory_is_the_projection,
    memory_knows_no_unit_of_time,
    polynomials_are_remembered,
    reconstruction_is_legendre_series,
    recurrence_is_the_double_sum,
    recurrence_joins_up,
    recurrence_works_linearly,
    s4d_asks_nothing,
    s4d_convolution_is_its_recurrence,
    s4d_follows_the_sampling_rate,
    s4d_is_accurate_in_float32,
    s4d_is_causal,
    s4d_is_materialised,
    s4d_kernel_is_that_of_the_full_model,
    s4d_starts_where_it_should,
    s4d_steps_add_up,
    samples_move_nothing_before_them,
    zoh_integrates_the_equation,
    zoh_is_the_printed_formula,
    zoh_steps_add_up,
)

from cheems_ref import state_space

ROOMS = (state_space,)


# fmt: off
MISTAKES = mistakes([
    (zoh_integrates_the_equation, {
        "ZOH by dividing by A": [
            ("    return step[:n, :n], step[:n, n]",
             "    A_bar = step[:n, :n]\n"
             "    return A_bar, torch.linalg.pinv(A) @ (A_bar - torch.eye(n).to(A)) @ B")],
        "B̄ of ZOH by Euler": [
            ("return step[:n, :n], step[:n, n]", "return step[:n, :n], dt * B")]}),
    (zoh_is_the_printed_formula, {
        "B̄ of ZOH by Euler, printed formula": [
            ("return step[:n, :n], step[:n, n]", "return step[:n, :n], dt * B")],
        "ZOH transposed": [("return step[:n, :n], step", "return step[:n, :n].mT, step")]}),
    (zoh_steps_add_up, {
        "dt left out of B": [
            ("torch.linalg.matrix_exp(dt * block)",
             "torch.linalg.matrix_exp(torch.cat([dt * block[:, :n], block[:, n:]], dim=1))")]}),
    (bilinear_is_its_formula, {
        "bilinear without its halves": [
            ("identity + dt / 2 * A", "identity + dt * A"),
            ("identity - dt / 2 * A", "identity - dt * A")],
        "bilinear B̄ not solved for": [
            ("return both[:, :-1], both[:, -1]", "return both[:, :-1], dt * B")],
        "ZOH called bilinear": [
            ("    return both[:, :-1], both[:, -1]", "    return discretize_zoh(A, B, dt)")]}),
    (bilinear_is_of_second_order, {
        "explicit Euler": [
            ("identity + dt / 2 * A", "identity + dt * A"),
            ("identity - dt / 2 * A, right", "identity, right")],
        "implicit Euler": [
            ("identity + dt / 2 * A", "identity"),
            ("identity - dt / 2 * A, right", "identity - dt * A, right")]}),
    (recurrence_is_the_double_sum, {
        "as printed: reads before it writes": [
            ("y = states[:, 1:] @ C", "y = states[:, :-1] @ C")],
        "Ā on the wrong side": [("states[-1] @ A_bar.mT + x_k", "states[-1] @ A_bar + x_k")]}),
    (recurrence_joins_up, {
        "initial state not looked at": [
            ('x.new_zeros(n["b"], n["n"]) if initial_state is None else initial_state',
             'x.new_zeros(n["b"], n["n"])')]}),
    (recurrence_works_linearly, {
        "indexing makes the backward pass quadratic": [
            ("for x_k in x.unbind(1):", "for x_k in (x[:, k] for k in range(x.shape[1])):")]}),
    (kernel_is_the_loop, {
        "kernel starts with Ā": [
            ("rows, power = C[None], A_bar", "rows, power = (C @ A_bar)[None], A_bar")],
        "power not squared": [("power = power @ power", "power = power @ A_bar")]}),
    (convolution_is_the_recurrence, {
        "kernel backwards": [
            ("return rows[:length] @ B_bar", "return rows[:length].flip(0) @ B_bar")]}),
    (convolution_is_the_sum, {
        "FFT wraps round": [('size = 2 * n["l"]', 'size = n["l"]')],
        "FFT wraps round at one place": [
            ('size = 2 * n["l"]', 'size = max(2 * n["l"] - 2, 1)')],
        "correlation": [
            ("torch.fft.rfft(kernel, size) *", "torch.fft.rfft(kernel, size).conj() *")]}),
    (samples_move_nothing_before_them, {
        "FFT wraps round: a leak of the future": [('size = 2 * n["l"]', 'size = n["l"]')]}),
    (hippo_is_its_formula, {
        "HiPPO transposed": [(".tril(-1) - (i + 1)", ".triu(1) - (i + 1)")]}),
    (memory_is_the_projection, {
        "HiPPO grows": [
            ("return -torch.outer(B, B).tril(-1) - (i + 1).diag(), B",
             "return torch.outer(B, B).tril(-1) + (i + 1).diag(), B")],
        "HiPPO's diagonal one too small": [
            ("- (i + 1).diag(), B", "- i.diag() - 1e-9 * torch.eye(n).to(B), B")],
        "time of a step not logarithmic": [("math.log1p(1 / k)", "1 / k")]}),
    (memory_knows_no_unit_of_time, {
        "times of steps one late": [("math.log1p(1 / k)", "math.log1p(1 / (k + 1))")]}),
    (polynomials_are_remembered, {
        "1/t left out, as in S4": [("math.log1p(1 / k)", "0.01")],
        "the past turned round": [("z = 2 * past - 1", "z = 1 - 2 * past")]}),
    (reconstruction_is_legendre_series, {
        "polynomials not scaled": [("coefficients * scale @", "coefficients @")],
        "Bonnet's recurrence with a wrong factor": [
            ("- i * legendre[i - 1]", "- legendre[i - 1]")]}),
    (s4d_kernel_is_that_of_the_full_model, {
        "conjugates not counted": [
            ('return 2 * einsum("dn,dnl->dl"', 'return einsum("dn,dnl->dl"')],
        "B̄ of S4D by Euler": [("torch.expm1(exponent) / A", "exponent / A")]}),
    (s4d_convolution_is_its_recurrence, {
        "conjugates counted in the kernel alone": [
            ('return 2 * einsum("bdn,dn->bd"', 'return einsum("bdn,dn->bd"')],
        "rate left out of the forward pass": [
            ("self.kernel(x.shape[1], rate=rate)", "self.kernel(x.shape[1])")],
        "no skip in the step": [
            ("state, C).real + self.D * x, state", "state, C).real, state")],
        "step reads before it writes": [
            ("        state = exponent.exp() * state + B_bar * x[..., None]\n",
             "        old, state = state, exponent.exp() * state + B_bar * x[..., None]\n"),
            ('"bdn,dn->bd", state, C', '"bdn,dn->bd", old, C')]}),
    (s4d_steps_add_up, {
        "B̄ of S4D by Euler: steps": [("torch.expm1(exponent) / A", "exponent / A")],
        "rate not looked at: steps": [("exponent = rate * self", "exponent = self")],
        "rate left out of B̄": [
            ("torch.expm1(exponent) / A", "torch.expm1(exponent / rate) / A")]}),
    (s4d_is_accurate_in_float32, {
        "exp(z) - 1 of small z": [("torch.expm1(exponent)", "(exponent.exp() - 1)")]}),
    (s4d_follows_the_sampling_rate, {
        "rate divides dt": [("exponent = rate * self", "exponent = 1 / rate * self")],
        "rate not looked at": [("exponent = rate * self", "exponent = self")]}),
    (s4d_is_causal, {
        "channels and times exchanged": [
            ("ssm_convolution(kernel, x.mT).mT", "ssm_convolution(kernel, x.mT.roll(1, 1)).mT")]}),
    (s4d_starts_where_it_should, {
        "frequencies from 1": [
            ("math.pi * torch.arange(modes)", "math.pi * torch.arange(1, modes + 1)")],
        "dt uniform, not log-uniform": [
            ("nn.init.uniform_(self.log_dt, math.log(1e-3), math.log(1e-1))",
             "nn.init.uniform_(self.log_dt, 1e-3, 1e-1).log_()")]}),
    (s4d_starts_where_it_should, "legs", {
        "negative half of the frequencies": [("[modes:]", "[:modes]")],
        "rank-one part left in": [("A + torch.outer(B, B) / 2", "A + torch.outer(B, B)")]}),
    (s4d_is_materialised, {
        "no seed for C": [("        nn.init.normal_(self.C)\n", "")],
        "frequencies not set": [("self.A_imag.copy_(math.pi * torch.arange(modes))", "pass")]}),
    (s4d_asks_nothing, {
        "looks at its step size": [
            ("exponent = rate * self.log_dt",
             "check.entries('(-inf, 0]', log_dt=self.log_dt)\n"
             "        exponent = rate * self.log_dt")]}),
])
