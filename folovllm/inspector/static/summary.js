// What happened in a moment, in plain sentences. A sentence is a list of texts and of sequences {seq}.
import { count, plural } from "./dom.js";
import { isPrefill, KINDS } from "./recording.js";

const MOST = 6; // items of a list in one sentence

/** The sentences of moment `at`, the most telling first: [{kind, parts}]. `state` is the state after it. */
export function sentencesOf(recording, at, state) {
  const by = {};
  for (const event of recording.moments[at]) (by[event[0]] ??= []).push(event);
  const said = [];
  const say = (kind, ...parts) => said.push({ kind, parts: parts.flat() });
  for (const event of by.preempt ?? []) sayPreempted(say, event);
  if (recording.columns.flags[at] & KINDS.refuse) sayRefused(say, by.refuse.at(-1), recording, state);
  sayMany(by.add, say, arrival, " came, and wait.");
  for (const event of by.admit ?? []) sayAdmitted(say, event, recording, at);
  sayEvicted(say, (by.evict ?? []).flatMap((event) => event.slice(1)));
  sayVerified(say, by.guess ?? []);
  for (const event of by.begin ?? []) sayStep(say, event, recording);
  sayMany(by.finish, say, (event) => finish(event, recording), " have finished.");
  sayMany(by.abort, say, ([, seq]) => [{ seq }, " was aborted from outside."], " were aborted from outside.");
  const isOver = at === recording.length - 1 && recording.how !== null && recording.how !== "closed";
  if (isOver) say("abort", `Here the run ended: ${recording.how}.`);
  if (!said.length) say("quiet", quiet(by));
  return said;
}

function quiet(by) {
  if (by.key) return by.key[0][3].sequences.length ? "The recording begins while requests are served." : "The engine waits for its first request.";
  return by.end ? "The tokens of the last step have arrived." : "No step was made.";
}

/** Which budget refused, in words. */
export function whyRefused(budget, state, engine) {
  return {
    sequences: engine.max_num_seqs === 1 ? "one is served at a time" : `all ${plural(engine.max_num_seqs, "row")} are taken (max_num_seqs)`,
    tokens: `this step's budget of ${plural(engine.max_num_batched_tokens, "token")} has too little left`,
    blocks: `too few blocks are free (${count(state.numBlocks - state.numUsed)} of ${count(state.numBlocks)})`,
    preemption: "a request was just preempted, and its room is for those that run",
  }[budget];
}

/** "A, B and C": of each item its parts. */
function listed(items, partsOf) {
  const words = items.slice(0, MOST).map(partsOf);
  if (items.length > MOST) words.push(`${items.length - MOST} more`);
  return words.flatMap((word, i) => [i === 0 ? "" : i === words.length - 1 ? " and " : ", ", word].flat());
}

function names(seqIds) {
  return listed(seqIds, (seq) => ({ seq }));
}

function sayMany(events, say, one, all) {
  if (!events) return;
  if (events.length <= 2) for (const event of events) say(event[0], ...one(event));
  else say(events[0][0], ...names(events.map(([, seq]) => seq)), all);
}

function arrival([, seq, , , prompt, maxTokens]) {
  return [{ seq }, ` came: ${plural(prompt.length, "token")} of prompt, at most ${count(maxTokens)} to answer.`];
}

function finish([, seq, reason], recording) {
  const drawn = recording.infos.get(seq)?.drawn.length ?? 0;
  return [{ seq }, ` finished ${reason === "length" ? "at its full length" : "by itself"}, with ${plural(drawn, "token")}${recording.engine.num_kv_blocks ? "; its blocks are given back" : ""}.`];
}

function sayPreempted(say, [kind, seq, by, lost]) {
  const price = lost ? `${plural(lost, "token")} lost, to be computed again.` : "it had computed nothing yet.";
  if (seq === by) say(kind, "No free block for ", { seq }, `, and nobody ranks behind it: it was preempted itself; ${price}`);
  else say(kind, { seq }, " was preempted for ", { seq: by }, `; ${price}`);
}

function sayRefused(say, [kind, seq, budget], recording, state) {
  say(kind, { seq }, `, first in line, must wait: ${whyRefused(budget, state, recording.engine)}.`);
}

function sayAdmitted(say, [, seq, cached], recording, at) {
  const isBack = recording.infos.get(seq)?.marks.some((mark) => mark.kind === "preempt" && mark.at < at);
  const verb = isBack ? " is back" : " was admitted";
  if (cached) say("hit", { seq }, `${verb}; its first ${plural(cached, "token")} were in the cache already.`);
  else say("admit", { seq }, isBack ? " is back, and computes its tokens again." : " was admitted.");
}

function sayEvicted(say, blocks) {
  if (blocks.length) say("evict", blocks.length === 1 ? "Block " : "Blocks ", listed(blocks, String), blocks.length === 1 ? " lost its cached contents." : " lost their cached contents.");
}

function sayStep(say, [, , , , shares, budgetLeft], recording) {
  const budget = recording.engine.num_kv_blocks && recording.engine.max_num_batched_tokens; // M1 has none
  const prefills = [];
  const decodes = [];
  let [tokens, drafts] = [0, 0];
  for (const share of shares) {
    const seq = share[0] ?? share;
    tokens += share[2] ?? 1;
    drafts += Math.max(0, (share[3] ?? 1) - 1);
    (isPrefill(share, recording.infos.get(seq)) ? prefills : decodes).push(share);
  }
  const parts = prefills.length === 1 ? onePrefill(prefills[0], recording) : prefills.length ? manyPrefills(prefills) : [];
  if (decodes.length) {
    if (parts.length) parts.push("; ");
    parts.push(...names(decodes.map((share) => share[0] ?? share)));
    parts.push(drafts ? ` verified ${plural(drafts, "draft token")}` : " decoded one token", decodes.length === 1 ? "" : drafts ? " in all" : " each");
  }
  say("begin", ...parts, budgetLeft === 0 && budget && tokens > 1 ? `; that is the whole budget of ${count(budget)} tokens.` : ".");
}

function sayVerified(say, events) {
  const each = listed(events, ([, seq, drafted, accepted]) => [{ seq }, ` ${accepted} of ${drafted}`]);
  if (events.length) say("guess", "Draft tokens accepted: ", each, "; and a bonus token each.");
}

function onePrefill([seq, start, n], recording) {
  const prompt = recording.infos.get(seq)?.prompt.length ?? 0;
  const end = start + n;
  const isWhole = start === 0 && end === prompt;
  const which = isWhole ? "the whole prompt of " : end < prompt || start > 0 ? `tokens ${count(start)} to ${count(end)} of ` : `${plural(n, "token")} of `;
  return ["The step computed ", which, { seq }, isWhole ? ` (${plural(n, "token")})` : ""];
}

function manyPrefills(shares) {
  const total = shares.reduce((sum, [, , n]) => sum + n, 0);
  return [`The step computed ${plural(total, "token")} of `, ...names(shares.map(([seq]) => seq))];
}

/** The sentences as one text. */
export function plainText(sentences, recording) {
  return sentences.map(({ parts }) => parts.map((part) => (part.seq === undefined ? part : recording.name(part.seq))).join("")).join(" ");
}
