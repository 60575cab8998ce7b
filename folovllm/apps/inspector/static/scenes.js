// Scenes: one click each. A bar to choose from, a sentence of what to watch, and the way to the chapter.
import { el, setText, template } from "./dom.js";
import { t, wordsOf } from "./words.js";

const GROUPS = { Start: ["choose", "memory"], Memory: ["prefix", "blocks", "slots"], Speed: ["chunks", "milestones"], Electives: [] }; // and the rest
const PANELS = { chunks: "steps", drafts: "requests", chain: "requests" };

/** The panel that a scene is about: "memory", "requests" or "steps". A wide page shows the requests beside the cache. */
export function panelOf(scene, isNarrow) {
  const panel = PANELS[scene?.name] ?? "memory";
  return panel === "requests" && !isNarrow ? "memory" : panel;
}

/** The address of a scene's chapter, or null: `book` is a pattern with {} for its name. */
function chapterOf(scene, book) {
  return scene.chapter && book ? book.replace("{}", scene.chapter) : null;
}

/** Fills what stands below the bar, or alone: what to watch, and where the book tells it. */
function tell(watch, link, scene, book) {
  setText(watch, wordsOf(scene).watch);
  const address = chapterOf(scene, book);
  link.hidden = !address;
  if (address) link.href = address;
}

/** What to watch in a recording, where there is nothing to choose. */
export function noteOf(scene, book) {
  const [element, choices, watch, link, run] = template("scenes", "choices", "watch", "chapter", "run");
  choices.hidden = run.hidden = true;
  tell(watch, link, scene, book);
  return element;
}

export class ScenesBar {
  /** `onShow(scene)` hears of a choice, `onRun(scene)` that the engine is to play it. */
  constructor({ scenes, book }, onShow, onRun) {
    this.book = book;
    [this.element, this.choices, this.watch, this.link, this.run] = template("scenes", "choices", "watch", "chapter", "run");
    this.run.onclick = () => onRun(this.scene);
    this.buttons = scenes.map((scene) => el("button", { type: "button", title: wordsOf(scene).watch, onclick: () => onShow(scene) }, wordsOf(scene).title));
    this.scenes = scenes;
    const groupOf = ({ name }) => Object.keys(GROUPS).find((group) => GROUPS[group].includes(name)) ?? "Electives";
    for (const group of Object.keys(GROUPS)) {
      const buttons = this.buttons.filter((_, i) => groupOf(scenes[i]) === group);
      this.choices.append(el("span", { class: "kind", role: "group", "aria-label": t(group) }, el("b", {}, t(group)), ...buttons));
    }
    this.choose(scenes[0]);
  }

  choose(scene) {
    this.scene = scene;
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(this.scenes[i] === scene)));
    tell(this.watch, this.link, scene, this.book);
  }

  /** `loading` is what the engine waits for, or null: then it can play. */
  set loading(loading) {
    this.run.disabled = !!loading;
    setText(this.run, loading ? t("The engine is on its way: {what}", { what: t(loading) }) : t("Run it on the engine"));
  }
}
