// The reducer: turns the events of a recording into the state behind them, as folovllm/watcher.py does. It asks nobody, and
// so it shows what wrong code does, too: a block that is free and held, or neither.
// The events are those of docs/reference/recording.md: lists that begin with their name.

/** How an engine stands: its blocks and the sequences that it serves. */
export class EngineState {
  constructor(numBlocks = 0, blockSize = 0) {
    this.numBlocks = numBlocks; // 0: the cache is no pool of blocks (M1)
    this.blockSize = blockSize;
    this.numSteps = 0; // taken in
    this.numUsed = 0; // blocks that are not free
    this.sequences = new Map(); // by number, in the order of their arrival
    this.clock = 0; // counts what is freed: the order of the least recently used
    this.totals = { preempted: 0, lost: 0, evicted: 0, finished: 0, aborted: 0, drawn: 0, asked: 0, hit: 0, drafted: 0, accepted: 0 };
    this.refCount = new Int32Array(numBlocks);
    this.isFree = new Uint8Array(numBlocks).fill(1);
    this.hash = new Array(numBlocks).fill(null); // the name under which others find a block, as 16 hexadecimal digits
    this.serial = new Float64Array(numBlocks);
    this.parent = new Float64Array(numBlocks); // the serial of the block before it
    this.freedAt = new Float64Array(numBlocks); // by `clock`
    this.originSeq = new Float64Array(numBlocks).fill(-1); // whose tokens a block with a name holds,
    this.originPlace = new Int32Array(numBlocks); // and which block of them
    this.snapshots = new Map(); // of states, by number: {tokens, serial}
  }

  /** Take in an event. */
  apply(event) {
    REDUCERS[event[0]]?.(this, event);
  }

  /** A copy that shares nothing which changes. */
  clone() {
    const copy = Object.assign(new EngineState(), this);
    for (const name of CELL_FIELDS) copy[name] = this[name].slice();
    copy.sequences = new Map();
    for (const [id, seq] of this.sequences) copy.sequences.set(id, { ...seq, table: seq.table.slice() });
    copy.totals = { ...this.totals };
    copy.snapshots = new Map(this.snapshots);
    return copy;
  }

  /** The block before block i in the chain of its prefix, -1 if there is none, or it is gone. */
  parentOf(i) {
    return this.parent[i] ? this.serial.indexOf(this.parent[i]) : -1;
  }

  /** The blocks at whose ends snapshots were taken. */
  blocksWithSnapshots() {
    return new Set([...this.snapshots.values()].map(({ serial }) => this.serial.indexOf(serial)));
  }

  /** Who holds each block: for each of [N] null, or a list of {seq, place, filled}; several are a shared prefix. */
  holders() {
    const held = new Array(this.numBlocks).fill(null);
    for (const seq of this.sequences.values()) {
      if (!seq.isRunning) continue;
      seq.table.forEach((block, place) => {
        if (block < 0) return; // behind its window
        const filled = Math.max(0, Math.min(this.blockSize, seq.numComputed - place * this.blockSize));
        (held[block] ??= []).push({ seq, place, filled });
      });
    }
    return held;
  }
}

const CELL_FIELDS = ["refCount", "isFree", "hash", "serial", "parent", "freedAt", "originSeq", "originPlace"];

function newSequence(seqId, numPrompt) {
  return {
    seqId,
    numPrompt,
    isRunning: false,
    row: -1, // its slot for a state, where the model has some
    numTokens: numPrompt,
    numComputed: 0, // computed or scheduled to be
    table: [],
    refused: null, // which budget, if it waits in front and was asked
    cached: null, // tokens that were in the cache when it was admitted
    victimOf: null, // for whom it was preempted, while it waits again,
    lost: 0, // and the tokens that it must compute again
    drafts: 0, // that the step in flight verifies: the last of the computed tokens
    drafted: 0, // that were verified so far,
    accepted: 0, // and were right
  };
}

/** A share as [sequence, start, tokens, draws, first new block, new blocks]; a number is a decode that says nothing new. */
export function shareOf(state, share) {
  return typeof share === "number" ? [share, state.sequences.get(share)?.numComputed ?? 0, 1, 1] : share;
}

/** How many tokens one entry of "end" brings: a number is one token. */
export function numDrawn(tokens) {
  return typeof tokens === "number" ? 1 : tokens.length;
}

