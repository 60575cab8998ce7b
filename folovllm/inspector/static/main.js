// The page: where recordings come from, what is on it, and what the keyboard does.
import { Clock } from "./clock.js";
import { el, setText, template } from "./dom.js";
import { describe, Lane, titleOf } from "./lane.js";
import { fetchWithKey, KeyNeeded, LineReader, readRecording, readStream } from "./lines.js";
import { readTheme } from "./palette.js";
import { JUMPS, Player } from "./player.js";
import { Playground } from "./playground.js";

const MOST_LIVE = 64e6; // characters of lines that a live page keeps

const options = new URLSearchParams(`${location.search.slice(1)}&${location.hash.slice(1)}`);
const root = document.documentElement;
const page = document.getElementById("page");
const keyTable = document.getElementById("keys");
const app = { lanes: [], player: null, playground: null, drawing: false, embed: options.has("embed") || (window.self !== window.top && innerHeight < 700) };

/** Draws everything at the next frame, however often it is asked for. */
function draw() {
  if (app.drawing) return;
  app.drawing = true;
  requestAnimationFrame(() => {
    app.drawing = false;
    drawNow();
  });
}

function drawNow() {
  if (!app.player || !app.lanes.length) return;
  const moments = app.player.clock.moments();
  app.lanes.forEach((lane, i) => lane.draw(moments[i], app.theme, app.player.playing));
  app.player.draw(app.lanes[0].frame);
  if (location.protocol === "about:") return; // a frame without an address
  clearTimeout(app.noting); // a browser lets nobody change its address all the time
  app.noting = setTimeout(() => history.replaceState(null, "", `#${hash()}`), 300);
}

function hash() {
  const now = new URLSearchParams(location.hash.slice(1));
  now.set("t", app.player.clock.tick);
  return now.toString();
}

/** Puts one recording on the page, or two. */
function show(recordings, { live = false } = {}) {
  const race = recordings.length > 1;
  const clock = new Clock(recordings);
  const goTo = (lane, moment) => app.player.go(clock.tickOf(lane.recording, moment));
  app.player = new Player(clock, draw, { live });
  app.lanes = recordings.map((recording) => new Lane(recording, goTo, draw, { embed: app.embed, race }));
  const title = race ? recordings.map(titleOf).join(" beside ") : titleOf(recordings[0]);
  document.title = `${title} – FoloVLLM inspector`;
  page.className = `${race ? "race" : "single"}${app.embed ? " embed" : ""} tab-memory`;
  page.replaceChildren(
    header(title, race ? "" : describe(recordings[0])),
    ...(app.playground ? [app.playground.element] : []),
    el("main", { class: "lanes" }, app.lanes.map((lane) => lane.element)),
    app.player.element,
  );
  const at = Number(options.get("t") ?? 0);
  clock.go(live ? clock.length - 1 : at);
  draw();
}

function header(title, facts) {
  const [element, open, keys, theme] = template("top", "open", "help", "theme");
  const [file, tabs] = [element.querySelector("input"), element.querySelectorAll(".tabs button")];
  element.querySelector("h1").textContent = title;
  element.querySelector("p").textContent = facts;
  file.onchange = () => openFiles(file.files);
  open.onclick = () => file.click();
  [keys.onclick, theme.onclick] = [() => keyTable.showModal(), toggleTheme];
  for (const tab of tabs) {
    tab.onclick = () => {
      page.className = page.className.replace(/tab-\w+/, `tab-${tab.textContent}`);
      tabs.forEach((other) => other.setAttribute("aria-pressed", String(other === tab)));
      draw();
    };
  }
  return element;
}

/** Says something in the place of the recording. */
function say(...children) {
  page.className = "message";
  page.replaceChildren(el("main", { class: "notice" }, el("h1", {}, "FoloVLLM inspector"), ...children));
}

function fail(error) {
  if (error instanceof KeyNeeded) return askForKey();
  say(el("p", { role: "alert", class: "error" }, error.message), opener());
}

function opener() {
  const file = el("input", { type: "file", multiple: true, accept: ".jsonl", onchange: () => openFiles(file.files) });
  return el("label", { class: "opener" }, "Open a recording (two for a race): ", file);
}

async function openFiles(files) {
  try {
    show(await Promise.all([...files].slice(0, 2).map(async (file) => readRecording(await file.text()))));
  } catch (error) {
    fail(error);
  }
}

