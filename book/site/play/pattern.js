// Parameters, operations and cache of a model, from the letters of its pattern: chapter 07,
// sections 5 to 7. The package computes the same in config.py and budget.py.
"use strict";

const $ = id => document.getElementById(id);
const digits = n => n.toLocaleString("en-US", { maximumFractionDigits: 9 });
const count = (c, letter) => c.pattern.split(letter).length - 1;
const sum = numbers => numbers.reduce((a, b) => a + b, 0);

class Invalid extends Error {}  // a pattern or a size that the package refuses, in its words
function refuseUnless(right, message) {
  if (!right) throw new Invalid(message);
}

// --- the pattern ----------------------------------------------------------------------------------

const quoted = text => (text.includes("'") && !text.includes('"') ? `"${text}"` : `'${text}'`);

// One letter per layer: "SM + SR × 3" becomes SMSRSRSR. As config.expand_pattern.
function expandPattern(pattern) {
  const known = Object.entries(DATA.letters).map(([key, letter]) => `${key} ${letter.name}`);
  for (const letter of pattern.match(/[A-Z]/g) ?? []) {
    refuseUnless(letter in DATA.letters,
      `unknown letter '${letter}' in pattern ${quoted(pattern)}; there are ${known.join(", ")}`);
  }
  const checkLength = (n, made) => refuseUnless(1 <= n && n <= DATA.max_layers,
    `${made} ${digits(n)} layers, not 1 to ${digits(DATA.max_layers)}`);
  // Replace one repeated word, or one bracket without × inside, by its letters.
  const repeated = /([A-Z]+)\s*[×x*]\s*(\d+)|\(([\s+]*[A-Z][A-Z\s+]*)\)/;
  let text = pattern;
  for (let found; (found = repeated.exec(text));) {
    const letters = found[1] ?? found[3].replace(/[\s+]/g, ""), times = Number(found[2] ?? 1);
    checkLength(times * letters.length, `${quoted(found[0])} in pattern ${quoted(pattern)} makes`);
    text = text.replace(repeated, ` ${letters.repeat(times)} `);
  }
  const letters = text.replace(/[\s+]/g, ""), wrong = letters.replace(/[A-Z]/g, "");
  const [first] = [...wrong, ""], small = first !== "x" && first.toUpperCase() in DATA.letters;
  refuseUnless(!wrong, `cannot read ${quoted(first)} in pattern ${quoted(pattern)}: `
    + "letters are capitals, × n follows a word or a bracket, and brackets are closed"
    + (small ? `; did you mean ${quoted(pattern.toUpperCase())}?` : ""));
  checkLength(letters.length, `pattern ${quoted(pattern)} has`);
  return letters;
}

// --- the sizes ------------------------------------------------------------------------------------

function checkSize(name, value) {
  refuseUnless(Number.isInteger(value), `${name} must be a whole number, got ${value ?? "None"}`);
  refuseUnless(value >= 1, `${name} must be at least 1, got ${value}`);
  refuseUnless(value < 2 ** 31, `${name} must be less than 2^31, got ${value}`);
}

const multiple = (name, a, divisor, b) =>
  refuseUnless(a % b === 0, `${name} = ${a} must be a multiple of ${divisor} = ${b}`);
const inPairs = (name, width) => refuseUnless(width % 2 === 0,
  `${name} must be even and at least 2, to be cut into pairs; got ${width}`);
const upTo = (most, name, value) =>
  refuseUnless(value <= most, `${name} must be a number in [1, ${most}], got ${value}`);

const CHECKS = {  // for letters of the pattern, in the order of the package
  S: c => {
    multiple("n_heads", c.n_heads, "n_groups", c.n_groups);
    if (c.d_head === null) multiple("d_model", c.d_model, "n_heads", c.n_heads);
    if (c.position === "rope") inPairs("d_state", c.d_state);
  },
  AI: c => {
    multiple("d_model", c.d_model, "n_heads", c.n_heads);
    multiple("n_heads", c.n_heads, "n_kv_heads", c.n_kv_heads ?? c.n_heads);
    inPairs("d_model / n_heads", c.d_model / c.n_heads);
  },
  I: c => {
    if (c.inner === "ssd") inPairs("d_state", c.d_state);
    refuseUnless(c.inner !== "retrieved" || c.k_values <= c.n_values,
      `k_values must be in [1, n_values = ${c.n_values}], got ${c.k_values}`);
    refuseUnless(c.mask !== "gate" || c.max_positions !== null,
      "mask='gate' needs max_positions, the length of its table");
  },
  RHCX: c => {
    upTo(DATA.max_layers, "n_experts", c.n_experts);
    upTo(c.n_experts, "k_experts", c.k_experts);
  },
  PKE: c => {
    const e = c.n_neurons, r = Math.floor(Math.sqrt(e));
    refuseUnless(r * r === e, "n_neurons must be a square, r keys for each half: "
      + `${e} is not, ${r * r} and ${(r + 1) ** 2} are`);
    upTo(e, "k_neurons", c.k_neurons);
    refuseUnless(c.d_query % 2 === 0,
      `d_query must be even, one half for each set of keys, got ${c.d_query}`);
  },
};

