// The page: its state, and the parts that show it.
import { $, bytes, clear, count, el, icon, store } from "./dom.js";
import { about, ask } from "./api.js";
import { Grid, HEIGHTS } from "./grid.js";
import { Atlas } from "./atlas.js";
import * as panel from "./panel.js";

const state = { where: "", sort: "", desc: false, hidden: new Set(), row: null, view: "grid" };
const PICTURED = new Set(["image", "video", "frames", "heat"]);
let grid, atlas, columns = [], vectors = [];

const actions = {
  busy: (on) => { $("busy").textContent = on ? "reading…" : ""; $("sheet").setAttribute("aria-busy", String(on)); },
  place: (from, to, total) => { $("place").textContent = total ? `${count(from)} – ${count(to)} of ${count(total)}` : ""; },
  sort: (column) => {
    const same = state.sort === column.path;
    if (same && state.desc) Object.assign(state, { sort: "", desc: false });
    else Object.assign(state, { sort: column.path, desc: same });
    return look();
  },
  statistics: (column, choose = false) => {
    const place = chosen().indexOf(column);
    if (place >= 0) grid.active = { ...grid.active, column: place };
    state.row = null;
    panel.showStatistics(column, actions, choose);
    mark(column.path);
    grid.aside();
  },
  compare: (path, other) => { state.row = null; panel.showComparison(path, other, state.where, actions); mark(null); grid.aside(); },
  filter: (text) => { $("where").value = text; submit(); },
  open: (row, find = false) => { state.row = row; panel.showDocument(row, actions, vectors); if (find) locate(row); },
  moved: (row) => { if (panel.isOpen() && state.row !== null && row !== undefined) { clearTimeout(actions.soon); actions.soon = setTimeout(() => actions.open(row), 120); } },
  step: (by) => { grid.goto(grid.active.row + by); const data = grid.data(grid.active.row); if (data) actions.open(data.row); },
};

async function locate(row) {
  // Where a row is shown, if the filter lets it through.
  try {
    const { place } = await ask("place", { row, where: state.where, sort: state.sort, desc: state.desc });
    if (place !== null) grid.goto(place);
  } catch { /* the panel shows it anyway */ }
}

// --- rows

function note(message, position = null) {
  const node = $("where-note");
  node.hidden = !message;
  node.textContent = message ?? "";
  $("filter").classList.toggle("wrong", Boolean(message));
  if (message && position !== null && document.activeElement === $("where")) $("where").setSelectionRange(position, $("where").value.length);
}

async function look() {
  try {
    const answer = await grid.show({ where: state.where, sort: state.sort, desc: state.desc });
    note(null);
    told(answer.count);
    remember();
    return answer;
  } catch (error) {
    if (error.name !== "AbortError") { note(error.message, error.position ?? null); actions.busy(false); }
    return null;
  }
}

function told(total) {
  const filtered = state.where ? `${count(total)} of ${count(about.rows)} rows` : `${count(about.rows)} rows`;
  $("about").textContent = `${filtered} · ${columns.length} columns · ${bytes(about.bytes)}`;
  const node = $("state");
  node.hidden = total > 0;
  if (total) return;
  const found = state.where
    ? [icon("glass"), el("h2", {}, "No rows match"), el("p", { class: "faint" }, "Try a wider filter."), el("button", { type: "button", class: "plain", onclick: () => { $("where").value = ""; submit(); } }, "Show all rows")]
    : [icon("empty"), el("h2", {}, "Nothing here yet"), el("p", { class: "faint" }, "This dataset has no rows.")];
  clear(node, ...found);
}

function submit() {
  state.where = $("where").value.trim();
  $("clear").hidden = !state.where;
  return look();
}

function remember() {
  const kept = new URLSearchParams();
  if (state.where) kept.set("where", state.where);
  if (state.sort) kept.set("sort", `${state.desc ? "-" : ""}${state.sort}`);
  history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname);
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  state.where = kept.get("where") ?? "";
  const sort = kept.get("sort") ?? "";
  Object.assign(state, { desc: sort.startsWith("-"), sort: sort.replace(/^-/, "") });
  $("where").value = state.where;
  $("clear").hidden = !state.where;
}

// --- columns

function flat(nodes) { return nodes.flatMap((node) => (node.role === "document" && node.children ? flat(node.children) : [node])); }

function chosen() { return columns.filter((column) => !state.hidden.has(column.path)); }

