// What the page knows: runs, how they are grouped and named, and which of them are selected.

export const runs = new Map(); // id -> summary
export const groups = new Map(); // key -> { key, comparison, label, runs }; its runs differ only in their seed
export const selected = new Map(); // id -> { known, columns, front }
const slots = new Map(); // key of a group -> number of its line style

export const $ = (id) => document.getElementById(id);

export function element(name, classes, text) {
  const created = document.createElement(name);
  if (classes) created.className = classes;
  if (text !== undefined) created.textContent = text;
  return created;
}

// method=fedavg,seed=1 -> fedavg · seed 1
function shorten(name, hasSeed) {
  const words = name.split(",").map((part) => {
    const [key, value] = part.split("=");
    if (value === undefined) return part;
    if (!key.endsWith("seed")) return value.replaceAll("_", " ");
    return hasSeed ? `seed ${value}` : "";
  });
  return words.filter(Boolean).join(" · ");
}

function lastFolder(run) {
  return run.name.slice(run.name.lastIndexOf("/") + 1);
}

export function updateGroups() {
  groups.clear();
  const byName = [...runs.values()].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  for (const run of byName) {
    const group = groups.get(run.group);
    if (group) group.runs.push(run);
    else groups.set(run.group, { key: run.group, comparison: run.comparison, runs: [run] });
  }
  for (const group of groups.values()) {
    const name = lastFolder(group.runs[0]);
    group.short = shorten(name, group.runs.length === 1) || name;
  }
  makeUnique([...groups.values()], (group) => group.runs[0].name);
  for (const run of byName) run.short = shorten(lastFolder(run), true) || run.name;
  makeUnique(byName, (run) => run.name);
}

// Set the label of each: the short name, with its folder where another has the same, else the full name.
function makeUnique(items, getName) {
  const forms = [
    (item) => item.short,
    (item) => (item.comparison ? `${item.comparison}/${item.short}` : item.short),
    getName,
  ];
  let ambiguous = items;
  for (const form of forms) {
    const counts = new Map();
    for (const item of ambiguous) counts.set(form(item), (counts.get(form(item)) ?? 0) + 1);
    for (const item of ambiguous) item.label = form(item);
    ambiguous = ambiguous.filter((item) => counts.get(form(item)) > 1);
  }
}

export function state(run) {
  if (run.has_table || (run.rounds && run.done >= run.rounds)) return "finished";
  if (!run.changed) return "waiting";
  return Date.now() / 1000 - run.changed < 30 ? "running" : "stopped";
}

// The line style of a group: the first that is free, and the same as long as it is selected.
export function slotOf(key) {
  if (!slots.has(key)) {
    const used = new Set(slots.values());
    let slot = 0;
    while (used.has(slot)) slot += 1;
    slots.set(key, slot);
  }
  return slots.get(key);
}

export function releaseSlots() {
  const used = new Set([...selected.keys()].map((id) => runs.get(id)?.group));
  for (const key of [...slots.keys()]) if (!used.has(key)) slots.delete(key);
}

// The selected runs by group: [group, [[run, view], ...]].
export function selectedGroups() {
  const views = new Map();
  for (const [id, view] of selected) {
    const run = runs.get(id);
    if (!run) continue;
    if (!views.has(run.group)) views.set(run.group, []);
    views.get(run.group).push([run, view]);
  }
  const bySlot = [...views].sort(([a], [b]) => slotOf(a) - slotOf(b));
  return bySlot.map(([key, members]) => [groups.get(key), members]);
}

export function meanAndSpread(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  if (values.length < 2) return [mean, 0];
  return [mean, Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1))];
}