// A whole configuration from some of its fields; refused as ModelConfig refuses it.
function configure(given) {
  const c = { ...DATA.defaults, ...given, pattern: expandPattern(given.pattern) };
  refuseUnless([...DATA.mixers].some(letter => c.pattern.includes(letter)), `pattern `
    + `${quoted(c.pattern)} has none of ${[...DATA.mixers].join(", ")}: no token would see another`);
  for (const [name, { kind }] of Object.entries(DATA.fields)) {
    if (kind === "size" || (kind === "optional" && c[name] !== null)) checkSize(name, c[name]);
  }
  for (const letter of new Set(c.pattern)) {
    try {
      for (const letters in CHECKS) if (letters.includes(letter)) CHECKS[letters](c);
    } catch (error) {
      throw new Invalid(`letter ${letter} (${DATA.letters[letter].name}): ${error.message}`);
    }
  }
  return c;
}

// --- what a layer costs ---------------------------------------------------------------------------

// For each letter, from a configuration c and the number of tokens that the new token sees:
//   matrices  parameters that multiply a token: active, two operations each
//   vectors   active parameters without a matrix product of their own
//   idle      parameters of experts that a token does not choose
//   table     parameters in rows of one-neuron experts; read, those of the rows of a token
//   between   operations with the state or with earlier tokens
const LAYERS = {
  S: c => {
    const hp = c.n_heads * (c.d_head ?? c.d_model / c.n_heads), gn = c.n_groups * c.d_state;
    const taps = c.position === "conv" ? c.d_conv * (hp + 2 * gn) : 0;
    return { matrices: c.d_model * (2 * hp + 2 * gn + c.n_heads), vectors: 3 * c.n_heads + taps,
             between: 2 * gn + 2 * hp + 4 * c.d_state * hp };
  },
  A: (c, seen) => ({ matrices: queriesAndKeys(c) + c.d_model * keyWidth(c),
                     between: 4 * c.d_model * seen }),
  I: (c, seen) => {
    const { matrices, vectors = 0, between = 0 } = INNER[c.inner](c), mask = MASKS[c.mask](c, seen);
    return { matrices: queriesAndKeys(c) + matrices, vectors: vectors + mask.vectors,
             between: between + mask.between + 4 * c.d_model * seen };
  },
  M: c => ({ matrices: 2 * wide(c) }),
  G: c => ({ matrices: 3 * wide(c) }),
  D: c => ({ matrices: 3 * wide(c) }),
  R: c => routed(c, 3 * wide(c)),
  H: c => routed(c, 3 * wide(c), 3 * wide(c)),
  C: c => routed(c, 2 * wide(c), wide(c)),  // V is shared, and multiplied once
  X: c => routed(c, 3 * wide(c) + c.d_model ** 2, 3 * wide(c)),
  P: c => retrieved(c, c.d_model, 2 * c.d_model, 0),
  K: c => {
    const p = c.d_private ?? Math.ceil(c.d_model / 2);
    return retrieved(c, p, 2 * p + c.d_model, 3 * wide(c) + c.d_model * p);
  },
  E: c => retrieved(c, c.d_model, 2 * c.d_model, 2 * wide(c)),
};

const wide = c => c.d_model * c.d_ff;
const keyWidth = c => (c.n_kv_heads ?? c.n_heads) * c.d_model / c.n_heads;
const queriesAndKeys = c => c.d_model * (2 * c.d_model + keyWidth(c));

const INNER = {  // the values of I
  linear: c => ({ matrices: c.d_model * keyWidth(c) }),
  ssd: c => ({ matrices: c.d_model * (2 * c.d_model + 2 * c.d_state + c.n_heads),
               vectors: 3 * c.n_heads, between: 2 * c.d_state * c.d_model }),
  retrieved: c => ({ matrices: c.d_model ** 2 / 2 + 1.5 * c.n_values * c.d_model }),
};

