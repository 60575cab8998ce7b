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
function patternOf(n) {
  return Math.floor(n / HUES.length) % NUM_PATTERNS;
}

const tiles = new Map(); // pictures of patterns

/** A CSS background of the sequence's hue and pattern. */
export function cssFill(n) {
  return patternOf(n) ? `url(${tileOf(n).toDataURL()}), ${hueOf(n)}` : hueOf(n);
}

/** Draws the pattern of sequence n over a rectangle that is filled already. */
export function drawPattern(ctx, n, x, y, w, h) {
  if (!patternOf(n) || w < 4 || h < 4) return;
  const tile = tileOf(n);
  ctx.fillStyle = tile.pattern ??= ctx.createPattern(tile, "repeat");
  ctx.fillRect(x, y, w, h);
}

function tileOf(n) {
  const [pattern, isDark] = [patternOf(n), inkOn(n) === "#fff"];
  const key = `${isDark} ${pattern}`;
  if (tiles.has(key)) return tiles.get(key);
  const tile = document.createElement("canvas");
  tiles.set(key, tile);
  tile.width = tile.height = 6;
  const ctx = tile.getContext("2d");
  ctx.strokeStyle = ctx.fillStyle = isDark ? "rgba(255,255,255,.5)" : "rgba(0,0,0,.35)";
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
  const probe = document.body.appendChild(document.createElement("i"));
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const theme = Object.fromEntries(
    ["ink", "muted", "faint", "line", "card", "accent", "prefill", "decode", "alarm", "cached", "hit"].map((name) => [name, read(name)]),
  );
  probe.remove();
  return theme;
}
