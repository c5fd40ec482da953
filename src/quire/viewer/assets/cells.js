// Cells as elements: small in the grid, large in a document.
import { bytes, count, el, icon, number, shapeOf, svg } from "./dom.js";
import { audioUrl, imageUrl, videoUrl } from "./api.js";

const player = new Audio();
let playing = null;

function mark(button, on) {
  if (!button) return;
  button.replaceChildren(icon(on ? "pause" : "play"));
  button.setAttribute("aria-pressed", String(on));
  button.classList.toggle("on", on);
}
for (const end of ["ended", "pause", "error"]) player.addEventListener(end, () => { mark(playing, false); });
player.addEventListener("playing", () => { mark(playing, true); });

function playButton(source, label) {
  const button = el("button", {
    class: "play", type: "button", tabIndex: -1, "aria-label": `Play ${label}`, "aria-pressed": "false",
    onclick: (event) => {
      event.stopPropagation();
      if (playing === button && !player.paused) { player.pause(); return; }
      mark(playing, false);
      playing = button;
      if (!player.src.endsWith(source)) player.src = source;
      player.play().catch(() => { button.classList.add("failed"); button.title = "This sound cannot be played."; });
    },
  }, icon("play"));
  if (player.src.endsWith(source) && !player.paused) { playing = button; mark(button, true); }
  return button;
}

export function image(row, path, size, alt, frame = 0) {
  const made = el("img", { alt, loading: "lazy", decoding: "async", draggable: false });
  made.addEventListener("error", () => made.replaceWith(el("span", { class: "faint broken", title: "This image cannot be read." }, icon("broken"), " unreadable")));
  made.src = imageUrl(row, path, size, frame);
  return made;
}

export function spark(values, width = 120, height = 28) {
  const low = Math.min(0, ...values), high = Math.max(0, ...values), span = high - low || 1;
  const x = (i) => (values.length < 2 ? width / 2 : 1 + (i * (width - 2)) / (values.length - 1));
  const y = (v) => height - 2 - ((v - low) / span) * (height - 4);
  const line = values.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", role: "img", "aria-label": `${values.length} values from ${number(low)} to ${number(high)}`, preserveAspectRatio: "none" });
  made.append(svg("path", { d: `${line}L${x(values.length - 1)} ${y(0)}L${x(0)} ${y(0)}Z`, class: "area" }));
  made.append(svg("line", { x1: 0, x2: width, y1: y(0), y2: y(0), class: "zero" }));
  made.append(svg("path", { d: line, class: "line" }));
  return made;
}

const missing = () => el("span", { class: "missing", "aria-label": "missing" }, "–");

const SMALL = {
  text: (cell) => el("span", { class: "text" }, cell.v, el("span", { class: "faint" }, " …")),
  name: (cell) => el("span", { class: "name" }, cell.v),
  moment: (cell) => el("span", { class: "moment" }, cell.v),
  number: (cell) => el("span", { class: "number" }, cell.v),
  bytes: (cell) => el("span", { class: "faint mono", title: cell.v }, bytes(cell.n)),
  docs: (cell) => (cell.n ? el("span", { class: "pill" }, `${count(cell.n)} document${cell.n === 1 ? "" : "s"}`) : el("span", { class: "faint" }, "none")),
  list: (cell) => el("span", { class: "tags" }, ...cell.v.map((item) => el("span", { class: "tag" }, item)), cell.n > cell.v.length ? el("span", { class: "faint" }, ` +${cell.n - cell.v.length}`) : ""),
  object: (cell) => el("span", { class: "mono faint" }, cell.v),
  tensor: (cell) => el("span", { class: "faint" }, shapeOf(cell)),
  vector: (cell) => (cell.v ? el("span", { class: "vector", title: shapeOf(cell) }, spark(cell.v)) : el("span", { class: "faint" }, shapeOf(cell))),
  heat: (cell, at) => { const made = image(at.row, at.path, 96, `${at.path}, ${shapeOf(cell)}`); made.classList.add("heat"); made.title = shapeOf(cell); return made; },
  image: (cell, at) => image(at.row, at.path, at.size ?? 192, cell.file ?? `${at.path} of row ${at.row}`),
  frames: (cell, at) => el("span", { class: "frames" }, image(at.row, at.path, 192, `${at.path} of row ${at.row}`), el("span", { class: "badge" }, icon("film"), count(cell.shape[0]))),
  audio: (cell, at) => el("span", { class: "sound" }, playButton(audioUrl(at.row, at.path), `${at.path} of row ${at.row}`), el("span", { class: "faint" }, cell.n ? bytes(cell.n) : count(Math.max(...cell.shape)))),
  video: (cell, at) => el("video", { src: videoUrl(at.row, at.path), preload: "metadata", muted: true, playsInline: true, controls: false, tabIndex: -1, title: "Play", "aria-label": `${at.path} of row ${at.row}`,
    onclick: (event) => { event.stopPropagation(); const v = event.currentTarget; v.muted = false; if (v.paused) v.play().catch(() => {}); else v.pause(); } }),
};

