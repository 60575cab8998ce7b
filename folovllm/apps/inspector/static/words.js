// What the page says, in the language of its reader. English stands in the code and in index.html; strings.zh.json has the
// Chinese of each text, with the same {names} in it.

const STRINGS = JSON.parse(document.getElementById("strings")?.textContent ?? "null");
const ATTRIBUTES = ["title", "aria-label", "placeholder"];

const asked = new URLSearchParams(`${location.search.slice(1)}&${location.hash.slice(1)}`).get("lang");
export const LANGUAGE = (asked ?? navigator.language).startsWith("zh") && STRINGS ? "zh" : "en";
document.documentElement.lang = LANGUAGE;

export const missing = new Set(); // texts without a translation, for the test that there are none

function known(text) {
  if (LANGUAGE === "en") return text;
  if (!STRINGS[text] && /[a-z]{3}/i.test(text.replace(/\{\w+\}/g, ""))) missing.add(text);
  return STRINGS[text] ?? text;
}

/** A text with values in the place of its {names}, as a list: a value may be a sequence {seq}, or a list itself. */
export function fill(text, values = {}) {
  const parts = known(text).split(/\{(\w+)\}/).map((part, i) => (i % 2 ? values[part] : part));
  return parts.flat(Infinity).filter((part) => part !== "");
}

/** The same as one text. */
export function t(text, values) {
  return fill(text, values).join("");
}

/** Translates what stands in a part of index.html: texts, and the attributes that are read. */
export function translate(element) {
  if (LANGUAGE === "en") return element;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.data.trim();
    if (text && node.parentNode.tagName !== "TEXTAREA") node.data = node.data.replace(text, known(text)); // prompts stay
  }
  for (const one of [element, ...element.querySelectorAll("*")]) {
    for (const name of ATTRIBUTES) if (one.hasAttribute(name)) one.setAttribute(name, known(one.getAttribute(name)));
  }
  return element;
}

/** What a scene, or a recording's header, says in the reader's language: {title, watch, question}. */
export function wordsOf(scene) {
  return (LANGUAGE === "zh" && scene.zh) || scene.words;
}
