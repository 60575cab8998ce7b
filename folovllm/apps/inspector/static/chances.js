// How the engine chooses a token, in its order: temperature, min-p, top-k, top-p, noise, argmax. (folovllm/sample/ is the original.)

const HALF = 2 ** 32;

/** The upper and the lower word of a product of two words of 32 bits. */
function multiply(a, b) {
  const [high, low, factor, rest] = [a >>> 16, a & 0xffff, b >>> 16, b & 0xffff];
  const middle = high * rest + Math.floor((low * rest) / 65536);
  const other = low * factor + (middle % 65536);
  return [(high * factor + Math.floor(middle / 65536) + Math.floor(other / 65536)) >>> 0, Math.imul(a, b) >>> 0];
}

/** Philox-4x32 with ten rounds: four random words that are a function of a counter (four words) and a key (two). */
export function philox([c0, c1, c2, c3], [k0, k1]) {
  for (let round = 0; round < 10; round++) {
    const [high0, low0] = multiply(0xd2511f53, c0);
    const [high1, low1] = multiply(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    [k0, k1] = [(k0 + 0x9e3779b9) >>> 0, (k1 + 0xbb67ae85) >>> 0];
  }
  return [c0, c1, c2, c3];
}

/** Gumbel noise for each token id: of this seed, and of the position at which the token will stand. */
export function gumbel(seed, position, size) {
  const noise = new Float64Array(size);
  for (let block = 0; 4 * block < size; block++) {
    const words = philox([block, position, 0, 0], [seed % HALF, Math.floor(seed / HALF)]);
    words.forEach((word, i) => (noise[4 * block + i] = -Math.log(-Math.log(((word >>> 9) + 0.5) * 2 ** -23))));
  }
  return noise;
}

/** Numbers of 16 bits in base64. */
export function float16s(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    const size = exponent === 31 ? Infinity : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    return bits >> 15 ? -size : size;
  });
}

/** Token ids, the likeliest first; of equal ones the lower id. */
export function ranked(logits) {
  return Uint32Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
}

/** Numbers as probabilities; where `cut` names a filter, 0. */
export function softmax(values, cut) {
  const most = values.reduce((a, b) => Math.max(a, b));
  const chances = Float64Array.from(values, (value, id) => (cut?.[id] ? 0 : Math.exp(value - most)));
  const sum = chances.reduce((a, b) => a + b);
  return chances.map((chance) => chance / sum);
}

/**
 * What becomes of `logits` under {temperature, min_p, top_k, top_p}, and who wins with `noise`. By token id: `scaled`, its logit after the
 * temperature, and `cut`, the filter that dropped it, if any.
 */
export function choose(logits, order, noise, { temperature, min_p, top_k, top_p }) {
  const scaled = temperature ? logits.map((logit) => logit / temperature) : logits;
  const cut = new Array(logits.length);
  const limit = scaled[order[0]] + Math.log(min_p);
  const last = top_k > 0 ? scaled[order[Math.min(top_k, order.length) - 1]] : -Infinity;
  for (const id of order) cut[id] = temperature && scaled[id] < limit ? "min-p" : temperature && scaled[id] < last ? "top-k" : "";
  if (top_p < 1 && temperature) {
    const left = softmax(scaled, cut);
    let before = 0;
    for (const id of order) {
      if (before >= top_p) cut[id] ||= "top-p";
      before += left[id];
    }
  }
  if (!temperature) for (const id of order.slice(1)) cut[id] = "greedy";
  let winner = order[0];
  for (let id = 0; temperature && id < cut.length; id++) {
    if (!cut[id] && scaled[id] + noise[id] > scaled[winner] + noise[winner]) winner = id;
  }
  return { scaled, cut, winner, greedy: order[0] };
}