function drawTree() {
  const branch = (nodes, level) => nodes.map((node) => {
    const nested = node.children?.length, leaf = columns.includes(node), shown = !state.hidden.has(node.path);
    const label = el("button", { class: "leaf", type: "button", tabIndex: -1, title: node.type, onclick: () => (leaf ? actions.statistics(node) : toggle(item)) },
      el("span", { class: `dot role-${node.role}`, "aria-hidden": "true" }), el("span", { class: "leaf-name" }, node.name), el("span", { class: "faint leaf-type" }, node.type));
    const twist = nested ? el("button", { class: "twist", type: "button", tabIndex: -1, "aria-label": `Fields of ${node.path}`, onclick: () => toggle(item) }) : "";
    const eye = leaf ? el("button", { class: "eye", type: "button", tabIndex: -1, "aria-pressed": String(shown), "aria-label": `Show ${node.path}`, title: shown ? "Hide" : "Show", onclick: () => hide(node) }, icon("eye")) : "";
    const item = el("li", { role: "treeitem", "aria-level": level, "aria-expanded": nested ? String(node.role === "document") : null, "aria-label": node.path, tabIndex: -1, class: shown ? "" : "off", data: { path: node.path } }, el("div", { class: "leaf-line" }, twist, label, eye));
    if (nested) item.append(el("ul", { role: "group" }, ...branch(node.children, level + 1)));
    return item;
  });
  clear($("tree"), ...branch(about.tree, 1));
  $("tree").querySelector("li")?.setAttribute("tabindex", "0");
  $("columns-count").textContent = state.hidden.size ? `${columns.length - state.hidden.size} of ${columns.length}` : String(columns.length);
}

function toggle(item) { item.setAttribute("aria-expanded", String(item.getAttribute("aria-expanded") !== "true")); }

function hide(node) {
  if (state.hidden.has(node.path)) state.hidden.delete(node.path); else state.hidden.add(node.path);
  drawTree();
  grid.setColumns(chosen());
}

function mark(path) {
  for (const item of $("tree").querySelectorAll("li")) item.classList.toggle("chosen", item.dataset.path === path);
}

function treeKey(event) {
  const items = [...$("tree").querySelectorAll("li")].filter((item) => !item.parentElement.closest('li[aria-expanded="false"]'));
  const at = items.indexOf(document.activeElement);
  if (at < 0) return;
  const item = items[at];
  const go = (next) => { if (next) { item.tabIndex = -1; next.tabIndex = 0; next.focus(); } };
  if (event.key === "ArrowDown") go(items[at + 1]);
  else if (event.key === "ArrowUp") go(items[at - 1]);
  else if (event.key === "Home") go(items[0]);
  else if (event.key === "End") go(items.at(-1));
  else if (event.key === "ArrowRight" && item.getAttribute("aria-expanded") === "false") toggle(item);
  else if (event.key === "ArrowLeft" && item.getAttribute("aria-expanded") === "true") toggle(item);
  else if (event.key === "Enter") item.querySelector(".leaf").click();
  else if (event.key === " ") item.querySelector(":scope > .leaf-line .eye")?.click();
  else return;
  event.preventDefault();
  event.stopPropagation();
}

// --- views, theme, help

function show(view) {
  state.view = view;
  $("sheet").hidden = view !== "grid";
  $("atlas").hidden = view !== "map";
  $("show-grid").setAttribute("aria-pressed", String(view === "grid"));
  $("show-map").setAttribute("aria-pressed", String(view === "map"));
  if (view === "map") atlas.show(vectors, columns).then(() => atlas.canvas?.focus({ preventScroll: true }));
  else { grid.draw(); grid.node.focus({ preventScroll: true }); }
}

function theme() {
  const dark = document.documentElement.dataset.theme !== "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  store("theme", dark ? "dark" : "light");
  atlas.draw();
}

function density() {
  const names = Object.keys(HEIGHTS), at = names.indexOf(grid.node.dataset.height);
  const next = names[(at + 1) % names.length];
  store("height", next);
  grid.setHeight(HEIGHTS[next]);
}

function sidebar(open = $("columns").hidden) {
  $("columns").hidden = !open;
  $("toggle-columns").setAttribute("aria-pressed", String(open));
  $("desk").classList.toggle("without-columns", !open);
}

const KEYS = [
  ["↑ ↓ ← →", "move"], ["Page ↑ ↓", "a page of rows"], ["Home End", "first and last row"], ["Enter", "open the document"], ["Esc", "close"], ["p", "play the sound or film"],
  ["/", "filter"], ["s", "sort by the column"], ["i", "statistics of the column"], ["x", "compare it with another"], ["m", "map and rows"], ["c", "columns"], ["d", "row height"], ["t", "dark or light"], ["?", "this help"],
];
const WORDS = [
  ["score > 0.5", "compare: = != < <= > >="], ["caption ~ dog", "contains a text"], ["caption ~ /^A .*s$/", "a regular expression"], ["label in (cat, dog)", "one of several"], ["label != prediction", "two columns of a row"],
  ["score is missing", "no value; or: is not missing"], ["not published and (a = 1 or b = 2)", "join conditions"], ["author.name = \"Ada L\"", "nested documents, quotes"], ["sunset", "a word alone: in any text"],
];

