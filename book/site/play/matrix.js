// The matrix of SSD beside its chain of states: chapter 03, sections 2 to 5.
"use strict";

const l = DATA.dt.length;
const $ = id => document.getElementById(id);
const start = () => ({ A: DATA.A, dt: [...DATA.dt], reset: DATA.dt.map(() => false),
                       n: 2, borders: [4, 8], t: 8, s: 2, step: 0 });
let now = start();
let preview = null;  // the entry under the mouse
let dragged = null;  // the number of the border that is moved

// --- the mathematics ------------------------------------------------------------------------------

const product = numbers => numbers.reduce((a, b) => a * b, 1);

// Equation 3.4: α_t = exp(Δ_t A). A reset is a decay of 0.
function decays({ A, dt, reset }) {
  return dt.map((step, t) => (reset[t] ? 0 : Math.exp(step * A)));
}

// C_t · B_s, over the first n columns.
function score(t, s, n) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += DATA.C[t][i] * DATA.B[s][i];
  return sum;
}

// Equation 3.3: M_ts = (α_t ⋯ α_{s+1}) (C_t · B_s) Δ_s where s ≤ t, else 0.
function matrix(m) {
  const alpha = decays(m);
  const entry = (t, s) => product(alpha.slice(s + 1, t + 1)) * score(t, s, m.n) * m.dt[s];
  return m.dt.map((_, t) => m.dt.map((_, s) => (s <= t ? entry(t, s) : 0)));
}

// Gaussian elimination: subtract a rank-one matrix that clears the largest entry, until nothing but
// rounding is left.
function rank(block) {
  let rest = block.map(row => [...row]);
  const size = () => Math.max(...rest.flat().map(Math.abs));
  const rounding = 1e-12 * size();
  let steps = 0;
  for (; size() > rounding; steps++) {
    const largest = size();
    const i = rest.findIndex(row => row.some(x => Math.abs(x) === largest));
    const j = rest[i].findIndex(x => Math.abs(x) === largest);
    const pivot = rest[i];
    rest = rest.map((row, k) => row.map((x, c) =>
      (k === i || c === j ? 0 : x - row[j] / pivot[j] * pivot[c])));
  }
  return steps;
}

// Chunks as pairs [first token, first token of the next chunk], and the number of a token's chunk.
function chunks({ borders }) {
  const edges = [0, ...borders, l];
  return edges.slice(1).map((end, i) => [edges[i], end]);
}
const chunkOf = t => now.borders.filter(border => border <= t).length;
const uniform = size => DATA.dt.map((_, t) => t).filter(t => t > 0 && t % size === 0);

// The rank of each block below the diagonal: chunk i reads what chunk j wrote.
function ranks(m) {
  const M = matrix(m), all = chunks(m);
  return all.flatMap((rows, i) => all.slice(0, i).map((columns, j) => (
    { i, j, rank: rank(M.slice(...rows).map(row => row.slice(...columns))) })));
}

// The four steps of section 5, for an x of ones. States have n numbers.
function fourSteps(m) {
  const alpha = decays(m), M = matrix(m), all = chunks(m);
  const state = values => Array.from({ length: m.n }, (_, i) => values(i));
  // 1. Inside a chunk: its own block of the matrix.
  const inside = all.map(([first, end]) => M.slice(first, end)
    .map(row => row.slice(first, end).reduce((a, b) => a + b)));
  // 2. Write: what a chunk would leave behind if it began with an empty state.
  const written = all.map(([first, end]) => state(i => {
    let sum = 0;
    for (let s = first; s < end; s++) sum += product(alpha.slice(s + 1, end)) * m.dt[s] * DATA.B[s][i];
    return sum;
  }));
  // 3. Carry: what is left of the state before the chunk, and what the chunk wrote.
  const passed = [], carried = [];
  all.forEach(([first, end], c) => {
    const left = product(alpha.slice(first, end)), before = carried.at(-1) ?? state(() => 0);
    passed.push(before.map(h => left * h));
    carried.push(state(i => passed[c][i] + written[c][i]));
  });
  // 4. Read: each token reads the state before its chunk.
  const across = all.map(([first, end], c) => Array.from({ length: end - first }, (_, row) => {
    const before = c > 0 ? carried[c - 1] : state(() => 0), t = first + row;
    return product(alpha.slice(first, t + 1)) * before.reduce((sum, h, i) => sum + DATA.C[t][i] * h, 0);
  }));
  return { written, passed, carried, across, y: inside.map((rows, c) => rows.map((y, i) => y + across[c][i])).flat() };
}

