// The few lines that stand between the views and the document.
import { LANGUAGE, t, translate } from "./words.js";

/** Makes an element: el("button", {class: "x", onclick: f}, "text", child). */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** A copy of one of the page's templates, and parts of it by their classes. */
export function template(name, ...parts) {
  const element = translate(document.getElementById(name).content.firstElementChild.cloneNode(true));
  return [element, ...parts.map((part) => element.querySelector(`.${part}`))];
}

/** Shows lines of text in a box beside a place of the picture that it lies in. */
export function showTip(tip, lines, x, y, width) {
  tip.replaceChildren(...lines.map((line, i) => el(i ? "div" : "b", {}, line)));
  tip.hidden = false;
  tip.style.left = `${Math.max(0, Math.min(x, width - tip.offsetWidth))}px`;
  tip.style.top = `${y}px`;
}

/** Sets an element's text where it differs: a screen reader hears of changes only. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A canvas as large as its box, in device pixels; returns its context, drawn on in CSS pixels. */
export function contextOf(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

export const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12345 as "12,345". */
export function count(n) {
  return NUMBER.format(n);
}

const widths = new WeakMap();
const observer = new ResizeObserver((entries) => {
  const changed = entries.filter(({ target, contentRect }) => widths.get(target) !== contentRect.width);
  for (const { target, contentRect } of changed) widths.set(target, contentRect.width);
  if (changed.length) dispatchEvent(new Event("resize"));
});

/** The width of an element's box, 0 while it is hidden. It is measured when it changes: to ask at each frame would lay out the page. */
export function widthOf(element) {
  if (!widths.has(element)) {
    widths.set(element, element.clientWidth);
    observer.observe(element);
  }
  return widths.get(element);
}

/** "1 token", "2 tokens". */
export function plural(n, noun) {
  return LANGUAGE === "zh" ? t(`{n} ${noun}s`, { n: count(n) }) : `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** A text without line breaks, cut so that it fits into a width as it is drawn; "" where less than a few letters would. */
export function fitted(ctx, text, width) {
  const line = text.trim().replaceAll("\n", "⏎");
  if (ctx.measureText(line).width <= width) return line;
  const most = placeOf(line.length, (n) => ctx.measureText(`${line.slice(0, n + 1)}…`).width <= width);
  return most < 3 ? "" : `${line.slice(0, most)}…`;
}

/** Seconds as a person says them. */
export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.1) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : `${count(seconds)} s`;
}

/** How many of the numbers 0 to `length` come before the place that is sought: a binary search. */
export function placeOf(length, isBefore) {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isBefore(middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}
