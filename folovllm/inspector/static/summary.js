// What happened in a moment, in plain sentences. A sentence is a list of texts and of sequences {seq}.
import { count, plural } from "./dom.js";
import { isPrefill, KINDS } from "./recording.js";
import { loadsOf } from "./states.js";
import { fill, t } from "./words.js";

const MOST = 6; // items of a list in one sentence

/** The sentences of moment `at`, the most telling first: [{kind, parts}]. `state` is the state after it. */
export function sentencesOf(recording, at, state) {
  const by = {};
  for (const event of recording.moments[at]) (by[event[0]] ??= []).push(event);
  const said = [];
  const say = (kind, text, values) => said.push({ kind, parts: fill(text, values) });
  for (const event of by.preempt ?? []) sayPreempted(say, event, recording);
  if (recording.columns.flags[at] & KINDS.refuse) sayRefused(say, by.refuse.at(-1), recording, state);
  sayMany(by.add, say, sayArrival, "{names} came, and wait.");
  for (const event of by.admit ?? []) sayAdmitted(say, event, recording, at);
  sayStates(say, recording.moments[at], state);
  sayEvicted(say, (by.evict ?? []).flatMap((event) => event.slice(1)));
  sayVerified(say, by.guess ?? []);
  for (const event of by.begin ?? []) sayStep(say, event, recording);
  sayMany(by.finish, say, (say, event) => sayFinished(say, event, recording), "{names} have finished.");
  sayMany(by.abort, say, (say, [kind, seq]) => say(kind, "{seq} was aborted from outside.", { seq: { seq } }), "{names} were aborted from outside.");
  const isOver = at === recording.length - 1 && recording.how !== null && recording.how !== "closed";
  if (isOver) say("abort", "Here the run ended: {how}.", { how: recording.how });
  if (!said.length) say("quiet", quiet(by, at));
  return said;
}

function quiet(by, at) {
  if (by.key?.[0][3].sequences.length) return "The recording begins while requests are served.";
  if (by.key || (by.experts && at === 1)) return "The engine waits for its first request.";
  return by.end ? "The tokens of the last step have arrived." : "No step was made.";
}

/** Which budget refused, in words. */
export function whyRefused(budget, state, engine) {
  const [free, all] = [count(state.numBlocks - state.numUsed), count(state.numBlocks)];
  return {
    sequences: engine.max_num_seqs === 1 ? t("one is served at a time") : t("all {rows} are taken (max_num_seqs)", { rows: plural(engine.max_num_seqs, "row") }),
    tokens: t("this step's budget of {tokens} has too little left", { tokens: plural(engine.max_num_batched_tokens, "token") }),
    blocks: t("too few blocks are free ({free} of {all})", { free, all }),
    preemption: t("a request was just preempted, and its room is for those that run"),
  }[budget];
}

/** "A, B and C": of each item its parts. */
function listed(items, partsOf) {
  const words = items.slice(0, MOST).map(partsOf);
  if (items.length > MOST) words.push(t("{n} more", { n: items.length - MOST }));
  return words.flatMap((word, i) => [i === 0 ? "" : i === words.length - 1 ? t(" and ") : t(", "), word].flat());
}

function names(seqIds) {
  return listed(seqIds, (seq) => ({ seq }));
}

function sayMany(events, say, one, all) {
  if (!events) return;
  if (events.length <= 2) for (const event of events) one(say, event);
  else say(events[0][0], all, { names: names(events.map(([, seq]) => seq)) });
}

function sayArrival(say, [kind, seq, , , prompt, maxTokens]) {
  say(kind, "{seq} came: {prompt} of prompt, at most {most} to answer.", { seq: { seq }, prompt: plural(prompt.length, "token"), most: count(maxTokens) });
}

function sayFinished(say, [kind, seq, reason], recording) {
  const how = reason === "length" ? t("at its full length") : t("by itself");
  const values = { seq: { seq }, how, tokens: plural(recording.infos.get(seq)?.drawn.length ?? 0, "token") };
  say(kind, recording.engine.num_kv_blocks ? "{seq} finished {how}, with {tokens}; its blocks are given back." : "{seq} finished {how}, with {tokens}.", values);
}

function sayPreempted(say, [kind, seq, by, lost], { engine }) {
  const tokens = plural(lost, "token");
  let price = t("it had computed nothing yet.");
  if (lost && engine.enable_prefix_caching) price = t("{tokens} given up; of these it finds again what is still cached when it returns.", { tokens });
  else if (lost) price = t("{tokens} lost, to be computed again.", { tokens });
  const values = { seq: { seq }, by: { seq: by }, price };
  say(kind, seq === by ? "No free block for {seq}, and nobody ranks behind it: it was preempted itself; {price}" : "{seq} was preempted for {by}; {price}", values);
}