// --- the pictures ---------------------------------------------------------------------------------

function draw(parent, tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  element.textContent = text;
  parent.append(element);
}

function arrow(x1, y1, x2, y2, width, lit) {
  const stroke = lit ? "var(--orange)" : "var(--quiet)";
  const angle = Math.atan2(y2 - y1, x2 - x1), head = 0.1 + 0.5 * width;
  const point = turn => `${x2 - head * Math.cos(angle + turn)},${y2 - head * Math.sin(angle + turn)}`;
  const line = { x1, y1, x2, y2, stroke, "stroke-width": width };
  draw($("chain"), "line", line);
  draw($("chain"), "polygon", { points: `${point(0.5)} ${x2},${y2} ${point(-0.5)}`, fill: stroke,
                                stroke, "stroke-width": 0.02 });
}

function drawChain() {
  const alpha = decays(now), chain = $("chain"), lit = preview ?? now;
  const isLit = (i, left) => now.step === 0 && lit.s <= i && i <= lit.t && left > 0;
  chain.replaceChildren();
  for (let i = 0; i < l; i++) {
    const left = product(alpha.slice(lit.s + 1, i + 1));
    const x = i + 0.5, onPath = isLit(i, left);
    if (now.dt[i] > 0) arrow(x, 2.85, x, 2.12, 0.03 + 0.1 * Math.min(1, now.dt[i]), i === lit.s && onPath);
    arrow(x, 1.48, x, 0.75, onPath && i === lit.t ? 0.03 + 0.12 * left : 0.03, onPath && i === lit.t);
    if (i > 0) {
      const carries = onPath && i > lit.s;
      const width = 0.015 + 0.14 * (carries ? left : alpha[i]);
      if (alpha[i] > 0) arrow(x - 0.67, 1.8, x - 0.34, 1.8, width, carries);
      else draw(chain, "path", { d: `M${x - 0.5} 1.5v.6`, stroke: "var(--ink)", "stroke-width": 0.08 });
    }
    draw(chain, "circle", { cx: x, cy: 1.8, r: 0.31, fill: "var(--paper)",
                            stroke: onPath ? "var(--orange)" : "var(--quiet)",
                            "stroke-width": onPath ? 0.06 : 0.03 });
    for (const [letter, y] of [["y", 0.45], ["h", 1.8], ["x", 3.1]]) {
      draw(chain, "text", { x, y }, letter + subscript(i));
    }
  }
}

function drawMatrix(moves) {
  const M = matrix(now), largest = Math.max(...M.flat()), picture = $("matrix");
  picture.replaceChildren();
  draw(picture, "text", { x: l / 2, y: -0.82 }, "source s");
  draw(picture, "text", { transform: `translate(-.82 ${l / 2}) rotate(-90)` }, "target t");
  for (let t = 0; t < l; t++) {
    draw(picture, "text", { x: t + 0.5, y: -0.3 }, t);
    draw(picture, "text", { x: -0.35, y: t + 0.5 }, t);
    for (let s = 0; s <= t; s++) {
      const inside = chunkOf(t) === chunkOf(s), fill = inside ? "var(--blue)" : "var(--green)";
      const asleep = (now.step > 0 && now.step < 4 && !inside) || (now.step > 1 && inside);
      const strength = (largest && M[t][s] / largest) * (asleep ? 0.15 : 1);
      draw(picture, "rect", { x: s, y: t, width: 1, height: 1, fill, "fill-opacity": strength,
                              stroke: "var(--line)", "stroke-width": 0.03 });
    }
  }
  drawBlocks(picture);
  if (now.step > 1) drawStates(picture, moves);
  drawEntries(picture);
}

