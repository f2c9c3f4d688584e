// Time series over the chosen range: from the admin API, and over ten minutes from the event stream's ticks too.

import { isBack } from "./panel.js";

const plots = document.getElementById("plots");
const range = Number(plots.dataset.range);
const isLive = range <= 600; // longer ranges are means of intervals: samples of a second would stand out as spikes
const figures = [...plots.querySelectorAll(".plot")];
const names = figures.filter((each) => !each.matches(".outcomes")).flatMap((each) => each.dataset.series.split(","));
const bars = figures.some((each) => each.matches(".outcomes"));
const asOf = document.getElementById("as-of");
const charts = [];
let data = { times: [], series: {} };
let outcomes = { times: [], step: 60 };
let marks = [];
let stream = null;

const write = {
  rate: (value) => (value < 10 ? String(Math.round(value * 100) / 100) : Math.round(value).toLocaleString("en")),
  count: (value) => (Math.round(value * 10) / 10).toLocaleString("en"),
  megahertz: (value) => `${Math.round(value)} MHz`,
  degrees: (value) => `${Math.round(value)} °C`,
  seconds: (value) => (value < 1 ? `${value < 0.01 ? Math.round(value * 1e5) / 100 : Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`),
  share: (value) => `${Math.round(value * 100)} %`,
  bytes: (value) => {
    const [unit, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => value >= size) ?? [1, "B"];
    return value ? `${Math.round((value / unit) * 10) / 10} ${name}` : "0";
  },
  watts: (value) => `${Math.round(value)} W`,
};

const two = (number) => String(number).padStart(2, "0");
function clock(unix) {
  const when = new Date(unix * 1000);
  const time = `${two(when.getHours())}:${two(when.getMinutes())}`;
  if (isLive) return `${time}:${two(when.getSeconds())}`;
  return range <= 86400 ? time : `${when.getMonth() + 1}/${when.getDate()} ${time}`;
}

const HEIGHT = 176;
const probe = plots.appendChild(document.createElement("i")); // a canvas does not know light-dark(): a computed color is resolved
probe.hidden = true;
const colors = new Map();
function css(name, alpha = 1) {
  if (!colors.has(name)) {
    probe.style.color = `var(${name})`;
    colors.set(name, getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).join(" "));
  }
  return `rgb(${colors.get(name)} / ${alpha})`;
}
const MARKS = { load: "--chart-1", eviction: "--chart-2", refusal: "--chart-2", restart: "--fail", failure: "--fail" };
const OUTCOMES = { answered: "--chart-1", refused: "--chart-2", caller: "--others", failed: "--fail" };

function dashed(ctx, color, from, to) {
  ctx.strokeStyle = css(color);
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
}

// Vertical lines where something happened, which the legend names when the cursor is near; horizontal ones at targets.
function drawLines(chart, lines) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of marks) {
    const x = Math.round(chart.valToPos(mark.time, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    dashed(ctx, MARKS[mark.kind] ?? "--quiet", [x, bbox.top], [x, bbox.top + bbox.height]);
  }
  for (const [value] of lines) {
    const y = Math.round(chart.valToPos(value, "y", true));
    if (y >= bbox.top) dashed(ctx, "--ink", [bbox.left, y], [bbox.left + bbox.width, y]);
  }
  ctx.restore();
}

function at(chart, unix) {
  if (unix == null) return "–";
  if (!(chart.cursor.left >= 0)) return "newest";
  const near = marks.find((mark) => Math.abs(chart.valToPos(mark.time, "x") - chart.valToPos(unix, "x")) < 5);
  return near ? `${clock(unix)}, ${near.kind} of ${near.model}` : clock(unix);
}

const blank = () => data.times.map(() => null);
const columns = ({ stacked, wanted }) => (stacked ? stack(wanted) : [data.times, ...wanted.map((name) => data.series[name] ?? blank())]);

// Each column reaches from zero to the sum of its own and those before it; the largest is drawn first.
function stack(wanted) {
  const sums = [];
  for (const name of wanted) {
    const below = sums.at(-1);
    sums.push((outcomes[name] ?? []).map((value, index) => value + (below ? below[index] : 0)));
  }
  return [outcomes.times, ...sums.reverse()];
}

// Values with a gap on both sides have no line to be seen by: they are dots.
function alone(chart, index) {
  const column = chart.data[index];
  return column.flatMap((value, i) => (value != null && column[i - 1] == null && column[i + 1] == null ? [i] : []));
}

function seriesOf(stacked, wanted, labels, text) {
  if (!stacked) {
    return wanted.map((_, index) => ({
      label: labels[index],
      stroke: index < 2 ? css(`--chart-${index + 1}`) : `hsl(${(index * 67 + 200) % 360} 50% 55%)`,
      width: 1.5,
      ...(index === 0 && wanted.length < 3 && { fill: css("--chart-1", 0.1) }),
      spanGaps: false,
      points: { show: true, size: 4, filter: alone },
      value: (_, value) => (value == null ? "–" : text(value)),
    }));
  }
  const paths = window.uPlot.paths.bars({ size: [0.8, 64], align: 1 });
  return [...wanted.keys()].reverse().map((index) => ({
    label: labels[index],
    fill: css(OUTCOMES[wanted[index]]),
    stroke: css(OUTCOMES[wanted[index]]),
    width: 0,
    paths,
    points: { show: false },
    value: (_, __, ___, i) => (i == null ? "–" : text(outcomes[wanted[index]]?.[i] ?? 0)),
  }));
}

function draw(figure) {
  const stacked = figure.matches(".outcomes");
  const wanted = figure.dataset.series.split(",");
  const lines = (figure.dataset.lines ?? "").split(";").filter(Boolean).map((each) => [Number(each.split("=")[0]), each.slice(each.indexOf("=") + 1)]);
  const text = write[figure.dataset.unit];
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `11px ${getComputedStyle(plots).fontFamily}` };
  const canvas = figure.querySelector(".canvas");
  const top = (high) => Math.max((high ?? 0) * 1.1, ...lines.map(([value]) => (value < (high ?? 0) * 2 ? value * 1.05 : 0)));
  const chart = new window.uPlot(
    {
      width: canvas.clientWidth,
      height: HEIGHT,
      cursor: { sync: { key: "telemetry" }, y: false },
      legend: { live: true, markers: { width: 0, fill: (drawn, index) => drawn.series[index].stroke?.(drawn, index) } },
      hooks: { drawAxes: [(drawn) => drawLines(drawn, lines)], setCursor: [(drawn) => drawn.cursor.left < 0 && rest(drawn)] },
      scales: { x: { range: () => [Date.now() / 1000 - range, Date.now() / 1000] }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), figure.dataset.unit === "share" ? 1 : figure.dataset.unit === "count" ? Math.max(1, top(high)) : top(high) || 1] } },
      axes: [{ ...axis, grid: { show: false }, space: 80, size: 24, gap: 4, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 60, gap: 8, space: 36, values: (_, ticks) => ticks.map(text), ...(figure.dataset.unit === "count" && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5] }) }],
      series: [{ label: stacked ? "from" : "at", value: at }, ...seriesOf(stacked, wanted, figure.dataset.labels.split(","), text)],
    },
    columns({ stacked, wanted }),
    canvas,
  );
  charts.push({ chart, wanted, stacked, lines, text, canvas, none: figure.querySelector(".none"), summary: figure.querySelector(".summary") });
}

