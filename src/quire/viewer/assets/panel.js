// The side panel: one document with its nearest neighbours, or the statistics of a column.
import { $, clear, count, el, icon, number } from "./dom.js";
import { about, ask } from "./api.js";
import { image, spark, tree } from "./cells.js";
import { histogram, label, statistics } from "./charts.js";

const node = $("panel");
let asked = 0;

export const isOpen = () => !node.hidden;

export function close() {
  node.hidden = true;
  $("desk").classList.remove("with-panel");
  node.replaceChildren();
  asked += 1;
}

function open(title, note, tools, ...content) {
  node.hidden = false;
  $("desk").classList.add("with-panel");
  clear(node,
    el("header", { class: "panel-head" }, el("div", { class: "panel-title" }, el("h2", {}, title), el("p", { class: "faint ellipsis", title: note }, note)), el("div", { class: "panel-tools" }, ...tools, el("button", { class: "icon", type: "button", "aria-label": "Close", title: "Close (Esc)", data: { close: "1" } }, icon("close")))),
    el("div", { class: "panel-body" }, ...content));
}

const failed = (error) => el("p", { class: "problem", role: "alert" }, icon("broken"), ` ${error.message}`);
const waiting = () => el("div", { class: "skeleton", "aria-label": "Loading" }, el("i", {}), el("i", {}), el("i", {}), el("i", {}));

// --- a document

export async function showDocument(row, actions, vectors) {
  const own = (asked += 1);
  const step = (by, name) => el("button", { class: "icon", type: "button", "aria-label": name, title: name, onclick: () => actions.step(by) }, icon(by < 0 ? "up" : "down"));
  const tools = [step(-1, "Previous row"), step(1, "Next row")];
  if (!isOpen() || node.dataset.kind !== "document") open(`Row ${count(row)}`, about.document, tools, waiting());
  node.dataset.kind = "document";
  let content;
  try {
    const answer = await ask("document", { row });
    if (own !== asked) return;
    content = [tree(answer.document.fields, row)];
  } catch (error) {
    if (own !== asked) return;
    content = [failed(error)];
  }
  if (vectors.length) content.push(neighbours(row, vectors, actions));
  const before = node.querySelector(".panel-body")?.scrollTop ?? 0;
  open(`Row ${count(row)}`, about.document, tools, ...content);
  node.dataset.row = row;
  node.querySelector(".panel-body").scrollTop = before;
}

const near = { path: "", metric: "cosine" };

function neighbours(row, vectors, actions) {
  if (!vectors.includes(near.path)) near.path = vectors[0];
  const strip = el("div", { class: "cards", role: "list", "aria-label": "Nearest rows" });
  const note = el("p", { class: "faint", role: "status" }, "Comparing…");
  const fill = async () => {
    try {
      const found = await ask("neighbours", { row, path: near.path, metric: near.metric, limit: 12 });
      const some = found.compared < found.total ? ` · ${count(found.compared)} of ${count(found.total)} rows compared` : "";
      note.textContent = found.rows.length ? `by ${near.path}, ${near.metric === "cosine" ? "similarity" : "distance"}${some}` : "No other row has a vector.";
      if (!found.rows.length) { clear(strip); return; }
      const answer = await ask("cards", { rows: found.rows.join(",") });
      clear(strip, ...answer.rows.map((each, i) => card(answer.columns, each, number(Number(found.scores[i].toFixed(3))), actions)));
    } catch (error) {
      note.textContent = error.message;
      clear(strip);
    }
  };
  const choose = (name, values, label) => el("select", { "aria-label": label, onchange: (event) => { near[name] = event.target.value; fill(); } }, ...values.map((value) => el("option", { value, selected: near[name] === value }, value)));
  fill();
  return el("section", { class: "near", "aria-label": "Neighbours" }, el("div", { class: "near-head" }, el("h3", {}, "Neighbours"), vectors.length > 1 ? choose("path", vectors, "Embedding") : "", choose("metric", ["cosine", "euclidean"], "Metric")), note, strip);
}

export function card(columns, each, score, actions) {
  const pictured = each.cells.findIndex((cell) => cell?.t === "image" || cell?.t === "frames");
  const worded = each.cells.findIndex((cell, i) => columns[i] !== "id" && !columns[i].endsWith(".id") && (typeof cell === "string" || cell?.t === "text") && cell);
  const sparked = each.cells.findIndex((cell) => cell?.t === "vector" && cell.v);
  const words = worded < 0 ? `Row ${count(each.row)}` : (each.cells[worded].v ?? each.cells[worded]);
  const head = pictured >= 0 ? image(each.row, columns[pictured], 192, "") : sparked >= 0 ? spark(each.cells[sparked].v, 120, 60) : el("span", { class: "card-blank" }, icon("empty"));
  return el("button", { class: "card", type: "button", role: "listitem", title: words, onclick: () => actions?.open(each.row, true), data: { row: each.row } }, el("span", { class: "card-picture" }, head), el("span", { class: "card-words" }, words), el("span", { class: "faint card-foot" }, el("span", {}, count(each.row)), score ? el("span", {}, score) : ""));
}

