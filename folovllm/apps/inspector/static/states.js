// Beside the blocks. Evicted ones in host memory (X7), or layers with states (X5): a slot of fixed size for each request that runs, and snapshots, which are copies of states.
import { outline, write } from "./cells.js";
import { contextOf, count, plural, setText, template, widthOf } from "./dom.js";
import { drawPattern, hueOf, inkOn } from "./palette.js";
import { t } from "./words.js";

const [ROW, LEFT, WIDEST] = [24, 72, 130]; // pixels

export class StatesView {
  constructor() {
    [this.element, this.title, this.facts, this.stage, this.canvas] = template("states", "title", "facts", "stage", "slots");
  }

  draw(frame) {
    setText(this.facts, frame.recording.engine.state_tokens ? this.#drawStates(frame) : this.#drawHost(frame));
    this.canvas.setAttribute("aria-label", this.facts.textContent);
  }

  #drawStates({ recording, at, state, theme }) {
    const { max_num_seqs: all, num_snapshots: most, state_tokens: size } = recording.engine;
    const running = [...state.sequences.values()].filter(({ row }) => row >= 0);
    const loads = loadsOf(recording.moments[at]);
    const width = Math.max(160, widthOf(this.stage));
    const wide = Math.min(WIDEST, (width - LEFT) / Math.max(all, most));
    const ctx = contextOf(this.canvas, width, ROW * (most ? 2 : 1));
    const drawRow = (line, name, num, slotOf) => {
      write(ctx, t(name), [0, ROW * line, LEFT - 6, ROW], theme.muted, false, 0.17);
      for (let i = 0; i < num; i++) {
        const box = [LEFT + wide * i + 1, ROW * line + 1, wide - 2, ROW - 3];
        const { info, tokens } = slotOf(i) ?? {};
        ctx.globalAlpha = line && info ? 0.45 : 1;
        ctx.fillStyle = info ? hueOf(info.index) : theme.faint;
        ctx.fillRect(...box);
        if (info) drawPattern(ctx, info.index, ...box);
        ctx.globalAlpha = 1;
        if (tokens) write(ctx, `${(line ? info?.letters.toLowerCase() : info?.letters) ?? ""} ${count(tokens)}`, box, line ? theme.ink : inkOn(info.index), false, 0.22);
        if (loads.some((load) => load[1 + line] === i)) outline(ctx, box, theme.hit, 3);
      }
    };
    drawRow(0, "states", all, (i) => {
      const seq = running.find(({ row }) => row === i);
      return seq && { info: recording.infos.get(seq.seqId), tokens: seq.numComputed };
    });
    drawRow(1, "snapshots", most, (i) => {
      const kept = state.snapshots.get(i);
      return kept && { info: recording.infos.get(state.originSeq[state.serial.indexOf(kept.serial)]), tokens: kept.tokens };
    });
    const values = { n: count(running.length), all: count(all), size: plural(size, "token"), kept: count(state.snapshots.size), most: count(most) };
    return t("{n} of {all} slots hold a state, as large as the K/V of {size} however long its text is", values) + (most ? t("; {kept} of {most} snapshots", values) : "");
  }

  /** Copies of evicted blocks in host memory, with the letters of those who computed them. */
  #drawHost({ recording, state }) {
    setText(this.title, t("Host memory"));
    const width = Math.max(160, widthOf(this.stage));
    const wide = Math.min(26, width / Math.max(1, state.host.size));
    const ctx = contextOf(this.canvas, width, ROW);
    [...state.host.values()].forEach((seq, i) => {
      const [info, box] = [recording.infos.get(seq) ?? { index: 0, letters: "" }, [wide * i + 1, 1, wide - 2, ROW - 3]];
      ctx.fillStyle = hueOf(info.index);
      ctx.fillRect(...box);
      drawPattern(ctx, info.index, ...box);
      write(ctx, info.letters, box, inkOn(info.index), false, 0.5);
    });
    return t("{blocks} were evicted, and have a copy in host memory", { blocks: plural(state.host.size, "block") });
  }
}

/** The states that begin in a moment as copies of snapshots: [sequence, row, snapshot]. */
export function loadsOf(events) {
  return events.flatMap(([kind, , , , scheduled]) => (kind === "StepBegan" ? scheduled : [])).filter((each) => each[7] >= 0).map((each) => [each[0], each[1], each[7]]);
}
