/* What the whole page uses: elements, numbers, texts. All text enters as text nodes. */
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const several = runs.length > 1;
const thumbnails = Object.assign({}, ...runs.map((run) => run.thumbnails));
const SVG = "http://www.w3.org/2000/svg";
const MINUS = "\u2212";
const COLOURS = 6;
const DASHES = [[], [7, 4], [2, 3], [11, 3, 2, 3], [5, 2], [1, 4]];
const CHART_HEIGHT = 176;
const PRINTED = { width: 320, height: 150 };
const FOLD_AT = 900;
const SAMPLES = 6;
// What cannot be seen, or turns the text around it: C0 and C1 but tab and line feed, bidi, tags.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e"
    + "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]", "gu");

const byId = (id) => document.getElementById(id);

/* --- text and elements --- */

const escapeOf = (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
const visible = (text) => String(text).replace(HIDDEN, escapeOf);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  return put(node, ...children);
}

function put(node, ...children) {
  for (const child of children.flat()) {
    if (child == null) continue;
    node.append(child instanceof Node ? child : visible(child));
  }
  return node;
}

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return put(node, ...children);
}

/** Rows are lists of texts, nodes, and {number}s, which stand on the right; the first is a heading. */
function table(caption, head, rows, className = "") {
  const isNumber = (value) => typeof value === "object" && value !== null && "number" in value;
  const cell = (value, place) => {
    const name = place === 0 ? "th" : "td";
    const attributes = { scope: place === 0 ? "row" : null, class: isNumber(value) ? "number" : null };
    return make(name, attributes, isNumber(value) ? value.number : value);
  };
  const first = rows.length ? rows[0].cells || rows[0] : [];
  const heading = (name, place) =>
    make("th", { scope: "col", class: isNumber(first[place]) ? "number" : null }, name);
  return make("div", { class: `scroll ${className}`, tabindex: 0, role: "region", "aria-label": caption },
    make("table", { class: className },
      make("caption", {}, make("span", {}, caption)),
      make("thead", {}, make("tr", {}, head.map(heading))),
      make("tbody", {}, rows.map((row) =>
        make("tr", { class: row.differs ? "differs" : null }, (row.cells || row).map(cell))))));
}

/* --- numbers --- */

function format(value) {
  if (value == null) return "\u2013";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(1).replace(/-/g, MINUS).replace("+", "");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  const least = Number.isInteger(value) ? 0 : Math.min(digits, 2);
  const options = { maximumFractionDigits: digits, minimumFractionDigits: least };
  return value.toLocaleString("en", options).replace("-", MINUS);
}

/** With two decimals, or three; more where they would say nothing. */
function fixed(value, digits = 2) {
  const size = Math.abs(value);
  if (value == null || size >= 1000 || (size && size < 0.5 * 10 ** -digits)) return format(value);
  return value.toFixed(digits).replace("-", MINUS);
}

const isZero = (value) => value == null || Math.abs(value) < 5e-4;
const sideOf = (value) => (isZero(value) ? "zero" : value > 0 ? "up" : "down");

function signed(value, digits) {
  if (isZero(value)) return value == null ? "none" : "0";
  return (value > 0 ? "+" : MINUS) + fixed(Math.abs(value), digits);
}

function percent(share) {
  if (share == null) return "\u2013";
  return `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)}%`;
}

const plural = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds == null) return null;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

const instant = (time) => new Date(1000 * time).toISOString().slice(0, 16).replace("T", " ") + " UTC";

