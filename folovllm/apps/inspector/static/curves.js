// Numbers over the whole recording, each in a small picture of its own, with the moment that is shown.
import { contextOf, count, duration, el, setText, widthOf } from "./dom.js";
import { t } from "./words.js";

const HEIGHT = 56;
const SMOOTH = 24; // moments: over so many a rate is taken

/** What is drawn: `lines` give [column of moment -> number, colour, filled?], `say` the value at a moment. */
const CURVES = [
  { title: "tokens a second", help: "answers' tokens over the last 24 moments", lines: [[rateAt, "accent", true]], say: (r, i) => count(rateAt(r, i)) },
  { title: "time to first token", help: "from a request's arrival to its first token: a point for each request", dots: true, lines: [[(r, i) => r.columns.first[i], "accent", false]], say: (r, i) => duration(lastFirst(r, i)) },
  {
    title: "blocks used, empty",
    help: "blocks that requests hold, and how many of these the slots without a token would fill",
    most: (r) => r.engine.num_kv_blocks,
    lines: [
      [(r, i) => r.columns.used[i], "accent", true],
      [(r, i) => r.columns.wasted[i] / r.engine.block_size, "alarm", true],
    ],
    say: (r, i) => `${count(r.columns.used[i])}, ${(r.columns.wasted[i] / r.engine.block_size).toFixed(1)}`,
    hidden: (r) => !r.engine.num_kv_blocks,
  },
  shareOf("prefix hit rate", "prompt tokens that were in the cache already", "hitRate", (r) => !r.engine.enable_prefix_caching),
  shareOf("draft tokens accepted", "of all draft tokens that were verified so far", "acceptance", (r) => !r.hasDrafts),
  {
    title: "running, waiting",
    help: "requests that take part in steps, and those that are not admitted yet",
    lines: [
      [(r, i) => r.columns.running[i], "accent", true],
      [(r, i) => r.columns.waiting[i], "alarm", false],
    ],
    say: (r, i) => `${count(r.columns.running[i])}, ${count(r.columns.waiting[i])}`,
  },
];

/** A number from 0 to 1 that is told in percent. */
function shareOf(title, help, column, hidden) {
  const of = (r, i) => r.columns[column][i];
  return { title, help, most: () => 1, lines: [[of, "hit", true]], say: (r, i) => `${Math.round(100 * of(r, i))}%`, hidden };
}

function rateAt({ columns: { drawn, time } }, i) {
  const before = Math.max(0, i - SMOOTH);
  const seconds = time[i] - time[before];
  return seconds > 0 ? (drawn[i] - drawn[before]) / seconds : 0;
}

function lastFirst({ columns: { first } }, i) {
  for (let k = i; k >= 0 && k > i - 2000; k--) if (first[k]) return first[k];
  return NaN;
}

export class CurvesView {
  /** `onGo(moment)` hears of clicks. */
  constructor(onGo) {
    this.pictures = CURVES.map((curve) => {
      const [canvas, value] = [el("canvas", { role: "img", height: HEIGHT }), el("b", {})];
      canvas.addEventListener("click", (event) => {
        const { left, width } = canvas.getBoundingClientRect();
        onGo(Math.round(((event.clientX - left) / width) * (this.length - 1)));
      });
      return { curve, canvas, value, figure: el("figure", { title: t(curve.help) }, el("figcaption", {}, el("span", {}, t(curve.title)), value), canvas), still: null };
    });
    this.element = el("section", { class: "curves", "aria-label": t("Curves") }, this.pictures.map(({ figure }) => figure));
  }

  draw({ recording, at, theme }) {
    this.length = recording.length;
    for (const picture of this.pictures) {
      const { curve, canvas, value, figure } = picture;
      figure.hidden = curve.hidden?.(recording) ?? false;
      const width = widthOf(figure);
      if (figure.hidden || !width) continue;
      setText(value, curve.say(recording, at));
      const key = `${recording.length} ${width} ${theme.ink} ${devicePixelRatio}`;
      if (picture.key !== key || picture.recording !== recording) {
        picture.still ??= document.createElement("canvas");
        drawCurve(contextOf(picture.still, width, HEIGHT), curve, recording, width, theme);
        Object.assign(picture, { key, recording });
      }
      const ctx = contextOf(canvas, width, HEIGHT);
      ctx.drawImage(picture.still, 0, 0, width, HEIGHT);
      ctx.fillStyle = theme.ink;
      ctx.fillRect((at / Math.max(1, recording.length - 1)) * (width - 1.5), 0, 1.5, HEIGHT);
      canvas.setAttribute("aria-label", `${t(curve.title)}: ${value.textContent}`);
    }
  }
}

/** Draws all moments: where several share a pixel, the largest. */
function drawCurve(ctx, curve, recording, width, theme) {
  const { length } = recording;
  const columns = Math.min(length, Math.ceil(width));
  const lines = curve.lines.map(([of]) => {
    const heights = new Float64Array(columns);
    for (let i = 0; i < length; i++) {
      const k = Math.min(columns - 1, Math.floor((i * columns) / length));
      heights[k] = Math.max(heights[k], of(recording, i));
    }
    return heights;
  });
  const most = curve.most?.(recording) ?? Math.max(...lines.map((heights) => heights.reduce((a, b) => Math.max(a, b), 0)), 1e-9);
  const [x, y] = [(k) => (k / Math.max(1, columns - 1)) * width, (value) => HEIGHT - 2 - (value / most) * (HEIGHT - 6)];
  lines.forEach((heights, line) => {
    const [, colour, filled] = curve.lines[line];
    ctx.strokeStyle = ctx.fillStyle = theme[colour];
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    if (curve.dots) heights.forEach((value, k) => value && ctx.rect(x(k) - 1.5, y(value) - 1.5, 3, 3));
    else heights.forEach((value, k) => (k ? ctx.lineTo(x(k), y(value)) : ctx.moveTo(x(k), y(value))));
    if (curve.dots) return ctx.fill();
    ctx.stroke();
    if (!filled) return;
    ctx.lineTo(width, HEIGHT);
    ctx.lineTo(0, HEIGHT);
    ctx.globalAlpha = 0.2;
    ctx.fill();
    ctx.globalAlpha = 1;
  });
  ctx.fillStyle = theme.line;
  ctx.fillRect(0, HEIGHT - 1, width, 1);
}
