// The controls of time: play, step, scrub, speed, and the next of each kind of event.
import { contextOf, duration, setText, template, widthOf } from "./dom.js";
import { KINDS } from "./recording.js";
import { t, wordsOf } from "./words.js";

/** What can be looked for, in the order of the buttons. */
export const JUMPS = [
  { kind: "preempt", key: "p", colour: "alarm" },
  { kind: "hit", key: "h", colour: "hit" },
  { kind: "refuse", key: "r", colour: "muted" },
  { kind: "evict", key: "e", colour: "cached" },
];
const TRACK = 20; // pixels
const SLOWLY = 16; // seconds that a scene may take to its question

export class Player {
  playing = false;
  #rest = 0;
  #last = 0;

  /** `onMove()` is called after the clock has moved. */
  constructor(clock, onMove, { live = false } = {}) {
    Object.assign(this, { clock, onMove, live });
    this.follows = live;
    this.stopAt = null; // the tick of a scene's question, until it is answered
    let first, back, forward, last, jumps, goOn;
    [this.element, this.playButton, this.speed, this.range, this.track, this.scrub, this.where, this.liveButton, this.asks, this.question, first, back, forward, last, jumps, goOn] =
      template("player", "play", "speed", "range", "track", "scrub", "where", "live", "asks", "question", "first", "back", "forward", "last", "jumps", "go-on");
    this.playButton.onclick = () => this.toggle();
    this.range.oninput = () => this.go(Number(this.range.value));
    first.onclick = () => this.go(0);
    back.onclick = (event) => this.go(this.clock.tick - (event.shiftKey ? 10 : 1));
    forward.onclick = (event) => this.go(this.clock.tick + (event.shiftKey ? 10 : 1));
    last.onclick = () => this.go(this.clock.length - 1);
    this.liveButton.onclick = () => this.follow();
    this.liveButton.hidden = !live;
    if (live) this.speed.value = 30;
    this.jumps = [...jumps.children].map((chosen, i) => ({ chosen, kind: JUMPS[i].kind }));
    goOn.onclick = () => {
      this.stopAt = null;
      this.toggle();
    };
    for (const { chosen, kind } of this.jumps) chosen.onclick = (event) => this.jump(kind, event.shiftKey ? -1 : 1);
  }

  /** Play a scene from the middle of its story, once and slowly, up to its question; by hand where the reader wants no motion. */
  playScene(scene) {
    const [recording] = this.clock.recordings;
    this.stopAt = this.clock.tickOf(recording, scene.stop);
    setText(this.question, wordsOf(scene).question);
    const speeds = [...this.speed.options].map((option) => Number(option.value));
    this.speed.value = speeds.find((speed) => (scene.stop - scene.start) / speed <= SLOWLY) ?? speeds.at(-1);
    this.go(this.clock.tickOf(recording, scene.start));
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const seen = new IntersectionObserver(([{ isIntersecting }]) => {
      if (!isIntersecting) return;
      seen.disconnect();
      if (!this.playing) this.toggle();
    });
    seen.observe(this.playButton);
  }

  go(tick) {
    this.follows = false;
    this.playing = false;
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
    this.playing = false;
    this.#move(this.clock.length - 1);
  }

  /** There is more to be seen. */
  grown() {
    if (this.follows) this.clock.go(this.clock.length - 1);
    this.onMove();
  }

  toggle() {
    this.follows = false;
    this.playing = !this.playing;
    this.#rest = 0;
    this.#last = performance.now();
    if (this.playing && this.clock.tick === this.clock.length - 1) this.clock.go(0);
    if (this.playing) requestAnimationFrame((now) => this.#run(now));
    this.onMove();
  }

  faster(by) {
    if (this.speed.options[this.speed.selectedIndex + by]) this.speed.selectedIndex += by;
  }

  #run(now) {
    if (!this.playing) return;
    const before = this.clock.tick;
    this.#rest = this.clock.advance(Math.min(0.25, Math.max(0, now - this.#last) / 1000), Number(this.speed.value), this.#rest);
    this.#last = now;
    if (this.stopAt !== null && before < this.stopAt && this.clock.tick >= this.stopAt) {
      this.clock.go(this.stopAt);
      this.playing = false;
    }
    if (this.clock.tick === this.clock.length - 1) this.playing = false;
    if (this.clock.tick !== before || !this.playing) this.onMove();
    if (this.playing) requestAnimationFrame((later) => this.#run(later));
  }

  draw({ theme }) {
    const { clock } = this;
    const [title, sign] = this.playing ? [t("Pause (space)"), "❚❚"] : [t("Play (space)"), "▶"];
    setText(this.playButton, sign);
    this.playButton.setAttribute("aria-label", title);
    this.playButton.title = title;
    this.range.min = clock.first;
    this.range.max = clock.length - 1;
    this.range.value = clock.tick;
    const where = t("{now} of {whole}", { now: duration(clock.time), whole: duration(clock.duration) });
    this.range.setAttribute("aria-valuetext", where);
    setText(this.where, where);
    this.asks.hidden = this.playing || clock.tick !== this.stopAt;
    this.liveButton.setAttribute("aria-pressed", String(this.follows));
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
