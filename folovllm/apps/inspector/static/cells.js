// How a block is drawn. A box is [x, y, width, height]; a frame is what a view draws: recording, state, theme.
import { count, fitted, FONT } from "./dom.js";
import { drawPattern, hueOf, inkOn } from "./palette.js";
import { t } from "./words.js";

const LETTERS_FROM = 15; // pixels of a cell that has room for a letter
const TEXT_FROM = 86; // and for the text of its tokens
const MOST_BANDS = 3; // holders of a shared block that are shown by their colours

/** The states of a block, as docs/reference/recording.md names them. */
export function stateOfCell(state, i) {
  if (state.isFree[i]) return state.refCount[i] ? "torn" : state.hash[i] === null ? "free" : "cached";
  return state.refCount[i] === 0 ? "lost" : state.refCount[i] === 1 ? "owned" : "shared";
}

/** Draws block i, which `held` hold, or nobody; `isSlot`: it is a long bar. */
export function drawCell(ctx, frame, i, held, box, isSlot) {
  const kind = stateOfCell(frame.state, i);
  if (kind === "lost" || kind === "torn" || !held !== !!frame.state.isFree[i]) drawWrong(ctx, frame, kind, box);
  else if (held) drawHeld(ctx, frame, held, box, isSlot);
  else if (kind === "cached") drawCached(ctx, frame, i, box);
  else {
    ctx.fillStyle = frame.theme.faint;
    ctx.fillRect(...box);
  }
}

function drawHeld(ctx, { recording, state, theme }, held, [x, y, w, h], isSlot) {
  const bands = held.slice(0, Math.max(1, Math.min(MOST_BANDS, Math.floor(w / 4))));
  const [alpha, wide] = [ctx.globalAlpha, w / bands.length];
  bands.forEach(({ seq, filled }, k) => {
    const { index } = recording.infos.get(seq.seqId);
    const [left, full] = [x + k * wide, (wide * filled) / state.blockSize];
    ctx.fillStyle = hueOf(index);
    ctx.globalAlpha = alpha * 0.25;
    ctx.fillRect(left, y, wide, h);
    ctx.globalAlpha = alpha;
    ctx.fillRect(left, y, full, h);
    drawPattern(ctx, index, left, y, full, h);
  });
  if (w < LETTERS_FROM || h < 12) return;
  const first = { info: recording.infos.get(held[0].seq.seqId), full: held[0].filled / state.blockSize, ...held[0] };
  const name = held.length > 1 ? `×${held.length}` : first.info.letters;
  if (isSlot) drawSlot(ctx, recording, state, theme, first, [x, y, w, h]);
  else if (w >= TEXT_FROM && h >= 30) drawTokens(ctx, recording, state, theme, first, name, [x, y, w, h]);
  else {
    const onPlate = held.length > 1 || (first.full > 0.35 && first.full < 0.65); // half on the colour, half beside it
    write(ctx, name, [x, y, w, h], onPlate ? "#111" : first.full > 0.5 ? inkOn(first.info.index) : theme.ink, onPlate);
  }
}

/** The letter and the text of a slot, and how much of it is empty. */
function drawSlot(ctx, recording, state, theme, { info, seq, filled, full }, [x, y, w, h]) {
  write(ctx, info.letters, [x, y, 26, h], w * full > 20 ? inkOn(info.index) : theme.ink);
  const middle = y + h / 2 + 0.5;
  ctx.textAlign = "left";
  ctx.font = `${Math.min(11, h * 0.6)}px ${FONT}`;
  ctx.fillText(fitted(ctx, recording.text(info, 0, Math.min(filled, seq.numTokens)), w * full - 34), x + 28, middle);
  ctx.fillStyle = theme.muted;
  ctx.textAlign = "right";
  if (w * (1 - full) > 70) ctx.fillText(t("{n} empty", { n: count(state.blockSize - filled) }), x + w - 6, middle);
}

