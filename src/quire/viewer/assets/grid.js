// The grid: a virtual list that keeps elements only for the rows in view.
//
// A browser has a greatest height for an element (some 33 million pixels in Chromium, 17 in Firefox). Above a quarter of
// that, the scroll bar is scaled, while the wheel still moves by pixels of the whole list.
import { $, clear, count, el, icon } from "./dom.js";
import { RequestError, ask } from "./api.js";
import { small } from "./cells.js";
import { miniature } from "./charts.js";

const TALLEST = 8_000_000, BLOCK = 64, KEPT = 40, SPARE = 4;
export const HEIGHTS = { low: 36, middle: 68, high: 116 };
const WIDTHS = { number: 104, flag: 84, moment: 168, name: 112, bytes: 120, vector: 168, heat: 116, image: 132, audio: 116, video: 164, frames: 132, text: 220, list: 180, documents: 132, object: 220, tensor: 132 };

export class Grid {
  constructor(actions) {
    this.actions = actions;
    this.node = $("grid");
    this.head = $("grid-head");
    this.layer = $("grid-layer");
    this.space = $("grid-space");
    this.columns = [];
    this.total = 0;
    this.top = 0; // pixels of the whole above what is in sight
    this.active = { row: 0, column: 0 };
    this.wanted = { where: "", sort: "", desc: false };
    this.widths = new Map();
    this.looks = new Map();
    this.fits = new Map(); // characters of the longest of the first texts
    this.height = HEIGHTS.middle;
    this.rail = innerWidth <= 600 ? 46 : 72; // pixels of the row numbers
    this.reset();
    this.node.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.node.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.layer.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.aside()).observe(this.node);
  }

  // --- what is shown

  reset() {
    this.asking?.abort();
    this.asking = new AbortController();
    this.blocks = new Map();
    this.broken = new Map(); // blocks that cannot be read, and why
    this.shown = new Map();
    this.layer?.replaceChildren();
  }

  async show(wanted) {
    this.actions.busy(true);
    const asking = new AbortController();
    this.looking?.abort();
    this.looking = asking;
    try {
      const first = await ask("rows", { ...wanted, start: 0, count: BLOCK }, asking.signal);
      this.reset();
      this.wanted = wanted;
      this.total = first.count;
      this.keep(0, first);
      this.top = 0;
      this.node.scrollTop = 0;
      this.active = { row: 0, column: Math.min(this.active.column, Math.max(0, this.columns.length - 1)) };
      this.layout();
      return first;
    } finally {
      if (this.looking === asking) this.actions.busy(false);
    }
  }

  setColumns(columns) {
    this.columns = columns;
    this.active.column = Math.max(0, Math.min(this.active.column, columns.length - 1));
    this.layout();
  }

  setHeight(height) {
    const row = this.top / this.height;
    this.height = height;
    this.layout();
    this.scrollTo(row * height);
  }

  width(column) {
    const own = this.widths.get(column.path), look = this.looks.get(column.path) ?? column.role, long = this.fits.get(column.path);
    if (own === undefined && long !== undefined && look === "text") return Math.round(Math.max(88, Math.min(264, 7.2 * long + 28)));
    return own ?? Math.max(WIDTHS[look] ?? 160, Math.min(200, 7.6 * column.path.length + 30));
  }

  layout() {
    const template = `${this.rail}px ${this.columns.map((column) => `${this.width(column)}px`).join(" ")} minmax(24px, 1fr)`;
    this.node.style.setProperty("--columns", template);
    this.node.style.setProperty("--row", `${this.height}px`);
    this.node.style.setProperty("--width", `${this.rail + this.columns.reduce((sum, column) => sum + this.width(column), 24)}px`);
    this.node.dataset.height = Object.keys(HEIGHTS).find((name) => HEIGHTS[name] === this.height) ?? "middle";
    this.node.setAttribute("aria-rowcount", this.total + 1);
    this.node.setAttribute("aria-colcount", this.columns.length + 1);
    this.space.style.height = `${Math.min(TALLEST, this.total * this.height)}px`;
    this.header();
    this.shown.clear();
    this.layer.replaceChildren();
    this.draw();
  }

  header() {
    const { sort, desc } = this.wanted;
    const cells = this.columns.map((column, i) => {
      const sorted = sort === column.path;
      const cell = el("div", { class: `head${column.role === "number" ? " right" : ""}`, role: "columnheader", "aria-colindex": i + 2, "aria-sort": sorted ? (desc ? "descending" : "ascending") : "none", data: { path: column.path } },
        el("button", { class: "head-name", type: "button", tabIndex: -1, title: column.sortable ? `Sort by ${column.path}` : column.path, onclick: () => (column.sortable ? this.actions.sort(column) : this.actions.statistics(column)) },
          el("span", { class: "ellipsis" }, column.path), sorted ? icon(desc ? "down" : "up") : ""),
        el("span", { class: "faint ellipsis head-type" }, column.type),
        el("button", { class: "head-chart", type: "button", tabIndex: -1, "aria-label": `Statistics of ${column.path}`, title: "Statistics", onclick: () => this.actions.statistics(column) }, miniature(column)),
        el("span", { class: "grip", "aria-hidden": "true", onpointerdown: (event) => this.resize(event, column) }));
      return cell;
    });
    clear(this.head, el("div", { class: "row row-head", role: "row", "aria-rowindex": 1 }, el("div", { class: "head corner", role: "columnheader", "aria-colindex": 1 }, el("span", { class: "faint" }, "row")), ...cells, el("div", { class: "head filler", role: "presentation" })));
  }

  resize(event, column) {
    event.preventDefault();
    const from = event.clientX, before = this.width(column), target = event.currentTarget;
    target.setPointerCapture(event.pointerId);
    const move = (moved) => {
      this.widths.set(column.path, Math.max(56, before + moved.clientX - from));
      const template = `${this.rail}px ${this.columns.map((each) => `${this.width(each)}px`).join(" ")} minmax(24px, 1fr)`;
      this.node.style.setProperty("--columns", template);
    };
    target.addEventListener("pointermove", move);
    target.addEventListener("pointerup", () => { target.removeEventListener("pointermove", move); this.layout(); }, { once: true });
  }

  // --- scrolling

  get whole() { return this.total * this.height; }
  get sight() { return Math.max(0, this.node.clientHeight - this.head.offsetHeight); }
  get furthest() { return Math.max(0, this.whole - this.sight); }
  get scaled() { return this.whole > TALLEST; }

  scrollTo(top) {
    this.top = Math.max(0, Math.min(top, this.furthest));
    const reach = this.node.scrollHeight - this.node.clientHeight;
    this.expected = this.scaled ? (this.furthest ? (this.top / this.furthest) * reach : 0) : this.top;
    this.node.scrollTop = this.expected;
    this.expected = this.node.scrollTop;
    this.draw();
  }

  scrolled() {
    const at = this.node.scrollTop;
    if (this.expected !== undefined && Math.abs(at - this.expected) < 1.5) { this.expected = undefined; this.draw(); return; }
    this.expected = undefined;
    const reach = this.node.scrollHeight - this.node.clientHeight;
    this.top = this.scaled ? (reach ? (at / reach) * this.furthest : 0) : at;
    this.draw();
  }

  wheel(event) {
    if (!this.scaled || event.ctrlKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? this.height : event.deltaMode === 2 ? this.sight : 1;
    this.scrollTo(this.top + event.deltaY * unit);
  }

  reveal() {
    const from = this.active.row * this.height;
    if (from < this.top) this.scrollTo(from);
    else if (from + this.height > this.top + this.sight) this.scrollTo(from + this.height - this.sight);
    else this.draw();
    const left = this.columns.slice(0, this.active.column).reduce((sum, column) => sum + this.width(column), this.rail);
    const wide = this.columns[this.active.column] ? this.width(this.columns[this.active.column]) : 0;
    if (left - this.rail < this.node.scrollLeft) this.node.scrollLeft = left - this.rail;
    else if (left + wide > this.node.scrollLeft + this.node.clientWidth) this.node.scrollLeft = left + wide - this.node.clientWidth;
  }

  aside() {
    // Beside a panel there is less room: the cell that is looked at stays in sight.
    const left = this.columns.slice(0, this.active.column).reduce((sum, column) => sum + this.width(column), this.rail);
    const wide = this.columns[this.active.column] ? this.width(this.columns[this.active.column]) : 0;
    if (left + wide > this.node.scrollLeft + this.node.clientWidth) this.node.scrollLeft = left + wide - this.node.clientWidth;
    this.draw();
  }

  goto(row) {
    this.active.row = Math.max(0, Math.min(row, this.total - 1));
    const from = this.active.row * this.height;
    if (from < this.top || from + this.height > this.top + this.sight) this.scrollTo(from - this.sight / 3);
    else this.draw();
  }

  // --- drawing

  draw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => { this.drawing = 0; this.paint(); });
  }

  paint() {
    const first = Math.max(0, Math.floor(this.top / this.height) - SPARE);
    const last = Math.min(this.total, Math.ceil((this.top + this.sight) / this.height) + SPARE);
    for (const [index, node] of this.shown) {
      if (index < first || index >= last) { node.remove(); this.shown.delete(index); }
    }
    const missing = new Set();
    for (let index = first; index < last; index += 1) {
      const data = this.data(index);
      let node = this.shown.get(index);
      const block = Math.floor(index / BLOCK), why = this.broken.get(block);
      if ((data || why) && node?.dataset.empty) { node.remove(); node = undefined; }
      if (!node) {
        node = why ? this.failure(index, why) : this.row(index, data);
        this.shown.set(index, node);
        this.layer.append(node);
      }
      node.style.transform = `translateY(${(index * this.height - this.top).toFixed(1)}px)`;
      if (!data && !why) missing.add(block);
    }
    this.highlight();
    if (missing.size) this.fetch(missing);
    const visible = [Math.floor(this.top / this.height) + 1, Math.min(this.total, Math.ceil((this.top + this.sight) / this.height))];
    this.actions.place(visible[0], visible[1], this.total);
  }

  data(index) { return this.blocks.get(Math.floor(index / BLOCK))?.rows[index % BLOCK]; }

  row(index, data) {
    const label = data ? data.row : null;
    const cells = data ? this.columns.map((column, i) => this.cell(column, i, data, index)) : this.columns.map(() => el("div", { class: "cell waiting", role: "gridcell" }, el("i", {})));
    return el("div", { class: "row", role: "row", "aria-rowindex": index + 2, data: data ? { index, row: data.row } : { index, empty: "1" } },
      el("div", { class: "cell number row-number", role: "rowheader", "aria-colindex": 1 }, label === null ? "" : count(label)), ...cells, el("div", { class: "cell filler", role: "presentation" }));
  }

  failure(index, why) {
    return el("div", { class: "row failed", role: "row", "aria-rowindex": index + 2, data: { index, empty: "", failed: "1" } },
      el("div", { class: "cell row-number", role: "rowheader" }), el("div", { class: "cell", role: "gridcell" }, icon("broken"), el("span", { class: "ellipsis", title: why }, why)));
  }

  cell(column, i, data, index) {
    const place = this.places?.get(column.path);
    const value = place === undefined ? null : data.cells[place];
    const size = this.height >= HEIGHTS.high ? 384 : 192;
    return el("div", { class: `cell look-${value?.t ?? column.role}`, role: "gridcell", id: `cell-${index}-${i}`, "aria-colindex": i + 2, data: { column: i } }, small(value, { row: data.row, path: column.path, size }));
  }

  highlight() {
    this.layer.querySelector(".cell.active")?.classList.remove("active");
    this.layer.querySelector(".row.active")?.classList.remove("active");
    const node = this.shown.get(this.active.row);
    node?.classList.add("active");
    const cell = node?.querySelector(`[data-column="${this.active.column}"]`);
    cell?.classList.add("active");
    if (cell) this.node.setAttribute("aria-activedescendant", cell.id);
    else this.node.removeAttribute("aria-activedescendant");
  }

  keep(block, answer) {
    if (!this.places) this.learn(answer);
    this.blocks.delete(block);
    this.blocks.set(block, answer);
    while (this.blocks.size > KEPT) this.blocks.delete(this.blocks.keys().next().value);
  }

  learn(answer) {
    // Where columns are in a row, and how they look: that of their first values.
    this.places = new Map(answer.columns.map((path, i) => [path, i]));
    for (const [path, i] of this.places) {
      const value = answer.rows.map((row) => row.cells[i]).find((cell) => cell !== null);
      if (value?.t && WIDTHS[value.t]) this.looks.set(path, value.t);
      const texts = answer.rows.map((row) => row.cells[i]).filter((cell) => typeof cell === "string");
      if (texts.length) this.fits.set(path, Math.max(path.length + 2, ...texts.map((text) => text.length)));
    }
  }

  async fetch(blocks) {
    for (const block of blocks) {
      const key = `${block}`;
      this.waiting ??= new Map();
      if (this.waiting.has(key)) continue;
      const { asking } = this;
      this.waiting.set(key, asking);
      this.actions.busy(true);
      ask("rows", { ...this.wanted, start: block * BLOCK, count: BLOCK }, asking.signal)
        .then((answer) => { if (asking === this.asking) { this.keep(block, answer); this.draw(); } })
        .catch((error) => { if (error instanceof RequestError && asking === this.asking) { this.broken.set(block, error.message); this.draw(); } })
        .finally(() => { if (this.waiting.get(key) === asking) this.waiting.delete(key); this.actions.busy(this.waiting.size > 0); });
    }
  }

  // --- mouse and keys

  click(event) {
    const row = event.target.closest(".row");
    if (!row?.dataset.row) return;
    const cell = event.target.closest("[data-column]");
    this.active = { row: Number(row.dataset.index), column: cell ? Number(cell.dataset.column) : this.active.column };
    this.highlight();
    this.node.focus({ preventScroll: true });
    this.actions.open(Number(row.dataset.row));
  }

  key(event) {
    if (event.target !== this.node || event.altKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.sight / this.height) - 1);
    const moves = {
      ArrowDown: [1, 0], ArrowUp: [-1, 0], j: [1, 0], k: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1],
      PageDown: [page, 0], PageUp: [-page, 0], " ": [event.shiftKey ? -page : page, 0], Home: [-Infinity, 0], End: [Infinity, 0],
    };
    if (event.key === "Enter") {
      const data = this.data(this.active.row);
      if (data) this.actions.open(data.row);
    } else if (event.key in moves && !(event.ctrlKey && event.key.length === 1)) {
      const [down, right] = moves[event.key];
      this.active = {
        row: Math.max(0, Math.min(this.total - 1, this.active.row + down)),
        column: Math.max(0, Math.min(this.columns.length - 1, this.active.column + right)),
      };
      this.reveal();
      this.actions.moved(this.data(this.active.row)?.row);
    } else if (event.key === "p") this.layer.querySelector(".cell.active button.play, .cell.active video")?.click();
    else return;
    event.preventDefault();
  }
}
