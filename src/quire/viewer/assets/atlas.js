// The map: a sample of rows by their embeddings, on a canvas.
import { $, clear, count, el, icon } from "./dom.js";
import { ask } from "./api.js";
import { statistics } from "./charts.js";
import { card } from "./panel.js";

const node = $("atlas");
const SPOTS = 10;

export class Atlas {
  constructor(actions) {
    this.actions = actions;
    this.view = { x: 0, y: 0, zoom: 1 };
    this.hover = -1;
    this.cards = new Map();
  }

  async show(vectors, columns, path = vectors[0], colour = undefined) {
    if (!vectors.length) {
      clear(node, el("div", { class: "state" }, icon("near"), el("h2", {}, "No embeddings"), el("p", { class: "faint" }, "A map needs a column of vectors.")));
      return;
    }
    const colours = columns.filter((column) => ["number", "flag", "name", "text"].includes(column.role));
    const chosen = colour ?? (await this.fewest(colours));
    this.chosen = { path, colour: chosen };
    const again = (change) => this.show(vectors, columns, change.path ?? path, change.colour ?? chosen);
    const pick = (label, values, value, change) => el("label", {}, label, el("select", { onchange: (event) => again(change(event.target.value)) }, ...values.map((each) => el("option", { value: each, selected: each === value }, each || "nothing"))));
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": `Map of ${path}: arrow keys go from point to point, Enter opens a row` });
    this.tip = el("div", { class: "tip", hidden: true });
    this.note = el("p", { class: "faint", role: "status" }, "Working out the map…");
    this.legend = el("div", { class: "legend", "aria-label": "Colours" });
    clear(node, el("div", { class: "atlas-head" }, pick("Embedding", vectors, path, (value) => ({ path: value })), pick("Colour", ["", ...colours.map((column) => column.path)], chosen, (value) => ({ colour: value })), this.note), el("div", { class: "atlas-body" }, this.canvas, this.legend, this.tip));
    this.listen();
    try {
      const found = await ask("map", { path, colour: chosen });
      if (this.chosen.path !== path || this.chosen.colour !== chosen) return;
      this.found = found;
    } catch (error) {
      this.found = null;
      this.note.textContent = error.message;
      return;
    }
    this.view = { x: 0, y: 0, zoom: 1 };
    this.fit();
    const [first, second] = this.found.explained.map((part) => `${Math.round(100 * part)}%`);
    this.note.textContent = `${count(this.found.rows.length)} of ${count(this.found.total)} rows · two axes with ${first} and ${second} of the variance`;
    this.explain();
    this.draw();
  }

  async fewest(columns) {
    // The first column with a few names, so that the map has colours from the start.
    for (const column of columns.filter((each) => each.role === "name" || each.role === "text").slice(0, 6)) {
      const found = await statistics(column.path, true).catch(() => ({}));
      const { distinct } = found[column.path] ?? {};
      if (distinct > 1 && distinct <= SPOTS) return column.path;
    }
    return "";
  }

  explain() {
    const { colour } = this.found;
    if (!colour) { clear(this.legend); return; }
    if (colour.kind === "name") clear(this.legend, ...colour.names.map((name, i) => el("span", { class: "legend-item" }, el("i", { class: `spot spot-${i}` }), name)));
    else clear(this.legend, el("span", { class: "legend-item" }, el("span", {}, Number(colour.low.toPrecision(3))), el("i", { class: "ramp" }), el("span", {}, Number(colour.high.toPrecision(3)))));
  }

