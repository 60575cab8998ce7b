// An engine of the page's own: prompts to be typed in, and sliders for what it is built with.
import { settings } from "./choice.js";
import { el, setText, template } from "./dom.js";
import { fetchWithKey } from "./lines.js";
import { t } from "./words.js";

const ASK_AGAIN = 500; // milliseconds, while the engine loads

export class Playground {
  onUse = () => {}; // the reader sent prompts, or changed a setting
  #timer = null;
  #changes = {}; // of sliders, that the engine was not built with yet

  /** `control` is the address that docs/reference/recording.md describes; `onLoading(what)` hears what the engine waits for, or null. */
  constructor(control, onLoading) {
    Object.assign(this, { control, onLoading });
    let abort, one, build;
    [this.element, this.asking, this.fields, this.error, this.delay, this.hold, abort, one, build] =
      template("playground", "asking", "fields", "error", "delay", "hold", "abort", "one", "build");
    this.asking.onsubmit = (event) => this.#ask(event);
    this.delay.oninput = () => this.#post("pace", { delay: Number(this.delay.value) });
    this.hold.onclick = () => this.#post("pace", { paused: this.hold.getAttribute("aria-pressed") !== "true" });
    abort.onclick = () => this.#post("abort", {});
    one.onclick = () => this.#post("pace", { paused: true, step: 1 });
    build.onclick = () => this.#change();
  }

  async start() {
    for (let isLoading = true; isLoading; ) {
      const ask = async () => {
        const told = await (await fetchWithKey(this.control)).json();
        isLoading = !!told.loading;
        this.#show(told);
      };
      if (!(await this.#try(ask))) return;
      if (isLoading) await new Promise((done) => setTimeout(done, ASK_AGAIN));
    }
    await this.#post("pace", { delay: Number(this.delay.value) });
  }

  /** Let the engine play a scene. Returns whether it does. */
  play(scene) {
    return this.#post("scene", { scene: scene.name, sampling: scene.sampling && settings });
  }

  /** Whether `act` did what it should; what it raises is shown. */
  async #try(act) {
    try {
      this.error.hidden = true;
      await act();
      return true;
    } catch (error) {
      this.error.hidden = false;
      setText(this.error, error.message);
      this.element.querySelector("details").open = true;
      return false;
    }
  }

  #post(what, body) {
    const address = what ? `${this.control}/${what}` : this.control;
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    return this.#try(async () => {
      const answer = await (await fetchWithKey(address, null, options)).json();
      if (what === "pace") this.hold.setAttribute("aria-pressed", String(!!answer.paused));
      else if (!what || what === "scene") this.#show(answer);
    });
  }

  async #ask(event) {
    event.preventDefault();
    const { prompts, max_tokens, temperature, seed } = this.asking.elements;
    const body = { prompts: prompts.value.split("\n").filter((line) => line.trim()) };
    Object.assign(body, { max_tokens: Number(max_tokens.value), temperature: Number(temperature.value) });
    if (seed.value !== "") body.seed = Number(seed.value);
    if (document.querySelector(".has-choice")) body.sampling = settings; // the sliders stand in the place of these two
    if (await this.#post("prompts", body)) this.onUse();
  }

  /** Builds the engine anew, a moment after the last change of a slider. */
  #change(name, value) {
    if (name) this.#changes[name] = value;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      const changes = this.#changes;
      this.#changes = {};
      return this.#post("", changes).then((done) => done && this.onUse());
    }, 250);
  }

  #show({ fields, values, error, loading }) {
    this.fields.replaceChildren(...Object.entries(fields).map(([name, schema]) => this.#field(name, schema, values[name])));
    this.error.hidden = !error;
    setText(this.error, error ?? "");
    this.onLoading(loading ?? null);
  }

  /** The control of a setting, of which `schema` is the JSON Schema: a choice, a switch, or else a slider. */
  #field(name, { enum: choices, type, minimum: min, maximum: max, multipleOf: step, description }, value) {
    const title = t(description);
    if (choices) {
      const options = choices.map((choice) => el("option", { value: choice, selected: choice === value }, `${choice}`));
      const select = el("select", { onchange: () => this.#change(name, choices[select.selectedIndex]) }, options);
      return el("label", { title }, name, select);
    }
    if (type === "boolean") {
      const box = el("input", { type: "checkbox", checked: value, onchange: () => this.#change(name, box.checked) });
      return el("label", { title, class: "switch" }, box, name);
    }
    const shown = el("output", {}, `${value}`);
    const range = el("input", { type: "range", min, max, step, value, oninput: () => setText(shown, range.value), onchange: () => this.#change(name, Number(range.value)) });
    return el("label", { title }, el("span", {}, `${name} `, shown), range);
  }
}
