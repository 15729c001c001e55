// Text, JSON and differences as parts of a document. Whatever a policy wrote is put in as text, never as markup, in
// isolation from the writing direction around it, and with characters that would not be seen spelled out.
"use strict";
(() => {

const LONG_TEXT = 20000;   // characters that are shown at once
const MANY_MEMBERS = 200;  // of an object or a list that are shown at once
const SHORT_JSON = 72;     // characters that stay on one line
const MOST_CELLS = 1e6;    // of the table that compares two texts word by word
// Controls but tab and line feed, soft hyphen, marks of direction, spaces without width, separators of lines.
// eslint-disable-next-line no-control-regex
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]+/g;

// Children come before attributes, and many at once within a span: in an element with dir="auto" each that is added makes
// the browser look through all for the direction.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  made.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  return made;
}

const nameOf = character => "U+" + character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");

function namesOf(characters) {
  const names = [...characters].slice(0, 20).map(nameOf).join(" ");
  return characters.length > 20 ? `${names} … ${characters.length} in all` : names;
}

// The text as nodes: what is not seen is named.
function visible(text) {
  const made = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(UNSEEN)) {
    made.append(text.slice(end, found.index));
    made.append(element("span", {class: "tv-unseen", title: "a character that is not seen"}, namesOf(found[0])));
    end = found.index + found[0].length;
  }
  made.append(text.slice(end));
  return made;
}

// The same as a string, for what holds no nodes.
function plain(text) {
  return String(text).replace(UNSEEN, found => namesOf(found));
}

// A short text within a line.
function inline(text) {
  return element("bdi", {}, visible(String(text)));
}

// A text of any length; the part beyond LONG_TEXT comes on demand.
function block(text, kind = "tv-text") {
  if (text.length <= LONG_TEXT) return element("div", {class: kind, dir: "auto"}, visible(text));
  const cut = LONG_TEXT - (/[\ud800-\udbff]/.test(text[LONG_TEXT - 1]) ? 1 : 0);
  const rest = element("button", {type: "button", class: "tv-more", onclick: () => {
    const more = element("span", {tabindex: "-1"}, visible(text.slice(cut)));
    rest.replaceWith(more);
    more.focus({preventScroll: true});
  }}, `Show the other ${(text.length - cut).toLocaleString("en")} characters`);
  return element("div", {class: kind, dir: "auto"}, visible(text.slice(0, cut)), rest);
}

// A folded part, built when it is first opened.
function folded(title, build, open = false) {
  const made = element("details", {class: "tv-fold"}, element("summary", {}, title));
  let built = false;
  const fill = () => {
    if (built || !made.open) return;
    built = true;
    made.append(...[build()].flat());
  };
  made.open = open;
  made.addEventListener("toggle", fill);
  fill();
  return made;
}

// --- JSON ---

// A number as it was written: a browser's own would lose digits.
class Written {
  constructor(source) { this.source = source; }
}

// The value of a JSON text, {value}; null where it is none.
function read(text) {
  try {
    return {value: JSON.parse(text, (_, value, context) =>
      typeof value === "number" ? new Written(context?.source ?? String(value)) : value)};
  } catch {
    return null;
  }
}

const isLeaf = value => value === null || typeof value !== "object" || value instanceof Written;
const membersOf = value => Array.isArray(value) ? value.map((child, place) => [place, child]) : Object.entries(value);
const sizeOf = value => JSON.stringify(value, (_, child) => child instanceof Written ? child.source : child).length;
const at = (path, key) => `${path}/${String(key).replaceAll("~", "~0").replaceAll("/", "~1")}`;

function leaf(value, mark) {
  if (value instanceof Written) return element("span", {class: "tv-number"}, value.source);
  if (typeof value !== "string") return element("span", {class: "tv-word"}, String(value));
  const text = JSON.stringify(value);
  if (mark?.words) return element("span", {class: "tv-string", dir: "auto"}, mark.words);
  return text.length > LONG_TEXT ? block(text, "tv-string tv-text") : element("span", {class: "tv-string", dir: "auto"}, visible(text));
}

// A JSON value as a tree that folds. `marks` has by path how a part differs: {tag: "ins" | "del", words?}.
function json(value, marks = new Map(), path = "", depth = 0) {
  const mark = marks.get(path);
  const shown = isLeaf(value) ? leaf(value, mark) : composed(value, mark ? new Map() : marks, path, depth);
  return mark && !mark.words ? element(mark.tag, {}, shown) : shown;
}

