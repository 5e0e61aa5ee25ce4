// A KV cache and a state that is updated by five rules: chapter 02, sections 1 to 7.
"use strict";

const P = 10;  // numbers that a value can be, each with its row of the state
const SHARP = 64;  // what attention multiplies its scores by
const $ = id => document.getElementById(id);
const start = () => ({ rule: "linear attention", n: 8, keys: "random", alpha: 0.9, beta: 1,
                       writes: DATA.cards.slice(0, 3), next: 3, chosen: DATA.names[2] });
const draws = [DATA.keys.random];  // the random keys of the page, and those drawn since
let now = start();
let tried = false;  // whether the last card was written, or new keys drawn: counts are shown then

// --- the mathematics ------------------------------------------------------------------------------

const range = n => Array.from({ length: n }, (_, i) => i);

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

// S q: the state's answer, one number for each value.
const read = (S, q) => S.map(row => dot(row, q));
const fade = (S, alpha) => S.map(row => row.map(x => alpha * x));
const add = (S, v, k) => S.map((row, i) => row.map((x, j) => x + v[i] * k[j]));

// S (I - β k kᵀ) + β v kᵀ = S + β (v - S k) kᵀ
function correct(S, v, k, beta) {
  const answer = read(S, k);
  return add(S, v.map((x, i) => beta * (x - answer[i])), k);
}

// Each rule: what it takes, its formula, and its update of the state S by a value v and a key k.
const RULES = {
  "linear attention": { takes: [], formula: "S + v kᵀ", update: (S, v, k) => add(S, v, k) },
  "Mamba-2": { takes: ["alpha"], formula: "α S + v kᵀ",
    update: (S, v, k, { alpha }) => add(fade(S, alpha), v, k) },
  "Longhorn": { takes: ["beta"], formula: "S + ε (v − S k) kᵀ, ε = β / (1 + β kᵀk)",
    update: (S, v, k, { beta }) => correct(S, v, k, beta / (1 + beta * dot(k, k))) },
  "DeltaNet": { takes: ["beta"], formula: "S + β (v − S k) kᵀ",
    update: (S, v, k, { beta }) => correct(S, v, k, beta) },
  "Gated DeltaNet": { takes: ["alpha", "beta"], formula: "α S + β (v − α S k) kᵀ",
    update: (S, v, k, { alpha, beta }) => correct(fade(S, alpha), v, k, beta) },
};

const oneHot = digit => range(P).map(i => (i === digit ? 1 : 0));

// The key of a name: random ones from the newest draw, or from another that `m` brings along.
function keyOf(name, m) {
  const keys = m.keys === "random" ? m.drawn ?? draws.at(-1) : DATA.keys.orthogonal;
  return keys[m.n][DATA.names.indexOf(name)];
}

// A vector whose direction is uniform: normal numbers, by Box and Muller, over their length.
function randomKey(n) {
  const key = range(n).map(() =>
    Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random()));
  return key.map(x => x / Math.sqrt(dot(key, key)));
}

const drawKeys = () =>
  Object.fromEntries([4, 8, 16].map(n => [n, DATA.names.map(() => randomKey(n))]));

// The state after each write, the first being the empty one.
function states(m) {
  const all = [range(P).map(() => Array(m.n).fill(0))];
  for (const { name, digit } of m.writes) {
    all.push(RULES[m.rule].update(all.at(-1), oneHot(digit), keyOf(name, m), m));
  }
  return all;
}

// Attention over the cache: the share of each value, by a softmax over the cards.
function attend(m, name) {
  const scores = m.writes.map(write => SHARP * dot(keyOf(write.name, m), keyOf(name, m)));
  const powers = scores.map(score => Math.exp(score - Math.max(...scores)));
  const sum = powers.reduce((a, b) => a + b);
  const shares = Array(P).fill(0);
  m.writes.forEach(({ digit }, i) => { shares[digit] += powers[i] / sum; });
  return shares;
}

// The largest, and whatever is within 1 percent of it: two values of one key tie, although other
// keys add a little to one of them. Where all are 0, they equal each other but for rounding.
function winners(numbers) {
  const largest = Math.max(...numbers), close = Math.max(1e-9, 0.01 * Math.abs(largest));
  return range(numbers.length).filter(i => numbers[i] > largest - close);
}

// The number that each name has by now, in the order of their first cards.
function truth(writes) {
  const found = new Map();
  for (const { name, digit } of writes) found.set(name, digit);
  return found;
}

// How many names the state answers right.
function countRight(m) {
  const S = states(m).at(-1);
  return [...truth(m.writes)].filter(([name, digit]) =>
    winners(read(S, keyOf(name, m))).join() === String(digit)).length;
}

// How much of the value on ann's card ann still reads after all cards: the others write zeros (no
// number is -1) with their keys, and erase as they would.
function leftOfAnn(m) {
  const [ann, ...others] = DATA.cards, writes = [ann, ...others.map(card => ({ ...card, digit: -1 }))];
  return read(states({ ...m, writes }).at(-1), keyOf(ann.name, m))[ann.digit];
}

