// The page around cheems.js: a text, and what the model does with the chosen byte of it.
"use strict";

const LONGEST = 400, LETTERS = 20;
const ROW = matchMedia("(pointer: coarse)").matches ? 20 : 12;  // pixels, enough for a finger
const $ = id => document.getElementById(id);
const START = $("text").value;
let tokens = [];  // what `next` returned for every byte of the text
let whole = [];  // the same for the whole model, while something is taken away
let chosen = 0;
let firstShown = 0;  // the first byte that has a column
let cursor = null;  // the row and the byte under the mouse, the finger or the arrow keys
let pinned = null;  // the cell that was clicked: it is named when the cursor is on no other
let drawnRows = [];
let writing = null;
const EXPLAINED = { S: "03_state_space_duality", I: "05_inner_function_attention", E: "06_cross_domain_experts" };

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
    const band = (what, rows) => ({ letter, what, rows, layer: i });
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

// Sizes in pixels, and the bytes that have a column. Of a long text, the columns stay where they are
// as long as the chosen byte is among them. `lens` is the room for the predictions at the right.
function layout() {
  const all = $("stack").clientWidth, label = all < 500 ? 40 : 132, lens = all < 500 ? 56 : 118;
  const width = all - label - lens, column = Math.min(Math.max(width / tokens.length, 14), 28);
  const room = Math.floor(width / column + 1e-6);
  firstShown = Math.min(firstShown, chosen, Math.max(0, tokens.length - room));
  firstShown = Math.max(firstShown, chosen - room + 1);
  const end = Math.min(tokens.length, firstShown + room);
  return { label, column, first: firstShown, end, small: all < 500 };
}

// Whether a head is taken away, alone or with its layer; the head of an E's row is null.
const isGone = (layer, head) => [`${layer}`, `${layer}.${head}`].includes($("without").value);

function drawBand(svg, { letter, what, rows, layer }, sizes, y) {
  const { label, column, first, end } = sizes, middle = y + rows.length * ROW / 2;
  const struck = (name, gone) => (gone ? `${name} gone` : name);
  if (what !== "mask") draw(svg, "text", { x: 0, y: middle, class: struck("letter", isGone(layer, null)) },
                            `${layer + 1} ${letter}`);
  if (label > 50) draw(svg, "text", { x: 28, y: middle, class: "what" }, what);
  rows.forEach((values, h) => {
    const head = what === "experts" ? null : h, gone = isGone(layer, head), center = y + (h + 0.5) * ROW;
    if (head !== null) draw(svg, "text", { x: label - 4, y: center, class: struck("number", gone) },
                            label > 50 ? `head ${h + 1}` : h + 1);
    drawnRows.push({ letter, what, layer, head, values, gone, y: y + h * ROW });
    if (gone) {
      draw(svg, "text", { x: label + 4, y: center, class: "what" },
           isGone(layer, null) ? "layer taken away" : "head taken away");
      return;
    }
    values.slice(first, end).forEach((value, i) => {
      if (value < 0.002) return;  // nothing to be seen
      draw(svg, "rect", { x: label + i * column, y: y + h * ROW, width: column - 1, height: ROW - 1,
                          class: what, "fill-opacity": value.toFixed(3) });
    });
  });
  if (what !== "mask") drawLens(svg, layer, label + (end - first) * column + 6, middle, sizes.small);
}

// What the model would predict if it ended after this layer: its first choice, and how likely.
function drawLens(svg, layer, x, y, small) {
  const shares = softmax(predict(tokens[chosen].stream[layer]));
  const [best] = largest(shares, 1), percent = `${(100 * shares[best]).toFixed(0)}${small ? "" : " %"}`;
  draw(svg, "text", { x, y, class: "lens byte" }, sign(best));
  if (!small) draw(svg, "rect", { x: x + 16, y: y - 5, width: 50 * shares[best], height: 10, class: "bar" });
  draw(svg, "text", { x: x + (small ? 16 : 70), y, class: "lens" }, percent);
}

