// Time series: history once from the admin API, then the event stream's ticks.

const plots = document.getElementById("plots");
const range = Number(plots.dataset.range);
const names = [...plots.querySelectorAll(".plot")].flatMap((each) => each.dataset.series.split(","));
const asOf = document.getElementById("as-of");
const charts = [];
let data = { times: [], series: {} };
let stream = null;

const write = {
  rate: (value) => (value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en")),
  count: (value) => String(Math.round(value * 10) / 10),
  seconds: (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`),
  share: (value) => `${Math.round(value * 100)} %`,
  bytes: (value) => (value < 1e9 ? `${Math.round(value / 1e6)} MB` : `${(value / 1e9).toFixed(1)} GB`),
  watts: (value) => `${Math.round(value)} W`,
};

const two = (number) => String(number).padStart(2, "0");
function clock(unix) {
  const when = new Date(unix * 1000);
  const time = `${two(when.getHours())}:${two(when.getMinutes())}`;
  if (range <= 600) return `${time}:${two(when.getSeconds())}`;
  return range <= 86400 ? time : `${when.getMonth() + 1}/${when.getDate()} ${time}`;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const columns = (wanted) => [data.times, ...wanted.map((name) => data.series[name] ?? data.times.map(() => null))];

function draw(figure) {
  const wanted = figure.dataset.series.split(",");
  const labels = figure.dataset.labels.split(",");
  const text = write[figure.dataset.unit];
  const ink = css("--quiet");
  const grid = { stroke: css("--line"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px system-ui" };
  const canvas = figure.querySelector(".canvas");
  const chart = new window.uPlot(
    {
      width: canvas.clientWidth,
      height: 180,
      cursor: { sync: { key: "telemetry" }, y: false },
      legend: { live: true },
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), figure.dataset.unit === "share" ? 1 : (high ?? 1) * 1.1 || 1] } },
      axes: [{ ...axis, space: 80, size: 30, values: (_, marks) => marks.map(clock) }, { ...axis, size: 64, values: (_, marks) => marks.map(text) }],
      series: [
        { label: "at", value: (_, value) => (value == null ? "–" : clock(value)) },
        ...wanted.map((_, index) => ({
          label: labels[index],
          stroke: css(index ? "--chart-2" : "--chart-1"),
          width: 1.5,
          spanGaps: false,
          points: { show: false },
          value: (_, value) => (value == null ? "–" : text(value)),
        })),
      ],
    },
    columns(wanted),
    canvas,
  );
  charts.push({ chart, wanted, canvas });
}

function refresh() {
  for (const { chart, wanted } of charts) chart.setData(columns(wanted));
}

async function load() {
  const since = Math.floor(Date.now() / 1000) - range;
  const response = await fetch(`/admin/api/telemetry?since=${since}&series=${names.join(",")}`);
  if (response.ok) data = await response.json();
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

function follow() {
  stream = new EventSource("/admin/api/events");
  stream.addEventListener("open", () => ((asOf.dataset.state = "live"), (asOf.textContent = "live")));
  stream.addEventListener("error", () => ((asOf.dataset.state = "lost"), (asOf.textContent = "connection lost, trying again")));
  if (range <= 600) stream.addEventListener("tick", (event) => add(JSON.parse(event.data)));
}

async function resume() {
  await load();
  follow();
}

document.addEventListener("visibilitychange", () => {
  stream?.close();
  if (!document.hidden) resume();
});
addEventListener("pagehide", () => stream?.close());
addEventListener("resize", () => {
  for (const { chart, canvas } of charts) chart.setSize({ width: canvas.clientWidth, height: 180 });
});
setInterval(() => range > 600 && !document.hidden && load(), 60_000);

for (const figure of plots.querySelectorAll(".plot")) draw(figure);
resume();