function help() {
  const table = (pairs, tag) => el("dl", { class: "keys" }, ...pairs.flatMap(([key, what]) => [el("dt", {}, el(tag, {}, key)), el("dd", {}, what)]));
  clear($("help"), el("header", { class: "panel-head" }, el("h2", { id: "help-title" }, "Keys and filters"), el("button", { class: "icon", type: "button", "aria-label": "Close", onclick: () => $("help").close() }, icon("close"))),
    el("div", { class: "help-body" }, el("section", {}, el("h3", {}, "Keys"), table(KEYS, "kbd")), el("section", {}, el("h3", {}, "Filters"), table(WORDS, "code"))));
  $("help").showModal();
}

function closeAll() {
  if (panel.isOpen()) { panel.close(); mark(null); state.row = null; (state.view === "grid" ? grid.node : atlas.canvas)?.focus({ preventScroll: true }); return; }
  if (state.view === "map") show("grid");
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches?.("input, select, textarea")) {
    if (event.key === "Escape") grid.node.focus();
    return;
  }
  const column = chosen()[grid.active.column];
  const keys = {
    "/": () => $("where").select(), "?": help, Escape: closeAll, m: () => show(state.view === "map" ? "grid" : "map"), t: theme, d: density, c: () => sidebar(),
    s: () => column?.sortable && actions.sort(column), i: () => column && actions.statistics(column), x: () => column && actions.statistics(column, true),
  };
  if (!(event.key in keys)) return;
  event.preventDefault();
  if (event.key === "/") $("where").focus();
  keys[event.key]();
}

function wire() {
  for (const [id, name] of [["toggle-columns", "columns"], ["density", "density"], ["theme", "theme"], ["help-open", "help"], ["clear", "close"]]) $(id).append(icon(name));
  document.querySelector(".glass").append(icon("glass"));
  $("filter").addEventListener("submit", (event) => { event.preventDefault(); submit().then((answer) => answer && grid.node.focus()); });
  $("where").addEventListener("input", () => { $("clear").hidden = !$("where").value; if (!$("where").value && state.where) submit(); });
  $("clear").addEventListener("click", () => { $("where").value = ""; submit(); });
  $("theme").addEventListener("click", theme);
  $("density").addEventListener("click", density);
  $("help-open").addEventListener("click", help);
  $("toggle-columns").addEventListener("click", () => sidebar());
  $("show-grid").addEventListener("click", () => show("grid"));
  $("show-map").addEventListener("click", () => show("map"));
  $("panel").addEventListener("click", (event) => { if (event.target.closest("[data-close]")) closeAll(); });
  $("tree").addEventListener("keydown", treeKey);
  document.addEventListener("keydown", key);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    if (!store("theme")) { document.documentElement.dataset.theme = event.matches ? "dark" : "light"; atlas.draw(); }
  });
}

async function begin() {
  wire();
  grid = new Grid(actions);
  atlas = new Atlas(actions);
  if (innerWidth < 900) sidebar(false);
  recall();
  const first = ask("rows", { start: 0, count: 64, where: state.where, sort: state.sort, desc: state.desc }).catch(() => null);
  try {
    Object.assign(about, await ask("dataset"));
  } catch (error) {
    $("state").hidden = false;
    clear($("state"), icon("broken"), el("h2", {}, "The dataset cannot be shown"), el("p", { class: "faint" }, error.message));
    return;
  }
  document.title = `${about.title} · quire`;
  $("title").textContent = about.title;
  $("title").title = about.title;
  columns = flat(about.tree);
  await first;
  const answer = await look();
  prepare(answer);
  document.documentElement.dataset.ready = "1";
}

const phone = () => innerWidth <= 600;

function arrange() {
  // A narrow page shows two or three columns at a time: pictures and texts come first, and ids stay out of the way.
  const order = ["image", "frames", "video", "text", "name", "flag", "number", "moment", "audio", "heat"];
  const rank = (column) => { const at = order.indexOf(grid.looks.get(column.path) ?? column.role); return at < 0 ? order.length : at; };
  columns = [...columns].sort((a, b) => rank(a) - rank(b));
  for (const column of columns) if (column.name === "id") state.hidden.add(column.path);
}

function prepare(answer) {
  // Columns that are empty in the first rows stay out of the way; they can be shown.
  for (const column of answer?.rows.length ? columns : []) {
    const place = answer.columns.indexOf(column.path);
    const values = answer.rows.map((row) => row.cells[place]);
    if (column.path.includes(".") && (values.every((cell) => cell === null) || column.name === "id")) state.hidden.add(column.path);
  }
  vectors = chosen().filter((column) => (grid.looks.get(column.path) ?? column.role) === "vector").map((column) => column.path);
  $("show-map").disabled = !vectors.length;
  if (phone()) arrange();
  const looks = chosen().map((column) => grid.looks.get(column.path) ?? column.role);
  const kept = HEIGHTS[store("height")];
  grid.height = kept ?? (looks.some((name) => PICTURED.has(name)) ? HEIGHTS.middle : HEIGHTS.low);
  drawTree();
  grid.setColumns(chosen());
  grid.node.focus({ preventScroll: true });
}

begin();
