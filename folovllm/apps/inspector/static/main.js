// The page: where recordings come from, what is on it, and what the keyboard does.
import { Clock } from "./clock.js";
import { el, setText, template } from "./dom.js";
import { describe, Lane, timesOf, titleOf } from "./lane.js";
import { fetchWithKey, KeyNeeded, LineReader, readRecording, readStream } from "./lines.js";
import { readTheme } from "./palette.js";
import { JUMPS, Player } from "./player.js";
import { Playground } from "./playground.js";
import { noteOf, panelOf, ScenesBar } from "./scenes.js";
import { t, translate, wordsOf } from "./words.js";

const MOST_LANES = 6;
const MOST_LIVE = 64e6; // characters of lines that a live page keeps

const options = new URLSearchParams(`${location.search.slice(1)}&${location.hash.slice(1)}`);
const source = JSON.parse(document.getElementById("source").textContent);
const root = document.documentElement;
const page = document.getElementById("page");
const keyTable = document.getElementById("keys");
const app = { find: options.get("find"), moment: options.get("t"), lanes: [], player: null, playground: null, scenes: null, stream: null, drawing: false, embed: options.has("embed") || (window.self !== window.top && innerHeight < 700) };

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
  const { clock, playing } = app.player;
  if (app.find && (app.lanes[0].selected = app.lanes[0].recording.findPrompt(app.find)) !== null) app.find = null;
  const moments = clock.moments();
  page.classList.toggle("has-choice", app.lanes[0].recording.scores.length > 0);
  app.lanes.forEach((lane, i) => lane.draw(moments[i], app.theme, playing, clock.time, clock.duration));
  app.player.draw(app.lanes[0].frame);
  if (location.protocol === "about:") return; // a frame without an address
  clearTimeout(app.noting); // a browser lets nobody change its address all the time
  app.noting = setTimeout(() => history.replaceState(null, "", `#${hash()}`), 300);
}

function hash() {
  const now = new URLSearchParams(location.hash.slice(1));
  now.set("t", app.player.clock.tick);
  if (app.scenes) now.set("scene", app.scenes.scene.name);
  return now.toString();
}

/** Puts a recording on the page, or several. */
function show(recordings, { live = false } = {}) {
  const others = recordings.length - 1;
  const race = others > 0;
  const scene = live ? null : recordings[0].scene;
  const clock = new Clock(recordings);
  const goTo = (lane, moment) => app.player.go(clock.tickOf(lane.recording, moment));
  app.player = new Player(clock, draw, { live });
  app.lanes = recordings.map((recording) => new Lane(recording, goTo, draw, { embed: app.embed, others }));
  const title = race && scene?.words.title ? wordsOf(scene).title : race ? recordings.map(titleOf).join(t(" beside ")) : titleOf(recordings[0]);
  document.title = t("{title} – FoloVLLM inspector", { title });
  page.className = `${others > 1 ? "strips" : race ? "race" : "single"}${app.embed ? " embed" : ""}${recordings[0].hasExperts ? " has-experts" : ""} tab-${panelOf(scene, innerWidth < 560)}`;
  const note = scene?.words.watch && !app.embed && !app.scenes ? noteOf(scene, source?.book) : null;
  const above = [app.scenes?.element ?? note, app.playground?.element].filter(Boolean);
  const lanes = el("main", { class: "lanes" }, app.lanes.map((lane) => lane.element));
  page.replaceChildren(header(title, race ? timesOf(recordings[0].header) : describe(recordings[0])), el("div", { class: "scroll" }, above, lanes), app.player.element);
  clock.go(live ? clock.length - 1 : Number(app.moment ?? 0));
  if (scene && app.moment === null) app.player.playScene(scene);
  app.moment = null; // of what the page opened with, and nothing else
  draw();
}

/** Plays the recording of a scene. */
async function showScene(scene) {
  app.stream?.abort();
  app.scenes.choose(scene);
  try {
    show(await readAll(scene.recordings, app.player === null));
  } catch (error) {
    fail(error);
  }
}

/** Shows what the engine does from now on. */
function goLive() {
  app.stream?.abort();
  app.stream = new AbortController();
  watch(source, app.stream.signal).catch(fail);
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
    tab.setAttribute("aria-pressed", String(page.className.includes(tab.className.replace("for", "tab"))));
    tab.onclick = () => {
      page.className = page.className.replace(/tab-\w+/, tab.className.replace("for", "tab"));
      tabs.forEach((other) => other.setAttribute("aria-pressed", String(other === tab)));
      draw();
    };
  }
  return element;
}

/** Says something in the place of the recording. */
function say(...children) {
  page.className = "message";
  page.replaceChildren(el("main", { class: "notice" }, el("h1", {}, t("FoloVLLM inspector")), ...children));
}