// While nobody points, the legend tells of the newest values.
function rest(chart) {
  const last = chart.data[0].length - 1;
  if (last >= 0) chart.setLegend({ idx: last }, false);
}

function summarize({ stacked, wanted, lines, text }, drawn) {
  if (stacked) {
    const total = (name) => (outcomes[name] ?? []).reduce((sum, value) => sum + value, 0);
    return wanted.filter((name) => total(name) || name === "failed").map((name) => `${total(name).toLocaleString("en")} ${name === "caller" ? "callers' errors" : name}`).join(", ");
  }
  const values = drawn.slice(1).flat().filter((value) => value != null);
  const targets = lines.map(([value, label]) => `${label} ${text(value)}`);
  return [values.length && `peak ${text(Math.max(...values))}`, ...targets].filter(Boolean).join(", ");
}

function refresh() {
  for (const each of charts) {
    const drawn = columns(each);
    each.chart.setData(drawn);
    if (!(each.chart.cursor.left >= 0)) rest(each.chart);
    each.none.hidden = drawn.slice(1).some((column) => column.some((value) => value != null && (!each.stacked || value)));
    each.summary.textContent = summarize(each, drawn);
  }
}

async function load() {
  const since = Math.floor(Date.now() / 1000) - range;
  const wanted = [`telemetry?since=${since}&points=${isLive ? 600 : 300}&series=${names.join(",")}`, `marks?since=${since}`, ...(bars ? [`outcomes?since=${since}&points=48`] : [])];
  const [history, happened, ended] = await Promise.all(wanted.map((path) => fetch(`/admin/api/${path}`)));
  if (history.ok) data = await history.json();
  if (happened.ok) ({ marks } = await happened.json());
  if (ended?.ok) outcomes = await ended.json();
  refresh();
}

function valueOf(tick, name) {
  const [head, field] = name.split(".");
  const found = field ? tick.gpus.devices[Number(head.slice(3))]?.[field] : (tick.totals[name] ?? tick.host[name]);
  return typeof found === "number" ? found : null;
}

function add(tick) {
  const now = Math.floor(tick.time);
  if (now <= (data.times.at(-1) ?? 0)) return;
  data.times.push(now);
  for (const name of names) (data.series[name] ??= []).push(valueOf(tick, name));
  while (data.times[0] < now - range) {
    data.times.shift();
    for (const name of names) data.series[name].shift();
  }
  refresh();
}

const ownsState = !document.querySelector("[sse-connect]"); // elsewhere the page's own stream says how fresh it is
function say(state, text) {
  if (ownsState) [asOf.dataset.state, asOf.textContent] = [state, text];
}

function follow() {
  if (!isLive && !ownsState) return;
  stream = new EventSource("/admin/api/events");
  stream.addEventListener("open", () => say("live", "live"));
  stream.addEventListener("error", () => {
    if (asOf.dataset.state !== "lost") say("lost", `no answer since ${new Date().toLocaleTimeString()}: trying again`);
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => isBack().then(resume), 2000);
  });
  for (const kind of ["ready", "evicted", "restarting", "failed"]) {
    stream.addEventListener(`model.${kind}`, () => setTimeout(load, 200));
  }
  if (isLive) stream.addEventListener("tick", (event) => add(JSON.parse(event.data)));
}

async function resume() {
  await load().catch(() => {}); // the stream tells that nothing answers
  follow();
}

function rebuild() {
  colors.clear();
  for (const { chart } of charts.splice(0)) chart.destroy();
  figures.forEach(draw);
  refresh();
}

document.addEventListener("visibilitychange", () => {
  stream?.close();
  if (!document.hidden) resume();
});
addEventListener("pagehide", () => stream?.close());
addEventListener("resize", () => {
  for (const { chart, canvas } of charts) chart.setSize({ width: canvas.clientWidth, height: HEIGHT });
});
setInterval(() => !document.hidden && (!isLive || bars) && load().catch(() => {}), isLive ? 15_000 : 60_000);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
document.addEventListener("llmbox:theme", rebuild);
figures.forEach(draw);
resume();
