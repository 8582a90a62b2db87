/* The curves: uPlot draws, what is around it is here. */

/* --- colours of the canvas --- */

let palette = {};

function readPalette() {
  const probe = document.body.appendChild(make("span", { hidden: true }));
  const names = ["ink", "soft", "rule", "paper",
    ...Array.from({ length: COLOURS }, (_, place) => `s${place + 1}`)];
  palette = Object.fromEntries(names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
}

const fade = (colour, alpha) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
const seriesColour = (place) => palette[`s${(place % COLOURS) + 1}`];

/* --- curves --- */

const charts = [];
const view = { smooth: false, zoom: null, full: [0, 1], shown: runs.map(() => true) };

const middles = (run) => run.curves.from.map((from, place) => (from + run.curves.to[place]) / 2);

/** Where the points of a line of a chart are among a run's curves. */
const keyOf = (spec, number) => spec.keys?.[number] || `${spec.id}/${number}`;

/** The lines of a chart: of a run its lines, its band and its held-out points. */
function linesOf(spec) {
  const lines = [];
  runs.forEach((run, place) => {
    spec.lines.forEach((line, number) => {
      const found = run.curves.lines[keyOf(spec, number)];
      if (!found) return;
      const label = several ? run.name : line.label;
      const { y, hi, lo } = several ? { y: found.y } : found;
      lines.push({ run: place, label, look: several ? place : number, x: middles(run), y, hi, lo });
    });
    for (const name of spec.held_out) {
      const points = run.points[name];
      if (!points) continue;
      const label = `${several ? run.name : name}, held out`;
      const [x, y] = [0, 1].map((at) => points.map((point) => point[at]));
      lines.push({ run: place, label, look: several ? place : 1, x, y, points: true });
    }
  });
  return lines;
}

function smoothed(values) {
  const weight = 1 - 2 / (Math.max(5, values.length / 12) + 1);
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Columns for uPlot: steps, then for each line its values, smoothed, and its band. */
function columnsOf(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const placeOf = new Map(steps.map((step, place) => [step, place]));
  const aligned = (line, values) => {
    const column = new Array(steps.length).fill(null);
    line.x.forEach((x, place) => { column[placeOf.get(x)] = values[place]; });
    return column;
  };
  const columns = [steps];
  const series = [{}];
  const bands = [];
  const add = (line, values, look) => {
    series.push({ spanGaps: true, points: { show: false }, ...look, line });
    columns.push(aligned(line, values));
  };
  for (const line of lines) {
    const colour = () => seriesColour(line.look);
    const dash = dashOf(line.look);
    if (line.points) {
      const rings = { show: true, size: 8, width: 2, stroke: colour, fill: () => palette.paper };
      const stroke = () => fade(colour(), 0.45);
      add(line, line.y, { role: "main", stroke, width: 1, dash: [2, 4], points: rings });
      continue;
    }
    const stroke = () => fade(colour(), view.smooth ? 0.3 : 1);
    const dots = { show: steps.length < 3, size: 7, stroke: colour, fill: colour };
    add(line, line.y, { role: "main", stroke, width: 1.75, dash, points: dots });
    add(line, smoothed(line.y), { role: "smooth", stroke: colour, width: 2.25, dash, show: view.smooth });
    if (!line.lo) continue;
    add(line, line.hi, { role: "band", stroke: null, width: 0 });
    add(line, line.lo, { role: "band", stroke: null, width: 0 });
    bands.push({ series: [series.length - 2, series.length - 1], fill: () => fade(colour(), 0.14) });
  }
  return { columns, series, bands };
}

function tick(value) {
  const size = Math.abs(value);
  const exact = Number(value.toPrecision(6));
  const short = size >= 1e5 || (size > 0 && size < 1e-3) ? exact.toExponential() : String(exact);
  return short.replace("+", "").replace(/-/g, MINUS);
}

function rangeOfValues(_, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function plotOptions(spec, series, bands, width) {
  const rule = { stroke: () => palette.rule, width: 1 };
  const axis = { stroke: () => palette.soft, font: "11px system-ui, sans-serif", grid: rule, gap: 4 };
  const ticks = { ...rule, size: 4 };
  const whole = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
  const inShares = { splits: () => [0, 0.25, 0.5, 0.75, 1], values: (_, splits) => splits.map(percent) };
  const inNumbers = { values: (_, splits) => splits.map(tick) };
  return {
    width, height: CHART_HEIGHT, padding: [6, 8, 0, 0], legend: { show: false }, series, bands,
    scales: {
      x: { time: false, range: () => view.zoom || view.full },
      y: { range: spec.share ? () => [-0.04, 1.04] : rangeOfValues },
    },
    axes: [
      { ...axis, ticks, size: 26, incrs: whole, grid: { show: false } },
      { ...axis, ticks, size: 52, ...(spec.share ? inShares : inNumbers) },
    ],
    cursor: {
      y: false, drag: { x: true, y: false, setScale: false },
      sync: { key: "steps", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => { setZoom(null); return null; } },
      points: { size: (u, place) => (u.series[place].role === "main" ? 7 : 0), width: 0 },
    },
    hooks: { setCursor: [onCursor], setSelect: [onSelect] },
  };
}

function noteOf(spec) {
  const rings = spec.held_out.length ? "rings: held-out prompts" : "";
  return [spec.note, several ? "" : spec.band_note, rings].filter(Boolean).join("; ");
}

/** The name of a line, with its value under the cursor. */
function keyNode(line, lines) {
  line.output = make("output");
  line.key = make("span", { class: "key" }, line.points ? ring(line.look) : swatch(line.look), line.label,
    line.output);
  // In a comparison a ring belongs to the line of its colour.
  const told = several && line.points && lines.some((one) => one.run === line.run && !one.points);
  return told ? null : line.key;
}

function chartFigure(spec, lines) {
  const [low, high] = view.full;
  const range = { "aria-valuemin": low, "aria-valuemax": high, "aria-valuenow": high };
  const label = { "aria-label": `${spec.title} over the steps`, "aria-valuetext": `step ${high}` };
  const plot = make("div", { class: "plot", tabindex: 0, role: "slider", ...label, ...range });
  const caption = make("figcaption", {}, make("h3", {}, spec.title),
    make("p", { class: "note" }, noteOf(spec)),
    make("div", { class: "keys" }, lines.map((line) => keyNode(line, lines))));
  return { plot, node: make("figure", { class: "chart" }, caption, plot) };
}

function addChart(host, spec) {
  const lines = linesOf(spec);
  if (!lines.length) return;
  const { plot, node } = chartFigure(spec, lines);
  host.append(node);
  const { columns, series, bands } = columnsOf(lines);
  const u = new uPlot(plotOptions(spec, series, bands, plot.clientWidth || PRINTED.width), columns, plot);
  const chart = { spec, lines, plot, u };
  u.chart = chart;
  charts.push(chart);
  plot.addEventListener("keydown", (event) => onChartKey(event, chart));
  new ResizeObserver(() => fit(chart)).observe(plot);
  showValues(chart, null);
}

function fit({ u, plot }) {
  if (plot.clientWidth) u.setSize({ width: plot.clientWidth, height: CHART_HEIGHT });
}

/** The value of a column at a place, or the nearest known one before it, else after. */
function known(column, place) {
  for (let at = place; at >= 0; at -= 1) if (column[at] != null) return column[at];
  return column.slice(place).find((value) => value != null) ?? null;
}

const display = (spec, value) => (spec.share ? percent(value) : format(value));

function showValues(chart, place) {
  const at = place ?? chart.u.data[0].length - 1;
  chart.u.series.forEach((series, number) => {
    if (series.role !== "main") return;
    series.line.output.value = display(chart.spec, known(chart.u.data[number], at));
  });
}

function stepText(x) {
  const at = several ? -1 : middles(runs[0]).indexOf(x);
  const [from, to] = at < 0 ? [x, x] : [runs[0].curves.from[at], runs[0].curves.to[at]];
  return from < to ? `steps ${from} to ${to}, mean` : `step ${from}`;
}

function onCursor(u) {
  if (!u.chart) return;
  const place = u.cursor.left < 0 ? null : u.cursor.idx;
  showValues(u.chart, place);
  byId("at-step").textContent = place == null ? "" : stepText(u.data[0][place]);
}

function onSelect(u) {
  const { left, width } = u.select;
  if (width < 6) return;
  setZoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

function setZoom(zoom) {
  const [low, high] = view.full;
  const [from, to] = zoom ? [Math.max(low, zoom[0]), Math.min(high, zoom[1])] : view.full;
  view.zoom = to - from > 0.5 && (from > low || to < high) ? [from, to] : null;
  const [min, max] = view.zoom || view.full;
  for (const { u } of charts) u.setScale("x", { min, max });
  byId("zoom-from").value = Math.ceil(min);
  byId("zoom-to").value = Math.floor(max);
}

/** Move the cursor of a chart, and of all others with it. */
function moveCursor(chart, place) {
  const { u, plot, spec } = chart;
  const steps = u.data[0];
  chart.place = Math.max(0, Math.min(steps.length - 1, place));
  const x = steps[chart.place];
  if (view.zoom && (x < view.zoom[0] || x > view.zoom[1])) {
    const half = (view.zoom[1] - view.zoom[0]) / 2;
    setZoom([x - half, x + half]);
  }
  u.setCursor({ left: u.valToPos(x, "x"), top: 1 }, true, true);
  plot.setAttribute("aria-valuenow", x);
  plot.setAttribute("aria-valuetext", stepText(x));
  byId("live").textContent = `${spec.title}, ${stepText(x)}: ${spoken(chart).join(", ") || "no value"}`;
}

/** What the chart shows under its cursor, in words. */
function spoken({ u, spec, place }) {
  const told = u.series.map((series, number) => ({ series, value: u.data[number][place] }))
    .filter(({ series, value }) => series.role === "main" && series.show !== false && value != null);
  return told.map(({ series, value }) => `${series.line.label} ${display(spec, value)}`);
}

function onChartKey(event, chart) {
  const last = chart.u.data[0].length - 1;
  const at = chart.place ?? last + 1;
  const stride = event.shiftKey ? 10 : 1;
  const [min, max] = view.zoom || view.full;
  const centre = chart.place == null ? (min + max) / 2 : chart.u.data[0][chart.place];
  const around = (times) => setZoom([centre - (centre - min) * times, centre + (max - centre) * times]);
  const keys = {
    ArrowLeft: () => moveCursor(chart, at - stride),
    ArrowRight: () => moveCursor(chart, at + stride),
    Home: () => moveCursor(chart, 0),
    End: () => moveCursor(chart, last),
    "+": () => around(0.5),
    "=": () => around(0.5),
    "-": () => around(2),
    0: () => setZoom(null),
  };
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}

function toggleRun(place, shown) {
  view.shown[place] = shown;
  for (const { u } of charts) {
    u.series.forEach((series, number) => {
      if (series.line?.run !== place) return;
      u.setSeries(number, { show: shown && (series.role !== "smooth" || view.smooth) });
      series.line.key.hidden = !shown;
    });
  }
}

function setSmooth(smooth) {
  view.smooth = smooth;
  for (const { u } of charts) {
    u.series.forEach((series, number) => {
      if (series.role === "smooth") u.setSeries(number, { show: smooth && view.shown[series.line.run] });
    });
    u.redraw(false);
  }
}

/** In a comparison a chart has one line a run. */
function specsOf(spec) {
  if (!several || spec.lines.length < 2) return [spec];
  return spec.lines.map((line, number) => {
    const title = `${spec.title}: ${line.label}`;
    return { ...spec, title, lines: [line], keys: [keyOf(spec, number)] };
  });
}

function showMore() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.more)))];
  byId("more-charts").hidden = !names.length;
  byId("more-charts").querySelector("summary").textContent = `More metrics (${names.length})`;
  byId("more-charts").addEventListener("toggle", () => {
    const host = byId("more-charts").querySelector(".charts");
    if (host.childElementCount) return;
    for (const name of names) {
      const key = `more/${name}`;
      for (const { curves } of runs) if (curves.more[name]) curves.lines[key] = { y: curves.more[name] };
      addChart(host, { title: name, lines: [{ label: name.split("/").pop() }], keys: [key], held_out: [] });
    }
    runs.forEach((_, place) => view.shown[place] || toggleRun(place, false));
  });
}