/* --- small parts --- */

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const range = document.createRange();
    range.selectNodeContents(button.previousElementSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

function copyable(text) {
  const onclick = () => copy(text, button);
  const button = make("button", { type: "button", class: "control", "aria-label": `Copy ${text}`, onclick },
    "Copy");
  return make("div", { class: "command" }, make("code", {}, text), button);
}

/** No two of 36 lines have both colour and dash in common. */
const dashOf = (place) => DASHES[(place + Math.floor(place / COLOURS)) % DASHES.length];

function swatch(place) {
  const dash = dashOf(place).join(" ");
  const line = { x1: 0, x2: 24, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": dash };
  return sample(place, draw("line", { ...line, stroke: "currentColor" }));
}

function ring(place) {
  const circle = { cx: 12, cy: 4, r: 3, "stroke-width": 2, fill: "none" };
  return sample(place, draw("circle", { ...circle, stroke: "currentColor" }));
}

function sample(place, shape) {
  const look = { class: `swatch s${(place % COLOURS) + 1}`, viewBox: "0 0 24 8" };
  return draw("svg", { ...look, "aria-hidden": "true" }, shape);
}

const runName = (place) => make("span", { class: "run-name" }, swatch(place), runs[place].name);

function fillSelect(select, options) {
  select.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
}

/* --- texts of the model --- */

/** Put a text, or [head, characters left out, tail], into a node; matches of a search are marked. */
function putText(node, text, query) {
  const [head, left, tail] = Array.isArray(text) ? text : [text, 0, ""];
  putMarked(node, head, query);
  if (left) {
    node.append(make("span", { class: "left-out" }, ` [${plural(left, "character")} left out] `));
    putMarked(node, tail, query);
  }
  return node;
}

function putMarked(node, text, query) {
  const lower = text.toLowerCase();
  let from = 0;
  // A letter whose lower case is longer would shift the places.
  while (query && lower.length === text.length) {
    const at = lower.indexOf(query, from);
    if (at < 0) break;
    putEscaped(node, text.slice(from, at));
    const mark = make("mark");
    putEscaped(mark, text.slice(at, at + query.length));
    node.append(mark);
    from = at + query.length;
  }
  putEscaped(node, text.slice(from));
}

function putEscaped(node, text) {
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    node.append(text.slice(from, match.index), make("span", { class: "escape" }, escapeOf(match[0])));
    from = match.index + match[0].length;
  }
  node.append(text.slice(from));
}

const wholeText = (text) => (Array.isArray(text) ? `${text[0]} ${text[2]}` : text || "");

function putPrompt(node, messages, query) {
  for (const message of messages) {
    const block = make("div", { dir: "auto" });
    if (message.role && messages.length > 1) block.append(make("span", { class: "role" }, message.role));
    for (const name of message.images || []) {
      const kept = Object.hasOwn(thumbnails, name);
      block.append(kept ? make("img", { src: thumbnails[name], alt: "image of the prompt" })
        : make("span", { class: "left-out" }, "[image] "));
    }
    node.append(putText(block, message.text, query));
  }
  return node;
}

const trimmed = (text) => (typeof text === "string" ? text.trim() : text);

/** Thought and answer of a completion, folded where long. */
function completionText(completion, query) {
  const box = make("div", { class: "text" });
  if (completion.turns) box.append(putPrompt(make("div", { class: "turns" }), completion.turns, query));
  if (completion.thought != null) {
    const label = make("span", { class: "part" }, "thought");
    const part = make("div", { class: "thought", dir: "auto" }, label);
    box.append(putText(part, trimmed(completion.thought), query));
  }
  const answer = trimmed(completion.answer);
  const label = completion.thought == null ? null : make("span", { class: "part" }, "answer");
  const part = make("div", { dir: "auto" }, label);
  const nothing = make("i", { class: "soft" }, "nothing");
  box.append(wholeText(answer) ? putText(part, answer, query) : put(part, nothing));
  const long = wholeText(completion.thought).length + wholeText(answer).length > FOLD_AT;
  return long ? foldable(box) : box;
}

function foldable(box) {
  box.classList.add("folded");
  const onclick = () => {
    const folded = box.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? "Show all" : "Show less";
  };
  const button = make("button", { type: "button", class: "unfold", "aria-expanded": "false", onclick },
    "Show all");
  return make("div", {}, box, button);
}