// Steps 2 to 4: the state behind each chunk, a grid of n numbers below it, and what flows through.
// Where nothing but 0 flows, no line is drawn.
function drawStates(picture, moves) {
  const flows = numbers => numbers.some(x => x !== 0);
  const { written, passed, carried, across } = fourSteps(now), all = chunks(now), size = 0.6;
  const shown = now.step === 2 ? written : carried;
  const largest = Math.max(1e-9, ...written.flat().map(Math.abs), ...carried.flat().map(Math.abs));
  const place = c => [(all[c][0] + all[c][1]) / 2 - now.n * size / 2, all[c][1] + 0.15];
  all.slice(0, -1).forEach((chunk, c) => {
    const [x, y] = place(c), stroke = "var(--green)";
    const line = { stroke, "stroke-width": 0.09, fill: "none" };
    if (now.step === 2 && flows(written[c])) {
      draw(picture, "path", { ...line, d: `M${x + now.n * size / 2} ${y - 0.9}v.8` });
    }
    if (now.step === 3 && flows(passed[c])) {
      const [fromX, fromY] = place(c - 1);
      draw(picture, "path", { ...line, d: `M${fromX + now.n * size} ${fromY + size}L${x} ${y}` });
    }
    if (now.step === 4 && flows(across[c + 1])) {
      draw(picture, "path", { ...line, "stroke-dasharray": "0.15 0.1",
                              d: `M${x + now.n * size} ${y + size / 2}H${all[c + 1][1]}` });
    }
    for (let i = 0; i < now.n; i++) {
      const cell = { x: x + i * size, y, width: size, height: size };
      draw(picture, "rect", { ...cell, fill: "var(--paper)" });
      draw(picture, "rect", { ...cell, fill: now.step === 2 ? "var(--amber)" : "var(--green)", stroke,
        "stroke-width": 0.06, "fill-opacity": Math.abs(shown[c][i]) / largest });
      if (moves && now.step === 3 && passed[c][i] !== 0) {  // what the chunk before hands over, on its way
        const [fromX, fromY] = place(c - 1);
        draw(picture, "rect", { ...cell, fill: "var(--green)", stroke, "stroke-width": 0.06, class: "carried",
          style: `--x: ${fromX - x}px; --y: ${fromY - y}px; animation-delay: ${c - 1}s` });
      }
    }
  });
}

function drawBlocks(picture) {
  const all = chunks(now);
  const frame = (i, j, stroke) => draw(picture, "rect", {
    x: all[j][0], y: all[i][0], width: all[j][1] - all[j][0], height: all[i][1] - all[i][0],
    fill: "none", stroke, "stroke-width": 0.07 });
  const blocks = ranks(now);
  for (const { i, j } of blocks) frame(i, j, "var(--green)");
  all.forEach((_, i) => frame(i, i, "var(--blue)"));
  for (const { i, j, rank } of blocks) {
    const [x, y] = [all[j][0], all[i][0]];
    draw(picture, "rect", { x: x + 0.06, y: y + 0.06, width: 0.4, height: 0.44, fill: "var(--paper)" });
    draw(picture, "text", { x: x + 0.26, y: y + 0.29, class: "rank" }, rank);
  }
  for (const border of now.borders) {
    draw(picture, "circle", { cx: border, cy: border, r: 0.2, fill: "var(--paper)", class: "border",
                              stroke: "var(--ink)", "stroke-width": 0.07 });
  }
}

