// Draft tokens, as ghosts: those that a step accepted and rejected, its bonus token, and those that the step in flight verifies.
import { write } from "./cells.js";
import { hueOf, inkOn } from "./palette.js";

/** The kinds of ghosts, in words. */
export const GHOSTS = {
  accepted: "accepted: a draft token that was right; it is a token of the text",
  bonus: "bonus: the token that the model sampled behind the accepted draft tokens; the next step computes it",
  rejected: "rejected: a wrong draft token; nobody reads its K/V in the cache, which are written over",
  proposed: "proposed: a draft token that the step in flight verifies",
};
const SIGNS = { accepted: "✓", bonus: "★", rejected: "✕", proposed: "?" };

/**
 * The ghosts of a moment: by sequence [{kind, text, place, block}], in the order of the text. `place` is the token's in its
 * sequence; `block` is null where its place in the cache has been given away, or written over.
 */
export function ghostsAt(recording, at, state) {
  const all = new Map();
  if (!recording.hasDrafts) return all;
  for (const [id, seq] of state.sequences) {
    const [info, ghosts] = [recording.infos.get(id), []];
    const blockOf = (place) => Math.floor(place / state.blockSize);
    const add = (kind, place, text, block) => ghosts.push({ kind, place, text, block });
    const check = info.checks.get(at);
    if (check) {
      const { from, accepted, rejected, first, blocks } = check;
      const left = (place) => {
        const block = blocks[blockOf(place) - first];
        return place >= seq.numComputed && (state.isFree[block] || seq.table[blockOf(place)] === block) ? block : null;
      };
      for (let i = from; i < from + accepted; i++) add("accepted", i, recording.text(info, i, i + 1), seq.table[blockOf(i)]);
      add("bonus", from + accepted, recording.text(info, from + accepted, from + accepted + 1), left(from + accepted));
      rejected.forEach((token, i) => add("rejected", from + accepted + i, recording.decode([token]), left(from + accepted + i)));
    }
    for (let i = seq.numComputed - seq.drafts; i < seq.numComputed; i++) add("proposed", i, "", seq.table[blockOf(i)]);
    if (ghosts.length) all.set(id, ghosts);
  }
  return all;
}

/** Draws a ghost at the foot of its slot, [x, y, w, h]. */
export function drawGhost(ctx, theme, index, kind, [x, y, w, h]) {
  const high = Math.max(3, Math.min(14, h / 3));
  const box = [x + 0.5, y + h - high + 0.5, Math.max(0.5, w - 1), high - 1];
  const ink = { accepted: inkOn(index), bonus: theme.accent, rejected: theme.alarm, proposed: theme.ink }[kind];
  const isFull = kind === "accepted" || kind === "bonus";
  ctx.fillStyle = isFull ? ink : theme.card;
  ctx.fillRect(...box);
  ctx.strokeStyle = kind === "bonus" ? theme.card : ink;
  ctx.lineWidth = 1;
  ctx.setLineDash(kind === "proposed" ? [2, 2] : []);
  ctx.strokeRect(...box);
  ctx.setLineDash([]);
  if (w >= 7 && high >= 8) write(ctx, SIGNS[kind], box, kind === "accepted" ? hueOf(index) : isFull ? theme.card : ink, false, 1);
}
