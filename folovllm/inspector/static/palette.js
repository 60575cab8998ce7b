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

/** Draws the pattern of sequence n over a rectangle that is filled already. */
export function drawPattern(ctx, n, x, y, w, h) {
  const pattern = patternOf(n);
  if (pattern === 0 || w < 4 || h < 4) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, h);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = inkOn(n) === "#fff" ? "rgba(255,255,255,.5)" : "rgba(0,0,0,.35)";
  ctx.lineWidth = 1;
  ctx.beginPath();
  if (pattern === 1) for (let d = -h; d < w; d += 5) ctx.moveTo(x + d, y + h), ctx.lineTo(x + d + h, y);
  if (pattern === 2) for (let i = 2; i < w; i += 5) for (let j = 2; j < h; j += 5) ctx.rect(x + i, y + j, 1.4, 1.4);
  if (pattern === 3) for (let j = 2; j < h; j += 4) ctx.moveTo(x, y + j), ctx.lineTo(x + w, y + j);
  pattern === 2 ? ctx.fill() : ctx.stroke();
  ctx.restore();
}

/** The colours of the page as it is shown now, light or dark: canvases cannot read CSS variables by themselves. */
export function themeOf(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    ["ink", "muted", "faint", "line", "card", "accent", "prefill", "decode", "alarm", "cached", "hit"].map((name) => [name, read(name)]),
  );
}
