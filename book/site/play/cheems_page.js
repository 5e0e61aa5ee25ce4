// The page around cheems.js: a text, and what the model does with the chosen byte of it.
"use strict";

const LONGEST = 400, ROW = 12;
const $ = id => document.getElementById(id);
const START = $("text").value;
let tokens = [];  // what `next` returned for every byte of the text
let chosen = 0;
let writing = null;

// --- what the picture shows of the chosen byte t --------------------------------------------------

// Equation 3.3: what is left at t of what byte s wrote into the state of a head, α_t ⋯ α_{s+1}.
function left(layer, head, t) {
  const shares = Array(t + 1).fill(1);
  for (let s = t - 1; s >= 0; s--) {
    shares[s] = shares[s + 1] * tokens[s + 1].layers[layer].decays[head];
  }
  return shares;
}

// The share of the experts of byte t that byte s is routed to as well, by the same head.
function shared(layer, t) {
  const experts = token => token.layers[layer].experts.map(({ head, i }) => `${head} ${i}`);
  const mine = new Set(experts(tokens[t]));
  return tokens.map(token => experts(token).filter(one => mine.has(one)).length / mine.size);
}

// A band per layer, two for I: rows of numbers from 0 to 1, one for each byte.
function bands(t) {
  const heads = range(config.n_heads), done = tokens[t].layers;
  return [...config.pattern].flatMap((letter, i) => {
    const band = (what, rows) => ({ letter, what, rows });
    if (letter === "S") return band("state", heads.map(h => left(i, h, t)));
    if (letter === "E") return band("experts", [shared(i, t)]);
    const hidden = h => tokens.slice(0, t + 1).map(s => 1 - Math.exp(s.layers[i].mu[h]));
    return [band("attention", done[i].weights), band("mask", heads.map(hidden))];
  });
}

// --- drawing --------------------------------------------------------------------------------------

function draw(parent, tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  element.textContent = text;
  parent.append(element);
  return element;
}

// A byte in one column: itself, or a sign for white space and for what isn't ASCII.
function sign(byte) {
  if (byte === 32) return "␣";
  if (byte === 10) return "↵";
  return byte > 32 && byte < 127 ? String.fromCharCode(byte) : "·";
}

// Sizes in pixels, and the bytes that have a column. Of a long text, the columns end at the chosen
// byte, or begin with the first.
function layout() {
  const all = $("stack").clientWidth, label = all < 500 ? 22 : 92;
  const column = Math.min(Math.max((all - label) / tokens.length, 14), 28);
  const room = Math.floor((all - label) / column + 1e-6), first = Math.max(0, chosen - room + 1);
  return { label, column, first, end: Math.min(tokens.length, first + room) };
}

function drawBand(svg, { letter, what, rows }, { label, column, first, end }, y) {
  const middle = y + rows.length * ROW / 2;
  if (what !== "mask") draw(svg, "text", { x: 8, y: middle, class: "letter" }, letter);
  if (label > 50) draw(svg, "text", { x: 20, y: middle, class: "what" }, what);
  rows.forEach((values, h) => {
    values.slice(first, end).forEach((value, i) => {
      if (value < 0.002) return;  // nothing to be seen
      const cell = draw(svg, "rect", { x: label + i * column, y: y + h * ROW, width: column - 1,
        height: ROW - 1, class: what, "fill-opacity": value.toFixed(3) });
      draw(cell, "title", {}, value.toFixed(3));
    });
  });
}

function drawStack() {
  const svg = $("stack"), sizes = layout(), { label, column, first, end } = sizes;
  svg.replaceChildren();
  if (tokens.length === 0) return;
  tokens.slice(first, end).forEach(({ byte }, i) => draw(svg, "text",
    { x: label + (i + 0.5) * column, y: 10, class: first + i > chosen ? "byte later" : "byte" },
    sign(byte)));
  let y = 24;
  for (const band of bands(chosen)) {
    drawBand(svg, band, sizes, y);
    y += band.rows.length * ROW + 5;
  }
  draw(svg, "rect", { x: label + (chosen - first) * column - 1.5, y: 0, width: column + 2,
                      height: y - 3, class: "chosen" });
  svg.style.height = `${y}px`;
}

// The experts of one E layer: row i and column j of the square is expert i·r + j (equation 6.4).
function drawExperts(svg) {
  const experts = token => token.layers[svg.dataset.layer].experts;
  const looks = Array(config.n_neurons).fill("unused");
  for (const token of tokens) experts(token).forEach(({ i }) => { looks[i] = "used"; });
  if (tokens.length) experts(tokens[chosen]).forEach(({ i, head }) => { looks[i] = `head-${head % 2}`; });
  looks.forEach((look, i) => svg.children[i].setAttribute("class", look));
}

