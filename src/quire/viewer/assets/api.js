// Requests to the server of the viewer. Nothing is fetched from anywhere else.

export class RequestError extends Error {
  constructor(message, status, position) {
    super(message);
    this.status = status;
    this.position = position;
  }
}

export const about = { version: "", columns: [], tree: [] };

function query(values) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== "" && value !== null && value !== undefined && value !== false) parameters.set(name, value);
  }
  return parameters.toString();
}

export async function ask(what, values = {}, signal = undefined) {
  let answer;
  try {
    answer = await fetch(`/api/${what}?${query(values)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The viewer does not answer: it may have been closed.", 0);
  }
  if (answer.ok) return answer.json();
  let problem = null;
  try { problem = await answer.json(); } catch { /* no JSON */ }
  throw new RequestError(problem?.error ?? `The viewer answered ${answer.status}.`, answer.status, problem?.position);
}

const address = (what, values) => `/api/${what}?${query({ ...values, v: about.version })}`;
export const imageUrl = (row, path, size = 192, frame = 0) => address("image", { row, path, size, frame: frame || "" });
export const audioUrl = (row, path) => address("audio", { row, path });
export const videoUrl = (row, path) => address("video", { row, path });