const MASKS = {  // the dynamic mask of I; that of content is computed for every token seen
  null: () => ({ vectors: 0, between: 0 }),
  gate: c => ({ vectors: c.n_heads * c.max_positions, between: 0 }),
  content: (c, seen) => {
    const matrix = c.n_heads * (c.inner === "linear" ? keyWidth(c) : c.d_model);
    return { vectors: matrix + 2 * c.n_heads, between: 2 * matrix * seen };
  },
};

const routed = (c, expert, shared = 0) => ({
  matrices: c.d_model * c.n_experts + c.k_experts * expert + shared,
  idle: (c.n_experts - c.k_experts) * expert,
});

function retrieved(c, width, row, shared) {
  const keys = c.n_retrieval_heads * c.d_query * (width + Math.sqrt(c.n_neurons));
  return { matrices: keys + shared, table: c.n_neurons * row,
           read: c.n_retrieval_heads * c.k_neurons * row };
}

// As budget.count_parameters: for each part all parameters, and those active for one token.
function countParameters(c) {
  const table = c.vocab_size * c.d_model, norms = (c.pattern.length + 1) * c.d_model;
  const head = [c.tie_embeddings ? 0 : table, table];
  const parts = { embedding: [table, 0], head, norms: [norms, norms] };
  for (const letter of new Set(c.pattern)) {
    const { matrices, vectors = 0, idle = 0, table: rows = 0, read = 0 } = LAYERS[letter](c, 1);
    const always = matrices + vectors, both = [always + idle + rows, always + Math.min(read, rows)];
    parts[letter] = both.map(n => n * count(c, letter));
  }
  return parts;
}

// As budget.count_flops for one more token after `context` tokens.
function countFlops(c, context) {
  const parts = { head: 2 * c.vocab_size * c.d_model };
  for (const letter of new Set(c.pattern)) {
    const { matrices, read = 0, between = 0 } = LAYERS[letter](c, context + 1);
    parts[letter] = count(c, letter) * (2 * matrices + 2 * read + between);
  }
  return parts;
}

// As budget.cache_bytes: one row, keys and values in 16 bits, states in 32.
function cacheBytes(c, context) {
  const [s, a, i] = [..."SAI"].map(letter => count(c, letter));
  const key = keyWidth(c), value = c.inner === "linear" ? key : c.d_model;
  const ssd = c.d_head === null ? c.d_model : c.n_heads * c.d_head;
  const states = s * ssd * c.d_state + (c.inner === "ssd" ? i * c.d_model * c.d_state : 0);
  const inputs = (c.d_conv - 1) * (ssd + 2 * c.n_groups * c.d_state);
  return { keys_values: 2 * context * (a * 2 * key + i * (key + value)), states: 4 * states,
           convolutions: c.position === "conv" ? 2 * s * inputs : 0,
           positions: 8 * (context * (a + i) + 1) };
}

// --- the page -------------------------------------------------------------------------------------

const CONTEXTS = Array.from({ length: 15 }, (_, i) => 2 ** (i + 6));
const FIELDS = Object.entries(DATA.fields);
const PAUSE = 500;  // milliseconds after the last key, until what is typed counts
let typing = null;
let clicked = [];  // the patterns before the clicks on letters since the last key
const flopsAt = c => context => sum(Object.values(countFlops(c, context)));
const bytesAt = c => context => sum(Object.values(cacheBytes(c, context)));

function makeControls() {
  const option = word => `<option value="${word ?? ""}">${word ?? "none"}`;
  const control = (id, kind) => (Array.isArray(kind)
    ? `<select id="${id}">${kind.map(option).join("")}</select>`
    : `<input id="${id}" type="${kind === "flag" ? "checkbox" : "number"}" min="1">`);
  $("fields").innerHTML = FIELDS.map(([name, { kind, meaning }]) =>
    `<label><span><code>${name}</code> ${meaning}</span>${control(name, kind)}</label>`).join("");
  $("letters").innerHTML = Object.entries(DATA.letters).map(([key, { name }]) =>
    `<span><button type="button" class="letter ${key}" title="insert">${key}</button> ${name}</span>`).join(" ");
  for (const button of $("letters").querySelectorAll("button")) button.onclick = () => insert(button.textContent);
  $("preset").innerHTML = Object.keys(DATA.presets).map(option).join("");
  $("preset").value = "cheems-320m";
}

