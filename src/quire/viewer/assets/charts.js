// Histograms and bars as SVG, and the requests for their statistics.
import { clear, count, el, number, svg } from "./dom.js";
import { ask } from "./api.js";

const known = new Map();
const PLAIN = new Set(["number", "flag", "text", "name", "moment", "list", "documents"]); // columns whose statistics are cheap

export function statistics(path, brief = false) {
  const key = `${path}|${brief}`;
  if (!known.has(key)) known.set(key, ask("statistics", { path, brief }).catch((error) => { known.delete(key); throw error; }));
  return known.get(key);
}

let line = Promise.resolve(); // one request at a time, so that rows come first

export function miniature(column) {
  const node = el("span", { class: "mini", "aria-hidden": "true" });
  if (!PLAIN.has(column.role)) return node;
  const fill = (found) => {
    const own = found[column.path];
    if (!own) return;
    const bars = own.histogram ?? null;
    if (bars && own.kind !== "bool") clear(node, histogram(bars, { width: 96, height: 22, plain: true }));
    else if (own.top?.length && own.distinct !== null && own.distinct <= 30) clear(node, shares(own));
    else if (own.lengths?.histogram && own.lengths.minimum < own.lengths.maximum) clear(node, histogram(own.lengths.histogram, { width: 96, height: 22, plain: true }));
    if (own.missing) node.append(el("span", { class: "mini-missing" }, `${Math.max(1, Math.round((100 * own.missing) / own.rows))}% –`));
  };
  const key = `${column.path}|true`;
  if (known.has(key)) known.get(key).then(fill, () => {});
  else line = line.then(() => statistics(column.path, true)).then(fill, () => {});
  return node;
}

function shares(own) {
  const width = 96, total = own.top.reduce((sum, each) => sum + each.count, 0) || 1;
  const made = svg("svg", { viewBox: `0 0 ${width} 22`, class: "chart shares", preserveAspectRatio: "none" });
  let x = 0;
  own.top.slice(0, 8).forEach((each, i) => {
    const wide = (each.count / total) * width;
    made.append(svg("rect", { x: x.toFixed(2), y: 9, width: Math.max(1, wide - 1).toFixed(2), height: 8, rx: 2, class: `share share-${i}` }));
    x += wide;
  });
  return made;
}

export function histogram(bars, { width = 340, height = 110, plain = false, pick = null } = {}) {
  const most = Math.max(...bars.counts, 1), wide = width / bars.counts.length;
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: `chart${plain ? "" : " tall"}`, preserveAspectRatio: plain ? "none" : "xMidYMid meet", role: "img", "aria-label": `Histogram from ${label(bars.edges[0])} to ${label(bars.edges.at(-1))}` });
  bars.counts.forEach((times, i) => {
    const high = times ? Math.max(1.5, (times / most) * (height - 2)) : 0;
    const bar = svg("rect", { x: (i * wide + 0.5).toFixed(2), y: (height - high).toFixed(2), width: Math.max(0.8, wide - 1).toFixed(2), height: high.toFixed(2), rx: plain ? 0.5 : 2 });
    if (!plain) {
      const hit = svg("g", { class: `bar${pick ? " pick" : ""}` }, svg("rect", { x: i * wide, y: 0, width: wide, height, class: "hit" }), bar);
      const title = svg("title");
      title.textContent = `${label(bars.edges[i])} to ${label(bars.edges[i + 1])}: ${count(times)}`;
      hit.append(title);
      if (pick) hit.addEventListener("click", () => pick(bars.edges[i], bars.edges[i + 1], i === bars.counts.length - 1));
      made.append(hit);
    } else made.append(bar);
  });
  return made;
}

export const label = (value) => (typeof value === "number" ? number(value) : String(value ?? "–"));
