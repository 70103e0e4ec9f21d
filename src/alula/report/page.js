"use strict";
// Curves: one SVG per chart, drawn to the width it has, redrawn when that or a switch changes.
let runs = [], charts = [];
const SVG = document.querySelector("svg").namespaceURI;
const state = { smooth: true, time: false, hidden: new Set(), focus: null };
const PAD = { left: 50, right: 12, top: 8, bottom: 34 };

function element(parent, name, attributes = {}, text = "") {
  const svg = ["svg", "line", "path", "text", "circle"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

// ---- numbers as people read them
const short = (value, digits) => String(Number(value.toPrecision(digits)));
function number(value, format, digits = 3) {
  if (format === "percent") return short(100 * value, digits) + "%";
  if (format === "bytes") return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], digits);
  if (format === "seconds") return short(value, digits) + " s";
  if (Math.abs(value) >= 1e4) return scaled(value, 1000, ["", "k", "M", "G"], digits, "");
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace(/\.0e/, "e").replace("e-", "e−");
  return short(value, digits);
}
function scaled(value, base, units, digits, space = " ") {
  let index = 0;
  while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index++; }
  return short(value, digits) + space + units[index];
}
function clock(seconds) {
  if (seconds < 120) return short(seconds, 3) + " s";
  return seconds < 7200 ? short(seconds / 60, 3) + " min" : short(seconds / 3600, 3) + " h";
}