// The entry that is held, with the states that it passes; and, thinner, the one under the mouse.
// While the four steps run, no entry is held or pointed at.
function drawEntries(picture) {
  if (now.step > 0) return;
  const frame = { fill: "none", stroke: "var(--orange)", width: 1 };
  const lit = preview ?? now;
  if (lit.s <= lit.t) {
    draw(picture, "rect", { ...frame, x: lit.s, y: lit.s, height: lit.t - lit.s + 1, "stroke-width": 0.06 });
  }
  if (preview) draw(picture, "rect", { ...frame, x: preview.s, y: preview.t, height: 1, "stroke-width": 0.08 });
  draw(picture, "rect", { ...frame, x: now.s, y: now.t, height: 1, "stroke-width": 0.16 });
}

// --- words and controls ---------------------------------------------------------------------------

const subscript = i => [...String(i)].map(digit => "₀₁₂₃₄₅₆₇₈₉"[digit]).join("");
const number = x => (x === 0 ? "0" : x < 0.001 ? x.toExponential(1) : x.toFixed(3));

// What is held or pointed at, as a product; and the resets that make it 0.
function describe() {
  if (now.step > 0) return "";
  const { t, s, n, dt } = { ...now, ...preview }, entry = `<b>M<sub>${t},${s}</sub></b>`;
  if (s > t) return `${entry} = 0: token ${s} comes after token ${t}.`;
  const names = [], factors = [];
  if (t > s) {
    const between = t > s + 1 ? `α<sub>${t}</sub>${t > s + 2 ? " ⋯ " : " "}` : "";
    names.push(`${between}α<sub>${s + 1}</sub>`);
    factors.push(product(decays(now).slice(s + 1, t + 1)));
  }
  names.push(`(C<sub>${t}</sub>·B<sub>${s}</sub>)`, `Δ<sub>${s}</sub>`);
  factors.push(score(t, s, n), dt[s]);
  const resets = now.reset.map((is, i) => (is && s < i && i <= t ? `α<sub>${i}</sub> = ` : "")).join("");
  return `${entry} = ${names.join(" × ")} = ${factors.map(number).join(" × ")} = `
    + `<b>${number(product(factors))}</b>${resets && `, since ${resets}0`}`;
}

// What the button does next, and what there is to see at each step.
const STEPS = [
  ["Run the four steps", ""],
  ["Next: 2, write", "<b>1, inside.</b> Each chunk is attention on its own few tokens. The green blocks wait."],
  ["Next: 3, carry", "<b>2, write.</b> Each chunk, as if it began with an empty state, leaves a state behind: "
    + "the grid below it, of <i>n</i> numbers."],
  ["Next: 4, read", "<b>3, carry.</b> A state goes from chunk to chunk. It fades by the decays of the chunk that "
    + "it passes, and what this one wrote is added. This is the only step in sequence."],
  ["Done", "<b>4, read.</b> Each token reads the state before its chunk. That fills whole green rows at once, "
    + "and these steps never compute an entry of theirs."],
];

function tellStep() {
  const [button, words] = STEPS[now.step];
  $("next").textContent = button;
  if (now.step < 4) return words;
  const sums = matrix(now).map(row => row.reduce((a, b) => a + b)), { y } = fourSteps(now);
  const off = Math.max(...y.map((value, t) => Math.abs(value - sums[t])));
  return `${words} For an <i>x</i> of ones, steps and matrix differ by ${off ? off.toExponential(0) : "0"}.`;
}

// One slider for each border, the keyboard's way to move it.
function showBorders() {
  if ($("borders").children.length !== now.borders.length) {
    $("borders").replaceChildren(...now.borders.map((_, i) => {
      const slider = document.createElement("input");
      Object.assign(slider, { type: "range", min: 1, max: l - 1, ariaLabel: `border ${i + 1} between chunks` });
      slider.oninput = () => moveBorder(i, Number(slider.value));
      return slider;
    }));
  }
  now.borders.forEach((border, i) => { $("borders").children[i].value = border; });
  $("borders").parentElement.hidden = now.borders.length === 0;
}

