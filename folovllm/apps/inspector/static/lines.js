// From text to recordings: a file, an address, a live stream.
import { Recording } from "./recording.js";

const SLICE = 12; // milliseconds of work before the page may do something else

/** Reads lines one after the other into recordings: a header begins one anew. */
export class LineReader {
  /** `onRecording` hears of each new recording. */
  constructor(onRecording) {
    this.recording = null;
    this.onRecording = onRecording;
  }

  line(text) {
    if (!text.trim()) return;
    const line = JSON.parse(text);
    if (Array.isArray(line)) {
      if (!this.recording) throw new Error("This is no recording: its first line is no header.");
      this.recording.take(line, text.length);
    } else this.onRecording((this.recording = new Recording(line)));
  }
}

/** A recording from the text of its lines. What is no whole line at its end is dropped: the file was cut off. */
export async function readRecording(text, onProgress = () => {}) {
  const reader = new LineReader(() => {});
  const whole = text.endsWith("\n") ? text.length : text.lastIndexOf("\n") + 1;
  let until = performance.now() + SLICE;
  for (let from = 0; from < whole; ) {
    const to = text.indexOf("\n", from);
    reader.line(text.slice(from, to));
    from = to + 1;
    if (performance.now() > until) {
      onProgress(from / whole);
      await pause();
      until = performance.now() + SLICE;
    }
  }
  if (!reader.recording?.length) throw new Error("The recording is empty.");
  return reader.recording;
}

/** Lets the page draw and hear its user. */
function pause() {
  return new Promise((done) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = done;
    channel.port2.postMessage(0);
  });
}

export class KeyNeeded extends Error {}

/** What an address answers. Raises Error with a sentence where it answers nothing useful. */
export async function fetchWithKey(url, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(url, { ...options, headers });
  if (answer.status === 401) throw new KeyNeeded("The server asks for its API key.");
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${url} answered ${answer.status} ${answer.statusText}.`);
  }
  return answer;
}

/**
 * Reads server-sent events by fetch, which can carry a key, until the stream ends or `signal` aborts.
 * `onLine` gets each line of data, `onBatch` is called after all lines of one event.
 */
export async function readStream(url, { key, signal, onLine, onBatch }) {
  const answer = await fetchWithKey(url, key, { signal, headers: { Accept: "text/event-stream" } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) onLine(line.slice(5).trimStart());
      else if (line === "") onBatch();
    }
  }
}