// A row of buttons is one tab stop. Tab comes to the button that had the focus last; the arrow keys,
// Home and End move on from there.
function setTabStop(row, stop) {
  for (const button of row.querySelectorAll("button")) button.tabIndex = button === stop ? 0 : -1;
}

function moveInRow(event) {
  const buttons = [...event.currentTarget.querySelectorAll("button")], i = buttons.indexOf(event.target);
  const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (!(to in buttons)) return;
  event.preventDefault();
  buttons[to].focus();
}

// Put a letter where the caret of the pattern is.
function insert(letter) {
  const { selectionStart, selectionEnd } = $("pattern");
  clicked.push($("pattern").value);
  $("pattern").setRangeText(letter, selectionStart, selectionEnd, "end");
  show();
}

// An S becomes an I, and an I an S; the pattern is then written letter by letter.
function drawStack(pattern) {
  $("stack").replaceChildren(...[...pattern].map((letter, i) => {
    const swapped = { S: "I", I: "S" }[letter], tile = document.createElement(swapped ? "button" : "b");
    tile.className = `letter ${letter}`;
    tile.textContent = letter;
    if (swapped) {
      tile.type = "button";
      tile.title = `make it ${swapped}`;
      tile.onclick = () => {
        clicked.push($("pattern").value);
        $("pattern").value = pattern.slice(0, i) + swapped + pattern.slice(i + 1);
        show();
        $("stack").children[i].focus();
      };
    }
    return tile;
  }));
}

function fill(given) {
  const c = { ...DATA.defaults, ...given };
  $("pattern").value = c.pattern;
  for (const [name] of FIELDS) $(name).value = c[name] ?? "";
  $("tie_embeddings").checked = c.tie_embeddings;
}

// What is typed in small letters alone means capitals: "ie x 24" is IE × 24.
const capitals = text => (/[A-Z]/.test(text) ? text
  : text.replace(/x(?!\s*\d)|[a-wyz]/g, letter => letter.toUpperCase()));

function read() {
  const value = ({ value, type }) => (value === "" ? null : type === "number" ? Number(value) : value);
  const given = Object.fromEntries(FIELDS.map(([name]) => [name, value($(name))]));
  return { ...given, pattern: capitals($("pattern").value), tie_embeddings: $("tie_embeddings").checked };
}

// A field is shown if a letter of the pattern takes it, some only if, say, inner is ssd.
function isTaken(name, { only }, c) {
  return ["vocab_size", "d_model", "tie_embeddings"].includes(name) || [...c.pattern].some(letter => {
    const [field, value] = only[letter] ?? [];
    return DATA.letters[letter].fields.includes(name) && (!field || c[field] === value);
  });
}

// The first context at which the larger of two curves is the other one, if they cross. Both are a sum
// of a constant and a multiple of the context, so they cross at most once.
function crossing(one, other) {
  let low = CONTEXTS[0], high = CONTEXTS.at(-1);
  const isMore = n => one(n) > other(n), first = isMore(low);
  if (isMore(high) === first) return null;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (isMore(middle) === first) low = middle;
    else high = middle;
  }
  return high;
}

// Curves over the context, both axes logarithmic: first the preset, then the model. The axes are
// those of the preset, with room for a hundred times as much, so that a change can be seen as one;
// they give way only where a curve would leave them.
function drawCurves(picture, unit, curves, context) {
  const [preset, own] = curves.map(curve => CONTEXTS.map(n => Math.log10(curve(n) / unit)));
  const low = Math.floor(Math.min(Math.min(...preset) - 0.5, ...own));
  const high = Math.ceil(Math.max(Math.max(...preset) + 2, ...own));
  const x = n => 60 + 330 * (Math.log2(n) - 6) / 14;
  const y = value => 190 - 175 * (Math.log10(value / unit) - low) / (high - low);
  const line = power => `<path d="M60 ${y(unit * 10 ** power)}H390"/>`
    + `<text class="end" x="54" y="${y(unit * 10 ** power)}">${digits(10 ** power)}</text>`;
  const cross = crossing(...curves), mark = cross === null ? ""
    : `<path class="crossing" d="M${x(cross)} 15V190"/><text x="${x(cross)}" y="7">${digits(cross)}</text>`;
  const points = curve => CONTEXTS.map(n => `${x(n)},${y(curve(n))}`).join(" ");
  picture.innerHTML = Array.from({ length: high - low + 1 }, (_, i) => line(low + i)).join("")
    + [64, 1024, 16384, 262144].map(n => `<text x="${x(n)}" y="208">${digits(n)}</text>`).join("") + mark
    + curves.map(curve => `<polyline points="${points(curve)}"/>`).join("")
    + `<circle cx="${x(context)}" cy="${y(curves[1](context))}" r="6"/>`;
}

