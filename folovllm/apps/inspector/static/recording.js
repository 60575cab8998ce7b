// A recording: all that happened in an engine, turn by turn, and the way to any moment of it.
// Moment 0 is the snapshot with which it begins, moment n is the engine after turn n.
import { placeOf } from "./dom.js";
import { lettersOf } from "./palette.js";
import { EngineState } from "./reducer.js";

const FORMAT = "folovllm recording";
const VERSION = 2;
const KEYFRAME_EVERY = 256; // moments
const MAX_KEYFRAME_CELLS = 4e6; // of all keyframes together: some 200 MB

/** What can be looked for: a bit for each kind, set in the moments that have one. */
export const KINDS = { preempt: 1, hit: 2, refuse: 4, evict: 8, finish: 16, abort: 32, add: 64, admit: 128 };

const COLUMNS = [
  "flags", "time", "step", "prefill", "decode", "idle", "width", "schedule", "device", "take",
  "running", "waiting", "used", "wasted", "drawn", "hitRate", "first", "drafts", "acceptance",
]; // prettier-ignore

/** Events by moment, the sequences' histories, numbers for each moment, and the state at any of them. */
export class Recording {
  #head; // the state after all moments
  #cursor = null; // {at, state}: where the viewer stands
  #keyframes = [];
  #every = KEYFRAME_EVERY;
  #refusal = ""; // of the moment before
  #sizes = []; // of each moment's line
  #numInfos = 0;
  #began = new Map(); // step -> its "begin", until it has ended

  /** `header` is the first line. Raises Error where it is of another format, or of another version of it. */
  constructor(header) {
    if (header?.format !== FORMAT) throw new Error(`This is no recording: its first line does not say "${FORMAT}".`);
    if (header.version !== VERSION) throw new Error(`The recording's format is version ${header.version}; this page reads version ${VERSION}.`);
    this.header = header;
    this.engine = header.engine;
    this.scene = header.scene ?? null; // what is said beside it, and where it begins and stops
    this.moments = []; // lists of events
    this.infos = new Map(); // by number: what is known of a sequence for ever
    this.ended = []; // those of them that ended, in their order
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.texts = new Map(); // token id -> a text, or bytes
    this.blockTokens = {}; // of blocks that were cached when the recording began
    this.stepsBefore = 0; // that the engine had made when the recording began
    this.how = null; // it ended
    this.hasDrafts = this.hasExperts = false;
    this.experts = []; // by moment: how often each expert of each layer was asked so far
    this.scores = []; // {at, info, position, logprobs}: what the model said of every token before it took the one at that position
    this.reach = 0; // the last block that was ever in use
    this.first = 0; // the first moment that is still known
    this.size = 0; // characters of the lines that are known
    this.start = Infinity; // seconds
    this.#head = new EngineState(this.engine.num_kv_blocks, this.engine.block_size);
  }

  get length() {
    return this.moments.length;
  }

  /** Take in a line that is no header. */
  take(line, size = 0) {
    const [name, , time] = line;
    this.size += size;
    if (name === "Texts") for (const [id, text] of Object.entries(line[1])) this.texts.set(Number(id), text);
    else if (name === "Turn") this.#append(line[3], time, size);
    else if (name === "Done") this.how = line[3];
  }