// How many of the first cards were written when a name first answered wrongly; 0 if none did.
function firstMistake(m) {
  const all = states(m);
  return range(m.writes.length).map(i => i + 1).find(count =>
    [...truth(m.writes.slice(0, count))].some(([name, digit]) =>
      winners(read(all[count], keyOf(name, m))).join() !== String(digit))) ?? 0;
}

// --- the pictures ---------------------------------------------------------------------------------

function draw(parent, tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  element.textContent = text;
  parent.append(element);
}

const shade = (value, color) => (value < 0 ? "var(--pink)" : color);
const number = x => x.toFixed(2).replace("-", "−");

// A cell, and what the page says of it under the mouse.
function drawCell(svg, x, y, value, largest, color, words) {
  draw(svg, "rect", { x, y, width: 1, height: 1, class: "cell", fill: shade(value, color),
                      "fill-opacity": Math.min(1, Math.abs(value) / largest).toFixed(3),
                      "data-words": `${words}: ${number(value)}` });
}

// The grid, the last key above it, and at its right what the chosen name reads.
function drawState(flash) {
  const svg = $("state"), all = states(now), S = all.at(-1), n = now.n;
  const largest = Math.max(1, ...S.flat().map(Math.abs));
  svg.replaceChildren();
  svg.setAttribute("viewBox", `-1 -1.7 ${n + 6} ${P + 2.6}`);
  S.forEach((row, i) => {
    draw(svg, "text", { x: -0.5, y: i + 0.5 }, i);
    row.forEach((value, j) => drawCell(svg, j, i, value, largest, "var(--green)",
                                             `S, row ${i}, column ${j + 1}`));
  });
  const last = now.writes.at(-1);
  keyOf(last.name, now).forEach((value, j) => drawCell(svg, j, -1.4, value, 1, "var(--blue)",
                                                       `key of ${last.name}, entry ${j + 1}`));
  draw(svg, "text", { x: n + 0.3, y: -0.9, style: "text-anchor: start" }, last.name);
  if (flash) drawWritten(svg, all, S);
  const answer = read(S, keyOf(now.chosen, now)), best = winners(answer);
  const scale = 3 / Math.max(1, ...answer.map(Math.abs));
  answer.forEach((value, i) => draw(svg, "rect", {
    x: n + 1.2 + Math.min(0, value * scale), y: i + 0.2, width: Math.abs(value * scale), height: 0.6,
    fill: best.includes(i) ? "var(--orange)" : "var(--quiet)",
    "data-words": `${now.chosen} reads of the number ${i}: ${number(value)}` }));
  draw(svg, "path", { d: `M${n + 1.2} 0V${P}`, stroke: "var(--quiet)", "stroke-width": 0.04 });
  draw(svg, "text", { x: n + 2.4, y: P + 0.5 }, `reads ${now.chosen}`);
}

// What the last card wrote, S_t less what was left of S_{t-1}, lights up and fades.
function drawWritten(svg, all, S) {
  const kept = RULES[now.rule].takes.includes("alpha") ? fade(all.at(-2), now.alpha) : all.at(-2);
  S.forEach((row, i) => row.forEach((value, j) => {
    const written = Math.abs(value - kept[i][j]);
    if (written > 0.01) {
      draw(svg, "rect", { x: j, y: i, width: 1, height: 1, class: "written",
                          "fill-opacity": Math.min(1, 2 * written).toFixed(3) });
    }
  }));
}

function drawCache() {
  $("cache").replaceChildren(...now.writes.map(({ name, digit }) => {
    const row = document.createElement("li");
    row.innerHTML = `<b>${name} → ${digit}</b>` + keyOf(name, now)
      .map(x => `<i style="background: ${shade(x, "var(--blue)")}; opacity: ${Math.abs(x).toFixed(2)}"></i>`)
      .join("");
    return row;
  }));
  $("cache").scrollTop = $("cache").scrollHeight;
  if ($("cache").scrollHeight > $("cache").clientHeight) $("cache").tabIndex = 0;
  else $("cache").removeAttribute("tabindex");
}

// "3 ✓", "5 ✗", or of a tie "3=5 ✗".
function verdict(numbers, digit) {
  const said = winners(numbers), right = said.join() === String(digit);
  const few = said.length > 2 ? "?" : said.join("=");
  return `<span class="${right ? "right" : "wrong"}">${few} ${right ? "✓" : "✗"}</span>`;
}