function numbersOf(run) {
  const columns = data.charts.flatMap((spec) => spec.lines.map((line, number) => ({
    spec,
    title: spec.lines.length > 1 ? `${spec.title}: ${line.label}` : spec.title,
    values: run.curves.lines[keyOf(spec, number)]?.y,
  }))).filter(({ values }) => values);
  const { from, to } = run.curves;
  const rows = from.map((first, at) => [
    first < to[at] ? `${first}\u2013${to[at]}` : first,
    ...columns.map(({ spec, values }) => ({ number: display(spec, values[at]) })),
  ]);
  const head = ["step", ...columns.map(({ title }) => title)];
  return table(`Every point of the curves of ${run.name}`, head, rows, "numbers");
}

function showNumbers() {
  byId("numbers").addEventListener("toggle", () => {
    const host = byId("numbers").querySelector("div");
    if (!host.childElementCount) put(host, runs.map(numbersOf));
  });
}

function showCurves() {
  const ends = runs.flatMap(({ curves, points }) =>
    [...curves.from, ...curves.to, ...Object.values(points).flat().map(([x]) => x)]);
  byId("no-curves").hidden = ends.length > 0;
  byId("curves-part").hidden = !ends.length;
  if (!ends.length) return;
  view.full = [Math.min(...ends), Math.max(...ends)];
  if (view.full[0] === view.full[1]) view.full = [view.full[0] - 1, view.full[1] + 1];
  put(byId("run-legend"), runs.map((run, place) => {
    const onchange = (event) => toggleRun(place, event.target.checked);
    return make("label", {}, make("input", { type: "checkbox", checked: true, onchange }), runName(place));
  }));
  for (const spec of data.charts.flatMap(specsOf)) addChart(byId("charts"), spec);
  byId("smooth").addEventListener("change", (event) => setSmooth(event.target.checked));
  byId("zoom-reset").addEventListener("click", () => setZoom(null));
  const fromFields = () => setZoom([Number(byId("zoom-from").value), Number(byId("zoom-to").value)]);
  byId("zoom-from").addEventListener("change", fromFields);
  byId("zoom-to").addEventListener("change", fromFields);
  byId("curve-tools").addEventListener("submit", (event) => event.preventDefault());
  setZoom(null);
  showMore();
  showNumbers();
}
