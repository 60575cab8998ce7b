// A mixture of experts: a cell for each expert of each layer, as full as the step's tokens asked it.
import { write } from "./cells.js";
import { contextOf, count, setText, template, widthOf } from "./dom.js";
import { t } from "./words.js";

const [ROW, LEFT] = [22, 62]; // pixels

export class ExpertsView {
  constructor() {
    [this.element, this.facts, this.stage, this.canvas] = template("experts", "facts", "stage", "loads");
  }

  draw({ recording, at, theme }) {
    const now = recording.experts[at];
    this.element.hidden = !recording.hasExperts;
    if (!now) return;
    const before = recording.experts[at - 1];
    const loads = now.map((layer, l) => layer.map((n, e) => n - (before?.[l]?.[e] ?? 0)));
    const width = Math.max(160, widthOf(this.stage));
    const ctx = contextOf(this.canvas, width, ROW * loads.length);
    const most = Math.max(1, ...loads.flat());
    loads.forEach((layer, l) => {
      write(ctx, t("layer {n}", { n: l }), [0, ROW * l, LEFT - 8, ROW], theme.muted, false, 0.2);
      const wide = (width - LEFT) / layer.length;
      layer.forEach((n, e) => {
        const box = [LEFT + wide * e + 1, ROW * l + 1, wide - 2, ROW - 2];
        ctx.globalAlpha = 1;
        ctx.fillStyle = theme.faint;
        ctx.fillRect(...box);
        ctx.globalAlpha = n ? 0.2 + (0.8 * n) / most : 0;
        ctx.fillStyle = theme.prefill;
        ctx.fillRect(...box);
        ctx.globalAlpha = 1;
        if (n && wide > 16) write(ctx, count(n), box, n > most / 2 ? theme.card : theme.ink);
      });
    });
    const [asked, all] = [loads.flat().filter(Boolean).length, loads.flat().length];
    setText(this.facts, asked ? t("this step reads the weights of {n} of {all} experts", { n: asked, all }) : t("no step: no expert is asked"));
    this.canvas.setAttribute("aria-label", t("How many tokens each expert of each layer was given: {facts}", { facts: this.facts.textContent }));
  }
}