// --- the next byte --------------------------------------------------------------------------------

function nameOf(byte) {
  if (byte === 32) return "space";
  if (byte === 10) return "new line";
  return byte > 32 && byte < 127 ? String.fromCharCode(byte) : `byte ${byte}`;
}

function drawNext() {
  const list = $("next");
  list.replaceChildren();
  if (tokens.length === 0) return;
  const shares = softmax(tokens[chosen].logits);
  for (const byte of largest(shares, 8)) {
    const button = document.createElement("button"), share = 100 * shares[byte];
    const percent = share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
    button.type = "button";
    button.disabled = byte > 126;  // part of a character
    button.innerHTML = `<b></b><i style="width: ${share / 2}%"></i><span>${percent}</span>`;
    button.firstChild.textContent = nameOf(byte);
    if (byte === tokens[chosen + 1]?.byte) button.className = "came";
    button.onclick = () => goOn(byte);
    list.appendChild(document.createElement("li")).append(button);
  }
}

// --- the text -------------------------------------------------------------------------------------

const decoder = new TextDecoder();
const textUpTo = t => decoder.decode(Uint8Array.from(tokens.slice(0, t + 1), token => token.byte));

function readText() {
  const bytes = new TextEncoder().encode($("text").value).slice(0, LONGEST);
  let same = 0;
  while (same < tokens.length && tokens[same].byte === bytes[same]) same++;
  tokens = tokens.slice(0, same);
  for (const byte of bytes.slice(same)) tokens.push(next(byte, tokens));
  choose(tokens.length - 1);
}

function choose(t) {
  chosen = Math.min(Math.max(t, 0), Math.max(tokens.length - 1, 0));
  $("chosen").max = Math.max(tokens.length - 1, 0);
  $("chosen").value = chosen;
  $("which").textContent = tokens.length === 0 ? "Type a text."
    : `“${nameOf(tokens[chosen].byte)}”, ${chosen + 1} of ${tokens.length}`;
  drawStack();
  drawNext();
  document.querySelectorAll("#experts svg").forEach(drawExperts);
}

// Put a byte behind the chosen one; what came after it goes.
function goOn(byte) {
  $("text").value = textUpTo(chosen) + String.fromCharCode(byte);
  $("text").scrollTop = $("text").scrollHeight;
  readText();
}

// Only whole characters fit into a text, so the page draws from ASCII.
function writeOne() {
  const ascii = tokens.at(-1).logits.slice(0, 127);
  goOn(sample(ascii, 0.7));
}

function stop() {
  clearInterval(writing);
  writing = null;
  $("write").textContent = "Let it write";
}

function write() {
  if (writing !== null) return stop();
  if (tokens.length === 0) return;
  choose(tokens.length - 1);
  $("write").textContent = "Stop";
  const end = Math.min(tokens.length + 100, LONGEST);
  writing = setInterval(() => (tokens.length < end ? writeOne() : stop()), 60);
}

function makeExperts() {
  const r = Math.sqrt(config.n_neurons);
  [...config.pattern].forEach((letter, i) => {
    if (letter !== "E") return;
    const figure = document.createElement("figure");
    figure.innerHTML = `<svg viewBox="0 0 ${r} ${r}" role="img" data-layer="${i}"
        aria-label="Experts of layer ${i + 1}"></svg><figcaption>layer ${i + 1}</figcaption>`;
    for (const expert of range(config.n_neurons)) {
      draw(figure.firstChild, "rect", { x: expert % r, y: Math.floor(expert / r), width: 0.9, height: 0.9 });
    }
    $("experts").append(figure);
  });
}

function tellRecord() {
  const { text, parameters, held_out, bigram, command, versions } = CHEEMS.record;
  $("source").textContent = text;
  $("parameters").textContent = parameters.toLocaleString("en");
  $("held-out").textContent = held_out.toFixed(2);
  $("bigram").textContent = bigram.toFixed(2);
  $("command").textContent = command;
  $("versions").textContent = `Python ${versions.python}, PyTorch ${versions.torch}`;
}

makeExperts();
tellRecord();
$("app").hidden = false;
$("text").oninput = () => { stop(); readText(); };
$("chosen").oninput = event => { stop(); choose(Number(event.target.value)); };
$("write").onclick = write;
$("again").onclick = () => { stop(); $("text").value = START; readText(); };
$("stack").onpointerdown = event => {
  const { label, column, first } = layout();
  const x = event.clientX - $("stack").getBoundingClientRect().left - label;
  if (x < 0) return;
  stop();
  choose(first + Math.floor(x / column));
};
window.onresize = drawStack;
readText();
