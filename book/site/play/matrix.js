// The matrix of SSD beside its chain of states: chapter 03, sections 2 to 6.
"use strict";

const l = DATA.dt.length;
const $ = id => document.getElementById(id);
const start = () => ({ A: DATA.A, dt: [...DATA.dt], reset: DATA.dt.map(() => false),
                       n: 2, chunk: 4, t: 8, s: 2 });
let now = start();

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

// The rank of each block below the diagonal: chunk i reads what chunk j wrote.
function ranks(m) {
  const M = matrix(m), found = [];
  for (let i = 1; i * m.chunk < l; i++) {
    for (let j = 0; j < i; j++) {
      const rows = M.slice(i * m.chunk, (i + 1) * m.chunk);
      found.push({ i, j, rank: rank(rows.map(row => row.slice(j * m.chunk, (j + 1) * m.chunk))) });
    }
  }
  return found;
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
  const alpha = decays(now), chain = $("chain");
  chain.replaceChildren();
  for (let i = 0; i < l; i++) {
    const left = product(alpha.slice(now.s + 1, i + 1));
    const x = i + 0.5, onPath = now.s <= i && i <= now.t && left > 0;
    arrow(x, 2.85, x, 2.12, 0.03 + 0.1 * Math.min(1, now.dt[i]), i === now.s && onPath);
    arrow(x, 1.48, x, 0.75, onPath && i === now.t ? 0.03 + 0.12 * left : 0.03, onPath && i === now.t);
    if (i > 0) {
      const lit = onPath && i > now.s;
      const width = 0.015 + 0.14 * (lit ? left : alpha[i]);
      if (alpha[i] > 0) arrow(x - 0.67, 1.8, x - 0.34, 1.8, width, lit);
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

function drawMatrix() {
  const M = matrix(now), largest = Math.max(...M.flat()), picture = $("matrix");
  picture.replaceChildren();
  const chunk = t => Math.floor(t / now.chunk);
  draw(picture, "text", { x: l / 2, y: -0.82 }, "source s");
  draw(picture, "text", { transform: `translate(-.82 ${l / 2}) rotate(-90)` }, "target t");
  for (let t = 0; t < l; t++) {
    draw(picture, "text", { x: t + 0.5, y: -0.3 }, t);
    draw(picture, "text", { x: -0.35, y: t + 0.5 }, t);
    for (let s = 0; s <= t; s++) {
      const fill = chunk(t) === chunk(s) ? "var(--blue)" : "var(--green)";
      const strength = largest && M[t][s] / largest;
      draw(picture, "rect", { x: s, y: t, width: 1, height: 1, fill, "fill-opacity": strength,
                              stroke: "var(--line)", "stroke-width": 0.03 });
    }
  }
  drawBlocks(picture);
}

function drawBlocks(picture) {
  const size = now.chunk;
  const frame = (i, j, stroke) => draw(picture, "rect", {
    x: j * size, y: i * size, width: size, height: size, fill: "none", stroke, "stroke-width": 0.07 });
  for (let i = 0; i * size < l; i++) frame(i, i, "var(--blue)");
  const blocks = ranks(now);
  for (const { i, j } of blocks) frame(i, j, "var(--green)");
  const path = { fill: "none", stroke: "var(--orange)", x: now.s, width: 1 };
  if (now.s <= now.t) {
    draw(picture, "rect", { ...path, y: now.s, height: now.t - now.s + 1, "stroke-width": 0.06 });
  }
  draw(picture, "rect", { ...path, y: now.t, height: 1, "stroke-width": 0.16 });
  for (const { i, j, rank } of blocks) {
    const x = (j + 0.5) * size, y = (i + 0.5) * size;
    draw(picture, "circle", { cx: x, cy: y, r: 0.42, fill: "var(--paper)", stroke: "var(--green)",
                              "stroke-width": 0.05 });
    draw(picture, "text", { x, y, "font-weight": "bold" }, rank);
  }
}

// --- words and controls ---------------------------------------------------------------------------

const subscript = i => [...String(i)].map(digit => "₀₁₂₃₄₅₆₇₈₉"[digit]).join("");
const number = x => (x === 0 ? "0" : x < 0.001 ? x.toExponential(1) : x.toFixed(3));

function describe() {
  const { t, s, n, dt } = now, entry = `<b>M<sub>${t},${s}</sub></b>`;
  if (s > t) return `${entry} = 0: token ${s} comes after token ${t}.`;
  const names = [], factors = [];
  if (t > s) {
    const between = t > s + 1 ? `α<sub>${t}</sub>${t > s + 2 ? " ⋯ " : " "}` : "";
    names.push(`${between}α<sub>${s + 1}</sub>`);
    factors.push(product(decays(now).slice(s + 1, t + 1)));
  }
  names.push(`(C<sub>${t}</sub>·B<sub>${s}</sub>)`, `Δ<sub>${s}</sub>`);
  factors.push(score(t, s, n), dt[s]);
  return `${entry} = ${names.join(" × ")} = ${factors.map(number).join(" × ")} = `
    + `<b>${number(product(factors))}</b>`;
}

function show() {
  $("A").value = now.A;
  $("A-value").textContent = now.A.toFixed(2);
  $("chunk").value = now.chunk;
  $("n").value = now.n;
  for (let t = 0; t < l; t++) {
    $(`dt-${t}`).value = now.dt[t];
    $(`dt-${t}-value`).textContent = now.dt[t].toFixed(2);
    $(`reset-${t}`).checked = now.reset[t];
  }
  $("lit").innerHTML = describe();
  drawChain();
  drawMatrix();
}

function choose(t, s) {
  now.t = Math.min(Math.max(t, 0), l - 1);
  now.s = Math.min(Math.max(s, 0), l - 1);
  show();
}

function point(event) {
  const box = $("matrix").getBoundingClientRect(), unit = box.width / (l + 1);
  const t = Math.floor((event.clientY - box.top) / unit - 1);
  const s = Math.floor((event.clientX - box.left) / unit - 1);
  if (t >= 0 && s >= 0) choose(t, s);
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
for (const name of ["A", "chunk", "n"]) {
  $(name).oninput = event => { now[name] = Number(event.target.value); show(); };
}
$("start").onclick = () => { now = start(); show(); };
$("matrix").onpointermove = point;
$("matrix").onpointerdown = point;
$("matrix").onkeydown = move;
$("app").hidden = false;
show();