// --- a column

const BRIEF = 5000; // rows of the brief statistics, which the headers show

export async function showStatistics(column, actions, choose = false) {
  const own = (asked += 1);
  node.dataset.kind = "statistics";
  delete node.dataset.row;
  open(column.path, column.type, [], waiting());
  let complete = false;
  const draw = (found) => {
    const paths = Object.keys(found);
    const parts = paths.map((path) => one(found[path], path === column.path || paths.length === 1, actions, column));
    if (!complete) parts.unshift(el("p", { class: "faint", role: "status" }, "First rows; reading more…"));
    open(column.path, column.type, [], comparison(column, actions), ...parts);
    if (choose) node.querySelector(".compare select")?.focus();
  };
  try {
    // A sample of a few thousand rows comes at once, that of all rows when it has been read.
    if (about.rows > BRIEF) statistics(column.path, true).then((found) => { if (own === asked && !complete) draw(found); }, () => {});
    const found = await statistics(column.path);
    complete = true;
    if (own === asked) draw(found);
  } catch (error) {
    complete = true;
    if (own === asked) open(column.path, column.type, [], failed(error));
  }
}

// --- two columns

const COMPARED = new Set(["name", "flag", "text", "number"]);
const flat = (nodes) => nodes.flatMap((each) => (each.role === "document" && each.children ? flat(each.children) : [each]));

function comparison(column, actions) {
  // Columns of the same kind come first: labels are compared with predictions.
  const others = flat(about.tree).filter((each) => COMPARED.has(each.role) && each.path !== column.path && each.name !== "id");
  if (!COMPARED.has(column.role) || !others.length) return "";
  others.sort((a, b) => (b.kind === column.kind) - (a.kind === column.kind));
  return el("label", { class: "compare" }, "Compare with ", el("select", { "aria-label": "Compare with", onchange: (event) => { if (event.target.value) actions.compare(column.path, event.target.value); } },
    el("option", { value: "" }, "another column…"), ...others.map((each) => el("option", { value: each.path }, each.path))));
}

export async function showComparison(path, other, where, actions) {
  const own = (asked += 1);
  const title = `${path} and ${other}`, note = where ? `rows with ${where}` : "all rows";
  node.dataset.kind = "comparison";
  delete node.dataset.row;
  const swap = el("button", { class: "icon", type: "button", "aria-label": "Exchange the columns", title: "Exchange the columns", onclick: () => actions.compare(other, path) }, icon("swap"));
  open(title, note, [swap], waiting());
  try {
    const found = await ask("comparison", { path, other, where });
    if (own === asked) open(title, note, [swap], ...matrix(found, where, actions));
  } catch (error) {
    if (own === asked) open(title, note, [swap], failed(error));
  }
}

function matrix(found, where, actions) {
  const columns = new Map(flat(about.tree).map((each) => [each.path, each]));
  const both = [columns.get(found.path), columns.get(found.other)];
  const within = (condition) => actions.filter(where ? `(${where}) and ${condition}` : condition);
  const equals = (column, label) => (label === null ? `${column.path} is missing` : `${column.path} = ${column.role === "number" || column.role === "flag" ? label : quoted(label)}`);
  const bar = el("div", { class: "meter", role: "img", "aria-label": `${share(found.equal, found.rows)} are equal` }, el("i", {}));
  bar.firstChild.style.width = `${found.rows ? (100 * found.equal) / found.rows : 0}%`;
  const facts = el("dl", { class: "facts-list" }, el("dt", {}, "rows counted"), el("dd", {}, found.rows < found.total ? `the first ${count(found.rows)} of ${count(found.total)}` : count(found.rows)),
    el("dt", {}, "equal"), el("dd", {}, `${count(found.equal)} (${share(found.equal, found.rows)})`), el("dt", {}, "different"), el("dd", {}, count(found.rows - found.equal)));
  const differ = both[0].kind === both[1].kind && found.rows > found.equal ? el("button", { type: "button", class: "plain", onclick: () => within(`${found.path} != ${found.other}`) }, "Show the rows that differ") : "";
  const names = [...found.labels.map((label) => label ?? "missing"), ...(found.others ? ["others"] : [])];
  const head = el("tr", {}, el("td", { class: "faint" }, `${found.path} / ${found.other}`), ...names.map((name) => el("th", { scope: "col", title: name }, el("span", { class: "ellipsis" }, name))));
  const rows = found.counts.map((line, i) => {
    const most = Math.max(1, line.reduce((sum, each) => sum + each, 0));
    return el("tr", {}, el("th", { scope: "row", title: names[i] }, el("span", { class: "ellipsis" }, names[i])), ...line.map((times, j) => {
      const known = i < found.labels.length && j < found.labels.length;
      const press = times && known ? () => within(`${equals(both[0], found.labels[i])} and ${equals(both[1], found.labels[j])}`) : null;
      const cell = el("td", { class: i === j && known ? "same" : "differs" }, times ? el("button", { type: "button", disabled: !press, title: `${found.path} ${names[i]}, ${found.other} ${names[j]}: ${count(times)} (${share(times, most)} of the row)`, onclick: press ?? (() => {}) }, count(times)) : "");
      cell.style.setProperty("--share", (times / most).toFixed(3));
      return cell;
    }));
  });
  return [bar, facts, differ, el("div", { class: "matrix" }, el("table", { "aria-label": `Counts of ${found.path} and ${found.other}` }, el("thead", {}, head), el("tbody", {}, ...rows))), el("p", { class: "faint" }, "Click a number to see its rows. Shades are shares of a row.")];
}