function show(moves = false) {
  showBorders();
  $("A").value = now.A;
  $("A-value").textContent = now.A.toFixed(2);
  const size = [...$("chunk").options].find(({ value }) => uniform(value).join() === now.borders.join());
  $("chunk").value = size ? size.value : "free";
  $("step").innerHTML = tellStep();
  $("n").value = now.n;
  for (let t = 0; t < l; t++) {
    $(`dt-${t}`).value = now.dt[t];
    $(`dt-${t}-value`).textContent = now.dt[t].toFixed(2);
    $(`reset-${t}`).checked = now.reset[t];
  }
  $("lit").innerHTML = describe();
  drawChain();
  drawMatrix(moves);
}

function choose(t, s) {
  if (now.step > 0) return;
  now.t = Math.min(Math.max(t, 0), l - 1);
  now.s = Math.min(Math.max(s, 0), l - 1);
  preview = null;
  show();
}

// Where a pointer is, in entries from the upper left corner of the matrix.
function placeOf(event) {
  const box = $("matrix").getBoundingClientRect(), unit = box.width / (l + 1);
  return [(event.clientY - box.top) / unit - 1, (event.clientX - box.left) / unit - 1];
}

// A press holds an entry, or takes a border; a finger or a pressed mouse goes on with it.
function press(event) {
  const [y, x] = placeOf(event);
  const near = now.borders.findIndex(border => Math.hypot(y - border, x - border) < 0.4);
  dragged = near < 0 ? null : near;
  preview = null;
  $("matrix").setPointerCapture(event.pointerId);
  if (dragged === null && y >= 0 && x >= 0) choose(Math.floor(y), Math.floor(x));
}

function point(event) {
  const [y, x] = placeOf(event);
  if (dragged !== null) return moveBorder(dragged, Math.round((x + y) / 2));
  if (now.step > 0) return;
  if (event.buttons) return choose(Math.floor(y), Math.floor(x));
  const [t, s] = [Math.floor(y), Math.floor(x)];
  preview = t >= 0 && s >= 0 && t < l && s < l ? { t, s } : null;
  show();
}

// A border stays between its neighbours.
function moveBorder(i, t) {
  const least = (now.borders[i - 1] ?? 0) + 1, most = (now.borders[i + 1] ?? l) - 1;
  now.borders[i] = Math.min(Math.max(t, least), most);
  show();
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function move(event) {
  const step = ARROWS[event.key];
  if (!step) return;
  event.preventDefault();
  choose(now.t + step[0], now.s + step[1]);
}

function makeTokens() {
  for (let t = 0; t < l; t++) {
    const column = document.createElement("div");
    column.innerHTML = `<input id="dt-${t}" type="range" min="0" max="1" step="0.05"
        aria-label="step size of token ${t}"><output id="dt-${t}-value" for="dt-${t}"></output>
      <input id="reset-${t}" type="checkbox" aria-label="reset the state at token ${t}">`;
    $("tokens").append(column);
    $(`dt-${t}`).oninput = event => { now.dt[t] = Number(event.target.value); show(); };
    $(`reset-${t}`).onchange = event => { now.reset[t] = event.target.checked; show(); };
  }
}

makeTokens();
$("chunk").oninput = event => {
  if (event.target.value !== "free") now.borders = uniform(Number(event.target.value));
  show();
};
for (const name of ["A", "n"]) {
  $(name).oninput = event => { now[name] = Number(event.target.value); show(); };
}
$("start").onclick = () => { now = start(); show(); };
$("next").onclick = () => { now.step = (now.step + 1) % STEPS.length; show(true); };
$("matrix").onpointermove = point;
$("matrix").onpointerdown = press;
$("matrix").onpointerup = event => { dragged = null; point(event); };
$("matrix").onpointerleave = () => { preview = null; show(); };
$("matrix").onkeydown = move;
$("app").hidden = false;
show();