// ---- axes
function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) ticks.push(i * step);
  return ticks;
}
function logTicks(low, high) {
  const decades = Math.log10(high / low), ticks = [];
  const factors = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors)
      if (power % every === 0 || factors.length > 1) ticks.push(factor * 10 ** power);
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : linearTicks(low, high, 4); // one number is no scale
}
function yRange(chart, values) {
  let low = Math.min(...values), high = Math.max(...values);
  if (chart.log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  if (low >= 0 && low < 0.6 * high) low = 0;
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const room = 0.06 * (high - low);
  if (low !== 0) low -= room;
  high += room;
  return chart.format === "percent" ? [Math.max(low, 0), Math.min(high, Math.max(1, ...values))] : [low, high];
}

// Seconds at a step: between the points of the run's clock, on a straight line.
function seconds(run, step) {
  const { x, y } = runs[run].clock;
  if (step <= x[0]) return y[0] * (step / x[0]);
  let left = 0, right = x.length - 1;
  if (step >= x[right]) return y[right];
  while (right - left > 1) {
    const middle = (left + right) >> 1;
    if (x[middle] <= step) left = middle; else right = middle;
  }
  return y[left] + ((y[right] - y[left]) * (step - x[left])) / (x[right] - x[left]);
}
const xValue = (line, step) => (state.time ? seconds(line.run, step) : step);

// All charts share one horizontal axis, from the start to where the longest visible run ends.
function end() {
  const ends = charts.flatMap((chart) => chart.lines).filter(visible).map((line) => xValue(line, line.x[line.x.length - 1]));
  return Math.max(1e-9, ...ends);
}
const visible = (line) => !state.hidden.has(line.run) && (!state.time || runs[line.run].clock);

// What is drawn of a line: points on the axes in use, without those that a log axis cannot show.
function prepare(chart, line, source) {
  const points = [];
  source.x.forEach((step, i) => {
    if (!chart.log || source.y[i] > chart.floor)
      points.push({ at: xValue(line, step), step, value: source.y[i], error: source.error ? source.error[i] || 0 : 0 });
  });
  return points;
}

function draw(chart) {
  const width = chart.plot.clientWidth, height = chart.plot.clientHeight;
  if (!width) return;
  chart.plot.replaceChildren();
  const svg = element(chart.plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  const shown = chart.lines.filter(visible);
  chart.drawn = shown
    .map((line) => {
      const raw = prepare(chart, line, line);
      const smooth = state.smooth && line.smooth ? prepare(chart, line, line.smooth) : null;
      return { line, raw, main: smooth || raw, faint: smooth && raw.length > 2 ? raw : [] };
    })
    .filter((one) => one.raw.length);
  absentees(chart);
  if (!chart.drawn.length) {
    element(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to show");
    return;
  }
  const all = chart.drawn.flatMap((one) => one.raw);
  const [low, high] = yRange(chart, all.flatMap((p) => reach(chart, p)).concat(reachable(chart, all)));
  const last = end();
  const scale = chart.log ? Math.log10 : (value) => value;
  const right = width - PAD.right, bottom = height - PAD.bottom;
  const x = (at) => PAD.left + (at / last) * (right - PAD.left);
  const y = (value) => bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (bottom - PAD.top);
  Object.assign(chart, { x, y, svg, right, bottom });

  const whole = chart.format === "bytes" ? 1024 ** Math.floor(Math.log(high) / Math.log(1024)) : 1;
  const ticks = linearTicks(low / whole, high / whole, height > 230 ? 5 : 4).map((tick) => tick * whole);
  for (const tick of chart.log ? logTicks(low, high) : ticks) {
    element(svg, "line", { class: "grid", x1: PAD.left, x2: right, y1: y(tick), y2: y(tick) });
    element(svg, "text", { x: PAD.left - 7, y: y(tick) + 4, "text-anchor": "end" }, number(tick, chart.format));
  }
  const [unit, per] = !state.time ? ["training step", 1] : last < 600 ? ["seconds", 1] : last < 14400 ? ["minutes", 60] : ["hours", 3600];
  for (const tick of linearTicks(0, last / per, Math.max(2, Math.floor(width / 65)))) {
    if (!state.time && tick % 1) continue;
    element(svg, "text", { x: x(tick * per), y: bottom + 18, "text-anchor": "middle" }, number(tick, "number"));
  }
  element(svg, "text", { x: right, y: bottom + 33, "text-anchor": "end" }, unit);
  element(svg, "line", { class: "axis", x1: PAD.left, x2: right, y1: bottom, y2: bottom });
  if (chart.limit && chart.limit <= high && chart.limit >= low)
    element(svg, "line", { class: "limit", x1: PAD.left, x2: right, y1: y(chart.limit), y2: y(chart.limit) });

  for (const one of chart.drawn) stroke(chart, one.line, one.faint, "raw");
  for (const one of chart.drawn) stroke(chart, one.line, one.main, "");
  warningMarks(chart);
  chart.cross = element(svg, "line", { class: "cross", y1: PAD.top, y2: bottom, visibility: "hidden" });
}

// From where to where a point's error bar goes; a share stays between 0 and 1, whatever its error.
function reach(chart, { value, error }) {
  const ends = error ? [value - error, value + error] : [value];
  return error && chart.format === "percent" ? ends.map((y) => Math.min(Math.max(y, 0), 1)) : ends;
}

// A limit line belongs in the picture when the curves come near it.
function reachable(chart, points) {
  return chart.limit && points.some((p) => p.value > chart.limit / 3) ? [chart.limit] : [];
}

function stroke(chart, line, points, kind) {
  if (!points.length) return;
  const away = state.focus !== null && state.focus !== line.run ? " away" : "";
  const colour = `stroke:var(--run-${runs[line.run].colour})`;
  const path = points.map((p, i) => `${i ? "L" : "M"}${chart.x(p.at).toFixed(1)} ${chart.y(p.value).toFixed(1)}`).join("");
  const dash = kind ? "" : line.dotted ? "1 5" : runs[line.run].dash;
  element(chart.svg, "path", { class: `curve ${kind}${away}`, d: path, style: colour, "stroke-dasharray": dash });
  if (kind) return;
  const dots = line.marks ? points : points.slice(-1);
  for (const p of dots) {
    if (p.error) {
      const [y1, y2] = reach(chart, p).map(chart.y);
      element(chart.svg, "line", { class: `curve raw error${away}`, style: `${colour};opacity:.55`, x1: chart.x(p.at), x2: chart.x(p.at), y1, y2 });
    }
    const fill = line.dotted ? "var(--card)" : `var(--run-${runs[line.run].colour})`;
    element(chart.svg, "circle", { class: `dot${away}`, cx: chart.x(p.at), cy: chart.y(p.value), r: 3, style: `fill:${fill};${colour}` });
  }
}

function warningMarks(chart) {
  chart.drawn.forEach(({ line }) => {
    if (line.dotted) return;
    for (const [step] of runs[line.run].warnings) {
      const at = chart.x(xValue(line, step));
      if (at < PAD.left - 1 || at > chart.right + 1) continue;
      element(chart.svg, "path", { d: `M${at} ${chart.bottom}l-3.500 6h7z`, style: `fill:var(--run-${runs[line.run].colour})` });
    }
  });
}

// Runs that a log axis cannot show are named, not silently dropped.
function absentees(chart) {
  const zero = chart.lines.filter((line) => chart.log && line.y.every((value) => value <= chart.floor)).map((line) => runs[line.run].name);
  const why = chart.floor ? `At most ${chart.floor} throughout (rounding)` : "Zero throughout";
  chart.absent.textContent = zero.length ? `${why}, so not on a log axis: ${zero.join(", ")}` : "";
}

// ---- read-out
function nearest(points, at) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].at < at) low = middle; else high = middle;
  }
  return Math.abs(points[low].at - at) <= Math.abs(points[high].at - at) ? points[low] : points[high];
}
function readOut(chart, event) {
  if (!chart.drawn || !chart.drawn.length) return;
  const box = chart.plot.getBoundingClientRect(), pixel = event.clientX - box.left;
  const all = chart.drawn.flatMap((one) => one.main);
  const close = all.reduce((a, b) => (Math.abs(chart.x(b.at) - pixel) < Math.abs(chart.x(a.at) - pixel) ? b : a));
  const rows = chart.drawn
    .map(({ line, main }) => ({ line, point: nearest(main, close.at) }))
    .filter(({ point }) => Math.abs(chart.x(point.at) - chart.x(close.at)) < 12)
    .sort((a, b) => b.point.value - a.point.value);
  chart.tip.replaceChildren();
  element(chart.tip, "small", {}, state.time ? `after ${clock(close.at)}` : `step ${close.step.toLocaleString("en")}`);
  for (const { line, point } of rows) {
    const row = element(chart.tip, "div");
    const swatch = element(row, "svg", { class: "swatch", viewBox: "0 0 26 10" });
    element(swatch, "line", { x1: 1, y1: 5, x2: 25, y2: 5, style: `stroke:var(--run-${runs[line.run].colour})`,
      "stroke-dasharray": line.dotted ? "2 4" : runs[line.run].dash });
    element(row, "span", {}, runs[line.run].name + (line.label ? ` (${line.label})` : ""));
    element(row, "b", {}, number(point.value, chart.format) + (point.error ? ` ± ${number(point.error, chart.format, 2)}` : ""));
  }
  chart.tip.hidden = false;
  const at = chart.x(close.at), room = chart.plot.clientWidth, wide = chart.tip.offsetWidth;
  chart.tip.style.left = `${Math.max(0, at + 14 + wide > room ? at - 14 - wide : at + 14)}px`;
  chart.tip.style.top = `${chart.plot.offsetTop + 8}px`;
  for (const other of charts) {
    if (!other.cross) continue;
    const mark = other.x(close.at), inside = mark >= PAD.left && mark <= other.right;
    other.cross.setAttribute("x1", mark);
    other.cross.setAttribute("x2", mark);
    other.cross.setAttribute("visibility", inside ? "visible" : "hidden");
  }
}
function hideReadOut(chart) {
  chart.tip.hidden = true;
  for (const other of charts) if (other.cross) other.cross.setAttribute("visibility", "hidden");
}