function one(own, alone, actions, column) {
  const rows = [["rows looked at", count(own.rows)], ["missing", own.missing ? `${count(own.missing)} (${share(own.missing, own.rows)})` : "none"]];
  if (own.distinct !== null && own.distinct !== undefined) rows.push(["distinct", count(own.distinct)]);
  for (const name of ["minimum", "mean", "maximum", "deviation"]) if (own[name] !== null && own[name] !== undefined) rows.push([name, label(own[name])]);
  if (own.not_finite) rows.push(["not finite", count(own.not_finite)]);
  const facts = el("dl", { class: "facts-list" }, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const present = own.rows - own.missing;
  const bar = el("div", { class: "meter", role: "img", "aria-label": `${share(present, own.rows)} have a value` }, el("i", {}));
  bar.firstChild.style.width = `${own.rows ? (100 * present) / own.rows : 0}%`;
  const parts = [alone ? null : el("h3", {}, own.path), bar, facts];
  if (own.histogram) parts.push(figure("Values", own.histogram, column.sortable ? (from, to, last) => actions.filter(`${own.path} >= ${literal(from)} and ${own.path} ${last ? "<=" : "<"} ${literal(to)}`) : null));
  if (own.lengths?.histogram) parts.push(el("p", { class: "faint" }, `lengths ${count(own.lengths.minimum)} to ${count(own.lengths.maximum)}, ${number(own.lengths.mean)} on average`), figure("Lengths", own.lengths.histogram, null));
  if (own.top?.length && own.top[0].count > 1) parts.push(top(own, actions));
  if (own.shapes?.length) parts.push(counted("Shapes", own.shapes.map(({ shape, count: times }) => [shape.join(" × ") || "scalar", times])));
  if (own.dtypes?.length) parts.push(counted("Types", own.dtypes.map(({ dtype, count: times }) => [dtype, times])));
  return el("section", { class: "stat" }, ...parts.filter(Boolean));
}

const share = (part, whole) => `${whole ? number(Number(((100 * part) / whole).toPrecision(3))) : 0}%`;
const literal = (value) => (typeof value === "number" ? String(value) : quoted(String(value)));
const quoted = (text) => `"${text.replace(/[\\"]/g, "\\$&")}"`;

function figure(title, bars, pick) {
  return el("figure", { class: "plot" }, el("figcaption", {}, title, pick ? el("span", { class: "faint" }, " · click a bar to filter") : ""), histogram(bars, { pick }), el("div", { class: "axis faint" }, el("span", {}, label(bars.edges[0])), el("span", {}, label(bars.edges.at(-1)))));
}

function top(own, actions) {
  const most = own.top[0].count;
  const line = ({ value, count: times }) => {
    const bar = el("i", {});
    bar.style.width = `${(100 * times) / most}%`;
    const text = value === null ? "missing" : typeof value === "string" ? value : label(value);
    const wanted = typeof value === "string" ? quoted(value) : String(value);
    return el("button", { class: "top-line", type: "button", title: `Filter: ${own.path} = ${text}`, onclick: () => actions.filter(`${own.path} = ${wanted}`) }, bar, el("span", { class: "ellipsis" }, text), el("span", { class: "faint number" }, count(times)));
  };
  return el("div", { class: "top" }, el("h3", {}, "Most frequent"), ...own.top.map(line));
}

function counted(title, pairs) {
  return el("div", { class: "counted" }, el("h3", {}, title), el("dl", { class: "facts-list" }, ...pairs.slice(0, 12).flatMap(([name, times]) => [el("dt", { class: "mono" }, name), el("dd", {}, count(times))])));
}
