// The sequences: who runs, who waits and why, who has finished; what of each is cached, computed, sampled; its text.
import { count, el, plural, setText, template } from "./dom.js";
import { GHOSTS } from "./ghosts.js";
import { cssFill, hueOf, inkOn } from "./palette.js";
import { whyRefused } from "./summary.js";
import { t } from "./words.js";

const MOST_WAITING = 12; // shown; the rest is a number
const MOST_ENDED = 6;
const TAGS = { accepted: "ins", rejected: "del" };
const MOST_LETTERS = 220; // of a text: its end

/** The letters of a sequence on its colour. */
export function badge(info) {
  const style = `background:${cssFill(info.index)};color:${inkOn(info.index)}`;
  return el("span", { class: "badge", style, title: info.requestId }, info.letters);
}

export class RequestsView {
  #rows = new Map(); // by number

  /** `onPick(seqId or null)` hears which sequence was chosen. */
  constructor(onPick) {
    this.onPick = onPick;
    let groups;
    [this.element, ...groups] = template("requests", "running", "waiting", "ended");
    this.groups = groups.map((element) => ({ element, title: element.children[0], list: element.children[1], rest: element.children[2] }));
  }

  draw(frame) {
    const { state, recording, at } = frame;
    const all = [...state.sequences.values()];
    const running = all.filter((seq) => seq.isRunning);
    const waiting = all.filter((seq) => !seq.isRunning).sort(orderOf(recording));
    const infos = recording.endedBy(at, MOST_ENDED);
    const total = state.totals.finished + state.totals.aborted;
    this.#fill(0, t("Running {n} of {most}", { n: running.length, most: recording.engine.max_num_seqs }), running, running.length, frame);
    this.#fill(1, t("Waiting {n}", { n: count(waiting.length) }), waiting.slice(0, MOST_WAITING), waiting.length, frame);
    this.#fill(2, t("Ended {n}", { n: count(total) }), infos.map((info) => ({ seqId: info.seqId, info })), total, frame);
  }