function drawStack() {
  const svg = $("stack"), sizes = layout(), { label, column, first, end } = sizes;
  svg.replaceChildren();
  drawnRows = [];
  if (tokens.length === 0) {
    svg.style.height = "0";
    return;
  }
  tokens.slice(first, end).forEach(({ byte }, i) => draw(svg, "text",
    { x: label + (i + 0.5) * column, y: 10, class: first + i > chosen ? "byte later" : "byte" },
    sign(byte)));
  if (first > 0) draw(svg, "text", { x: 0, y: 10, class: "what" }, `… ${first}${sizes.small ? "" : " earlier"}`);
  draw(svg, "text", { x: label + (end - first) * column + 6, y: 10, class: "what" },
       sizes.small ? "ends, %" : "if it ended here");
  let y = 24;
  for (const band of bands(chosen)) {
    drawBand(svg, band, sizes, y);
    y += band.rows.length * ROW + 5;
  }
  draw(svg, "rect", { x: label + (chosen - first) * column - 1.5, y: 0, width: column + 2,
                      height: y - 3, class: "chosen" });
  svg.style.height = `${y}px`;
  drawCursor();
}

const valueAt = place => drawnRows[place?.row]?.values[place.byte];

// A frame around the cell under the cursor, or else the pinned one, and a line that names it.
function drawCursor() {
  const svg = $("stack");
  svg.querySelector(".cursor")?.remove();
  const place = valueAt(cursor) === undefined ? pinned : cursor, value = valueAt(place);
  if (value === undefined) {
    $("cell").innerHTML = tokens.length ? "Point at a cell, or use the arrow keys, to read what it is. A click keeps it." : "";
    return;
  }
  const { label, column, first, end } = layout(), row = drawnRows[place.row];
  const inView = first <= place.byte && place.byte < end;
  if (inView) draw(svg, "rect", { x: label + (place.byte - first) * column - 0.5, y: row.y - 0.5, width: column,
                      height: ROW, class: "cursor" });
  const chapter = EXPLAINED[row.letter];
  $("cell").innerHTML = `layer ${row.layer + 1} (${row.letter}, <a href="../chapters/${chapter}.html">chapter `
    + `${chapter.slice(0, 2)}</a>)${row.head === null ? "" : `, head ${row.head + 1}`}: `
    + (row.gone ? "taken away" : `${row.what} of “<b></b>”, byte ${place.byte + 1}: <b>${value.toFixed(2)}</b>`);
  if (!row.gone) $("cell").querySelector("b").textContent = nameOf(tokens[place.byte].byte);
}

