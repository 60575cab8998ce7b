// One recording and its views. A race has two of them, side by side; of more than two each has a strip.
import { count, duration, el, plural, template, widthOf } from "./dom.js";
import { ChoiceView } from "./choice.js";
import { CurvesView } from "./curves.js";
import { ExpertsView } from "./experts.js";
import { ghostsAt } from "./ghosts.js";
import { MemoryView } from "./memory.js";
import { badge, RequestsView } from "./requests.js";
import { StatesView } from "./states.js";
import { StripView } from "./strip.js";
import { plainText, sentencesOf } from "./summary.js";
import { TimelineView } from "./timeline.js";
import { t, wordsOf } from "./words.js";

const SIGNS = { preempt: "✕", refuse: "‖", add: "+", admit: "→", hit: "◆", evict: "⌫", begin: "·", finish: "■", abort: "⊘", key: "·", guess: "✓", snapshot: "▐", drop: "⌫" };

export class Lane {
  /** `onGo(lane, moment)` hears of clicks into time; `others` is how many lanes there are beside this one. */
  constructor(recording, onGo, onDraw, { embed, others }) {
    this.recording = recording;
    this.selected = null;
    this.onDraw = onDraw;
    const race = others > 0;
    const go = (moment) => onGo(this, moment);
    const pick = (seqId) => this.pick(seqId);
    let name, views, story;
    [this.element, name, this.score, story, this.step, this.said, views] = template("lane", "name", "score", "story", "step", "said", "views");
    name.textContent = titleOf(recording);
    name.hidden = this.score.hidden = !race;
    story.hidden = others > 1;
    if (others > 1) {
      this.strip = new StripView((seconds) => go(recording.atTime(seconds)));
      this.most = embed ? (innerHeight - 130) / (others + 1) - 22 : 70; // pixels
      return views.append(this.strip.element);
    }
    const hasStates = recording.engine.state_tokens > 0 || Boolean(recording.engine.kv_offload);
    const isStacked = race && innerWidth < 560; // one above the other
    const room = isStacked ? innerHeight / 2 - 130 : Math.max(120, innerHeight - (race ? 270 : 262) - 84 * hasStates);
    this.memory = new MemoryView(pick, embed ? Math.max(60, room) : isStacked ? 160 : 340);
    this.requests = new RequestsView(pick);
    this.experts = new ExpertsView();
    this.states = new StatesView();
    this.timeline = new TimelineView(go, pick, embed ? 9 : race ? 12 : 16);
    this.curves = new CurvesView(go);
    this.choice = new ChoiceView(recording, onDraw);
    this.views = [this.choice, this.memory, this.requests, this.states, this.experts, this.timeline, this.curves];
    views.append(...this.views.map(({ element }) => element));
    this.states.element.hidden = !hasStates;
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

  /** Draws moment `at`, which is at `time` of `whole` seconds. */
  draw(at, theme, isPlaying, time, whole) {
    const { recording } = this;
    const state = recording.stateAt(at);
    const news = new Set();
    for (const event of recording.moments[at]) {
      if (["BlockTaken", "BlockClaimed", "BlockAdopted"].includes(event[0])) news.add(event[1]);
    }
    this.frame = { recording, at, state, theme, news, ghosts: ghostsAt(recording, at, state), selected: this.selected };
    this.#tell(isPlaying);
    if (this.strip) return this.strip.draw(this.frame, time, whole, this.most);
    this.experts.element.hidden = !recording.hasExperts;
    this.choice.element.hidden = !recording.scores.length;
    for (const view of this.views) if (widthOf(view.element)) view.draw(this.frame);
  }

  #tell(isPlaying) {
    const { recording, at, state } = this.frame;
    const sentences = sentencesOf(recording, at, state);
    const running = recording.columns.running[at];
    const step = count(recording.stepAt(at));
    this.text = t("Step {step}: {said}", { step, said: plainText(sentences, recording) });
    this.said.parentElement.setAttribute("aria-live", isPlaying ? "off" : "polite");
    this.step.textContent = at === 0 ? t("Start") : t("Step {step}", { step });
    const key = `${at} ${recording.length} ${recording.how}`;
    if (this.told === key) return;
    this.told = key;
    this.said.replaceChildren(...sentences.map(({ kind, parts }) => {
      const words = parts.map((part) => (part?.seq === undefined ? part : this.#named(part.seq)));
      return el("p", { class: kind }, el("i", { "aria-hidden": "true" }, SIGNS[kind] ?? "·"), el("span", {}, words));
    })); // prettier-ignore
    const values = { running, waiting: state.sequences.size - running, tokens: plural(state.totals.drawn, "token"), time: duration(recording.duration) };
    values.finished = plural(state.totals.finished, "request");
    const isOver = at === recording.length - 1;
    this.score.textContent = t(isOver ? "{finished} finished, {tokens}; all done after {time}." : "{finished} finished, {running} running, {waiting} waiting; {tokens}.", values);
  }

  #named(seqId) {
    const info = this.recording.infos.get(seqId);
    return info ? badge(info) : `#${seqId}`;
  }
}

export function titleOf({ header, engine, scene }) {
  const [whose, name] = [engine.mine ? t(", your code") : "", engine.milestone ?? t("the fastest")];
  const title = scene?.words.title === header.title ? wordsOf(scene).title : scene ? t(header.title) : header.title;
  return title ? `${title} (${name}${whose})` : `${engine.milestone ?? engine.model}${whose}`;
}

/** Where the times of a recording come from. */
export function timesOf({ started, engine }) {
  return started === null ? t("a made-up clock") : t("measured on {device}", { device: engine.device });
}

/** What engine it is, in a line. */
export function describe({ engine, header }) {
  const pool = { blocks: plural(engine.num_kv_blocks, "block"), size: count(engine.block_size) };
  const cache = engine.num_kv_blocks ? t("{blocks} of {size} tokens", pool) : t("a cache that grows");
  const modes = [engine.enable_prefix_caching && t("prefix caching"), engine.enable_chunked_prefill && t("chunked prefill"), engine.async_scheduling && t("overlap")];
  const budget = engine.num_kv_blocks ? t("{n} tokens a step", { n: count(engine.max_num_batched_tokens) }) : t("one request at a time");
  return [String(engine.model).split("/").at(-1), cache, budget, ...modes.filter(Boolean), timesOf(header)].join(" · ");
}
