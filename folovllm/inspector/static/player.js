// The controls of time: play, step, scrub, speed, and the next of each kind of event.
import { button, contextOf, count, duration, el, setText, widthOf } from "./dom.js";
import { KINDS } from "./recording.js";

const SPEEDS = [1, 2, 4, 10, 30, 100, 400];
export const JUMPS = [
  { kind: "preempt", sign: "✕", word: "preemption", key: "p", colour: "alarm" },
  { kind: "hit", sign: "◆", word: "prefix hit", key: "h", colour: "hit" },
  { kind: "refuse", sign: "‖", word: "refusal", key: "r", colour: "muted" },
  { kind: "evict", sign: "⌫", word: "eviction", key: "e", colour: "cached" },
];
const TRACK = 20; // pixels

export class Player {
  #playing = false;
  #rest = 0;
  #last = 0;

  /** `onMove()` is called after the clock has moved. */
  constructor(clock, onMove, { live = false } = {}) {
    Object.assign(this, { clock, onMove, live });
    this.follows = live;
    this.playButton = button("▶", "Play (space)", () => this.toggle(), { class: "play" });
    this.speed = el("select", { "aria-label": "Speed", title: "Speed (< and >)" }, SPEEDS.map((speed) => el("option", { value: speed }, `${speed}/s`)));
    this.speed.value = live ? 30 : 4;
    this.range = el("input", { type: "range", min: 0, step: 1, "aria-label": "Moment", oninput: () => this.go(Number(this.range.value)) });
    this.track = el("canvas", { class: "track", "aria-hidden": "true" });
    this.scrub = el("div", { class: "scrub" }, this.track, this.range);
    this.where = el("output", { class: "where" });
    this.jumps = JUMPS.map(({ kind, sign, word, key, colour }) => {
      const title = `Next ${word} (${key}; with shift: the one before)`;
      const act = (event) => this.jump(kind, event.shiftKey ? -1 : 1);
      return { kind, chosen: button([el("b", {}, sign), el("span", {}, ` ${word}`)], title, act, { class: `jump ${colour}` }) };
    });
    this.liveButton = live ? button("● live", "Follow the engine (f)", () => this.follow(), { class: "live" }) : null;
    this.element = el("nav", { class: "player", "aria-label": "Time" },
      this.scrub,
      el("div", { class: "buttons" },
        button("«", "To the beginning (Home)", () => this.go(0), { class: "first" }),
        button("‹", "One moment back (←; with shift: ten)", (event) => this.go(this.clock.tick - (event.shiftKey ? 10 : 1)), { class: "back" }),
        this.playButton,
        button("›", "One moment on (→; with shift: ten)", (event) => this.go(this.clock.tick + (event.shiftKey ? 10 : 1)), { class: "forward" }),
        button("»", "To the end (End)", () => this.go(this.clock.length - 1), { class: "last" }),
        this.speed, this.liveButton, this.where,
        el("span", { class: "jumps", role: "group", "aria-label": "Next" }, this.jumps.map(({ chosen }) => chosen)),
      ),
    ); // prettier-ignore
  }

  get playing() {
    return this.#playing;
  }

  go(tick) {
    this.follows = false;
    this.#playing = false;
    this.#move(tick);
  }

  #move(tick) {
    this.clock.go(tick);
    this.onMove();
  }

  jump(kind, direction) {
    const tick = this.clock.find(kind, direction);
    if (tick !== null) this.go(tick);
  }

  /** Show what the engine does now, whenever there is more. */
  follow() {
    if (!this.live) return;
    this.follows = true;
    this.#playing = false;
    this.#move(this.clock.length - 1);
  }

  /** There is more to be seen. */
  grown() {
    if (this.follows) this.clock.go(this.clock.length - 1);
    this.onMove();
  }

  toggle() {
    this.follows = false;
    this.#playing = !this.#playing;
    this.#rest = 0;
    this.#last = performance.now();
    if (this.#playing && this.clock.tick === this.clock.length - 1) this.clock.go(0);
    if (this.#playing) requestAnimationFrame((now) => this.#run(now));
    this.onMove();
  }

  faster(by) {
    const i = SPEEDS.indexOf(Number(this.speed.value)) + by;
    if (SPEEDS[i]) this.speed.value = SPEEDS[i];
  }

  #run(now) {
    if (!this.#playing) return;
    const before = this.clock.tick;
    this.#rest = this.clock.advance(Math.min(0.25, Math.max(0, now - this.#last) / 1000), Number(this.speed.value), this.#rest);
    this.#last = now;
    if (this.clock.tick === this.clock.length - 1) this.#playing = false;
    if (this.clock.tick !== before || !this.#playing) this.onMove();
    if (this.#playing) requestAnimationFrame((later) => this.#run(later));
  }

  draw({ theme }) {
    const { clock } = this;
    const [title, sign] = this.#playing ? ["Pause (space)", "❚❚"] : ["Play (space)", "▶"];
    setText(this.playButton, sign);
    this.playButton.setAttribute("aria-label", title);
    this.playButton.title = title;
    this.range.min = clock.first;
    this.range.max = clock.length - 1;
    this.range.value = clock.tick;
    this.range.setAttribute("aria-valuetext", `moment ${clock.tick} of ${clock.length - 1}`);
    setText(this.where, `${count(clock.tick)} / ${count(clock.length - 1)} · ${duration(clock.time)}`);
    this.liveButton?.setAttribute("aria-pressed", String(this.follows));
    for (const { kind, chosen } of this.jumps) chosen.disabled = !clock.recordings.some((recording) => has(recording, kind));
    this.#drawTrack(theme);
  }

  /** Where in the whole recording what happened: a lane for each kind that can be looked for. */
  #drawTrack(theme) {
    const width = widthOf(this.scrub);
    const key = `${width} ${this.clock.length} ${theme.ink} ${devicePixelRatio}`;
    if (!width || this.trackKey === key) return;
    this.trackKey = key;
    const ctx = contextOf(this.track, width, TRACK);
    const inset = 8; // half the width of the range's thumb
    for (const recording of this.clock.recordings) {
      const { flags } = recording.columns;
      JUMPS.forEach(({ kind, colour }, lane) => {
        ctx.fillStyle = theme[colour];
        let last = -2;
        for (let i = 0; i < flags.length; i++) {
          if (!(flags[i] & KINDS[kind])) continue;
          const x = inset + (this.clock.tickOf(recording, i) / Math.max(1, this.clock.length - 1)) * (width - 2 * inset);
          if (x - last < 1.5) continue;
          ctx.fillRect((last = x) - 1, lane * 5, 2, 4);
        }
      });
    }
  }
}

/** Whether a kind came up in the recording so far: looked for once, and then in what is new. */
function has(recording, kind) {
  const seen = ((recording.seen ??= {})[kind] ??= { found: false, upTo: -1 });
  seen.found ||= recording.find(kind, seen.upTo, 1) !== null;
  seen.upTo = recording.length - 1;
  return seen.found;
}
