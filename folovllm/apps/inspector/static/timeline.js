// Steps: above, how each spent its budget of tokens and its time; below, a row for each sequence (a Gantt picture).
import { contextOf, count, duration, FONT, placeOf, plural, setText, showTip, template, widthOf } from "./dom.js";
import { write } from "./cells.js";
import { drawPattern, hueOf, inkOn } from "./palette.js";
import { t } from "./words.js";

const [BUDGET, TIMES, ROW, GAP] = [58, 26, 17, 8]; // heights in pixels
const LEFT = 40; // for the rows' letters
const MARKS = { preempt: "✕", hit: "◆", finish: "■", abort: "⊘" };
const WORDS = { preempt: "preempted", hit: "prefix hit", finish: "finished", abort: "aborted", admit: "admitted", refuse: "must wait" };

export class TimelineView {
  #frame = null;

  /** `onGo(moment)` and `onPick(seqId)` hear of clicks. */
  constructor(onGo, onPick, maxRows) {
    Object.assign(this, { onGo, onPick, maxRows });
    this.factor = 1; // of what fits
    [this.element, this.facts, this.stage, this.canvas, this.tip, this.checkKey] = template("timeline", "facts", "stage", "steps", "tip", "drafts");
    this.element.querySelectorAll("button").forEach((button, i) => (button.onclick = () => this.zoom([0.7, 1.4][i])));
    this.canvas.addEventListener("click", (event) => this.#click(event));
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  zoom(factor) {
    this.factor = Math.max(0.1, Math.min(8, this.factor * factor));
    this.draw(this.#frame);
  }

  draw(frame) {
    this.#frame = frame;
    const { recording, at } = frame;
    this.width = Math.max(160, widthOf(this.stage));
    const whole = Math.max(8, Math.min(22, (this.width - LEFT) / recording.length)); // pixels
    this.perStep = Math.max(2.5, Math.min(40, whole * this.factor));
    const fit = Math.floor((this.width - LEFT) / this.perStep);
    this.from = Math.max(recording.first, Math.min(at - Math.floor(fit * 0.7), recording.length - fit));
    this.to = Math.min(recording.length, this.from + fit);
    this.rows = this.#choose();
    this.height = BUDGET + TIMES + 2 * GAP + Math.max(1, this.rows.length) * ROW + 2;
    const ctx = contextOf(this.canvas, this.width, this.height);
    this.#drawCursor(ctx, at);
    this.#drawBudget(ctx);
    this.#drawTimes(ctx);
    this.rows.forEach((info, i) => this.#drawRow(ctx, info, BUDGET + TIMES + 2 * GAP + i * ROW));
    this.#tell();
  }

  #x(at) {
    return LEFT + (at - this.from) * this.perStep;
  }

  /** Sequences that are there in the window: the selected one, then by arrival, those of the moment before the rest. */
  #choose() {
    const { recording, at, selected } = this.#frame;
    const there = [];
    for (const info of recording.infos.values()) if (info.start < this.to && info.end >= this.from) there.push(info);
    this.numThere = there.length;
    if (there.length <= this.maxRows) return there;
    const isNow = (info) => info.start <= at && info.end >= at && info.at[0] <= at;
    const rank = (info) => (info.seqId === selected ? 0 : isNow(info) ? 1 : info.at[0] < this.to ? 2 : 3);
    const byIndex = (a, b) => a.index - b.index;
    return there.sort((a, b) => rank(a) - rank(b) || byIndex(a, b)).slice(0, this.maxRows).sort(byIndex);
  }

  #drawCursor(ctx, at) {
    ctx.fillStyle = this.#frame.theme.line;
    ctx.fillRect(this.#x(at), 0, Math.max(2, this.perStep), this.height);
  }

  #most(of) {
    let most = 0;
    for (let i = this.from; i < this.to; i++) most = Math.max(most, of(i));
    return most;
  }

  #drawBudget(ctx) {
    const { columns } = this.#frame.recording;
    const { theme } = this.#frame;
    const used = this.#most((i) => columns.prefill[i] + columns.decode[i]);
    const whole = this.#most((i) => columns.prefill[i] + columns.decode[i] + columns.idle[i]);
    const scale = Math.min(whole, Math.max(2 * used, 8)) || 1; // a budget far above what is used is cut off
    const [wide, gap] = [this.perStep, this.perStep > 5 ? 1.5 : 0.5];
    for (let i = this.from; i < this.to; i++) {
      const [prefill, decode, idle] = [columns.prefill[i], columns.decode[i], columns.idle[i]];
      if (!prefill && !decode) continue;
      const high = (n) => (Math.min(n, scale) / scale) * BUDGET;
      const [x, w] = [this.#x(i) + gap / 2, wide - gap];
      const bars = [[theme.muted, 0.16, 0, prefill + decode + idle], [theme.decode, 1, 0, decode], [theme.prefill, 1, decode, prefill + decode]]; // prettier-ignore
      for (const [colour, alpha, from, to] of bars) {
        [ctx.fillStyle, ctx.globalAlpha] = [colour, alpha];
        ctx.fillRect(x, BUDGET - high(to), w, high(to) - high(from));
      }
      ctx.strokeStyle = theme.decode; // what a recorded graph computes besides, for it is wider than the step
      ctx.lineWidth = 1;
      if (columns.width[i] > decode) ctx.strokeRect(x + 0.5, BUDGET - high(columns.width[i]), w - 1, high(columns.width[i] - decode));
    }
    this.#label(ctx, count(scale), LEFT - 4, 9);
    this.#label(ctx, t("tok"), LEFT - 4, 20);
  }

  #drawTimes(ctx) {
    const { columns } = this.#frame.recording;
    const { theme } = this.#frame;
    const [top, gap] = [BUDGET + GAP, this.perStep > 5 ? 1.5 : 0.5];
    const total = (i) => columns.schedule[i] + columns.device[i] + columns.take[i];
    const all = [];
    for (let i = this.from; i < this.to; i++) all.push(total(i));
    all.sort((a, b) => a - b);
    const scale = Math.min(all.at(-1) ?? 0, 4 * (all[all.length >> 1] ?? 0)) || all.at(-1) || 1; // one slow step hides no other
    for (let i = this.from; i < this.to; i++) {
      let bottom = top + TIMES;
      for (const [name, colour] of [["device", theme.muted], ["schedule", theme.hit], ["take", theme.ink]]) {
        const high = Math.min((columns[name][i] / scale) * TIMES, bottom - top);
        ctx.fillStyle = colour;
        ctx.fillRect(this.#x(i) + gap / 2, bottom - high, this.perStep - gap, high);
        bottom -= high;
      }
    }
    this.#label(ctx, duration(scale).replace(" ", ""), LEFT - 3, top + 9);
  }

  #label(ctx, text, x, y) {
    ctx.font = `9px ${FONT}`;
    ctx.fillStyle = this.#frame.theme.muted;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    ctx.fillText(text, x, y);
  }

