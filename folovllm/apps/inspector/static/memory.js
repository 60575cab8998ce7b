// The KV cache as a picture: a cell for each block. Hover for what it holds, click for the chain of its prefix.
import { drawCell, drawSnapshot, drawToken, outline, stateOfCell, write } from "./cells.js";
import { drawGhost, GHOSTS } from "./ghosts.js";
import { contextOf, count, el, plural, setText, showTip, template, widthOf } from "./dom.js";
import { t } from "./words.js";

const [MIN_CELL, MAX_CELL, MAX_ASPECT] = [1.5, 60, 2.6]; // CSS pixels; how much wider than high a cell of a small pool may be
const [FEW, MANY] = [64, 256]; // blocks: of a pool of more than MANY as far as it was ever used, a power of two from FEW on

const LEGEND = {
  free: "free",
  owned: "owned: colour and letter of its request, filled as far as it holds tokens",
  shared: "shared: so many hold it",
  snapshot: "snapshot: a copy of the state at the end of this block",
  cached: "cached: nobody's, but it can be found again; the paler, the longer ago",
  lost: "lost: not free, and nobody counts it",
  torn: "torn: free, and held",
  ...GHOSTS,
};

export class MemoryView {
  #zoom = 1;
  #pan = { x: 0, y: 0 };
  #cell = null; // under the pointer, or the keyboard's
  #chain = []; // blocks, the first of the prefix first
  #frame = null;
  #drag = null;

  /** `onPick(seqId or null)` hears whose block was clicked. */
  constructor(onPick, maxHeight) {
    this.onPick = onPick;
    this.maxHeight = maxHeight;
    [this.element, this.facts, this.stage, this.canvas, this.tip, this.legend] = template("memory", "facts", "stage", "cells", "tip", "legend");
    this.element.querySelectorAll("button").forEach((button, i) => (button.onclick = () => this.zoom([1 / 1.5, 1.5, 0][i])));
    this.#listen();
  }

