// Who has which colour, pattern and letter. Seven colours that colour-blind people tell apart (Okabe and Ito, 2008),
// times four patterns; the letter says the same a third time.

const HUES = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"];
const NUM_PATTERNS = 4; // plain, stripes, dots, grid

/** The letters of the n-th sequence of a recording: A to Z, then AA, AB and so on. */
export function lettersOf(n) {
  let letters = "";
  for (let rest = n + 1; rest > 0; rest = Math.floor((rest - 1) / 26)) {
    letters = String.fromCharCode(65 + ((rest - 1) % 26)) + letters;
  }
  return letters;
}

export function hueOf(n) {
  return HUES[n % HUES.length];
}

/** The colour of letters on a hue: only blue is dark. */
export function inkOn(n) {
  return n % HUES.length === 4 ? "#fff" : "#111";
}

/** The pattern's number, 0 for plain: it tells sequences of the same hue apart. */
export function patternOf(n) {
  return Math.floor(n / HUES.length) % NUM_PATTERNS;
}

/** A CSS background of the sequence's hue and pattern. */
export function cssFill(n) {
  const line = inkOn(n) === "#fff" ? "rgba(255,255,255,.45)" : "rgba(0,0,0,.35)";
  const over = [
    "",
    `repeating-linear-gradient(45deg, ${line} 0 1.5px, transparent 1.5px 5px)`,
    `radial-gradient(${line} 1.2px, transparent 1.4px) 0 0 / 5px 5px`,
    `repeating-linear-gradient(0deg, ${line} 0 1px, transparent 1px 4px)`,
  ][patternOf(n)];
  return over ? `${over}, ${hueOf(n)}` : hueOf(n);
}

const tiles = new Map();

/** Draws the pattern of sequence n over a rectangle that is filled already. */
export function drawPattern(ctx, n, x, y, w, h) {
  const pattern = patternOf(n);
  if (pattern === 0 || w < 4 || h < 4) return;
  const ink = inkOn(n) === "#fff" ? "rgba(255,255,255,.5)" : "rgba(0,0,0,.35)";
  const key = `${ink} ${pattern}`;
  if (!tiles.has(key)) tiles.set(key, ctx.createPattern(tileOf(pattern, ink), "repeat"));
  ctx.fillStyle = tiles.get(key);
  ctx.fillRect(x, y, w, h);
}

function tileOf(pattern, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ctx = tile.getContext("2d");
  ctx.strokeStyle = ctx.fillStyle = ink;
  ctx.lineWidth = 1.4;
  ctx.beginPath();
  if (pattern === 1) for (const d of [-6, 0, 6]) ctx.moveTo(d - 1, 7), ctx.lineTo(d + 7, -1);
  if (pattern === 2) ctx.rect(2, 2, 2, 2);
  if (pattern === 3) ctx.rect(0, 2, 6, 1.2);
  pattern === 1 ? ctx.stroke() : ctx.fill();
  return tile;
}

/** The colours of the page as it is shown, light or dark: canvases cannot read CSS variables by themselves. */
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    ["ink", "muted", "faint", "line", "card", "accent", "prefill", "decode", "alarm", "cached", "hit"].map((name) => [name, read(name)]),
  );
}
