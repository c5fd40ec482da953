// Elements, icons and numbers. Text of the data only ever becomes textContent.

export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list" && name !== "role") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const PATHS = {
  columns: "M4 5h16M4 12h10M4 19h13",
  glass: "M11 4a7 7 0 1 1 0 14 7 7 0 0 1 0-14zM16.2 16.2 20.5 20.5",
  close: "M6 6l12 12M18 6 6 18",
  theme: "M12 4a8 8 0 1 0 8 8 6 6 0 0 1-8-8z",
  help: "M9.2 9.2a2.8 2.8 0 1 1 4.2 2.4c-.9.5-1.4 1.1-1.4 2.1M12 17h.01",
  density: "M4 6h16M4 10.5h16M4 15h16M4 19.5h16",
  play: "M8 5.5v13l10.5-6.5z",
  pause: "M8.5 6v12M15.5 6v12",
  up: "M12 19V5.5M6 11l6-6 6 6",
  down: "M12 5v13.5M6 13l6 6 6-6",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  chart: "M5 20V10M10 20V5M15 20v-8M20 20v-4",
  swap: "M7 4 3.5 7.5 7 11M3.5 7.5H18M17 13l3.5 3.5L17 20M20.5 16.5H6",
  film: "M4 6h16v12H4zM8 6v12M16 6v12M4 12h4M16 12h4",
  near: "M12 12m-2 0a2 2 0 1 0 4 0 2 2 0 1 0-4 0M5 6h.01M19 7h.01M18 18h.01M6 17h.01M12 4h.01",
  eye: "M3 12s3.5-6 9-6 9 6 9 6-3.5 6-9 6-9-6-9-6zM12 12m-2.5 0a2.5 2.5 0 1 0 5 0 2.5 2.5 0 1 0-5 0",
  empty: "M5 4h9l5 5v11H5zM14 4v5h5M9 14h6",
  broken: "M12 4 2.8 20h18.4zM12 10v4.5M12 17.2h.01",
};

export function icon(name) {
  const made = svg("svg", { viewBox: "0 0 24 24", class: `glyph glyph-${name}`, "aria-hidden": "true" });
  made.append(svg("path", { d: PATHS[name] }));
  return made;
}

export function clear(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const $ = (id) => document.getElementById(id);

const plain = new Intl.NumberFormat("en");
export const count = (value) => plain.format(value);

export function number(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? plain.format(value) : value.toExponential(4);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(3);
  return plain.format(Number(value.toPrecision(5)));
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const shapeOf = (cell) => `${cell.dtype} ${cell.shape.join(" × ") || "scalar"}`;

// What the reader chose is kept in cookies: the storage of a browser belongs to a port, and every viewer has another one.
export function store(name, value) {
  try {
    if (value === undefined) return document.cookie.split("; ").find((pair) => pair.startsWith(`quire-${name}=`))?.split("=")[1] ?? null;
    document.cookie = `quire-${name}=${value}; path=/; max-age=31536000; samesite=strict`;
  } catch { /* cookies may be off */ }
  return null;
}
