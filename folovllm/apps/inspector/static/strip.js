// One of many recordings: a row for each request, on the time that all of them share. Full where it is computed, a line where it waits.
import { contextOf, el, widthOf } from "./dom.js";
import { hueOf } from "./palette.js";
import { t } from "./words.js";

const [MOST, LEAST] = [7, 3]; // pixels of a row

export class StripView {
  /** `onGo(seconds)` hears of clicks. */
  constructor(onGo) {
    this.canvas = el("canvas", { role: "img" });
    this.element = el("section", { class: "strip" }, this.canvas);
    this.canvas.addEventListener("click", (event) => {
      const { left, width } = this.canvas.getBoundingClientRect();
      onGo(((event.clientX - left) / width) * this.whole);
    });
  }

  /** `time` is now, `whole` how long the slowest takes, in seconds. */
  draw({ recording, theme }, time, whole, most) {
    this.whole = whole;
    this.spans ??= [...recording.infos.values()].map((info) => spansOf(info, recording));
    const width = Math.max(120, widthOf(this.element));
    const row = Math.max(LEAST, Math.min(MOST, Math.floor(most / this.spans.length)));
    const height = row * this.spans.length;
    const ctx = contextOf(this.canvas, width, height);
    const x = (seconds) => (seconds / whole) * (width - 2);
    this.spans.forEach(({ hue, from, to, busy }, i) => {
      const bar = (a, b, alpha, high) => {
        ctx.globalAlpha = alpha;
        ctx.fillRect(x(a), row * i + (row - high) / 2, Math.max(0, x(b) - x(a)), high);
      };
      ctx.fillStyle = theme.muted;
      if (from < time) bar(from, Math.min(to, time), 0.5, 1);
      ctx.fillStyle = hue;
      for (const [a, b] of busy) {
        if (a < time) bar(a, Math.min(b, time), 1, row - 1);
      }
    });
    ctx.globalAlpha = 1;
    ctx.fillStyle = theme.ink;
    ctx.fillRect(x(time), 0, 1.5, height);
    this.canvas.setAttribute("aria-label", t("The requests of this engine over time"));
  }
}

/** When a request came, ended, and was computed: spans of seconds, those that touch made one. */
function spansOf(info, { columns: { time }, length }) {
  const busy = [];
  for (const at of info.at) {
    const [from, to] = [time[Math.max(0, at - 1)], time[at]];
    if (busy.length && from - busy.at(-1)[1] < 1e-9) busy.at(-1)[1] = to;
    else busy.push([from, to]);
  }
  return { hue: hueOf(info.index), from: time[info.start], to: time[Math.min(info.end, length - 1)], busy };
}