  draw(frame) {
    this.#frame = frame;
    if (this.#chain.length && frame.at !== this.#chain.at) this.#chain = [];
    const { state } = frame;
    this.held = state.holders();
    this.#layOut();
    const ctx = contextOf(this.canvas, this.width, this.height);
    state.numBlocks ? this.#drawPool(ctx) : this.#drawGrowing(ctx);
    this.#tell();
    if (this.#cell !== null && !this.tip.hidden) this.#showTip();
  }

  /** Larger or smaller around a point, which is the cell that is pointed at where nobody says; 0: all of it. */
  zoom(factor, at = this.#middle()) {
    const before = this.#zoom;
    this.#zoom = factor === 0 ? 1 : Math.max(1, Math.min(24, this.#zoom * factor));
    const moved = (pan, place) => ((pan + place) * this.#zoom) / before - place;
    this.#pan = { x: moved(this.#pan.x, at[0]), y: moved(this.#pan.y, at[1]) };
    this.draw(this.#frame);
  }

  #middle() {
    const [x, y, w, h] = this.#cell === null ? [0, 0, this.width, this.height] : this.#box(this.#cell);
    return [x + w / 2, y + h / 2];
  }

  /** Cells: how many, how large, how many a row. */
  #layOut() {
    const { state, recording } = this.#frame;
    const width = Math.max(120, widthOf(this.stage));
    const used = Math.min(state.numBlocks, Math.max(FEW, 2 ** Math.ceil(Math.log2(recording.reach + 1))));
    this.num = state.numBlocks > MANY ? used : state.numBlocks || this.#growing().length;
    this.isWide = recording.engine.kv_cache === "slots"; // a slot is a long bar
    const most = state.numBlocks ? this.num : Math.max(recording.engine.max_model_len ?? 0, this.num);
    const aspect = this.isWide ? Infinity : state.numBlocks ? MAX_ASPECT : 1;
    for (this.columns = 1; ; this.columns++) {
      this.w = width / this.columns;
      this.h = Math.min(this.isWide ? 0.7 * MAX_CELL : MAX_CELL, this.w);
      const fits = Math.ceil(most / this.columns) * this.h <= this.maxHeight && this.w <= this.h * aspect;
      if (fits || this.w < MIN_CELL) break;
    }
    this.width = width;
    this.height = Math.max(24, Math.ceil(Math.min(this.maxHeight, Math.ceil(most / this.columns) * this.h) + 2));
    const [mostX, mostY] = [this.columns * this.w * this.#zoom - width, Math.ceil(this.num / this.columns) * this.h * this.#zoom - this.height];
    this.#pan.x = Math.max(0, Math.min(this.#pan.x, mostX));
    this.#pan.y = Math.max(0, Math.min(this.#pan.y, mostY + 2));
  }

  /** M1 has no pool: a cell is a token of the cache that grows. */
  #growing() {
    const cells = [];
    for (const seq of this.#frame.state.sequences.values()) {
      if (seq.isRunning) for (let place = 0; place < seq.numComputed; place++) cells.push({ seq, place });
    }
    return cells;
  }

  #box(i) {
    const [w, h] = [this.w * this.#zoom, this.h * this.#zoom];
    return [(i % this.columns) * w - this.#pan.x, Math.floor(i / this.columns) * h - this.#pan.y, w, h];
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left + this.#pan.x) / (this.w * this.#zoom));
    const i = Math.floor((event.clientY - box.top + this.#pan.y) / (this.h * this.#zoom)) * this.columns + column;
    return column >= 0 && column < this.columns && i >= 0 && i < this.num ? i : null;
  }

  #drawPool(ctx) {
    const { state, theme, selected, news } = this.#frame;
    const order = new Map(selected === null ? [] : (state.sequences.get(selected)?.table ?? []).map((block, place) => [block, place]));
    const dim = selected !== null && state.sequences.has(selected);
    const marked = state.blocksWithSnapshots();
    for (let i = 0; i < this.num; i++) {
      const [x, y, w, h] = this.#box(i);
      if (y > this.height || y + h < 0 || x > this.width || x + w < 0) continue;
      const gap = w > 8 ? 1.5 : w > 4 ? 0.5 : 0;
      const box = [x + gap, y + gap, w - 2 * gap, h - 2 * gap];
      ctx.globalAlpha = dim && !order.has(i) ? 0.3 : 1;
      drawCell(ctx, this.#frame, i, this.held[i], box, this.isWide);
      ctx.globalAlpha = 1;
      if (marked.has(i)) drawSnapshot(ctx, theme, box);
      if (order.has(i)) outline(ctx, box, theme.ink, 2);
      else if (news.has(i) && w > 6) outline(ctx, box, theme.accent, 2);
      if (order.has(i) && w >= 26 && !this.isWide) write(ctx, `${order.get(i)}`, [x + w - 16, y + 1, 15, 13], "#111", true);
    }
    this.#drawGhosts(ctx);
    ctx.globalAlpha = 1;
    this.#drawChain(ctx, theme);
    if (this.#cell !== null) outline(ctx, this.#box(this.#cell), theme.accent, 2.5);
  }

  /** The last first: a bonus token lies over the draft token that it stands for. */
  #drawGhosts(ctx) {
    const { ghosts, recording, state, theme, selected } = this.#frame;
    for (const [id, own] of ghosts) {
      ctx.globalAlpha = state.sequences.has(selected) && selected !== id ? 0.3 : 1;
      for (const { kind, place, block } of own.toReversed()) {
        if (block === null) continue;
        const [x, y, w, h] = this.#box(block);
        const gap = w > 8 ? 1.5 : 0;
        const wide = (w - 2 * gap) / state.blockSize;
        drawGhost(ctx, theme, recording.infos.get(id).index, kind, [x + gap + (place % state.blockSize) * wide, y + gap, wide, h - 2 * gap]);
      }
    }
  }

  #drawChain(ctx, theme) {
    if (this.#chain.length < 2) return;
    ctx.strokeStyle = ctx.fillStyle = theme.ink;
    ctx.lineWidth = 2;
    ctx.beginPath();
    this.#chain.forEach((block, i) => {
      const [x, y, w, h] = this.#box(block);
      i ? ctx.lineTo(x + w / 2, y + h / 2) : ctx.moveTo(x + w / 2, y + h / 2);
    });
    ctx.stroke();
    for (const block of this.#chain) {
      const [x, y, w, h] = this.#box(block);
      ctx.beginPath();
      ctx.arc(x + w / 2, y + h / 2, 3.5, 0, 7);
      ctx.fill();
    }
  }

  #drawGrowing(ctx) {
    this.#growing().forEach(({ seq, place }, i) => drawToken(ctx, this.#frame, seq, place, this.#box(i)));
    if (this.#cell !== null && this.#cell < this.num) outline(ctx, this.#box(this.#cell), this.#frame.theme.accent, 2.5);
  }

  /** The numbers above the picture, the legend below, and what a screen reader says instead of the picture. */
  #tell() {
    const { state, recording } = this.#frame;
    if (!state.numBlocks) {
      setText(this.facts, this.num ? t("no pool: the cache of the one that runs has grown to {tokens}", { tokens: plural(this.num, "token") }) : t("no pool: nobody runs, and no cache is there"));
      this.canvas.setAttribute("aria-label", this.facts.textContent);
      this.legend.replaceChildren(el("li", {}, t("pale: prompt")), el("li", {}, t("full colour: answer")));
      return;
    }
    const counts = Object.fromEntries(Object.keys(LEGEND).map((kind) => [kind, 0]));
    for (let i = 0; i < state.numBlocks; i++) counts[stateOfCell(state, i)]++;
    for (const own of this.#frame.ghosts.values()) for (const { kind } of own) counts[kind]++;
    counts.snapshot = state.snapshots.size;
    let [reserved, filled] = [0, 0];
    for (const seq of state.sequences.values()) {
      if (seq.isRunning && seq.table.length) [reserved, filled] = [reserved + seq.table.length * state.blockSize, filled + seq.numComputed];
    }
    const waste = reserved ? Math.round(100 * Math.max(0, 1 - filled / reserved)) : 0;
    const values = { used: count(state.numUsed), blocks: plural(state.numBlocks, "block"), size: state.blockSize, waste, n: count(this.num) };
    const facts = t("{used} of {blocks} of {size} used; {waste}% of that empty", values);
    setText(this.facts, this.num < state.numBlocks ? `${facts}${t("; the first {n} are drawn", values)}` : facts);
    const said = Object.keys(LEGEND).filter((kind) => counts[kind]).map((kind) => `${count(counts[kind])} ${t(kind)}`);
    this.canvas.setAttribute("aria-label", t("KV cache: {said}. Arrow keys go from block to block.", { said: said.join(", ") }));
    const shown = Object.keys(LEGEND).filter((kind) => counts[kind] || kind === "free" || kind === "owned" || (recording.hasDrafts && kind in GHOSTS && kind !== "proposed"));
    if (this.shown !== shown.join()) {
      this.shown = shown.join();
      this.numbers = new Map(shown.map((kind) => [kind, el("b", {})]));
      this.legend.replaceChildren(...shown.map((kind) => el("li", { title: t(LEGEND[kind]) }, el("i", { class: `key ${kind}` }), this.numbers.get(kind), ` ${t(kind)}`)));
    }
    for (const [kind, number] of this.numbers) setText(number, count(counts[kind]));
  }

  /** What a block holds, in lines of text. */
  describe(i) {
    const { state, recording } = this.#frame;
    if (!state.numBlocks) {
      const { seq, place } = this.#growing()[i];
      const info = recording.infos.get(seq.seqId);
      return [t("Token {place} of {name}", { place, name: info.letters }), JSON.stringify(recording.text(info, place, place + 1))];
    }
    const held = this.held[i] ?? [];
    const lines = [t("Block {i}: {kind}", { i, kind: t(stateOfCell(state, i)) })];
    for (const { seq, place, filled } of held) {
      const info = recording.infos.get(seq.seqId);
      const values = { place, name: info.letters, request: info.requestId, filled, size: state.blockSize };
      lines.push(t("block {place} of {name} ({request}): {filled} of {size} filled", values));
    }
    if (!held.length && state.refCount[i]) lines.push(t("held by nobody who runs"));
    const contents = recording.contents(state, i, held[0]);
    if (contents) {
      const text = contents.ids ? recording.decode(contents.ids) : recording.text(contents.info, contents.from, contents.to);
      if (!held.length && contents.info) lines.push(t("tokens {from} to {to} of {name}", { from: contents.from, to: contents.to, name: contents.info.letters }));
      if (text) lines.push(`“${text.length > 160 ? `${text.slice(0, 160)}…` : text}”`);
    }
    for (const own of this.#frame.ghosts.values()) {
      for (const { kind, text, block } of own) if (block === i) lines.push(`${t(kind)}${text ? ` “${text}”` : ""}`);
    }
    if (state.hash[i] !== null) {
      const parent = state.parentOf(i);
      const after = state.parent[i] ? (parent < 0 ? t("follows a block that is gone") : t("follows block {parent}", { parent })) : t("begins a prefix");
      lines.push(t("hash {hash}, {after}", { hash: state.hash[i], after }));
      if (state.blocksWithSnapshots().has(i)) lines.push(t(LEGEND.snapshot));
    }
    return lines;
  }

  #showTip() {
    if (this.#cell === null || this.#cell >= this.num) return void (this.tip.hidden = true);
    const [x, y, w, h] = this.#box(this.#cell);
    showTip(this.tip, this.describe(this.#cell), x + w / 2 - 20, y + h + 6, this.width);
  }

  #pick(i) {
    const { state, at } = this.#frame;
    this.#chain = [];
    if (state.numBlocks && state.hash[i] !== null) for (let j = i; j >= 0; j = state.parentOf(j)) this.#chain.unshift(j);
    this.#chain.at = at;
    const owner = state.numBlocks ? this.held[i]?.[0]?.seq : this.#growing()[i]?.seq;
    this.onPick(owner ? owner.seqId : null);
  }

  #point(i) {
    if (i === this.#cell) return;
    this.#cell = i;
    this.draw(this.#frame);
    this.#showTip();
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => (this.#drag = { x: event.clientX, y: event.clientY, pan: { ...this.#pan }, far: false }));
    canvas.addEventListener("pointermove", (event) => {
      const drag = this.#drag;
      if (!drag || !(event.buttons & 1) || this.#zoom === 1) return this.#point(this.#at(event));
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.far ||= Math.hypot(dx, dy) > 4;
      this.#pan = { x: drag.pan.x - dx, y: drag.pan.y - dy };
      this.draw(this.#frame);
    });
    canvas.addEventListener("pointerup", (event) => {
      const i = this.#at(event);
      if (!this.#drag?.far) i === null ? this.onPick(null) : (this.#point(i), this.#pick(i));
      this.#drag = null;
    });
    canvas.onpointerleave = canvas.onblur = () => (this.#point(null), (this.tip.hidden = true));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.25 : 0.8, [event.offsetX, event.offsetY]);
    }, { passive: false }); // prettier-ignore
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
      if (step && !event.shiftKey) this.#point(Math.max(0, Math.min(this.num - 1, (this.#cell ?? -step) + step)));
      else if ((event.key === "Enter" || event.key === " ") && this.#cell !== null) this.#pick(this.#cell);
      else if (event.key === "Escape") this.#point(null);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }
}