  #drawRow(ctx, info, y) {
    const { theme, selected, at } = this.#frame;
    const [middle, hue] = [y + ROW / 2, hueOf(info.index)];
    ctx.globalAlpha = selected !== null && selected !== info.seqId ? 0.35 : 1;
    ctx.strokeStyle = theme.muted;
    ctx.lineWidth = 1;
    ctx.setLineDash([2, 3]);
    ctx.beginPath();
    ctx.moveTo(this.#x(Math.max(info.start, this.from)), middle);
    ctx.lineTo(this.#x(Math.min(info.end, this.to - 1)) + this.perStep, middle);
    ctx.stroke();
    ctx.setLineDash([]);
    for (let k = placeOf(info.at.length, (i) => info.at[i] < this.from); k < info.at.length && info.at[k] < this.to; k++) {
      const drafts = info.drafts[k];
      const isPrefill = info.size[k] > 1 + drafts || info.from[k] < info.prompt.length;
      const [x, w, h] = [this.#x(info.at[k]) + 0.5, this.perStep - 1, isPrefill || drafts ? ROW - 3 : ROW - 9];
      const each = h / (1 + drafts); // a bar for each token that counts, and a frame in the place of those that do not
      const kept = 1 + (info.accepted[k] ?? 0);
      ctx.fillStyle = theme.card;
      if (drafts) ctx.fillRect(x, middle - h / 2, w, h);
      ctx.fillStyle = ctx.strokeStyle = hue;
      for (let i = 1; i <= kept; i++) ctx.fillRect(x, middle + h / 2 - each * i, w, drafts ? each * 0.7 : h);
      if (kept <= drafts) ctx.strokeRect(x + 0.5, middle - h / 2 + 0.5, w - 1, h - each * kept - 1);
      if (isPrefill) drawPattern(ctx, info.index, x, middle - h / 2, w, h);
    }
    for (const { at: when, kind } of info.marks) {
      if (when >= this.from && when < this.to && MARKS[kind]) this.#mark(ctx, kind, this.#x(when), middle, theme);
    }
    const isThere = info.start <= at && info.end >= at;
    ctx.fillStyle = isThere ? hue : theme.faint;
    ctx.fillRect(2, y + 1, LEFT - 8, ROW - 2);
    write(ctx, info.letters, [2, y + 1, LEFT - 8, ROW - 2], isThere ? inkOn(info.index) : theme.muted);
    ctx.globalAlpha = 1;
  }

  #mark(ctx, kind, x, middle, theme) {
    ctx.font = `700 ${kind === "preempt" ? 13 : 10}px ${FONT}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.lineWidth = 3;
    ctx.strokeStyle = theme.card;
    ctx.fillStyle = kind === "preempt" || kind === "abort" ? theme.alarm : theme.ink;
    const at = x + (kind === "hit" ? 0 : this.perStep / 2);
    ctx.strokeText(MARKS[kind], at, middle);
    ctx.fillText(MARKS[kind], at, middle);
  }

  #tell() {
    const { recording, at } = this.#frame;
    const { columns } = recording;
    const hidden = this.numThere - this.rows.length;
    this.checkKey.hidden = !recording.hasDrafts;
    const padded = { width: columns.width[at], n: columns.width[at] - columns.decode[at] };
    const graph = recording.engine.device === "cpu" ? "; packed to {width} rows ({n} padded)" : "; graph of {width} ({n} padded)";
    const names = { schedule: duration(columns.schedule[at]), device: duration(columns.device[at]), take: duration(columns.take[at]) };
    const facts = [t("schedule {schedule}, device and sampling {device}, postprocess {take}", names)];
    if (padded.width) facts.push(t(graph, padded));
    if (hidden > 0) facts.push(t("; {n} rows not shown", { n: count(hidden) }));
    setText(this.facts, columns.prefill[at] + columns.decode[at] ? facts.join("") : "");
    const window = { from: recording.stepAt(this.from), to: recording.stepAt(this.to - 1), now: this.#numbers(at) };
    this.canvas.setAttribute("aria-label", t("Steps {from} to {to}. This one: {now}.", window));
  }

  #numbers(at) {
    const { prefill, decode, idle, drafts } = this.#frame.recording.columns;
    const values = { prefill: plural(prefill[at], "token"), decode: count(decode[at]), idle: count(idle[at]), drafts: plural(drafts[at], "draft token") };
    return t(drafts[at] ? "{prefill} of prefill, {decode} of decode ({drafts}), {idle} idle" : "{prefill} of prefill, {decode} of decode, {idle} idle", values);
  }

  #under(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const at = Math.floor((x - LEFT) / this.perStep) + this.from;
    const info = this.rows[Math.floor((y - BUDGET - TIMES - 2 * GAP) / ROW)] ?? null;
    return { x, y, info, at: x >= LEFT && at < this.to ? at : null };
  }

  #click(event) {
    const { at, info } = this.#under(event);
    if (at === null) this.onPick(info?.seqId ?? null);
    else this.onGo(at);
  }

  #hover(event) {
    const { x, y, at, info } = this.#under(event);
    if (at === null && !info) return void (this.tip.hidden = true);
    showTip(this.tip, at === null ? [info.requestId] : this.#lines(at, info), x + 14, y + 16, this.width);
  }

  #lines(at, info) {
    const { columns } = this.#frame.recording;
    const values = { step: count(this.#frame.recording.stepAt(at)), time: duration(columns.time[at]), numbers: this.#numbers(at) };
    const lines = [t(at ? "Step {step}, at {time}: {numbers}" : "The beginning: {numbers}", values)];
    if (!info) return lines;
    const k = placeOf(info.at.length, (i) => info.at[i] < at);
    const share = { name: info.letters, from: info.from[k], to: info.from[k] + info.size[k], n: info.accepted[k] ?? 0, drafts: plural(info.drafts[k], "draft token") };
    if (info.at[k] === at) lines.push(t(info.drafts[k] ? "{name}: tokens {from} to {to}, {n} of {drafts} accepted" : "{name}: tokens {from} to {to}", share));
    for (const { at: when, kind, n, other } of info.marks) {
      const values = { name: info.letters, what: t(WORDS[kind]), n: n || "", by: this.#frame.recording.name(other) };
      if (when === at) lines.push(t(kind === "preempt" ? "{name}: {what} for {by} {n}" : "{name}: {what} {n}", values));
    }
    return lines;
  }
}