/** The letter and the text of a large cell. */
function drawTokens(ctx, recording, state, theme, { info, seq, place, filled, full }, name, [x, y, w, h]) {
  const [from, half] = [place * state.blockSize, Math.ceil(filled / 2)];
  const known = Math.min(from + filled, seq.numTokens); // what is in flight has no text yet
  const isShared = name !== info.letters;
  const isPlain = !isShared && full > 0.8; // one colour lies behind all of the text
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  ctx.font = `10px ${FONT}`;
  const texts = [recording.text(info, from, Math.min(from + half, known)), recording.text(info, from + half, known)];
  const lines = texts.map((text) => fitted(ctx, text, w - 28));
  if (!isPlain && lines.some(Boolean)) {
    ctx.globalAlpha *= 0.78;
    ctx.fillStyle = theme.card;
    ctx.fillRect(x + 22, y + h / 2 - 13, Math.max(...lines.map((line) => ctx.measureText(line).width)) + 6, 26);
    ctx.globalAlpha /= 0.78;
  }
  ctx.fillStyle = isPlain ? inkOn(info.index) : theme.ink;
  lines.forEach((line, i) => ctx.fillText(line, x + 25, y + h / 2 + (i ? 6.5 : -6.5)));
  write(ctx, name, [x, y, 24, h], isShared ? "#111" : full * w > 18 ? inkOn(info.index) : theme.ink, isShared);
}

/** Nobody's block that can be found again: the longer ago it was freed, the paler. */
function drawCached(ctx, { recording, state, theme }, i, [x, y, w, h]) {
  const [alpha, age] = [ctx.globalAlpha, state.clock ? (state.clock - state.freedAt[i]) / state.numBlocks : 0];
  ctx.globalAlpha = alpha * Math.max(0.2, 0.75 - 0.55 * age);
  ctx.fillStyle = ctx.strokeStyle = theme.cached;
  ctx.fillRect(x, y, w, h);
  ctx.globalAlpha = alpha;
  if (w < 10) return;
  ctx.setLineDash([3, 2]);
  ctx.lineWidth = 1;
  ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  ctx.setLineDash([]);
  const owner = recording.infos.get(state.originSeq[i]);
  if (w >= LETTERS_FROM && owner) write(ctx, owner.letters.toLowerCase(), [x, y, w, h], theme.ink);
}

/** What only wrong code makes. */
function drawWrong(ctx, { theme }, kind, [x, y, w, h]) {
  ctx.fillStyle = ctx.strokeStyle = theme.alarm;
  if (w < 6) return ctx.fillRect(x, y, w, h);
  outline(ctx, [x, y, w, h], theme.alarm, 1.5);
  if (w >= LETTERS_FROM) write(ctx, kind === "lost" ? "!" : "!!", [x, y, w, h], theme.alarm);
}

/** A bar at the end of a block: there is a snapshot of the state at its last token. */
export function drawSnapshot(ctx, { ink }, [x, y, w, h]) {
  const wide = Math.max(2, Math.min(6, w / 6));
  ctx.fillStyle = ink;
  ctx.fillRect(x + w - wide, y, wide, h);
}

/** A token of the cache that grows (M1). */
export function drawToken(ctx, { recording }, seq, place, [x, y, w, h]) {
  const info = recording.infos.get(seq.seqId);
  const gap = w > 5 ? 1 : 0;
  ctx.globalAlpha = place < seq.numPrompt ? 0.45 : 1;
  ctx.fillStyle = hueOf(info.index);
  ctx.fillRect(x + gap, y + gap, w - 2 * gap, h - 2 * gap);
  ctx.globalAlpha = 1;
  if (w >= 28) write(ctx, recording.text(info, place, place + 1).trim().replaceAll("\n", "⏎"), [x, y, w, h], inkOn(info.index), false, 0.3);
}

export function outline(ctx, [x, y, w, h], colour, width) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = Math.min(width, w / 4);
  ctx.strokeRect(x + ctx.lineWidth / 2, y + ctx.lineWidth / 2, w - ctx.lineWidth, h - ctx.lineWidth);
}

/** Text in the middle of a box, on a light plate if what lies behind it is of several colours; nothing where it does not fit. */
export function write(ctx, text, [x, y, w, h], ink, onPlate = false, scale = 0.55) {
  const size = Math.min(15, w * scale, h * 0.62);
  ctx.font = `600 ${size}px ${FONT}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const wide = ctx.measureText(text).width + 4;
  if (wide > w + 4) return;
  if (onPlate) {
    ctx.fillStyle = "rgba(255,255,255,.88)";
    ctx.fillRect(x + (w - wide) / 2, y + (h - size) / 2 - 1, wide, size + 2);
  }
  ctx.fillStyle = ink;
  ctx.fillText(text, x + w / 2, y + h / 2 + 0.5);
}
