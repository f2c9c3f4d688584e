// Settings are searched by name, key and description; sections with a match open, and a link to a setting opens its own.

const search = document.getElementById("search");
const changedOnly = document.getElementById("changed-only");
const sections = [...document.querySelectorAll(".section")].map((section) => ({ section, open: section.open, rows: [...section.querySelectorAll("li")] }));

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const isFiltered = words.length > 0 || changedOnly.checked;
  let found = 0;
  for (const each of sections) {
    let here = 0;
    for (const row of each.rows) {
      const text = row.textContent.toLowerCase();
      const matches = words.every((word) => text.includes(word)) && (!changedOnly.checked || row.matches(".changed"));
      row.hidden = !matches;
      here += matches;
    }
    each.section.hidden = !here;
    each.section.open = isFiltered || each.open;
    found += here;
  }
  document.getElementById("found").textContent = isFiltered ? `${found} ${found === 1 ? "setting matches" : "settings match"}` : "";
}

function reveal() {
  const field = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const section = field?.closest(".section");
  if (!section) return;
  section.open = true;
  field.scrollIntoView({ block: "center" });
  field.focus?.();
}

document.getElementById("find").hidden = false;
search.addEventListener("input", filter);
search.addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
changedOnly.addEventListener("change", filter);
addEventListener("hashchange", reveal);
filter();
reveal();
