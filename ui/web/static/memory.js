// The block map tells of the square under the pointer or under the arrow keys' cursor, and goes on after a swap.

const cursors = new Map(); // by the map's id: the square
const plain = new Map(); // what stands below while nobody points

function squares(map) {
  const cells = [];
  for (const run of map.dataset.cells.split(";")) {
    const [count, ...cell] = run.split(",").map(Number);
    for (let i = 0; i < count; i++) cells.push(cell);
  }
  return cells;
}

function words(map, index) {
  const [live, cached, owner, holders] = squares(map)[index] ?? [];
  if (live === undefined) return "";
  const each = Number(map.dataset.each);
  const first = index * each;
  const last = Math.min(first + each, Number(map.dataset.blocks)) - 1;
  const free = last - first + 1 - live - cached;
  const where = first === last ? `Block ${first}` : `Blocks ${first}–${last}`;
  const parts = [[live, "in use"], [cached, "cached"], [free, "free"]].filter(([n]) => n);
  const what = first === last ? parts[0][1] : parts.map(([n, word]) => `${n} ${word}`).join(", ");
  const name = owner < 0 ? "" : map.dataset.owners.split(" ")[owner];
  const by = !name ? "" : live ? `; held by ${name}${holders > 1 ? ` and ${holders - 1} more` : ""}` : `; computed for ${name}`;
  return `${where}: ${what}${by}.`;
}

function say(map) {
  const told = document.getElementById(map.dataset.say);
  const at = cursors.get(map.id);
  if (at === undefined) return;
  if (!plain.has(map.id)) plain.set(map.id, told.textContent);
  told.textContent = words(map, at) || plain.get(map.id);
}

function rest(map) {
  cursors.delete(map.id);
  const told = document.getElementById(map.dataset.say);
  if (plain.has(map.id) && told) told.textContent = plain.get(map.id);
  plain.delete(map.id);
}

const columns = (map) => map.viewBox.baseVal.width / 10;

document.addEventListener("pointermove", (event) => {
  const map = event.target.closest?.(".map");
  if (!map) return;
  const box = map.getBoundingClientRect();
  const scale = map.viewBox.baseVal.width / box.width / 10;
  const [x, y] = [Math.floor((event.clientX - box.left) * scale), Math.floor((event.clientY - box.top) * scale)];
  cursors.set(map.id, y * columns(map) + x);
  say(map);
});
document.addEventListener("pointerout", (event) => event.target.closest?.(".map") && !event.relatedTarget?.closest?.(".map") && rest(event.target.closest(".map")));

document.addEventListener("keydown", (event) => {
  const map = event.target.closest?.(".map");
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: map && columns(map), ArrowUp: map && -columns(map) }[event.key];
  if (!map || !step) return;
  event.preventDefault();
  const next = (cursors.get(map.id) ?? -step) + step;
  if (next >= 0 && words(map, next)) cursors.set(map.id, next);
  say(map);
});
document.addEventListener("focusout", (event) => {
  const left = event.target.closest?.(".map");
  // A swap takes the focused map away and gives the focus to the new one: that is no leaving.
  if (left) setTimeout(() => document.activeElement?.id !== left.id && rest(document.getElementById(left.id) ?? left), 50);
});

document.addEventListener("htmx:afterSwap", () => {
  plain.clear();
  for (const map of document.querySelectorAll(".map")) say(map);
});
