// A whole Cheems, from a byte to the logits of the next one: S, I and E of chapter 07.
//
// Every layer is a function (x, W, before, gone) of one byte. x is its copy of the stream, W its
// weights under the package's names, before what it returned for the earlier bytes: its cache, and
// gone(h) says whether the reader has taken head h away. It returns y, which is added to the stream,
// and whatever later bytes or the page ask for.
"use strict";

// --- vectors are arrays of numbers, matrices are arrays of rows -----------------------------------

const range = n => Array.from({ length: n }, (_, i) => i);
const plus = (a, b) => a.map((value, i) => value + b[i]);
const times = (matrix, x) => matrix.map(row => dot(row, x));
const silu = x => x / (1 + Math.exp(-x));
const softplus = x => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

// Σ_j weights[j] rows[j]
function mix(weights, rows) {
  const sum = new Array(rows[0].length).fill(0);
  rows.forEach((row, j) => row.forEach((value, i) => { sum[i] += weights[j] * value; }));
  return sum;
}

function softmax(scores) {
  const highest = Math.max(...scores), powers = scores.map(score => Math.exp(score - highest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map(power => power / sum);
}

// Where the k largest are, the largest first; of two equal ones the earlier.
const largest = (scores, k) => range(scores.length).sort((i, j) => scores[j] - scores[i]).slice(0, k);

// The part of each head.
function split(x, heads) {
  const width = x.length / heads;
  return range(heads).map(h => x.slice(h * width, (h + 1) * width));
}

// --- every layer: norm and position ---------------------------------------------------------------

// Chapter 07, equation 7.1, right.
function rmsNorm(z, weight) {
  const size = Math.sqrt(dot(z, z) / z.length + config.norm_eps);
  return z.map((value, i) => value / size * weight[i]);
}

// Chapter 04, equations 4.2 and 4.7: coordinates i and i + half are a pair, turned by t θ_i.
function rotate(x, t) {
  const half = x.length / 2;
  return x.map((value, i) => {
    const angle = t * config.rope_base ** (-2 * (i % half) / x.length);
    const quarterTurn = i < half ? -x[i + half] : x[i - half];
    return Math.cos(angle) * value + Math.sin(angle) * quarterTurn;
  });
}

// --- S: a state that decays (chapter 03) ----------------------------------------------------------

// Equation 3.4 for every head, with B and C rotated (equation 4.9) and the skip D x:
// h_t = e^(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ,  y_t = h_t C_t + D x_t.
function stateLayer(x, W, before, gone) {
  const t = before.length, values = split(times(W.x_proj.weight, x), config.n_heads);
  const B = rotate(times(W.B_proj.weight, x), t), C = rotate(times(W.C_proj.weight, x), t);
  const steps = plus(times(W.dt_proj.weight, x), W.dt_bias).map(softplus);  // Δ_t
  const decays = steps.map((step, h) => Math.exp(-step * Math.exp(W.A_log[h])));
  const old = t > 0 ? before[t - 1].states : null;
  const states = values.map((value, h) => value.map((x_i, i) => B.map((B_j, j) =>
    (old ? decays[h] * old[h][i][j] : 0) + steps[h] * x_i * B_j)));
  const read = values.map((value, h) => (gone(h) ? value.map(() => 0)
    : plus(times(states[h], C), value.map(x_i => W.D[h] * x_i))));
  return { y: times(W.out_proj.weight, read.flat()), states, decays };
}

// --- I: attention with computed values and a dynamic mask (chapter 05) ----------------------------

// Equation 5.3, over this byte and the earlier ones: w_ts ∝ exp(q_t·k_s / √p + μ_s).
function attentionLayer(x, W, before, gone) {
  const rotated = matrix => split(times(matrix, x), config.n_heads)
    .map(head => rotate(head, before.length));
  const q = rotated(W.q_proj.weight), k = rotated(W.k_proj.weight);
  const v = retrievedValues(x, W.inner), mu = contentMask(v, W.mask);
  const seen = [...before, { k, v, mu }];  // the static mask: nothing later is there
  const weights = q.map((query, h) => softmax(seen.map(s =>
    dot(query, s.k[h]) / Math.sqrt(query.length) + s.mu[h])));
  const read = weights.map((row, h) =>  // equation 5.1
    mix(row.map(share => (gone(h) ? 0 : share)), seen.map(s => s.v[h])));
  return { y: times(W.out_proj.weight, read.flat()), k, v, mu, weights };
}

// Equation 5.2: x times a weighted sum of the rows that fit it best, for every head.
function retrievedValues(x, W) {
  const queries = split(times(W.query_proj.weight, x), config.n_heads);
  return split(x, config.n_heads).map((part, h) => {
    const scores = times(W.keys[h], queries[h]).map(score => score / Math.sqrt(queries[h].length));
    const best = largest(scores, config.k_values);
    const row = mix(softmax(best.map(j => scores[j])), best.map(j => W.values[h][j]));
    return row.map((value, i) => value * part[i]);
  });
}

// Chapter 05, section 6: μ_s = -a softplus(u·v_s + ν), the log of the share that is left of a key.
function contentMask(v, W) {
  const steps = plus(times(W.dt_proj.weight, v.flat()), W.dt_bias).map(softplus);
  return steps.map((step, h) => -Math.exp(W.A_log[h]) * step);
}

// --- E: a shared MLP, and experts of one neuron behind it (chapter 06) ----------------------------

// Section 8, equation 6.7, right, with φ added: y = φ + Σ g_i SiLU(φ·down_i) up_i, φ = FFN(x).
function expertLayer(x, W, before, gone) {
  const phi = times(W.shared.out_proj.weight, times(W.shared.in_proj.weight, x).map(silu));
  const { down, up } = W.experts, experts = route(phi, W.experts);
  const active = experts.map(({ head, gate, i }) =>  // equation 6.5
    (gone(head) ? 0 : gate * silu(dot(phi, down[i]))));
  return { y: plus(phi, mix(active, experts.map(({ i }) => up[i]))), experts };
}

// Equations 6.4 and 6.5: every head finds the k best of r² experts with 2r keys.
function route(x, W) {
  const queries = split(times(W.query_proj.weight, x), config.n_retrieval_heads);
  return queries.flatMap((query, head) => {
    const [a, b] = split(query, 2).map((half, side) => times(W.keys[head][side], half));
    const k = config.k_neurons, columns = largest(b, k);
    const sums = largest(a, k).flatMap(row =>
      columns.map(column => ({ head, i: row * b.length + column, score: a[row] + b[column] })));
    const best = largest(sums.map(sum => sum.score), k).map(place => sums[place]);
    const gates = softmax(best.map(sum => sum.score));
    return best.map((sum, place) => ({ ...sum, gate: gates[place] }));
  });
}

// --- the model (chapter 07) -----------------------------------------------------------------------

const LAYERS = { S: stateLayer, I: attentionLayer, E: expertLayer };

// One byte behind the earlier ones, which this function has returned: section 2, with the cache of
// section 7. The logits are those of the byte that comes next. `without` has the layers, "6", and the
// heads, "6.3", that are taken away; `stream` is what the stream carries after each layer.
function next(byte, before, without = new Set()) {
  let z = model.embedding.weight[byte], stream = [];
  const layers = model.blocks.map(({ norm, layer }, i) => {
    const letter = LAYERS[config.pattern[i]];
    const done = letter(rmsNorm(z, norm.weight), layer, before.map(token => token.layers[i]),
                        h => without.has(`${i}.${h}`));
    if (!without.has(String(i))) z = plus(z, done.y);  // equation 7.1
    stream.push(z);
    return done;
  });
  return { byte, layers, stream, logits: predict(z) };
}

// The logits of the next byte, if the stream went to the head as it is.
const predict = z => times(model.embedding.weight, rmsNorm(z, model.norm.weight));

// Section 8: draw a byte from softmax(logits / T).
function sample(logits, temperature) {
  let rest = Math.random();
  return softmax(logits.map(logit => logit / temperature)).findIndex(p => (rest -= p) < 0);
}

// --- the weights ----------------------------------------------------------------------------------

// A number from 16 bits: a sign, five bits of exponent, ten of fraction. No weight is infinite.
function float16(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

function decode(base64) {
  const text = atob(base64);
  return Float64Array.from(range(text.length / 2), i =>
    float16(text.charCodeAt(2 * i) | text.charCodeAt(2 * i + 1) << 8));
}

// A vector stays one array; of a matrix, the rows are the arrays.
function rows(numbers, [n, ...inner]) {
  if (inner.length === 0) return numbers;
  const size = numbers.length / n;
  return range(n).map(i => rows(numbers.subarray(i * size, (i + 1) * size), inner));
}

// "blocks.0.norm.weight" becomes blocks[0].norm.weight.
function load(weights) {
  const root = {};
  for (const [name, { shape, float16 }] of Object.entries(weights)) {
    const path = name.split("."), last = path.pop();
    const place = path.reduce((at, part) => (at[part] ??= {}), root);
    place[last] = rows(decode(float16), shape);
  }
  return { ...root, blocks: Object.values(root.blocks) };
}

const config = CHEEMS.config, model = load(CHEEMS.weights);