function fail(error) {
  if (error instanceof KeyNeeded) return askForKey();
  say(el("p", { role: "alert", class: "error" }, error.message), opener());
}

function opener() {
  const file = el("input", { type: "file", multiple: true, accept: ".jsonl", onchange: () => openFiles(file.files) });
  return el("label", { class: "opener" }, t("Open a recording (several for a race): "), file);
}

async function openFiles(files) {
  try {
    show(await Promise.all([...files].slice(0, MOST_LANES).map(async (file) => readRecording(await file.text()))));
  } catch (error) {
    fail(error);
  }
}

function askForKey() {
  const input = el("input", { type: "password", autocomplete: "off", "aria-label": t("API key") });
  const submit = (event) => {
    event.preventDefault();
    app.key = input.value;
    start();
  };
  say(el("form", { onsubmit: submit }, el("label", {}, t("The server asks for its API key: "), input), el("button", { type: "submit", class: "main" }, t("Show"))));
  input.focus();
}

async function readAll(recordings, isLoud = true) {
  const progress = recordings.map(() => 0);
  const note = el("p", { role: "status" }, t("Reading…"));
  if (isLoud) say(note);
  const texts = await Promise.all(recordings.map(async ({ text, url }) => text ?? (await fetchWithKey(url, app.key)).text()));
  return Promise.all(
    texts.map((text, i) =>
      readRecording(text, (part) => {
        progress[i] = part;
        setText(note, t("Reading… {n}%", { n: Math.round((100 * progress.reduce((a, b) => a + b)) / progress.length) }));
      }),
    ),
  );
}

/** Shows a stream for as long as it lasts, and asks for it again when it breaks off. */
async function watch(source, signal) {
  for (let wait = 500; !signal.aborted; wait = Math.min(8000, wait * 2)) {
    let shown = null;
    const reader = new LineReader(() => (shown = null));
    const onBatch = () => {
      if (!reader.recording?.length || signal.aborted) return;
      wait = 500;
      reader.recording.forget(MOST_LIVE);
      if (shown === reader.recording) return app.player.grown();
      shown = reader.recording;
      show([shown], { live: true });
    };
    try {
      await readStream(source.events, { key: app.key, signal, onLine: (line) => reader.line(line), onBatch });
    } catch (error) {
      if (error instanceof KeyNeeded) return askForKey();
      if (!shown && !signal.aborted) say(el("p", { role: "alert" }, t("{error} Asking again…", { error: error.message })));
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function start() {
  try {
    if (!source) say(opener());
    else if (source.kind === "live" && source.needs_key && !app.key) askForKey();
    else if (source.kind === "live") goLive();
    else if (source.kind === "playground") await play();
    else show(await readAll(source.recordings));
  } catch (error) {
    fail(error);
  }
}

/** The playground: a scene that plays while the engine loads; its engine at once where the reader chose one. */
async function play() {
  app.playground = new Playground(source.control, (loading) => app.scenes && (app.scenes.loading = loading));
  app.playground.onUse = () => app.stream?.signal.aborted === false || goLive();
  const run = async (scene) => (await app.playground.play(scene)) && goLive();
  if (source.scenes?.length) app.scenes = new ScenesBar(source, showScene, run);
  app.playground.start();
  if (app.scenes && !source.live) return showScene(source.scenes.find(({ name }) => name === options.get("scene")) ?? source.scenes[0]);
  app.playground.element.querySelector("details").open = true;
  goLive();
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
    setText(note, t("A link to this moment is copied."));
  } catch {
    setText(note, t("The browser lets this page copy nothing; the moment is #{hash}", { hash: hash() }));
  }
}

function onKey(event) {
  const { key, target } = event;
  const { player } = app;
  if (!player || event.ctrlKey || event.metaKey || event.altKey || target.closest("textarea, select, dialog, input:not(.range)")) return;
  const jump = JUMPS.find((other) => other.key === key.toLowerCase());
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step) player.go(player.clock.tick + step * (event.shiftKey ? 10 : 1));
  else if (key === "Home") player.go(0);
  else if (key === "End") player.go(player.clock.length - 1);
  else if (key === " " && !target.closest("button, summary, a")) player.toggle();
  else if (jump) player.jump(jump.kind, event.shiftKey ? -1 : 1);
  else if (key === "[" || key === "]") app.lanes[0].pickNext(key === "]" ? 1 : -1);
  else if ("+=-0".includes(key)) app.lanes.forEach((lane) => lane.memory?.zoom({ "-": 1 / 1.5, 0: 0 }[key] ?? 1.5));
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
translate(keyTable);
window.inspector = app; // for tests and for the curious
start();