function composed(value, marks, path, depth) {
  const members = membersOf(value);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (!members.length) return element("span", {class: "tv-word"}, open + close);
  const member = ([key, child], comma) => [
    Array.isArray(value) ? null : [element("span", {class: "tv-key", dir: "auto"}, visible(JSON.stringify(key))), ": "],
    json(child, marks, at(path, key), depth + 1), comma ? ", " : null];
  if (members.every(([, child]) => isLeaf(child)) && sizeOf(value) <= SHORT_JSON) {
    return element("span", {class: "tv-inline"}, open,
      members.flatMap((entry, place) => member(entry, place < members.length - 1).flat()), close);
  }
  const within = [...marks.keys()].some(key => key.startsWith(path + "/"));
  const count = `${members.length} ${Array.isArray(value) ? "entries" : "members"}`;
  const list = (from = 0) => {
    const rows = members.slice(from, from + MANY_MEMBERS).map(entry => element("li", {}, member(entry, false).flat()));
    const left = members.length - from - rows.length;
    const more = left > 0 && element("li", {}, element("button", {type: "button", class: "tv-more", onclick: () => {
      const next = list(from + MANY_MEMBERS);
      more.replaceWith(...next);
      next[0].tabIndex = -1;
      next[0].focus({preventScroll: true});
    }}, `Show ${left} more`));
    return more ? [...rows, more] : rows;
  };
  const made = folded(`${open} ${count} ${close}`, () => element("ul", {class: "tv-members"}, list()), depth < 2 || within);
  made.classList.add("tv-json");
  return made;
}

// --- differences ---

function same(one, other) {
  if (isLeaf(one) || isLeaf(other)) {
    if (one instanceof Written && other instanceof Written) {
      return one.source === other.source || Number(one.source) === Number(other.source) && Math.abs(one.source) < 2 ** 53;
    }
    return one === other;
  }
  const left = membersOf(one), right = new Map(membersOf(other));
  return Array.isArray(one) === Array.isArray(other) && left.length === right.size &&
    left.every(([key, child]) => right.has(key) && same(child, right.get(key)));
}

// Two texts word by word: nodes for each, what only the first has within <ins>, only the second within <del>.
function words(one, other) {
  const left = one.split(/(\s+)/).filter(Boolean), right = other.split(/(\s+)/).filter(Boolean);
  let start = 0, end = 0;
  while (start < Math.min(left.length, right.length) && left[start] === right[start]) start++;
  while (end < Math.min(left.length, right.length) - start && left.at(-1 - end) === right.at(-1 - end)) end++;
  const keep = common(left.slice(start, left.length - end), right.slice(start, right.length - end));
  const nodes = (all, tag, kept) => {
    const made = document.createDocumentFragment();
    let marked = "";
    const flush = () => { if (marked) made.append(element(tag, {}, visible(marked))); marked = ""; };
    all.forEach((word, place) => {
      if (place < start || place >= all.length - end || kept.has(place - start)) {
        flush();
        made.append(visible(word));
      } else marked += word;
    });
    flush();
    return made;
  };
  return [nodes(left, "ins", keep[0]), nodes(right, "del", keep[1])];
}

// Places of a longest common subsequence; none where the texts are too long for that.
function common(left, right) {
  const width = right.length + 1;
  if (left.length * width > MOST_CELLS) return [new Set(), new Set()];
  const longest = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i--) {
    for (let j = right.length - 1; j >= 0; j--) {
      longest[i * width + j] = left[i] === right[j] ? longest[(i + 1) * width + j + 1] + 1 :
        Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const kept = [new Set(), new Set()];
  for (let i = 0, j = 0; i < left.length && j < right.length;) {
    if (left[i] === right[j]) {
      kept[0].add(i++);
      kept[1].add(j++);
    } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return kept;
}

// Marks for two values, and the names of the parts that differ.
function compare(one, other, path = "", name = "", found = {left: new Map(), right: new Map(), names: []}) {
  if (same(one, other)) return found;
  if (isLeaf(one) || isLeaf(other) || Array.isArray(one) !== Array.isArray(other)) {
    const both = typeof one === "string" && typeof other === "string" && words(JSON.stringify(one), JSON.stringify(other));
    found.left.set(path, {tag: "ins", words: both && both[0]});
    found.right.set(path, {tag: "del", words: both && both[1]});
    found.names.push(name || "the whole");
    return found;
  }
  const left = new Map(membersOf(one)), right = new Map(membersOf(other));
  for (const key of new Set([...left.keys(), ...right.keys()])) {
    const inner = typeof key === "number" ? `${name}[${key}]` : name ? `${name}.${key}` : key;
    if (left.has(key) && right.has(key)) compare(left.get(key), right.get(key), at(path, key), inner, found);
    else if (left.has(key)) {
      found.left.set(at(path, key), {tag: "ins"});
      found.names.push(`${inner} (only rehearsed)`);
    } else {
      found.right.set(at(path, key), {tag: "del"});
      found.names.push(`${inner} (only recorded)`);
    }
  }
  return found;
}

// Two results beside each other: {left, right, names}, the first two as nodes.
function difference(rehearsed, recorded) {
  const one = read(rehearsed), other = read(recorded);
  if (one && other) {
    const found = compare(one.value, other.value);
    return {left: json(one.value, found.left), right: json(other.value, found.right), names: found.names};
  }
  const [left, right] = words(rehearsed, recorded);
  const text = nodes => element("div", {class: "tv-text", dir: "auto"}, nodes);
  return {left: text(left), right: text(right), names: rehearsed === recorded ? [] : ["the text"]};
}

// A text as a tree where it is JSON, else as it is.
function jsonText(text) {
  const found = read(text);
  return found ? json(found.value) : block(text);
}

window.EnvaceText = {element, visible, plain, inline, block, folded, jsonText, difference};
})();