  /** The state at a moment: from where the viewer stands, or from the nearest keyframe before it. */
  stateAt(wanted) {
    const at = Math.max(this.first, wanted);
    const index = Math.floor(at / this.#every);
    if (this.#cursor === null || this.#cursor.at > at || this.#cursor.at < index * this.#every) {
      this.#cursor = { at: index * this.#every, state: this.#keyframes[index].clone() };
    }
    const { state } = this.#cursor;
    while (this.#cursor.at < at) for (const event of this.moments[++this.#cursor.at]) state.apply(event);
    return state;
  }

  /** Forget the oldest moments, as many as it takes that `most` characters of lines are left: a live view may stay for days. */
  forget(most) {
    if (this.size <= most) return;
    let before = this.first;
    for (let left = this.size; left > most / 2 && before < this.length - 1; before++) left -= this.#sizes[before];
    const until = Math.floor(before / this.#every) * this.#every; // a keyframe stands there
    for (; this.first < until; this.first++) {
      this.size -= this.#sizes[this.first];
      this.moments[this.first] = this.experts[this.first] = null;
      delete this.#keyframes[this.first / this.#every];
    }
    this.scores = this.scores.filter(({ at }) => at >= this.first);
    this.ended = this.ended.filter((info) => info.end >= this.first || !this.infos.delete(info.seqId));
  }

  /** The nearest moment of a kind behind (direction 1) or before (-1) `at`, or null. */
  find(kind, at, direction) {
    const { flags } = this.columns;
    for (let i = at + direction; i >= this.first && i < flags.length; i += direction) if (flags[i] & KINDS[kind]) return i;
    return null;
  }

  /** The last sequence whose prompt has a text in it, by number, or null. */
  findPrompt(text) {
    const found = [...this.infos.values()].findLast((info) => this.text(info, 0, info.prompt.length).includes(text));
    return found?.seqId ?? null;
  }

  /** The last moment whose time is not after `seconds` from the beginning. */
  atTime(seconds) {
    const times = this.columns.time;
    return Math.max(0, placeOf(times.length, (i) => times[i] <= seconds) - 1);
  }

  /** The step that moment `at` has taken in, counted from 1 in this recording. */
  stepAt(at) {
    return this.columns.step[at] - this.stepsBefore;
  }

  /** Seconds. */
  get duration() {
    return this.columns.time.at(-1) ?? 0;
  }

  /** The letters of a sequence, by its number. */
  name(seqId) {
    return this.infos.get(seqId)?.letters ?? `#${seqId}`;
  }

  /** Tokens `from` to `to` of a sequence as text. */
  text(info, from, to) {
    const ids = [];
    for (let i = Math.max(0, from); i < to; i++) ids.push(i < info.prompt.length ? info.prompt[i] : info.drawn[i - info.prompt.length]);
    return this.decode(ids);
  }

  /** Token ids as text. A token may be a part of a character: their bytes are decoded together. */
  decode(ids) {
    let said = "";
    let bytes = [];
    for (const id of ids) {
      const text = this.texts.get(id);
      if (Array.isArray(text)) {
        bytes.push(...text);
        continue;
      }
      if (bytes.length) said += DECODER.decode(new Uint8Array(bytes));
      bytes = [];
      said += text ?? (id === undefined ? "" : `⟨${id}⟩`);
    }
    return bytes.length ? said + DECODER.decode(new Uint8Array(bytes)) : said;
  }

  /** The tokens in a block, and whose they are: {info, from, to}, {ids} or null. */
  contents(state, block, held) {
    const size = state.blockSize;
    if (held) {
      const from = held.place * size;
      return { info: this.infos.get(held.seq.seqId), from, to: from + held.filled };
    }
    if (state.hash[block] === null) return null;
    const from = state.originPlace[block] * size;
    const info = this.infos.get(state.originSeq[block]);
    return info ? { info, from, to: from + size } : { ids: this.blockTokens[block] ?? [] };
  }

  /** Sequences that had ended by moment `at`, the last first. */
  endedBy(at, most) {
    const n = placeOf(this.ended.length, (i) => this.ended[i].end <= at);
    return this.ended.slice(Math.max(0, n - most), n).reverse();
  }

  #begin([, , , , , numSteps, blocks, sequences]) {
    this.stepsBefore = numSteps;
    for (const [i, , , , , , tokens] of blocks) this.blockTokens[i] = int32s(tokens);
    for (const [[, ...added], , , , , tokens] of sequences) {
      const info = this.#info(added, 0);
      info.drawn = tokens.slice(info.prompt.length);
      if (info.drawn.length) info.first = 0;
    }
  }

  #append(events, time, size) {
    const at = this.moments.length;
    this.moments.push(events);
    this.#sizes.push(size);
    const row = { flags: 0, prefill: 0, decode: 0, idle: 0, width: 0, schedule: 0, device: 0, take: 0, first: 0, drafts: 0 };
    for (const event of events) {
      this.#learn[event[0]]?.call(this, event, at, row);
      this.#head.apply(event);
      if (event[0] === "Snapshot") this.reach = Math.max(0, this.#head.isFree.lastIndexOf(0), this.#head.hash.findLastIndex(Boolean));
      else if (event[0] === "BlockClaimed" || event[0] === "BlockTaken") this.reach = Math.max(this.reach, event[1]);
    }
    this.experts.push(row.experts ?? this.experts.at(-1) ?? null);
    this.#refusal = row.refusal ?? "";
    this.#measure(row, time);
    for (const name of COLUMNS) this.columns[name].push(row[name]);
    if (at % this.#every === 0) this.#keepKeyframe();
  }

  /** What an event says of its sequence's history, and of its moment: the row of numbers, and the flags. The state is not changed yet. */
  #learn = {
    Snapshot: this.#begin,
    RequestAdded: ([, ...added], at, row) => {
      row.flags |= KINDS.add;
      this.#info(added, at);
    },
    Refused: this.#refused,
    Admitted: ([, seq, n], at, row) => this.#mark(seq, row, { at, kind: "admit", n }),
    PrefixHit: ([, seq, n], at, row) => this.#mark(seq, row, { at, kind: "hit", n }),
    Preempted: ([, seq, other, n], at, row) => this.#mark(seq, row, { at, kind: "preempt", n, other }),
    BlockEvicted: (event, at, row) => (row.flags |= KINDS.evict),
    Finished: ([, seq, reason], at, row) => this.#ended(seq, row, { at, kind: "finish", n: reason }),
    Aborted: ([, seq], at, row) => this.#ended(seq, row, { at, kind: "abort", n: "abort" }),
    StepBegan: this.#stepBegan,
    StepEnded: this.#stepEnded,
    DraftsVerified: this.#verified,
    Scored: this.#scored,
    ExpertsAsked: ([, counts], at, row) => ([row.experts, this.hasExperts] = [counts, true]),
  };

  #mark(seqId, row, what) {
    row.flags |= KINDS[what.kind];
    this.infos.get(seqId)?.marks.push(what);
  }

  #ended(seqId, row, what) {
    this.#mark(seqId, row, what);
    const info = this.infos.get(seqId);
    if (!info || info.end !== Infinity) return;
    [info.end, info.reason] = [what.at, what.n];
    this.ended.push(info);
  }