  #fill(group, title, seqs, total, frame) {
    const { title: heading, list, rest, element } = this.groups[group];
    setText(heading, title);
    element.classList.toggle("empty", total === 0);
    rest.hidden = total <= seqs.length;
    setText(rest, t("and {n} more", { n: count(total - seqs.length) }));
    const rows = seqs.map((seq) => {
      const row = this.#row(group, seq.seqId, frame.recording);
      seq.info ? this.#showEnded(row, seq.info, frame) : this.#show(row, seq, frame);
      return row.element;
    });
    if (rows.length !== list.children.length || rows.some((row, i) => row !== list.children[i])) list.replaceChildren(...rows);
  }

  #row(group, seqId, recording) {
    const key = `${group} ${seqId}`;
    let row = this.#rows.get(key);
    if (row?.recording === recording) return row;
    const info = recording.infos.get(seqId);
    const [element, pick, what, bar, prompt, text, last] = template("request", "pick", "what", "bar", "prompt", "drawn", "newest");
    pick.onclick = () => this.onPick(seqId);
    pick.prepend(badge(info));
    bar.style.setProperty("--hue", hueOf(info.index));
    row = { recording, info, what, bar, prompt, text, last, pick, element };
    this.#rows.set(key, row);
    if (this.#rows.size > 400) this.#rows.delete(this.#rows.keys().next().value);
    return row;
  }

  #show(row, seq, frame) {
    const { state, selected } = frame;
    const { info } = row;
    setText(row.what, seq.isRunning ? progressOf(seq, info) : reasonOf(seq, frame));
    row.element.classList.toggle("preempted", seq.victimOf !== null);
    row.pick.setAttribute("aria-pressed", String(selected === seq.seqId));
    const whole = info.prompt.length + info.maxTokens;
    const answer = Math.max(0, seq.numTokens - info.prompt.length);
    const parts = row.bar.children;
    const computed = Math.min(seq.numComputed, info.prompt.length);
    const cached = Math.min(seq.isRunning ? (seq.cached ?? 0) : 0, computed);
    span(parts[0], 0, cached / whole);
    span(parts[1], cached / whole, (computed - cached) / whole);
    span(parts[2], info.prompt.length / whole, seq.isRunning ? answer / whole : 0);
    span(parts[3], 0, seq.victimOf === null ? 0 : seq.numTokens / whole);
    span(parts[4], info.prompt.length / whole, 0);
    this.#showText(row, seq.numTokens, frame, state);
  }

  #showEnded(row, info, frame) {
    const how = t({ length: "full length", stop: "stopped", abort: "aborted" }[info.reason] ?? info.reason);
    setText(row.what, t("{how}, {tokens}", { how, tokens: plural(info.drawn.length, "token") }));
    row.pick.setAttribute("aria-pressed", String(frame.selected === info.seqId));
    row.bar.hidden = true;
    this.#showText(row, info.prompt.length + info.drawn.length, frame);
  }

  #showText(row, numTokens, { recording, at, ghosts }) {
    const { info } = row;
    const shown = `${at} ${numTokens} ${info.drawn.length}`;
    if (row.shown === shown) return;
    row.shown = shown;
    const numPrompt = info.prompt.length;
    const prompt = recording.text(info, Math.max(0, Math.min(numPrompt, numTokens) - 60), Math.min(numPrompt, numTokens));
    const newest = numTokens > numPrompt ? recording.text(info, numTokens - 1, numTokens) : "";
    const last = ghosts.get(info.seqId)?.filter(({ kind }) => kind !== "proposed") ?? [{ text: newest }];
    const numNew = last.filter(({ kind }) => kind !== "rejected").length;
    const before = recording.text(info, Math.max(numPrompt, numTokens - 60), numTokens - numNew);
    setText(row.prompt, cut(prompt, Math.max(24, MOST_LETTERS - before.length)));
    setText(row.text, cut(before, MOST_LETTERS));
    row.last.replaceChildren(...last.map(({ kind, text }) => el(TAGS[kind] ?? "mark", { class: kind, title: GHOSTS[kind] && t(GHOSTS[kind]) }, text)));
  }
}

function span(part, from, size) {
  part.style.left = `${100 * from}%`;
  part.style.width = `${100 * size}%`;
}

function cut(text, most) {
  return text.length > most ? `…${text.slice(-most)}` : text;
}

function orderOf(recording) {
  const priority = (seq) => (recording.engine.scheduling === "priority" ? recording.infos.get(seq.seqId).priority : 0);
  return (a, b) => priority(a) - priority(b) || a.seqId - b.seqId;
}

function progressOf(seq, info) {
  const drawn = seq.numTokens - info.prompt.length;
  const hit = seq.cached ? t(", {n} cached", { n: count(seq.cached) }) : "";
  const values = { computed: count(seq.numComputed), prompt: count(info.prompt.length), drawn: count(drawn), most: count(info.maxTokens) };
  if (seq.numComputed < info.prompt.length) return t("prompt {computed} of {prompt}", values) + hit;
  const verified = { n: count(seq.accepted), drafts: plural(seq.drafted, "draft token") };
  return t("{drawn} of {most} generated", values) + (seq.drafted ? t(", {n} of {drafts} accepted", verified) : "") + hit;
}

function reasonOf(seq, { recording, state }) {
  const why = seq.refused ? t(": {why}", { why: whyRefused(seq.refused, state, recording.engine) }) : "";
  if (seq.victimOf === null) return t("{tokens} of prompt", { tokens: plural(seq.numPrompt, "token") }) + why;
  const whom = seq.victimOf === seq.seqId ? t("preempted itself") : t("preempted for {by}", { by: recording.name(seq.victimOf) });
  const price = recording.engine.enable_prefix_caching ? "{whom}; {tokens} given up" : "{whom}; {tokens} lost";
  return t(price, { whom, tokens: plural(seq.lost, "token") }) + why;
}
