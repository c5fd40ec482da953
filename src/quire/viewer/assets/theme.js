// Runs before the first paint: apply the chosen theme, or that of the system.
(() => {
  let chosen = null;
  try { chosen = document.cookie.match(/(?:^|; )quire-theme=(\w+)/)?.[1]; } catch { /* cookies may be off */ }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