  listen() {
    const { canvas } = this;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerleave", () => { this.drag = null; this.point(-1); });
    canvas.addEventListener("pointerdown", (event) => { this.drag = { x: event.clientX, y: event.clientY, far: 0 }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", (event) => { const { drag } = this; this.drag = null; if (drag && drag.far < 4) { this.point(this.nearest(event)); this.open(); } });
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); this.zoom(Math.exp(-event.deltaY / 400), event); }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const ways = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (event.key === "Enter") this.open();
    else if (event.key === "+" || event.key === "=") this.zoom(1.3);
    else if (event.key === "-") this.zoom(1 / 1.3);
    else if (event.key === "0") { this.view = { x: 0, y: 0, zoom: 1 }; this.draw(); }
    else if (event.key in ways && this.found) this.walk(ways[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  walk([right, up]) {
    const { points } = this.found;
    if (this.hover < 0) { this.point(0); return; }
    const [x, y] = points[this.hover];
    let best = -1, least = Infinity;
    points.forEach(([px, py], i) => {
      const along = (px - x) * right + (py - y) * up, across = Math.abs((px - x) * up + (py - y) * right);
      if (i !== this.hover && along > 1e-6 && along + 2 * across < least) { least = along + 2 * across; best = i; }
    });
    if (best >= 0) this.point(best);
  }

  zoom(by, event = null) {
    const zoom = Math.max(0.5, Math.min(60, this.view.zoom * by)), rect = this.canvas.getBoundingClientRect();
    const x = event ? event.clientX - rect.left - rect.width / 2 : 0, y = event ? event.clientY - rect.top - rect.height / 2 : 0;
    const times = zoom / this.view.zoom;
    this.view = { zoom, x: x - (x - this.view.x) * times, y: y - (y - this.view.y) * times };
    this.draw();
  }

  fit() {
    const all = [0, 1].map((axis) => this.found.points.map((point) => point[axis]));
    this.middle = all.map((values) => (values.reduce((a, b) => Math.min(a, b)) + values.reduce((a, b) => Math.max(a, b))) / 2);
    this.reach = all.map((values, axis) => values.reduce((a, b) => Math.max(a, Math.abs(b - this.middle[axis])), 1e-6));
  }

  place(i) {
    const { clientWidth: w, clientHeight: h } = this.canvas, [x, y] = this.found.points[i];
    const across = (w / 2 - 36) / this.reach[0], up = (h / 2 - 44) / this.reach[1], least = Math.min(across, up) * this.view.zoom;
    const wide = Math.min(across / up, 1.5) > 1 ? Math.min(across / up, 1.5) : 1, high = Math.min(up / across, 1.5) > 1 ? Math.min(up / across, 1.5) : 1;
    return [w / 2 + this.view.x + (x - this.middle[0]) * least * wide, h / 2 - 8 + this.view.y - (y - this.middle[1]) * least * high];
  }

  nearest(event) {
    if (!this.found) return -1;
    const rect = this.canvas.getBoundingClientRect(), x = event.clientX - rect.left, y = event.clientY - rect.top;
    let best = -1, least = 14 * 14;
    for (let i = 0; i < this.found.points.length; i += 1) {
      const [px, py] = this.place(i), far = (px - x) ** 2 + (py - y) ** 2;
      if (far < least) { least = far; best = i; }
    }
    return best;
  }

  moved(event) {
    if (this.drag) {
      const { drag } = this;
      drag.far += Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y);
      this.view = { ...this.view, x: this.view.x + event.clientX - drag.x, y: this.view.y + event.clientY - drag.y };
      drag.x = event.clientX; drag.y = event.clientY;
      this.draw();
      return;
    }
    this.point(this.nearest(event));
  }

  point(i) {
    if (i === this.hover) return;
    this.hover = i;
    this.canvas.style.cursor = i < 0 ? "grab" : "pointer";
    this.draw();
    clearTimeout(this.soon);
    if (i < 0) { this.tip.hidden = true; return; }
    this.soon = setTimeout(() => this.tell(i), 60);
  }

  async tell(i) {
    const row = this.found.rows[i];
    if (!this.cards.has(row)) this.cards.set(row, ask("cards", { rows: String(row) }).catch(() => null));
    const answer = await this.cards.get(row);
    if (this.hover !== i || !answer?.rows.length) return;
    clear(this.tip, card(answer.columns, answer.rows[0], "", null));
    this.tip.hidden = false;
    const [x, y] = this.place(i), { clientWidth: w, clientHeight: h } = this.canvas;
    this.tip.style.left = `${Math.min(x + 14, w - 172)}px`;
    this.tip.style.top = `${Math.max(8, Math.min(y - 60, h - 190))}px`;
  }

  open() { if (this.hover >= 0 && this.found) this.actions.open(this.found.rows[this.hover], true); }

  draw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => { this.drawing = 0; this.paint(); });
  }

  paint() {
    const { canvas, found } = this;
    if (!canvas?.isConnected || !found) return;
    const dense = devicePixelRatio || 1, style = getComputedStyle(node);
    canvas.width = canvas.clientWidth * dense;
    canvas.height = canvas.clientHeight * dense;
    const draw = canvas.getContext("2d");
    draw.scale(dense, dense);
    const spots = Array.from({ length: SPOTS }, (_, i) => style.getPropertyValue(`--spot-${i}`).trim());
    const plain = style.getPropertyValue("--chart").trim(), faint = style.getPropertyValue("--line-strong").trim();
    const size = Math.max(2.2, Math.min(5, 2.6 * Math.sqrt(this.view.zoom)));
    draw.globalAlpha = found.points.length > 3000 ? 0.62 : 0.78;
    for (let i = 0; i < found.points.length; i += 1) {
      const [x, y] = this.place(i);
      if (x < -9 || y < -9 || x > canvas.clientWidth + 9 || y > canvas.clientHeight + 9) continue;
      const value = found.colour?.values[i];
      draw.fillStyle = !found.colour ? plain : value === null || value === undefined ? faint : found.colour.kind === "name" ? spots[value] : ramp(value);
      draw.beginPath();
      draw.arc(x, y, size, 0, 7);
      draw.fill();
    }
    if (this.hover >= 0) {
      const [x, y] = this.place(this.hover);
      draw.globalAlpha = 1;
      draw.lineWidth = 2;
      draw.strokeStyle = style.getPropertyValue("--ink").trim();
      draw.beginPath();
      draw.arc(x, y, size + 4, 0, 7);
      draw.stroke();
    }
  }
}

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function ramp(value) {
  const at = Math.max(0, Math.min(0.9999, value)) * (RAMP.length - 1), from = RAMP[Math.floor(at)], to = RAMP[Math.floor(at) + 1];
  return `rgb(${from.map((part, i) => Math.round(part + (to[i] - part) * (at % 1))).join(" ")})`;
}
