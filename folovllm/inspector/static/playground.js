// An engine of the page's own: prompts to be typed in, and sliders for what it is built with.
import { el, setText } from "./dom.js";
import { fetchWithKey } from "./lines.js";

const PROMPTS = "Once upon a time\nThe sea was\nOne day, a bird\nTom and his dog";

export class Playground {
  #timer = null;
  #changes = {}; // of sliders, that the engine was not built with yet

  /** `control` is the address that docs/reference/recording.md describes. */
  constructor(control) {
    this.control = control;
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.fields = el("div", { class: "fields" });
    const input = (name, label, attributes) => el("label", {}, label, el("input", { name, ...attributes }));
    this.prompts = el("textarea", { name: "prompts", rows: 4, spellcheck: "false", "aria-label": "Prompts, one a line" }, PROMPTS);
    this.asking = el("form", { class: "asking", onsubmit: (event) => this.#ask(event) },
      el("label", {}, "Prompts, one a line", this.prompts),
      el("div", { class: "row" },
        input("max_tokens", "tokens", { type: "number", min: 1, max: 4096, value: 40 }),
        input("temperature", "temperature", { type: "number", min: 0, max: 2, step: 0.1, value: 0.7 }),
        input("seed", "seed", { type: "number", min: 0, placeholder: "any" }),
        el("button", { type: "submit", class: "main" }, "Send"),
        el("button", { type: "button", onclick: () => this.#post("abort", {}) }, "Abort all"),
      ),
    ); // prettier-ignore
    this.delay = el("input", { type: "range", min: 0, max: 1, step: 0.05, value: 0.2, oninput: () => this.#pace({ delay: Number(this.delay.value) }) });
    this.hold = el("button", { type: "button", "aria-pressed": "false", onclick: () => this.#pace({ paused: this.hold.getAttribute("aria-pressed") !== "true" }) }, "Hold the engine");
    this.pace = el("div", { class: "row" },
      el("label", {}, "seconds between steps", this.delay), this.hold,
      el("button", { type: "button", onclick: () => this.#pace({ paused: true, step: 1 }) }, "One step"),
      el("button", { type: "button", title: "With --mine: with your code as it is now", onclick: () => this.#change() }, "Build anew"),
    ); // prettier-ignore
    const panel = el("details", { open: true, class: "panel" }, el("summary", {}, "Playground"),
      el("div", { class: "halves" }, el("div", {}, this.asking, this.pace), this.fields), this.error,
    ); // prettier-ignore
    this.element = el("section", { class: "playground", "aria-label": "Playground" }, panel);
  }

  async start() {
    await this.#try(async () => this.#show(await (await fetchWithKey(this.control)).json()));
    await this.#pace({ delay: Number(this.delay.value) });
  }

  async #try(act) {
    try {
      this.error.hidden = true;
      await act();
    } catch (error) {
      this.error.hidden = false;
      setText(this.error, error.message);
    }
  }

  #post(what, body) {
    const address = what ? `${this.control}/${what}` : this.control;
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    return this.#try(async () => {
      const answer = await (await fetchWithKey(address, null, options)).json();
      if (what === "pace") this.hold.setAttribute("aria-pressed", String(!!answer.paused));
      else if (!what) this.#show(answer);
    });
  }

  #ask(event) {
    event.preventDefault();
    const { max_tokens, temperature, seed } = this.asking.elements;
    const body = { prompts: this.prompts.value.split("\n").filter((line) => line.trim()) };
    Object.assign(body, { max_tokens: Number(max_tokens.value), temperature: Number(temperature.value) });
    if (seed.value !== "") body.seed = Number(seed.value);
    return this.#post("prompts", body);
  }

  #pace(body) {
    return this.#post("pace", body);
  }

  /** Builds the engine anew, a moment after the last change of a slider. */
  #change(name, value) {
    if (name) this.#changes[name] = value;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      const changes = this.#changes;
      this.#changes = {};
      return this.#post("", changes);
    }, 250);
  }

  #show({ fields, error }) {
    this.fields.replaceChildren(...fields.map((field) => this.#field(field)));
    this.error.hidden = !error;
    setText(this.error, error ?? "");
  }

  #field({ name, kind, value, choices, min, max, step, help }) {
    const title = help ?? "";
    if (kind === "choice") {
      const select = el("select", { onchange: () => this.#change(name, choices[select.selectedIndex]) }, choices.map((choice) => el("option", { value: choice, selected: choice === value }, `${choice}`)));
      return el("label", { title }, name, select);
    }
    if (kind === "switch") {
      const box = el("input", { type: "checkbox", checked: !!value, onchange: () => this.#change(name, box.checked) });
      return el("label", { title, class: "switch" }, box, name);
    }
    const shown = el("output", {}, `${value}`);
    const range = el("input", { type: "range", min, max, step, value, oninput: () => setText(shown, range.value), onchange: () => this.#change(name, Number(range.value)) });
    return el("label", { title }, el("span", {}, `${name} `, shown), range);
  }
}