export function small(cell, at) {
  if (cell === null) return missing();
  if (typeof cell === "number") return el("span", { class: "number" }, number(cell));
  if (typeof cell === "boolean") return el("span", { class: `flag ${cell ? "yes" : "no"}` }, String(cell));
  if (typeof cell === "string") return cell === "" ? el("span", { class: "faint" }, "empty") : el("span", { class: "text" }, cell);
  return (SMALL[cell.t] ?? SMALL.object)(cell, at);
}

function tensorFacts(cell) {
  const values = cell.values?.map((value) => value?.v ?? value).join(", ");
  return el("p", { class: "faint facts" }, shapeOf(cell), values ? el("span", { class: "mono values" }, `[${values}]`) : "");
}

const media = (cell) => [cell.file, cell.mime, bytes(cell.n)].filter(Boolean).join(" · ");

const LARGE = {
  text: (cell) => el("div", { class: "prose" }, cell.v, el("p", { class: "faint" }, `… cut off; ${count(cell.n)} in all`)),
  image: (cell, at) => el("figure", {}, image(at.row, at.path, 768, `${at.path} of row ${at.row}`), el("figcaption", { class: "faint" }, cell.shape ? shapeOf(cell) : media(cell))),
  heat: (cell, at) => { const made = image(at.row, at.path, 384, `${at.path}, ${shapeOf(cell)}`); made.classList.add("heat"); return el("figure", {}, made, el("figcaption", { class: "faint" }, shapeOf(cell))); },
  frames: (cell, at) => {
    const steps = Math.min(cell.shape[0], 12);
    const places = Array.from({ length: steps }, (_, i) => Math.round((i * (cell.shape[0] - 1)) / Math.max(1, steps - 1)));
    return el("figure", {}, el("div", { class: "strip" }, ...places.map((frame) => image(at.row, at.path, 192, `frame ${frame}`, frame))), el("figcaption", { class: "faint" }, shapeOf(cell)));
  },
  vector: (cell) => el("figure", {}, cell.v ? spark(cell.v, 360, 72) : "", tensorFacts(cell)),
  tensor: (cell) => tensorFacts(cell),
  audio: (cell, at) => el("figure", {}, el("audio", { src: audioUrl(at.row, at.path), controls: true, preload: "metadata" }), el("figcaption", { class: "faint" }, cell.shape ? shapeOf(cell) : media(cell))),
  video: (cell, at) => el("figure", {}, el("video", { src: videoUrl(at.row, at.path), controls: true, preload: "metadata", playsInline: true }), el("figcaption", { class: "faint" }, media(cell))),
};

function nested(title, note, fields, row, open) {
  return el("details", { class: "nest", open }, el("summary", {}, el("span", { class: "nest-name" }, title), el("span", { class: "faint" }, note)), tree(fields, row));
}

export function tree(fields, row) {
  return el("dl", { class: "fields" }, ...fields.flatMap((field) => [el("dt", { title: field.path }, field.name), el("dd", {}, large(field.value, { row, path: field.path }))]));
}

export function large(cell, at) {
  if (cell === null || typeof cell !== "object") return typeof cell === "string" && cell ? el("div", { class: "prose" }, cell) : small(cell, at);
  if (cell.t === "document") return nested(cell.name, `${cell.fields.length} fields`, cell.fields, at.row, true);
  if (cell.t === "docs" && cell.items) {
    if (!cell.n) return el("span", { class: "faint" }, "none");
    const items = cell.items.map((item, i) => nested(`${i}`, item.name, item.fields, at.row, i < 3));
    return el("div", { class: "nests" }, ...items, cell.n > cell.items.length ? el("p", { class: "faint" }, `and ${count(cell.n - cell.items.length)} more`) : "");
  }
  if (cell.fields) {
    const plain = cell.fields.every((field) => field.value === null || typeof field.value !== "object");
    if (cell.t === "items" && plain) return el("span", { class: "tags" }, ...cell.fields.map((field) => el("span", { class: "tag" }, String(field.value))));
    return cell.fields.length ? tree(cell.fields, at.row) : el("span", { class: "faint" }, "empty");
  }
  return (LARGE[cell.t] ?? SMALL[cell.t] ?? SMALL.object)(cell, at);
}