function drawAnswers() {
  const S = states(now).at(-1), held = document.activeElement?.dataset?.name;
  $("answers").replaceChildren(...[...truth(now.writes)].map(([name, digit]) => {
    const answer = read(S, keyOf(name, now)), most = Math.max(1e-9, ...answer.map(Math.abs));
    const bars = answer.map((x, i) => `<rect x="${i}" width=".8" y="${x > 0 ? 10 - 10 * x / most : 10}"
      height="${10 * Math.abs(x) / most}" fill="var(${i === digit ? "--green" : "--quiet"})"/>`);
    const row = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.dataset.name = name;
    button.setAttribute("aria-pressed", String(name === now.chosen));
    button.innerHTML = `<span>${name} → ${digit}</span><svg viewBox="0 0 10 20" preserveAspectRatio="none"
      aria-hidden="true">${bars.join("")}</svg>${verdict(answer, digit)}${verdict(attend(now, name), digit)}`;
    button.onclick = () => { now.chosen = name; show(); };
    row.append(button);
    return row;
  }));
  $("strip").innerHTML = [...truth(now.writes)].map(([name, digit]) =>
    `<span>${name} → ${digit}: ${verdict(read(S, keyOf(name, now)), digit)}</span>`).join("");
  if (held) document.querySelector(`#answers [data-name="${held}"]`)?.focus();
}

// --- words and controls ---------------------------------------------------------------------------

function tell() {
  const wrong = firstMistake(now);
  const { name, digit } = now.writes.at(-1);
  const first = wrong ? `The first ✗ came with card ${wrong}.` : "No ✗ so far.";
  return `Card ${now.writes.length}: ${name} → ${digit}. The state answers ${countRight(now)} of `
    + `${truth(now.writes).size} names right. ${first}`;
}

// What chance does: names right once every card is written, for each width, in every draw so far.
function tellLuck() {
  if (!tried) return "";
  if (now.keys !== "random") return `Orthogonal keys leave nothing to chance. ${tellLeft()}`;
  const right = (n, drawn) => countRight({ ...now, n, drawn, writes: DATA.cards });
  const each = [4, 8, 16].map(n => {
    const counts = draws.map(drawn => right(n, drawn));
    const mean = counts.reduce((a, b) => a + b) / counts.length;
    return `n = ${n}: ${counts.at(-1)}` + (draws.length > 1 ? ` (mean ${mean.toFixed(1)})` : "");
  });
  const which = draws.length > 1 ? `draw ${draws.length}, and the mean of all of them` : "these keys";
  return `Names right after all ${DATA.cards.length} cards, with ${which}: ${each.join(", ")}. ${tellLeft()}`;
}

// Why the rules with a decay or a correction answer fewer of these names than linear attention.
function tellLeft() {
  const [fades, corrects] = ["alpha", "beta"].map(name => RULES[now.rule].takes.includes(name));
  if (!fades && !corrects) return "No card takes anything from an earlier one.";
  return (fades ? "Each card fades all earlier ones. " : "")
    + (corrects ? "Each card first erases along its own key, and so takes a part of every earlier card "
      + "whose key isn't orthogonal. " : "")
    + `Of the value on her first card, ann still reads ${number(leftOfAnn(now))}; linear attention keeps all of it.`;
}

function show(flash = false) {
  for (const name of ["rule", "n", "keys", "alpha", "beta"]) $(name).value = now[name];
  for (const name of ["alpha", "beta"]) {
    $(`${name}-value`).textContent = now[name].toFixed(2);
    $(name).disabled = !RULES[now.rule].takes.includes(name);
    $(name).parentElement.classList.toggle("off", $(name).disabled);
  }
  const card = DATA.cards[now.next];
  $("card").textContent = card ? `${card.name} → ${card.digit}` : "no more cards";
  $("write").disabled = !card;
  $("formula").textContent = `S ← ${RULES[now.rule].formula}`;
  $("cache-count").textContent = now.writes.length * (now.n + P);
  $("state-count").textContent = now.n * P;
  tried ||= !card || draws.length > 1;
  $("told").textContent = tell();
  $("pointed").textContent = "";
  $("luck").textContent = tellLuck();
  $("redraw").disabled = now.keys !== "random";
  drawCache();
  drawState(flash);
  drawAnswers();
}

function write(card) {
  now.writes.push(card);
  now.chosen = card.name;
  show(true);
}

$("rule").innerHTML = Object.keys(RULES).map(name => `<option>${name}</option>`).join("");
$("write").onclick = () => { now.next += 1; write(DATA.cards[now.next - 1]); };
$("rewrite").onclick = () => {
  const name = DATA.names[0];
  write({ name, digit: (truth(now.writes).get(name) + 2) % P });
};
$("again").onclick = () => {
  const { writes, next, chosen } = start();
  now = { ...now, writes, next, chosen };
  show();
};
$("redraw").onclick = () => { draws.push(drawKeys()); show(); };
for (const name of ["rule", "keys"]) $(name).oninput = event => { now[name] = event.target.value; show(); };
for (const name of ["n", "alpha", "beta"]) {
  $(name).oninput = event => { now[name] = Number(event.target.value); show(); };
}
$("state").onpointermove = event => { $("pointed").textContent = event.target.dataset.words ?? ""; };
$("app").hidden = false;
show();
