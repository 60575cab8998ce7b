// How a token is chosen: bars of the ten likeliest, what the filters leave of them under the reader's sliders, and the noise that decides.
import { choose, float16s, gumbel, ranked, softmax } from "./chances.js";
import { count, el, setText, template } from "./dom.js";
import { t } from "./words.js";

const [SHOWN, CONTEXT] = [10, 90]; // tokens; letters of the text before
const OFF = { min_p: 0, top_k: 0, top_p: 1 };

export const settings = { temperature: 1, min_p: 0, top_k: 0, top_p: 1, seed: 0 }; // of the sliders, and of the engine that runs next

export class ChoiceView {
  constructor(recording, onDraw) {
    this.recorded = { ...settings, ...recording.scene?.sampling };
    let anew, again;
    [this.element, this.facts, this.context, this.sliders, this.tokens, this.said, this.source, anew, again] =
      template("choice", "facts", "context", "sliders", "tokens", "winner", "source", "anew", "again");
    const set = (changes) => {
      this.#set(changes);
      onDraw();
    };
    this.sliders.oninput = ({ target: { name, value } }) => set({ [name]: name === "seed" ? Math.min(Number.MAX_SAFE_INTEGER, Math.floor(Math.abs(value))) : Number(value) });
    this.sliders.onsubmit = (event) => event.preventDefault(); // Enter in the seed
    anew.onclick = () => set({ seed: settings.seed + 1 });
    again.onclick = () => set(this.recorded);
    this.#set(this.recorded);
  }

  #set(changes) {
    Object.assign(settings, changes);
    for (const [name, value] of Object.entries(settings)) {
      const input = this.sliders.elements[name];
      if (Number(input.value) !== value) input.value = value;
      input.parentElement.querySelector("output")?.replaceChildren(value === OFF[name] ? t("off") : `${value}`);
    }
  }

  draw({ recording, at }) {
    const score = recording.scores.findLast((one) => one.at <= at) ?? recording.scores[0];
    if (!score) return;
    const { info, position } = score;
    const now = shares(score);
    const name = (id) => recording.decode([id]).replaceAll("\n", "⏎").replaceAll(" ", "␣");
    const before = recording.text(info, 0, position);
    this.context.replaceChildren(before.length > CONTEXT ? before.slice(-CONTEXT).replace(/^\S*/, "…") : before, el("mark", {}, recording.decode([now.winner])));
    this.#drawRows(score.order, now, name);
    const quoted = (id) => `“${name(id)}”`;
    const taken = info.drawn[position - info.prompt.length];
    const values = { winner: quoted(now.winner), greedy: quoted(now.greedy), taken: quoted(taken), chance: percent(now.kept[now.winner]) };
    const agrees = now.winner === now.greedy;
    const said = [t(agrees ? "{winner} wins with {chance}: the likeliest token, which greedy takes too." : "{winner} wins with {chance}; greedy takes {greedy}.", values)];
    if (taken !== now.winner) said.push(t("The engine took {taken}, and so the text goes on.", values));
    setText(this.said, said.join(" "));
    const past = recording.scores.filter((one) => one.at <= score.at && one.info === info).map(decided);
    const lost = past.filter(({ winner, greedy }) => winner !== greedy);
    setText(this.facts, t("the likeliest token lost in {n} of {all} steps so far", { n: count(lost.length), all: count(past.length) }));
    const run = { ...this.recorded, model: String(recording.engine.model).split("/").at(-1) };
    setText(this.source, t(recording.scene ? "Recorded from {model} at temperature {temperature}, seed {seed}: what it said of each of its tokens." : "Live from {model}, at temperature {temperature}, seed {seed}.", run));
  }

  /** The likeliest tokens, all others as one, and the winner where it is none of the first. */
  #drawRows(order, now, name) {
    const [first, rest] = [[...order.slice(0, SHOWN)], [...order.slice(SHOWN)]];
    const sum = (chances) => rest.reduce((all, id) => all + chances[id], 0);
    const others = { model: sum(now.model), warm: sum(now.warm), kept: sum(now.kept) };
    const left = rest.filter((id) => !now.cut[id]);
    const tokens = rest.includes(now.winner) ? [...first, now.winner] : first;
    const rows = tokens.map((id) => {
      const marks = [id === now.winner && el("b", {}, t("wins")), id === now.greedy && el("small", {}, t("greedy"))].filter(Boolean);
      const [model, warm, kept] = [now.model[id], now.warm[id], now.kept[id]];
      const race = now.cut[id] ? [] : [Math.log(kept), now.sums[id] - Math.log(kept), now.sums[id]];
      return row([el("code", {}, name(id)), ...marks], { model, warm, kept }, now.cut[id], race, id === now.winner);
    });
    const best = left.filter((id) => id !== now.winner).map((id) => now.sums[id]).reduce((a, b) => Math.max(a, b), -Infinity); // prettier-ignore
    const all = t(left.length < rest.length ? "{left} of {n} others" : "{n} others", { left: count(left.length), n: count(rest.length) });
    rows.splice(first.length, 0, row([all], others, "", best > -Infinity ? ["", t("best"), best] : []));
    this.tokens.replaceChildren(...rows);
  }
}

/** A token's line: its bars, and (log p, noise, sum) or the filter that dropped it. */
function row(token, { model, warm, kept }, cut, race, wins = false) {
  const bars = Object.entries({ warm, kept, model }).map(([kind, chance]) => el("i", { class: kind, style: `--p: ${chance}` }));
  const numbers = [0, 1, 2].map((i) => el("td", { class: i < 2 ? "term" : "sum" }, typeof race[i] === "number" ? signed(race[i], i === 1) : race[i] ?? ""));
  const chance = el("td", { class: "chance" }, cut ? el("s", {}, t(cut)) : percent(kept));
  return el("tr", { class: `${cut ? "cut" : ""} ${wins ? "wins" : ""}` }, el("th", { scope: "row" }, token), el("td", { class: "bars" }, el("span", {}, bars)), chance, numbers);
}

/** What the sliders make of a step's scores. What they do not change is kept beside these. */
function decided(score) {
  score.logits ??= float16s(score.logprobs);
  score.order ??= ranked(score.logits);
  if (score.seed !== settings.seed) score.noise = gumbel((score.seed = settings.seed), score.position, score.logits.length);
  const key = JSON.stringify(settings);
  if (score.key !== key) score.decided = choose(score.logits, score.order, score.noise, settings);
  score.key = key;
  return score.decided;
}

/** The same, with what is shown of it: each token's probability, after the temperature and after the filters; its logarithm, noise added. */
function shares(score) {
  const now = decided(score);
  const kept = softmax(now.scaled, now.cut);
  const sums = kept.map((chance, id) => Math.log(chance) + (settings.temperature ? score.noise[id] : 0));
  return { ...now, model: softmax(score.logits), warm: softmax(now.scaled), kept, sums };
}

function percent(chance) {
  return chance > 0 && chance < 5e-5 ? "<0.01%" : `${(100 * chance).toFixed(chance < 0.00995 ? 2 : 1)}%`;
}

function signed(number, plus) {
  return `${number < 0 ? "−" : plus ? "+" : ""}${Math.abs(number).toFixed(2)}`;
}