function sayRefused(say, [kind, seq, budget], recording, state) {
  say(kind, "{seq}, first in line, must wait: {why}.", { seq: { seq }, why: whyRefused(budget, state, recording.engine) });
}

function sayAdmitted(say, [, seq, cached], recording, at) {
  const isBack = recording.infos.get(seq)?.marks.some((mark) => mark.kind === "preempt" && mark.at < at);
  const values = { seq: { seq }, tokens: plural(cached, "token") };
  if (cached) say("hit", isBack ? "{seq} is back; its first {tokens} were in the cache still." : "{seq} was admitted; its first {tokens} were in the cache already.", values);
  else say("admit", isBack ? "{seq} is back, and computes its tokens again." : "{seq} was admitted.", values);
}

function sayEvicted(say, blocks) {
  const values = { blocks: listed(blocks, String) };
  if (blocks.length) say("evict", blocks.length === 1 ? "Block {blocks} lost its cached contents." : "Blocks {blocks} lost their cached contents.", values);
}

function sayStates(say, events, state) {
  const tokensOf = (n) => plural(n, "token");
  for (const [seq] of loadsOf(events)) {
    say("hit", "The state of {seq} begins as a copy of the snapshot after {tokens}.", { seq: { seq }, tokens: tokensOf(state.sequences.get(seq)?.cached ?? 0) });
  }
  events.forEach(([kind, , tokens, serial], i) => {
    if (kind === "snapshot") say(kind, "A snapshot was taken: the state of {seq} after {tokens}.", { tokens: tokensOf(tokens), seq: { seq: state.originSeq[state.serial.indexOf(serial)] } });
    const text = events[i + 1]?.[0] === "evict" ? "A snapshot after {tokens} goes with its block." : "A snapshot after {tokens} makes room for a new one; its block stays.";
    if (kind === "drop") say(kind, text, { tokens: tokensOf(tokens) });
  });
}

function sayStep(say, [, , , , shares, budgetLeft], recording) {
  const budget = recording.engine.num_kv_blocks && recording.engine.max_num_batched_tokens; // M1 has none
  const [prefills, decodes] = [[], []];
  let [tokens, drafts] = [0, 0];
  for (const share of shares) {
    tokens += share[2] ?? 1;
    drafts += Math.max(0, (share[3] ?? 1) - 1);
    (isPrefill(share, recording.infos.get(share[0] ?? share)) ? prefills : decodes).push(share);
  }
  const parts = prefills.length === 1 ? onePrefill(prefills[0], recording) : prefills.length ? manyPrefills(prefills) : [];
  if (decodes.length) {
    if (parts.length) parts.push(t("; "));
    const text = drafts ? "{names} verified {drafts}" : decodes.length === 1 ? "{names} decoded one token" : "{names} decoded one token each";
    parts.push(...fill(text, { names: names(decodes.map((share) => share[0] ?? share)), drafts: plural(drafts, "draft token") }));
  }
  const isFull = budgetLeft === 0 && budget && tokens > 1;
  say("begin", isFull ? "{parts}; that is the whole budget of {budget} tokens." : "{parts}.", { parts, budget: count(budget || 0) });
}

function sayVerified(say, events) {
  const each = listed(events, ([, seq, drafted, accepted]) => fill("{seq} {accepted} of {drafted}", { seq: { seq }, accepted, drafted }));
  if (events.length) say("guess", "Draft tokens accepted: {each}; and a bonus token each.", { each });
}

function onePrefill([seq, start, n], recording) {
  const prompt = recording.infos.get(seq)?.prompt.length ?? 0;
  const end = start + n;
  const values = { seq: { seq }, from: count(start), to: count(end), tokens: plural(n, "token") };
  if (start === 0 && end === prompt) return fill("The step computed the whole prompt of {seq} ({tokens})", values);
  return fill(end < prompt || start > 0 ? "The step computed tokens {from} to {to} of {seq}" : "The step computed {tokens} of {seq}", values);
}

function manyPrefills(shares) {
  const total = shares.reduce((sum, [, , n]) => sum + n, 0);
  return fill("The step computed {tokens} of {names}", { tokens: plural(total, "token"), names: names(shares.map(([seq]) => seq)) });
}

/** The sentences as one text. */
export function plainText(sentences, recording) {
  return sentences.map(({ parts }) => parts.map((part) => (part?.seq === undefined ? part : recording.name(part.seq))).join("")).join(" ");
}