// ---- the page
function redraw() { charts.forEach(draw); }

function addChart(chart) {
  const box = document.getElementById(chart.section === "more" ? "more" : "charts");
  const figure = element(box, "figure", { class: `chart ${chart.section}` });
  const caption = element(figure, "figcaption", {}, chart.title);
  element(caption, "small", {}, chart.unit + (chart.log ? ", log scale" : "") + (chart.note ? ` · ${chart.note}` : ""));
  chart.plot = element(figure, "div", { class: "plot" });
  chart.absent = element(figure, "p", { class: "absent" });
  chart.tip = element(figure, "div", { class: "tip", hidden: "" });
  chart.plot.addEventListener("pointermove", (event) => readOut(chart, event));
  chart.plot.addEventListener("pointerdown", (event) => readOut(chart, event));
  chart.plot.addEventListener("pointerleave", () => hideReadOut(chart));
  new ResizeObserver(() => draw(chart)).observe(chart.plot);
}
function addLegend(run, index) {
  const pressed = String(!state.hidden.has(index));
  const button = element(document.getElementById("legend"), "button", { type: "button", "aria-pressed": pressed });
  const swatch = element(button, "svg", { class: "swatch", viewBox: "0 0 26 10" });
  element(swatch, "line", { x1: 1, y1: 5, x2: 25, y2: 5, style: `stroke:var(--run-${run.colour})`, "stroke-dasharray": run.dash });
  element(button, "span", {}, run.name);
  const focus = (to) => { state.focus = state.hidden.has(index) ? null : to; redraw(); };
  button.addEventListener("click", () => {
    if (!state.hidden.delete(index)) state.hidden.add(index);
    button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
    focus(null);
  });
  button.addEventListener("mouseenter", () => focus(index));
  button.addEventListener("mouseleave", () => focus(null));
}
// Draws everything anew from the data in the page; hidden runs and switches stay as they are.
function show(data) {
  ({ runs, charts } = data);
  for (const id of ["charts", "more", "legend"]) document.getElementById(id).replaceChildren();
  charts.forEach(addChart);
  runs.forEach(addLegend);
  document.getElementById("time-switch").hidden = !runs.some((run) => run.clock);
  document.getElementById("more-box").hidden = !charts.some((chart) => chart.section === "more");
  redraw();
  document.documentElement.dataset.drawn = String(charts.length);
}
document.getElementById("smooth").addEventListener("change", (event) => { state.smooth = event.target.checked; redraw(); });
document.getElementById("time").addEventListener("change", (event) => { state.time = event.target.checked; redraw(); });
show(JSON.parse(document.getElementById("data").textContent));
