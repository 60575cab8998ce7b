// The reducer: turns the events of a recording into the state behind them, as folovllm/apps/inspector/watcher.py does. It asks nobody, and
// so it shows what wrong code does, too: a block that is free and held, or neither.
// The events are those of docs/reference/recording.md: lists that begin with their name. A scheduled sequence is
// [seq_id, row, start, end, num_samples, first_new_block, new_blocks, load_state, save_state].

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
    this.hash = new Array(numBlocks).fill(null); // the name under which others find a block, its first hexadecimal digits
    this.serial = new Float64Array(numBlocks);
    this.parent = new Float64Array(numBlocks); // the serial of the block before it
    this.freedAt = new Float64Array(numBlocks); // by `clock`
    this.originSeq = new Float64Array(numBlocks).fill(-1); // whose tokens a block with a name holds,
    this.originPlace = new Int32Array(numBlocks); // and which block of them
    this.snapshots = new Map(); // of states, by number: {tokens, serial}
    [this.host, this.leaving] = [new Map(), 0]; // copies of evicted blocks in host memory, by hash: whose tokens; how many are about to go there
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
    [copy.snapshots, copy.host] = [new Map(this.snapshots), new Map(this.host)];
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

// Events about a sequence do nothing where it has ended meanwhile.
const REDUCERS = {
  Snapshot(state, [, , , , , numSteps, blocks, sequences]) {
    state.numSteps = numSteps;
    for (const [i, count, isFree, hash, serial, parent] of blocks) {
      [state.refCount[i], state.isFree[i]] = [count, isFree];
      [state.hash[i], state.serial[i], state.parent[i]] = [hash === null ? null : digits(hash), serial, parent];
    }
    state.numUsed = state.isFree.reduce((used, free) => used - free, state.numBlocks);
    for (const [[, seqId, , , prompt], isRunning, numTokens, numComputed, table] of sequences) {
      state.sequences.set(seqId, Object.assign(newSequence(seqId, prompt.length), { isRunning, numTokens, numComputed, table: table.slice() }));
    }
  },
  RequestAdded: (state, [, seqId, , , prompt]) => state.sequences.set(seqId, newSequence(seqId, prompt.length)),
  Refused: (state, [, seqId, budget]) => Object.assign(state.sequences.get(seqId) ?? {}, { refused: budget }),
  Admitted(state, [, seqId, cached]) {
    const seq = state.sequences.get(seqId);
    if (!seq) return;
    Object.assign(seq, { isRunning: true, numComputed: cached, cached, refused: null, victimOf: null });
    state.totals.asked += seq.numTokens;
  },
  PrefixHit: (state, [, , tokens]) => (state.totals.hit += tokens),
  Preempted(state, [, seqId, victimOf, lost]) {
    state.totals.preempted++;
    state.totals.lost += lost;
    Object.assign(state.sequences.get(seqId) ?? {}, { isRunning: false, row: -1, numComputed: 0, drafts: 0, victimOf, lost });
  },
  Finished(state, [, seqId]) {
    state.sequences.delete(seqId);
    state.totals.finished++;
  },
  Aborted(state, [, seqId]) {
    state.sequences.delete(seqId);
    state.totals.aborted++;
  },
  StepBegan(state, [, , , , scheduled]) {
    for (const [seqId, row, , end, numSamples, first, blocks] of scheduled) {
      const seq = state.sequences.get(seqId);
      if (!seq) continue;
      Object.assign(seq, { row, numComputed: end, drafts: Math.max(0, numSamples - 1) });
      if (blocks.length || first < seq.table.length) seq.table.splice(first, Infinity, ...blocks);
    }
  },
  StepEnded(state, [, , , , , sampled]) {
    for (const [seqId, tokens] of sampled) {
      const seq = state.sequences.get(seqId);
      if (!seq) continue;
      seq.numTokens += tokens.length;
      state.totals.drawn += tokens.length;
    }
    state.numSteps++;
  },
  BlockClaimed(state, [, i]) {
    state.numUsed += state.isFree[i];
    state.isFree[i] = 0;
  },
  BlockTaken: (state, [, i]) => (state.refCount[i] = 1),
  BlockFreed(state, [, i]) {
    state.numUsed -= 1 - state.isFree[i];
    state.isFree[i] = 1;
    state.freedAt[i] = ++state.clock;
  },
  BlockAdopted(state, [, block, , refCount]) {
    state.refCount[block] = refCount;
  },
  BlockCached(state, [, i, seqId, place, hash, serial, parent]) {
    [state.hash[i], state.serial[i], state.parent[i]] = [digits(hash), serial, parent];
    [state.originSeq[i], state.originPlace[i]] = [seqId, place];
  },
  BlockEvicted(state, [, i]) {
    if (state.leaving && state.leaving--) state.host.set(state.hash[i], state.originSeq[i]);
    [state.hash[i], state.serial[i], state.parent[i], state.originSeq[i]] = [null, 0, 0, -1];
    state.totals.evicted++;
  },
  BlocksMoved(state, [, what, place, n]) {
    if (what === "offloaded" && place === "host") state.leaving += n;
    if (what === "lost" && place === "host") for (const hash of [...state.host.keys()].slice(0, n)) state.host.delete(hash);
  },
  SnapshotCached: (state, [, number, tokens, serial]) => state.snapshots.set(number, { tokens, serial }),
  SnapshotEvicted: (state, [, number]) => state.snapshots.delete(number),
  BlockPassed(state, [, seqId, place, block, left]) {
    state.refCount[block] = left;
    const table = state.sequences.get(seqId)?.table ?? [];
    if (place < table.length) table[place] = -1;
  },
  TableFreed(state, [, seqId, blocks]) {
    for (const [block, left] of blocks) state.refCount[block] = left;
    Object.assign(state.sequences.get(seqId) ?? {}, { table: [] });
  },
  TableCut(state, [, seqId, block]) {
    state.refCount[block] = 0;
    state.freedAt[block] = -state.clock; // the next one to be taken
    state.sequences.get(seqId)?.table.pop();
  },
  DraftsVerified(state, [, seqId, drafted, accepted]) {
    for (const counts of [state.totals, state.sequences.get(seqId) ?? {}]) [counts.drafted, counts.accepted] = [counts.drafted + drafted, counts.accepted + accepted];
    const seq = state.sequences.get(seqId);
    if (seq) [seq.numComputed, seq.drafts] = [seq.numComputed - drafted + accepted, 0];
  },
};

/** The first half of a hash, as hexadecimal digits: JavaScript's numbers do not hold all 64 bits. */
function digits(hash) {
  return BigInt(hash).toString(16).padStart(16, "0").slice(0, 8);
}
