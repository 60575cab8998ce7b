// One recording and its views. A race has two of them, side by side.
import { count, duration, el, plural, template, widthOf } from "./dom.js";
import { CurvesView } from "./curves.js";
import { ghostsAt } from "./ghosts.js";
import { MemoryView } from "./memory.js";
import { badge, RequestsView } from "./requests.js";
import { plainText, sentencesOf } from "./summary.js";
import { TimelineView } from "./timeline.js";

const SIGNS = { preempt: "✕", refuse: "‖", add: "+", admit: "→", hit: "◆", evict: "⌫", begin: "·", finish: "■", abort: "⊘", key: "·", guess: "✓" };

export class Lane {
  /** `onGo(lane, moment)` hears of clicks into time. */
  constructor(recording, onGo, onDraw, { embed, race }) {
    this.recording = recording;
    this.selected = null;
    this.onDraw = onDraw;
    const go = (moment) => onGo(this, moment);
    const pick = (seqId) => this.pick(seqId);
    this.memory = new MemoryView(pick, embed ? Math.max(120, innerHeight - (race ? 270 : 262)) : 340);
    this.requests = new RequestsView(pick);
    this.timeline = new TimelineView(go, pick, embed ? 9 : race ? 12 : 16);
    this.curves = new CurvesView(go);
    let name, views;
    [this.element, name, this.score, this.step, this.said, views] = template("lane", "name", "score", "step", "said", "views");
    name.textContent = titleOf(recording);
    name.hidden = this.score.hidden = !race;
    views.append(this.memory.element, this.requests.element, this.timeline.element, this.curves.element);
  }

  pick(seqId) {
    this.selected = seqId === this.selected ? null : seqId;
    this.onDraw();
  }

  /** Choose the next sequence that is served (or the one before). */
  pickNext(direction) {
    const ids = [...this.frame.state.sequences.keys()];
    const i = ids.indexOf(this.selected);
    this.pick(ids[(i < 0 && direction < 0 ? ids.length - 1 : i + direction + ids.length) % ids.length] ?? null);
  }

  draw(at, theme, isPlaying) {
    const { recording } = this;
    const state = recording.stateAt(at);
    const news = new Set();
    for (const event of recording.moments[at]) {
      if (["new", "take", "claim"].includes(event[0])) event.slice(1).forEach((block) => news.add(block));
      else if (event[0] === "adopt") news.add(event[1]);
    }
    this.frame = { recording, at, state, theme, news, ghosts: ghostsAt(recording, at, state), selected: this.selected };
    this.#tell(isPlaying);
    for (const view of [this.memory, this.requests, this.timeline, this.curves]) if (widthOf(view.element)) view.draw(this.frame);
  }

  #tell(isPlaying) {
    const { recording, at, state } = this.frame;
    const sentences = sentencesOf(recording, at, state);
    const running = recording.columns.running[at];
    const step = state.numSteps - recording.stepsBefore;
    this.text = `Step ${step}: ${plainText(sentences, recording)}`;
    this.said.parentElement.setAttribute("aria-live", isPlaying ? "off" : "polite");
    this.step.textContent = at === 0 ? "Start" : `Step ${count(step)}`;
    const key = `${at} ${recording.length} ${recording.how}`;
    if (this.told === key) return;
    this.told = key;
    this.said.replaceChildren(...sentences.map(({ kind, parts }) => {
      const words = parts.map((part) => (part.seq === undefined ? part : this.#named(part.seq)));
      return el("p", { class: kind }, el("i", { "aria-hidden": "true" }, SIGNS[kind] ?? "·"), el("span", {}, words));
    })); // prettier-ignore
    const now = `${plural(state.totals.finished, "request")} finished, ${running} running, ${state.sequences.size - running} waiting`;
    const isOver = at === recording.length - 1 ? `; all done after ${duration(recording.duration)}` : "";
    this.score.textContent = `${now}; ${plural(state.totals.drawn, "token")}${isOver}.`;
  }

  #named(seqId) {
    const info = this.recording.infos.get(seqId);
    return info ? badge(info) : `#${seqId}`;
  }
}

export function titleOf({ header, engine }) {
  const whose = engine.mine ? ", your code" : "";
  return header.title ? `${header.title} (${engine.milestone ?? "the fastest"}${whose})` : `${engine.milestone ?? engine.model}${whose}`;
}

/** What engine it is, in a line. */
export function describe({ engine }) {
  const cache = engine.num_kv_blocks ? `${plural(engine.num_kv_blocks, "block")} of ${count(engine.block_size)} tokens` : "a cache that grows";
  const modes = [engine.enable_prefix_caching && "prefix caching", engine.enable_chunked_prefill && "chunked prefill", engine.async_scheduling && "overlap"];
  const budget = engine.num_kv_blocks ? `${count(engine.max_num_batched_tokens)} tokens a step` : "one request at a time";
  return [String(engine.model).split("/").at(-1), cache, budget, ...modes.filter(Boolean)].join(" · ");
}
