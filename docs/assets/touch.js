// A table that one can touch: its rows, and where it says so its columns, are the stops of sliders; bars show the values.
// Without this script there is the table.
for (const box of document.querySelectorAll(".touch")) {
  const isChinese = document.documentElement.lang === "zh";
  const make = (name, attributes = {}, ...children) => {
    const element = Object.assign(document.createElement(name), attributes);
    element.append(...children);
    return element;
  };
  const table = box.querySelector("table");
  const [heads, ...rows] = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  const numberOf = (text) => parseFloat(text.replaceAll(",", ""));
  const { columns, start = rows.length >> 1 } = box.dataset; // what the columns are; without it each is a measure of its own
  const said = make("p", { className: "touch-said" });
  const bars = make("div", { className: "touch-bars" });
  said.setAttribute("aria-live", "polite");
  bars.setAttribute("aria-hidden", "true");

  const slider = (name, stops, at) => {
    const input = make("input", { type: "range", min: 0, max: stops.length - 1, step: 1, value: at, oninput: show });
    const output = make("output");
    return { input, output, stops, label: make("label", {}, `${name} `, output, input) };
  };
  const row = slider(heads[0], rows.map((cells) => cells[0]), start);
  const column = columns && slider(columns, heads.slice(1), 1);
  const sliders = [row, column].filter(Boolean);

  function show() {
    for (const { input, output, stops } of sliders) {
      output.textContent = stops[input.value];
      input.setAttribute("aria-valuetext", stops[input.value]);
    }
    const chosen = column ? [Number(column.input.value) + 1] : [...heads.keys()].slice(1);
    const most = (i) => Math.max(...rows.flatMap((cells) => (column ? cells.slice(1) : [cells[i]])).map(numberOf)); // one scale for all columns of a kind
    const name = (i) => (column ? box.dataset.value : heads[i]);
    said.replaceChildren(...chosen.map((i) => make("span", {}, `${name(i)}: `, make("b", {}, rows[row.input.value][i]))));
    bars.replaceChildren(...chosen.map((i) => make("div", {}, ...rows.map((cells, at) => {
      const bar = make("i", { className: at === Number(row.input.value) ? "chosen" : "", title: `${cells[0]}: ${cells[i]}` });
      bar.style.height = `${(100 * numberOf(cells[i])) / most(i)}%`;
      return bar;
    })))); // prettier-ignore
  }

  const all = make("details", {}, make("summary", {}, isChinese ? "全部数值" : "All values"), ...box.childNodes);
  box.append(make("div", { className: "touch-sliders" }, ...sliders.map(({ label }) => label)), said, bars, all);
  show();
}
