// What is asked of the server. Everything is on this machine; nothing else is ever fetched.

export class AskError extends Error {
  constructor(message, status, position) {
    super(message);
    this.status = status;
    this.position = position;
  }
}

export const about = { version: "", columns: [], tree: [] };

function query(values) {
  const made = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== "" && value !== null && value !== undefined && value !== false) made.set(name, value);
  }
  return made.toString();
}

export async function ask(what, values = {}, signal = undefined) {
  let answer;
  try {
    answer = await fetch(`/api/${what}?${query(values)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError("The viewer does not answer: it may have been closed.", 0);
  }
  if (answer.ok) return answer.json();
  let told = null;
  try { told = await answer.json(); } catch { /* no JSON */ }
  throw new AskError(told?.error ?? `The viewer answered ${answer.status}.`, answer.status, told?.position);
}

const address = (what, values) => `/api/${what}?${query({ ...values, v: about.version })}`;
export const picture = (row, path, size = 192, frame = 0) => address("picture", { row, path, size, frame: frame || "" });
export const sound = (row, path) => address("sound", { row, path });
export const film = (row, path) => address("film", { row, path });