function askForKey() {
  const input = el("input", { type: "password", autocomplete: "off", "aria-label": "API key" });
  const submit = (event) => {
    event.preventDefault();
    app.key = input.value;
    start();
  };
  say(el("form", { onsubmit: submit }, el("label", {}, "The server asks for its API key: ", input), el("button", { type: "submit", class: "main" }, "Show")));
  input.focus();
}

async function readAll(recordings) {
  const progress = recordings.map(() => 0);
  const note = el("p", { role: "status" }, "Reading…");
  say(note);
  const texts = await Promise.all(recordings.map(async ({ text, url }) => text ?? (await fetchWithKey(url, app.key)).text()));
  return Promise.all(
    texts.map((text, i) =>
      readRecording(text, (part) => {
        progress[i] = part;
        setText(note, `Reading… ${Math.round((100 * progress.reduce((a, b) => a + b)) / progress.length)}%`);
      }),
    ),
  );
}

/** Shows a stream for as long as it lasts, and asks for it again when it breaks off. */
async function watch(source) {
  for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
    let shown = null;
    const reader = new LineReader(() => (shown = null));
    const onBatch = () => {
      if (!reader.recording?.length) return;
      wait = 500;
      reader.recording.forget(MOST_LIVE);
      if (shown === reader.recording) return app.player.grown();
      shown = reader.recording;
      show([shown], { live: true });
    };
    try {
      await readStream(source.events, { key: app.key, onLine: (line) => reader.line(line), onBatch });
    } catch (error) {
      if (error instanceof KeyNeeded) return askForKey();
      if (!shown) say(el("p", { role: "alert" }, `${error.message} Asking again…`));
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function start() {
  const source = JSON.parse(document.getElementById("source").textContent) ?? sourceOfAddress();
  try {
    if (!source) say(opener());
    else if (source.kind === "live" && source.needs_key && !app.key) askForKey();
    else if (source.kind === "live" || source.kind === "playground") {
      if (source.kind === "playground") (app.playground = new Playground(source.control)).start();
      await watch(source);
    } else show(await readAll(source.recordings));
  } catch (error) {
    fail(error);
  }
}

/** `?src=a.jsonl`, and `&race=b.jsonl`. */
function sourceOfAddress() {
  const urls = [options.get("src"), options.get("race")].filter(Boolean);
  return urls.length ? { kind: "files", recordings: urls.map((url) => ({ name: url, url })) } : null;
}

function setTheme(name) {
  root.dataset.theme = name;
  app.theme = readTheme();
  draw();
}

function toggleTheme() {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
}

async function copyLink() {
  const note = el("p", { class: "note", role: "status" });
  document.body.append(note);
  setTimeout(() => note.remove(), 2500);
  try {
    await navigator.clipboard.writeText(`${location.href.split("#")[0]}#${hash()}`);
    setText(note, "A link to this moment is copied.");
  } catch {
    setText(note, `The browser lets this page copy nothing; the moment is #${hash()}`);
  }
}

function onKey(event) {
  const { key, target } = event;
  const { player } = app;
  if (!player || event.ctrlKey || event.metaKey || event.altKey || target.closest("textarea, select, dialog, input:not([type=range])")) return;
  const jump = JUMPS.find((other) => other.key === key.toLowerCase());
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step) player.go(player.clock.tick + step * (event.shiftKey ? 10 : 1));
  else if (key === "Home") player.go(0);
  else if (key === "End") player.go(player.clock.length - 1);
  else if (key === " " && !target.closest("button, summary, a")) player.toggle();
  else if (jump) player.jump(jump.kind, event.shiftKey ? -1 : 1);
  else if (key === "[" || key === "]") app.lanes[0].pickNext(key === "]" ? 1 : -1);
  else if ("+=-0".includes(key)) app.lanes.forEach((lane) => lane.memory.zoom({ "-": 1 / 1.5, 0: 0 }[key] ?? 1.5));
  else if (key === "<" || key === ">") player.faster(key === ">" ? 1 : -1);
  else if (key === "f") player.follow();
  else if (key === "c") copyLink();
  else if (key === "t") toggleTheme();
  else if (key === "?") keyTable.showModal();
  else return;
  event.preventDefault();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const followTheme = () => setTheme(options.get("theme") ?? (dark.matches ? "dark" : "light"));
followTheme();
dark.addEventListener("change", followTheme);
addEventListener("keydown", onKey);
addEventListener("resize", draw);
addEventListener("hashchange", () => {
  const t = new URLSearchParams(location.hash.slice(1)).get("t");
  if (app.player && t !== null && Number(t) !== app.player.clock.tick) app.player.go(Number(t));
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) openFiles(event.dataTransfer.files);
});
window.inspector = app; // for tests and for the curious
start();
