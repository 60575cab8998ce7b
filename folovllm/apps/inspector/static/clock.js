// Where the viewer stands in time. Of one recording each moment is a tick; in a race of two, each moment of either is one.
import { placeOf } from "./dom.js";

export class Clock {
  constructor(recordings) {
    this.recordings = recordings;
    this.tick = 0;
    this.times = null;
    if (recordings.length > 1) this.times = [...new Set(recordings.flatMap((recording) => recording.columns.time))].sort((a, b) => a - b);
  }

  get length() {
    return this.times ? this.times.length : this.recordings[0].length;
  }

  /** Seconds since the beginning. */
  get time() {
    return this.times ? this.times[this.tick] : this.recordings[0].columns.time[this.tick];
  }

  /** Seconds of the longest recording. */
  get duration() {
    return Math.max(...this.recordings.map((recording) => recording.duration));
  }

  /** The moment of each recording at the tick. */
  moments() {
    return this.times ? this.recordings.map((recording) => recording.atTime(this.time)) : [this.tick];
  }

  /** The first tick that can be shown. */
  get first() {
    return this.times ? 0 : this.recordings[0].first;
  }

  go(tick) {
    this.tick = Math.max(this.first, Math.min(this.length - 1, Math.round(tick)));
  }

  /** The tick at which a recording is at a moment. */
  tickOf(recording, moment) {
    if (!this.times) return moment;
    const time = recording.columns.time[moment];
    return placeOf(this.times.length, (i) => this.times[i] < time);
  }

  /** The next tick (or the one before) at which something of a kind happened, or null. */
  find(kind, direction) {
    const found = this.recordings.map((recording, i) => {
      const moment = recording.find(kind, this.moments()[i], direction);
      return moment === null ? null : this.tickOf(recording, moment);
    });
    const there = found.filter((tick) => tick !== null && tick !== this.tick);
    return there.length ? (direction > 0 ? Math.min(...there) : Math.max(...there)) : null;
  }

  /** Ticks after `seconds` of watching at `speed` moments a second. In a race time runs as evenly as it did for the engines. */
  advance(seconds, speed, rest) {
    if (!this.times) {
      const ticks = rest + seconds * speed;
      this.go(this.tick + Math.floor(ticks));
      return ticks - Math.floor(ticks);
    }
    const { columns, length } = this.recordings[0];
    const time = this.time + rest + (seconds * speed * columns.time.at(-1)) / Math.max(1, length - 1);
    while (this.tick < this.length - 1 && this.times[this.tick + 1] <= time) this.tick++;
    return time - this.time;
  }
}
