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
  for (const event of by.Preempted ?? []) sayPreempted(say, event, recording);
  if (recording.columns.flags[at] & KINDS.refuse) sayRefused(say, by.Refused.at(-1), recording, state);
  sayMany(by.RequestAdded, "add", say, sayArrival, "{names} came, and wait.");
  for (const event of by.Admitted ?? []) sayAdmitted(say, event, recording, at);
  sayStates(say, recording.moments[at], state);
  sayEvicted(say, (by.BlockEvicted ?? []).map(([, block]) => block));
  const left = (by.BlocksMoved ?? []).reduce((sum, [, what, place, n]) => sum + (what === "offloaded" && place === "host" ? n : 0), 0);
  for (const [, what, place, n, , seq] of by.BlocksMoved ?? []) if (what === "loaded" && seq >= 0) say("hit", place === "disk" ? "{blocks} came back from the disk for {seq}." : "{blocks} came back from host memory for {seq}.", { blocks: plural(n, "block"), seq: { seq } });
  if (left) say("evict", "{blocks} went to host memory.", { blocks: plural(left, "block") });
  sayVerified(say, by.DraftsVerified ?? []);
  for (const event of by.StepBegan ?? []) sayStep(say, event, recording);
  sayMany(by.Finished, "finish", say, (say, event) => sayFinished(say, event, recording), "{names} have finished.");
  sayMany(by.Aborted, "abort", say, (say, [, seq]) => say("abort", "{seq} was aborted from outside.", { seq: { seq } }), "{names} were aborted from outside.");
  const isOver = at === recording.length - 1 && recording.how !== null && recording.how !== "closed";
  if (isOver) say("abort", "Here the run ended: {how}.", { how: recording.how });
  if (!said.length) say("quiet", quiet(by, at));
  return said;
}

function quiet(by, at) {
  if (by.Snapshot?.[0][7].length) return "The recording begins while requests are served.";
  if (by.Snapshot || (by.ExpertsAsked && at === 1)) return "The engine waits for its first request.";
  return by.StepEnded ? "The tokens of the last step have arrived." : "No step was made.";
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

function sayMany(events, kind, say, one, all) {
  if (!events) return;
  if (events.length <= 2) for (const event of events) one(say, event);
  else say(kind, all, { names: names(events.map(([, seq]) => seq)) });
}

function sayArrival(say, [, seq, , , prompt, maxTokens]) {
  say("add", "{seq} came: {prompt} of prompt, at most {most} to answer.", { seq: { seq }, prompt: plural(prompt.length, "token"), most: count(maxTokens) });
}

function sayFinished(say, [, seq, reason], recording) {
  const how = reason === "length" ? t("at its full length") : t("by itself");
  const values = { seq: { seq }, how, tokens: plural(recording.infos.get(seq)?.drawn.length ?? 0, "token") };
  say("finish", recording.engine.num_kv_blocks ? "{seq} finished {how}, with {tokens}; its blocks are given back." : "{seq} finished {how}, with {tokens}.", values);
}

function sayPreempted(say, [, seq, by, lost], { engine }) {
  const tokens = plural(lost, "token");
  let price = t("it had computed nothing yet.");
  if (lost && engine.enable_prefix_caching) price = t("{tokens} given up; of these it finds again what is still cached when it returns.", { tokens });
  else if (lost) price = t("{tokens} lost, to be computed again.", { tokens });
  const values = { seq: { seq }, by: { seq: by }, price };
  say("preempt", seq === by ? "No free block for {seq}, and nobody ranks behind it: it was preempted itself; {price}" : "{seq} was preempted for {by}; {price}", values);
}

function sayRefused(say, [, seq, budget], recording, state) {
  say("refuse", "{seq}, first in line, must wait: {why}.", { seq: { seq }, why: whyRefused(budget, state, recording.engine) });
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
    if (kind === "SnapshotCached") say("snapshot", "A snapshot was taken: the state of {seq} after {tokens}.", { tokens: tokensOf(tokens), seq: { seq: state.originSeq[state.serial.indexOf(serial)] } });
    const text = events[i + 1]?.[0] === "BlockEvicted" ? "A snapshot after {tokens} goes with its block." : "A snapshot after {tokens} makes room for a new one; its block stays.";
    if (kind === "SnapshotEvicted") say("drop", text, { tokens: tokensOf(tokens) });
  });
}

function sayStep(say, [, , , , scheduled, budgetLeft], recording) {
  const budget = recording.engine.num_kv_blocks && recording.engine.max_num_batched_tokens; // M1 has none
  const [prefills, decodes] = [[], []];
  let [tokens, drafts] = [0, 0];
  for (const each of scheduled) {
    tokens += each[3] - each[2];
    drafts += Math.max(0, each[4] - 1);
    (isPrefill(each, recording.infos.get(each[0])) ? prefills : decodes).push(each);
  }
  const parts = prefills.length === 1 ? onePrefill(prefills[0], recording) : prefills.length ? manyPrefills(prefills) : [];
  if (decodes.length) {
    if (parts.length) parts.push(t("; "));
    const text = drafts ? "{names} verified {drafts}" : decodes.length === 1 ? "{names} decoded one token" : "{names} decoded one token each";
    parts.push(...fill(text, { names: names(decodes.map(([seq]) => seq)), drafts: plural(drafts, "draft token") }));
  }
  const isFull = budgetLeft === 0 && budget && tokens > 1;
  say("begin", isFull ? "{parts}; that is the whole budget of {budget} tokens." : "{parts}.", { parts, budget: count(budget || 0) });
}

function sayVerified(say, events) {
  const each = listed(events, ([, seq, drafted, accepted]) => fill("{seq} {accepted} of {drafted}", { seq: { seq }, accepted, drafted }));
  if (events.length) say("guess", "Draft tokens accepted: {each}; and a bonus token each.", { each });
}

function onePrefill([seq, , start, end], recording) {
  const prompt = recording.infos.get(seq)?.prompt.length ?? 0;
  const values = { seq: { seq }, from: count(start), to: count(end), tokens: plural(end - start, "token") };
  if (start === 0 && end === prompt) return fill("The step computed the whole prompt of {seq} ({tokens})", values);
  return fill(end < prompt || start > 0 ? "The step computed tokens {from} to {to} of {seq}" : "The step computed {tokens} of {seq}", values);
}

function manyPrefills(scheduled) {
  const total = scheduled.reduce((sum, [, , start, end]) => sum + end - start, 0);
  return fill("The step computed {tokens} of {names}", { tokens: plural(total, "token"), names: names(scheduled.map(([seq]) => seq)) });
}

/** The sentences as one text. */
export function plainText(sentences, recording) {
  return sentences.map(({ parts }) => parts.map((part) => (part?.seq === undefined ? part : recording.name(part.seq))).join("")).join(" ");
}
