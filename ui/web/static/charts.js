// Time series: history once from the admin API, then the event stream's ticks.

const plots = document.getElementById("plots");
const range = Number(plots.dataset.range);
const names = [...plots.querySelectorAll(".plot")].flatMap((each) => each.dataset.series.split(","));
const asOf = document.getElementById("as-of");
const charts = [];
let data = { times: [], series: {} };
let marks = [];
let stream = null;

const write = {
  rate: (value) => (value < 10 ? String(Math.round(value * 100) / 100) : Math.round(value).toLocaleString("en")),
  count: (value) => String(Math.round(value * 10) / 10),
  megahertz: (value) => `${Math.round(value)} MHz`,
  degrees: (value) => `${Math.round(value)} °C`,
  seconds: (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`),
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
  if (range <= 600) return `${time}:${two(when.getSeconds())}`;
  return range <= 86400 ? time : `${when.getMonth() + 1}/${when.getDate()} ${time}`;
}

const MARKS = { load: "--chart-1", eviction: "--chart-2", refusal: "--chart-2", restart: "--fail", failure: "--fail" };

// Vertical lines where something happened; what it was stands in the legend when the cursor is near.
function drawMarks(chart) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of marks) {
    const x = Math.round(chart.valToPos(mark.time, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = css(MARKS[mark.kind] ?? "--quiet");
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function at(chart, unix) {
  if (unix == null) return "–";
  const near = marks.find((mark) => Math.abs(chart.valToPos(mark.time, "x") - chart.valToPos(unix, "x")) < 5);
  return near ? `${clock(unix)}, ${near.kind} of ${near.model}` : clock(unix);
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
      hooks: { drawAxes: [drawMarks] },
      scales: { x: { range: () => [Date.now() / 1000 - range, Date.now() / 1000] }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), figure.dataset.unit === "share" ? 1 : (high ?? 1) * 1.1 || 1] } },
      axes: [{ ...axis, space: 80, size: 30, values: (_, marks) => marks.map(clock) }, { ...axis, size: 64, values: (_, marks) => marks.map(text), ...(figure.dataset.unit === "count" && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }) }],
      series: [
        { label: "at", value: at },
        ...wanted.map((_, index) => ({
          label: labels[index],
          stroke: index < 2 ? css(`--chart-${index + 1}`) : `hsl(${(index * 67 + 200) % 360} 50% 55%)`,
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
  charts.push({ chart, wanted, canvas, none: figure.querySelector(".none") });
}

function refresh() {
  for (const { chart, wanted, none } of charts) {
    const drawn = columns(wanted);
    chart.setData(drawn);
    none.hidden = drawn.slice(1).some((column) => column.some((value) => value != null));
  }
}

async function load() {
  const since = Math.floor(Date.now() / 1000) - range;
  const wanted = [`telemetry?since=${since}&series=${names.join(",")}`, `marks?since=${since}`];
  const [history, happened] = await Promise.all(wanted.map((path) => fetch(`/admin/api/${path}`)));
  if (history.ok) data = await history.json();
  if (happened.ok) ({ marks } = await happened.json());
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
  for (const kind of ["ready", "evicted", "restarting", "failed"]) {
    stream.addEventListener(`model.${kind}`, () => setTimeout(load, 200));
  }
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

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
for (const figure of plots.querySelectorAll(".plot")) draw(figure);
resume();