// Events about a sequence do nothing where it has ended meanwhile.
const REDUCERS = {
  key(state, [, , , key]) {
    state.numSteps = key.steps;
    key.refs.forEach((count, i) => (state.refCount[i] = count));
    for (let i = 0; i < key.free.length; i++) state.isFree[i] = key.free[i] === "1" ? 1 : 0;
    state.numUsed = state.isFree.reduce((used, free) => used - free, state.numBlocks);
    state.hash.fill(null);
    for (const [i, hash, serial, parent] of key.named) [state.hash[i], state.serial[i], state.parent[i]] = [hash, serial, parent];
    state.sequences = new Map();
    for (const [seqId, , , numPrompt, , , , isRunning, numTokens, numComputed, table, refused] of key.sequences) {
      const seq = Object.assign(newSequence(seqId, numPrompt), { isRunning: !!isRunning, numTokens, numComputed, refused });
      seq.table = table.slice();
      state.sequences.set(seqId, seq);
    }
  },
  add: (state, [, seqId, , , prompt]) => state.sequences.set(seqId, newSequence(seqId, prompt.length)),
  refuse: (state, [, seqId, budget]) => Object.assign(state.sequences.get(seqId) ?? {}, { refused: budget }),
  admit(state, [, seqId, cached]) {
    const seq = state.sequences.get(seqId);
    if (!seq) return;
    Object.assign(seq, { isRunning: true, numComputed: cached, cached, refused: null, victimOf: null });
    state.totals.asked += seq.numTokens;
  },
  hit: (state, [, , tokens]) => (state.totals.hit += tokens),
  preempt(state, [, seqId, victimOf, lost]) {
    state.totals.preempted++;
    state.totals.lost += lost;
    Object.assign(state.sequences.get(seqId) ?? {}, { isRunning: false, row: -1, numComputed: 0, drafts: 0, victimOf, lost });
  },
  finish(state, [, seqId]) {
    state.sequences.delete(seqId);
    state.totals.finished++;
  },
  abort(state, [, seqId]) {
    state.sequences.delete(seqId);
    state.totals.aborted++;
  },
  begin(state, [, , , , shares, , states]) {
    for (const [seqId, row] of states ?? []) Object.assign(state.sequences.get(seqId) ?? {}, { row });
    for (const share of shares) {
      const [seqId, start, tokens, draws, first, blocks] = shareOf(state, share);
      const seq = state.sequences.get(seqId);
      if (!seq) continue;
      seq.numComputed = start + tokens;
      seq.drafts = Math.max(0, draws - 1);
      if (blocks) seq.table.splice(first, Infinity, ...blocks);
    }
  },
  end(state, [, , , , , seqIds, tokens]) {
    seqIds.forEach((id, i) => {
      const seq = state.sequences.get(id);
      if (!seq) return;
      seq.numTokens += numDrawn(tokens[i]);
      state.totals.drawn += numDrawn(tokens[i]);
    });
    state.numSteps++;
  },
  claim: forEachBlock((state, i) => {
    state.numUsed += state.isFree[i];
    state.isFree[i] = 0;
  }),
  take: forEachBlock((state, i) => (state.refCount[i] = 1)),
  new: (state, event) => [REDUCERS.claim, REDUCERS.take].forEach((reduce) => reduce(state, event)),
  free: forEachBlock((state, i) => {
    state.numUsed -= 1 - state.isFree[i];
    state.isFree[i] = 1;
    state.freedAt[i] = ++state.clock;
  }),
  adopt(state, [, block, , refCount]) {
    state.refCount[block] = refCount;
  },
  publish(state, [, i, seqId, place, hash, serial, parent]) {
    [state.hash[i], state.serial[i], state.parent[i]] = [hash, serial, parent];
    [state.originSeq[i], state.originPlace[i]] = [seqId, place];
  },
  evict: forEachBlock((state, i) => {
    [state.hash[i], state.serial[i], state.parent[i], state.originSeq[i]] = [null, 0, 0, -1];
    state.totals.evicted++;
  }),
  snapshot: (state, [, number, tokens, serial]) => state.snapshots.set(number, { tokens, serial }),
  drop: (state, [, number]) => state.snapshots.delete(number),
  pass(state, [, seqId, place, block, left]) {
    state.refCount[block] = left;
    const table = state.sequences.get(seqId)?.table ?? [];
    if (place < table.length) table[place] = -1;
  },
  table(state, [, seqId, blocks, left]) {
    blocks.forEach((block, i) => (state.refCount[block] = left ? left[i] : 0));
    Object.assign(state.sequences.get(seqId) ?? {}, { table: [] });
  },
  cut(state, [, seqId, block]) {
    state.refCount[block] = 0;
    state.freedAt[block] = -state.clock; // the next one to be taken
    state.sequences.get(seqId)?.table.pop();
  },
  guess(state, [, seqId, drafted, accepted]) {
    for (const counts of [state.totals, state.sequences.get(seqId) ?? {}]) [counts.drafted, counts.accepted] = [counts.drafted + drafted, counts.accepted + accepted];
    const seq = state.sequences.get(seqId);
    if (seq) [seq.numComputed, seq.drafts] = [seq.numComputed - drafted + accepted, 0];
  },
};

function forEachBlock(change) {
  return (state, event) => {
    for (let i = 1; i < event.length; i++) change(state, event[i]);
  };
}
