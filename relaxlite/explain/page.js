"use strict";
// Data, figures at the symbols' values, long texts, the table of kernels, and the search. graph.js and memory.js draw.

const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const byId = id => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// ---- expressions: a number, a symbol's name, or [operator, operand, ...]; whole numbers, exact below 2^53

const values = Object.fromEntries(data.symbols.map(symbol => [symbol.name, symbol.value]));

function evaluate(tree) {
  if (typeof tree === "number") return tree;
  if (typeof tree === "string") return values[tree];
  const [operator, ...operands] = tree, found = operands.map(evaluate), [a, b] = found;
  switch (operator) {
    case "+": return found.reduce((x, y) => x + y);
    case "*": return found.reduce((x, y) => x * y);
    case "//": return b ? Math.floor(a / b) : 0;
    case "%": return b ? a - b * Math.floor(a / b) : 0;
    case "min": return Math.min(...found);
    case "max": return Math.max(...found);
  }
  throw new Error(`unknown operator ${operator}`);
}

let evaluated = [];
const figure = number => evaluated[number] ??= evaluate(data.figures[number].tree);

function scaled(count, units) {
  let place = 0;
  while (Math.abs(count) >= 999.95 && place < units.length - 1) { count /= 1000; place++; }
  return `${count.toFixed(place ? 1 : 0)} ${units[place]}`.trim();
}
const bytesText = count => scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"]);
const countText = count => scaled(count, ["", "k", "M", "G", "T", "P"]);

// ---- the symbols' values

const listeners = []; // called when a value has changed
const FAR = 4096; // the slider's end for a symbol without an upper bound

function limitsOf(symbol) {
  return [symbol.lower, symbol.upper ?? Math.max(FAR, symbol.lower * 4)];
}

function fitting(symbol, value) {
  const [low] = limitsOf(symbol), step = symbol.divisor, high = symbol.upper ?? Infinity;
  const rounded = Math.round(Math.min(Math.max(value, low), high) / step) * step;
  return rounded < low ? rounded + step : rounded > high ? rounded - step : rounded;
}

// The slider moves by factors, as sizes do: equal steps double the value.
const toSlider = (symbol, value) => {
  const [low, high] = limitsOf(symbol);
  return high > low ? 1000 * Math.log((value + 1) / (low + 1)) / Math.log((high + 1) / (low + 1)) : 0;
};
const fromSlider = (symbol, place) => {
  const [low, high] = limitsOf(symbol);
  return Math.exp(place / 1000 * Math.log((high + 1) / (low + 1))) * (low + 1) - 1;
};

data.symbols.forEach((symbol, k) => {
  const box = document.querySelector(`[data-symbol="${k}"]`), slider = document.querySelector(`[data-slider="${k}"]`);
  const take = value => { values[symbol.name] = value; refresh(); };
  slider.value = toSlider(symbol, symbol.value);
  box.addEventListener("input", () => {
    if (box.value === "" || !box.validity.valid) return;
    slider.value = toSlider(symbol, +box.value);
    take(+box.value);
  });
  slider.addEventListener("input", () => { box.value = fitting(symbol, fromSlider(symbol, +slider.value)); take(+box.value); });
});
byId("symbols")?.addEventListener("submit", event => event.preventDefault());

function refresh() {
  evaluated = [];
  for (const item of all("data.figure")) {
    const value = figure(item.dataset.figure);
    item.value = value;
    item.textContent = item.dataset.unit === "bytes" ? bytesText(value) : countText(value);
  }
  refreshCosts();
  for (const listener of listeners) listener();
}

for (const item of all("data.figure")) item.title = data.figures[item.dataset.figure].text;

// ---- the table of kernels

const costShares = []; // of each kernel's calls together, of all kernels' cost

function refreshCosts() {
  const rows = all("#kernel-table tbody tr").map(row => {
    const [flops, read, written] = all("data.figure", row).map(item => figure(item.dataset.figure));
    return { row, flops, bytes: read + written, cost: Math.max(read + written, flops / data.flopsPerByte) };
  }).filter(item => item.row.querySelector("[data-cost]"));
  const total = rows.reduce((sum, item) => sum + item.cost, 0) || 1;
  for (const { row, flops, bytes, cost } of rows) {
    const ratio = row.querySelector("[data-intensity]"), share = row.querySelector("[data-cost]");
    ratio.textContent = bytes ? (flops / bytes).toFixed(2) : "-";
    costShares[row.dataset.kernel] = cost / total;
    share.textContent = `${(100 * cost / total).toFixed(1)} %`;
    share.parentNode.dataset.value = cost;
    ratio.parentNode.dataset.value = bytes ? flops / bytes : 0;
  }
}