function placeOf(event) {
  const { label, column, first, end } = layout(), box = $("stack").getBoundingClientRect();
  const x = event.clientX - box.left - label, y = event.clientY - box.top;
  const byte = first + Math.floor(x / column);
  const row = drawnRows.findIndex(one => one.y <= y && y < one.y + ROW);
  if (x < 0) return { row, byte: chosen, isName: row >= 0 };
  return byte < end ? { byte, row, isLetter: y < LETTERS } : null;
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function move(event) {
  if (event.key === "Enter" && cursor?.row >= 0) return toggle(cursor.row);
  const step = MOVES[event.key];
  if (!step || tokens.length === 0) return;
  event.preventDefault();
  const { first, end } = layout(), old = cursor ?? pinned ?? { row: 0, byte: chosen };
  cursor = { row: Math.min(Math.max(old.row + step[0], 0), drawnRows.length - 1),
             byte: Math.min(Math.max(old.byte + step[1], first), end - 1) };
  drawCursor();
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

const temperature = () => Number($("temperature").value);
const sharesOf = bytes => softmax(bytes[chosen].logits.map(logit => logit / temperature()));
const percentOf = share => (share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

function drawNext() {
  const list = $("next");
  list.replaceChildren();
  $("temperature-value").textContent = temperature().toFixed(1);
  $("press").hidden = tokens.length === 0;
  if (tokens.length === 0) return;
  const shares = sharesOf(tokens), before = whole.length ? sharesOf(whole) : null;
  for (const byte of largest(shares, 8)) {
    const button = document.createElement("button"), percent = percentOf(shares[byte]);
    const was = before ? ` <span class="whole">was ${percentOf(before[byte])}</span>` : "";
    button.type = "button";
    button.disabled = byte > 126;  // part of a character
    button.innerHTML = `<b></b><i style="width: ${100 * shares[byte] / 3}%"></i><span>${percent}${was}</span>`;
    button.firstChild.textContent = nameOf(byte);
    if (byte === tokens[chosen + 1]?.byte) button.className = "came";
    button.onclick = () => goOn(byte);
    list.appendChild(document.createElement("li")).append(button);
  }
}

// --- the text -------------------------------------------------------------------------------------

const decoder = new TextDecoder();
const textUpTo = t => decoder.decode(Uint8Array.from(tokens.slice(0, t + 1), token => token.byte));

// The box is as high as its text, up to a limit.
function fitText() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}

function readText() {
  fitText();
  const bytes = new TextEncoder().encode($("text").value).slice(0, LONGEST);
  const away = $("without").value;
  tokens = readOn(tokens, bytes, new Set(away ? [away] : []));
  whole = away ? readOn(whole, bytes, new Set()) : [];
  choose(tokens.length - 1);
}

// What the model makes of the bytes, from where they differ from those that it has read.
function readOn(before, bytes, without) {
  let same = 0;
  while (same < before.length && before[same].byte === bytes[same]) same++;
  const read = before.slice(0, same);
  for (const byte of bytes.slice(same)) read.push(next(byte, read, without));
  return read;
}

// Another model reads the text anew.
function takeAway() {
  const at = chosen, away = $("without").value;
  if (away && whole.length === 0) whole = tokens;
  tokens = [];
  readText();
  choose(at);
}

// Take the head of a row away, or the layer if the row is that of an E; or give it back.
function toggle(row) {
  const { layer, head } = drawnRows[row], away = head === null ? `${layer}` : `${layer}.${head}`;
  stop();
  $("without").value = $("without").value === away ? "" : away;
  takeAway();
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
  readText();
  $("text").scrollTop = $("text").scrollHeight;
}

// Only whole characters fit into a text, so the page draws from ASCII.
function writeOne() {
  const ascii = tokens.at(-1).logits.slice(0, 127);
  goOn(sample(ascii, temperature()));
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

function makeChoices() {
  const heads = { S: config.n_heads, I: config.n_heads, E: config.n_retrieval_heads };
  [...config.pattern].forEach((letter, i) => {
    const group = document.createElement("optgroup");
    group.label = `layer ${i + 1}, ${letter}`;
    group.append(new Option(`layer ${i + 1} (${letter})`, i));
    range(heads[letter]).forEach(h =>
      group.append(new Option(`layer ${i + 1} (${letter}), head ${h + 1}`, `${i}.${h}`)));
    $("without").append(group);
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
makeChoices();
tellRecord();
$("app").hidden = false;
$("text").oninput = () => { stop(); readText(); };
$("chosen").oninput = event => { stop(); choose(Number(event.target.value)); };
$("write").onclick = write;
$("again").onclick = () => {
  stop();
  $("text").value = START;
  $("without").value = "";
  $("temperature").value = 1;
  pinned = null;
  takeAway();
  choose(tokens.length - 1);
};
$("without").oninput = () => { stop(); takeAway(); };
$("temperature").oninput = drawNext;
$("stack").onpointermove = event => { cursor = placeOf(event); drawCursor(); };
$("stack").onpointerdown = event => {
  const place = cursor = placeOf(event);
  if (place?.isName) {
    toggle(place.row);
  } else if (place?.isLetter) {
    stop();
    choose(place.byte);
  } else if (place) {
    pinned = valueAt(place) === undefined ? null : place;
    drawCursor();
  }
};
$("stack").onpointerleave = () => { cursor = null; drawCursor(); };
$("stack").onkeydown = move;
window.onresize = () => { fitText(); drawStack(); };
readText();