  #keepKeyframe() {
    this.#keyframes.push(this.#head.clone());
    if (this.#keyframes.length > 64 && this.#keyframes.length * this.#head.numBlocks > MAX_KEYFRAME_CELLS) {
      for (let i = 0; 2 * i < this.#keyframes.length; i++) this.#keyframes[i] = this.#keyframes[2 * i];
      this.#keyframes.length = Math.ceil(this.#keyframes.length / 2);
      this.#every *= 2;
    }
  }

  #info([seqId, requestId, answer, prompt, maxTokens, priority, time], at) {
    const index = this.#numInfos++;
    const info = {
      ...{ index, letters: lettersOf(index), seqId, requestId, answer, prompt, maxTokens, priority, time },
      drawn: [], // its tokens behind the prompt
      start: at, // moments: it came,
      first: null, // had its first token,
      end: Infinity, // and ended
      reason: null,
      at: [], // its part in steps: the moment of each,
      from: [], // its first token
      size: [], // and how many,
      drafts: [], // how many of them were draft tokens,
      accepted: [], // and of these, once they are verified, accepted
      checks: new Map(), // by the moment in which draft tokens were verified: {from, accepted, rejected, first, blocks}
      marks: [], // {at, kind, n, other}: what else happened to it
      ttft: null, // seconds
    };
    this.start = Math.min(this.start, time);
    this.infos.set(seqId, info);
    return info;
  }

  #scored([, seqId, logprobs], at) {
    const info = this.infos.get(seqId);
    if (info) this.scores.push({ at, info, position: info.prompt.length + info.drawn.length, logprobs });
  }

  #refused([, seqId, budget], at, row) {
    row.refusal = `${seqId} ${budget}`;
    if (row.refusal === this.#refusal) return; // as in the moment before: that is no news
    this.#mark(seqId, row, { at, kind: "refuse", n: budget });
  }

  #stepBegan([, step, start, scheduled, sequences, budgetLeft], at, row) {
    this.start = Math.min(this.start, start);
    this.#began.set(step, scheduled);
    row.schedule = scheduled - start;
    row.idle = budgetLeft;
    for (const each of sequences) {
      const [seqId, , from, end, numSamples] = each;
      const [info, size] = [this.infos.get(seqId), end - from];
      const drafts = Math.max(0, numSamples - 1);
      row[isPrefill(each, info) ? "prefill" : "decode"] += size;
      row.drafts += drafts;
      if (!info) continue;
      info.at.push(at);
      info.from.push(from);
      info.size.push(size);
      info.drafts.push(drafts);
    }
    this.hasDrafts ||= row.drafts > 0;
    row.width = row.prefill || row.drafts ? 0 : this.engine.graph_widths?.find((width) => width >= sequences.length) ?? 0;
  }

  #stepEnded([, step, start, arrived, end, sampled], at, row) {
    for (const [seqId, tokens] of sampled) {
      const info = this.infos.get(seqId);
      if (!info || info.end !== Infinity) continue;
      info.drawn.push(...tokens);
      if (info.first !== null || !tokens.length) continue;
      info.first = at;
      row.first = info.ttft = end - info.time;
    }
    row.device = arrived - Math.max(start, this.#began.get(step) ?? start);
    row.take = end - arrived;
    row.end = end;
    this.#began.delete(step);
  }

  /** Draft tokens were verified: the first of them lies at `from`, in the first of `blocks`, which is block `first` of the sequence. */
  #verified([, seqId, drafted, accepted, rejected], at) {
    const seq = this.#head.sequences.get(seqId);
    if (!seq) return;
    const info = this.infos.get(seqId);
    const from = seq.numComputed - drafted;
    const first = Math.floor(from / this.#head.blockSize);
    info.accepted[info.at.length - 1] = accepted;
    info.checks.set(at, { from, accepted, rejected, first, blocks: seq.table.slice(first) });
  }

  /** The numbers that the state gives. */
  #measure(row, time) {
    const head = this.#head;
    row.time = Math.max(this.columns.time.at(-1) ?? 0, (row.end ?? time) - Math.min(this.start, time));
    row.step = head.numSteps;
    row.running = row.wasted = 0;
    for (const seq of head.sequences.values()) {
      if (!seq.isRunning) continue;
      row.running++;
      row.wasted += Math.max(0, seq.table.length * head.blockSize - seq.numComputed);
    }
    row.waiting = head.sequences.size - row.running;
    row.used = head.numUsed;
    row.drawn = head.totals.drawn;
    row.hitRate = head.totals.asked ? head.totals.hit / head.totals.asked : 0;
    row.acceptance = head.totals.drafted ? head.totals.accepted / head.totals.drafted : 0;
  }
}

const DECODER = new TextDecoder();

function int32s(base64) {
  return new Int32Array(Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer);
}

/** Whether a step computes a sequence's prompt, or what a preemption lost; else it decodes, or verifies draft tokens. */
export function isPrefill([, , start, end, numSamples], info) {
  return end - start > Math.max(1, numSamples) || !info || start < info.prompt.length;
}