const kernelTable = byId("kernel-table");
all("th", kernelTable).forEach((head, column) => {
  const sort = () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    all("th", kernelTable).forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[column];
      return +(cell.dataset.value ?? cell.querySelector("data")?.value ?? cell.textContent);
    };
    const text = row => row.cells[column].textContent;
    const compare = (a, b) => (isNaN(key(a)) || isNaN(key(b)) ? text(a).localeCompare(text(b)) : key(a) - key(b));
    const body = kernelTable.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(a, b) * (down ? -1 : 1)));
  };
  head.tabIndex = 0;
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
});

// ---- long texts: unpacked and coloured when they are opened

async function unpack(item) {
  if (item.text !== undefined) return item.text;
  const bytes = Uint8Array.from(atob(item.zlib), sign => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

const KINDS = { "-": "gone", "+": "added", "@": "hunk" };
function colour(block) {
  const lines = block.textContent.split("\n"), parts = [];
  for (const line of lines) {
    const kind = KINDS[line[0]], last = parts[parts.length - 1];
    if (last && last.kind === kind) last.lines.push(line); else parts.push({ kind, lines: [line] });
  }
  block.replaceChildren(...parts.flatMap(({ kind, lines }) =>
    kind ? [element("span", { class: kind }, lines.join("\n"))] : [lines.join("\n"), "\n"]));
}

async function openText(block) {
  if (block.dataset.open) return;
  block.dataset.open = "yes";
  if (block.dataset.text) block.textContent = await unpack(data.texts[block.dataset.text]);
  if (block.classList.contains("diff")) colour(block);
}

// "toggle" does not bubble, but can be caught on its way down.
document.addEventListener("toggle", event => {
  if (event.target.open) all(":scope > pre", event.target).forEach(openText);
}, true);

// ---- going to a place: open what holds it, and mark it

function goTo(target) {
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  all(".found").forEach(other => other.classList.remove("found"));
  target.classList.add("found");
  target.scrollIntoView({ block: "start" });
}

function followHash() {
  const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName !== "SECTION") goTo(target);
}
window.addEventListener("hashchange", followHash);
document.addEventListener("click", event => { // also a second time to the same place
  const link = event.target.closest?.("a[href^='#']");
  if (link && link.hash === location.hash) followHash();
});

// ---- search: what is in the page, and the nodes of the graphs

const index = all("[data-find]").map(item => ({ text: item.dataset.find, kind: item.dataset.kind, go: () => { location.hash = item.id; goTo(item); } }));
data.symbols.forEach((symbol, k) => index.push({ text: symbol.name, kind: "symbol", go: () => byId(`symbol-${k}`).focus() }));

const query = byId("query"), results = byId("results");
let found = [], selected = 0;

function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  found = [];
  for (const entry of words.length ? index : []) {
    const text = `${entry.text} ${entry.kind}`.toLowerCase();
    if (words.every(word => text.includes(word)) && found.push(entry) >= 60) break;
  }
  selected = 0;
  results.replaceChildren(...found.map((entry, k) => {
    const item = element("li", { role: "option", id: `result-${k}` }, entry.text, element("small", {}, entry.kind));
    item.addEventListener("mousedown", event => { event.preventDefault(); choose(k); });
    return item;
  }));
  if (words.length && !found.length) results.append(element("li", { "aria-disabled": "true" }, "nothing of that name"));
  showResults(words.length > 0);
}

function showResults(visible) {
  results.hidden = !visible;
  query.setAttribute("aria-expanded", visible);
  all("li", results).forEach((item, k) => item.setAttribute("aria-selected", k === selected && found.length > 0));
  if (visible && found.length) {
    query.setAttribute("aria-activedescendant", `result-${selected}`);
    results.children[selected].scrollIntoView({ block: "nearest" });
  } else query.removeAttribute("aria-activedescendant");
}

function choose(k) {
  const entry = found[k];
  showResults(false);
  if (entry) entry.go();
}

query.addEventListener("input", search);
query.addEventListener("focus", () => { if (query.value) search(); });
query.addEventListener("blur", () => showResults(false));
query.addEventListener("keydown", event => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    selected = (selected + (event.key === "ArrowDown" ? 1 : -1) + found.length) % (found.length || 1);
    showResults(true);
  } else if (event.key === "Enter") { event.preventDefault(); choose(selected); }
  else if (event.key === "Escape") { query.value = ""; showResults(false); query.blur(); }
});
document.addEventListener("keydown", event => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); query.focus(); }
});