// Numbers for people: 320.1 million, 9.0 GiB.
function inWords(n, isBytes) {
  const units = isBytes ? ["KiB", "MiB", "GiB", "TiB"] : ["thousand", "million", "billion", "trillion"];
  const step = isBytes ? 1024 : 1000;
  let power = -1;
  while (power + 1 < units.length && n >= step) {
    n /= step;
    power += 1;
  }
  return power < 0 ? "" : `${n.toFixed(n < 100 ? 2 : 1)} ${units[power]}`;
}

// A number of the model beside that of the preset: "× 7.90 of the preset", near 1 with three decimals.
function factor(mine, preset) {
  if (mine === preset) return "as the preset";
  const ratio = mine / preset;
  const decimals = ratio < 0.1 ? 4 : Math.abs(ratio - 1) < 0.1 ? 3 : ratio < 10 ? 2 : 1;
  return `× ${ratio.toFixed(decimals)} of the preset`;
}

const sizesOf = c => [0, 1].map(i => sum(Object.values(countParameters(c)).map(both => both[i])));

function showCosts(c, context) {
  const parameters = countParameters(c), flops = countFlops(c, context);
  const [total, active] = sizesOf(c);
  refuseUnless(Number.isSafeInteger(total), "more than 2^53 parameters: too many for this page");
  const preset = configure(DATA.presets[$("preset").value]), [presetTotal, presetActive] = sizesOf(preset);
  const shown = { total: [total, presetTotal], active: [active, presetActive],
                  flops: [c, preset].map(one => flopsAt(one)(context)),
                  bytes: [c, preset].map(one => bytesAt(one)(context)) };
  for (const id in shown) {
    $(`${id}-words`).textContent = inWords(shown[id][0], id === "bytes") || digits(shown[id][0]);
    $(`${id}-value`).textContent = digits(shown[id][0]);
    $(`${id}-factor`).textContent = factor(...shown[id]);
  }
  $("context-value").textContent = digits(context);
  const row = part => [`<b>${part}</b>`, DATA.letters[part]?.name ?? "", count(c, part) || "",
                       ...parameters[part].map(digits), digits(flops[part] ?? 0)];
  $("parts").innerHTML = Object.keys(parameters)
    .map(part => `<tr><td>${row(part).join("</td><td>")}</td></tr>`).join("");
  drawCurves($("bytes"), 2 ** 20, [preset, c].map(bytesAt), context);
  drawCurves($("flops"), 1e9, [preset, c].map(flopsAt), context);
}

function show() {
  clearTimeout(typing);
  $("undo").disabled = clicked.length === 0;
  try {
    const c = configure(read());
    showCosts(c, 2 ** $("context").value);
    for (const [name, field] of FIELDS) $(name).parentElement.hidden = !isTaken(name, field, c);
    drawStack(c.pattern);
    $("message").textContent = "";
  } catch (error) {
    if (!(error instanceof Invalid)) throw error;
    const isEmpty = $("pattern").value.trim() === "";
    $("message").textContent = isEmpty ? "A pattern needs at least one letter." : error.message;
  }
}

makeControls();
$("preset").oninput = () => fill(DATA.presets[$("preset").value]);
$("preset").oninput();
// Half a pattern is wrong more often than not, so a key waits for the next one, or for Enter.
$("app").oninput = event => {
  if (["pattern", "preset"].includes(event.target.id)) clicked = [];
  if (!event.target.matches("#pattern, [type=number]")) return show();
  clearTimeout(typing);
  typing = setTimeout(show, PAUSE);
};
$("app").onkeydown = event => { if (event.key === "Enter" && event.target.matches("input")) show(); };
$("undo").onclick = () => {
  $("pattern").value = clicked.pop();
  show();
};
for (const row of [$("stack"), $("letters")]) {
  row.onkeydown = moveInRow;
  row.addEventListener("focusin", event => setTabStop(row, event.target));
}
$("app").hidden = false;
show();
