// The list of runs: comparisons, in them groups of runs that differ in their seed, in those the runs.

import { percent, percentWithSpread, swatch } from "./chart.js";
import { $, element, groups, meanAndSpread, runs, selected, slotOf, state } from "./state.js";

export const SORTS = {
  newest: ["newest first", (a, b) => changed(b) - changed(a)],
  name: ["name", (a, b) => a.comparison.localeCompare(b.comparison, "en", { numeric: true })],
  accuracy: ["accuracy", (a, b) => (accuracyOf(b)?.[0] ?? -1) - (accuracyOf(a)?.[0] ?? -1)],
  method: ["method", (a, b) => a.runs[0].method.localeCompare(b.runs[0].method)],
};

const items = new Map(); // key of a comparison, group or run -> its item
const closed = new Set(); // comparisons that show only their name
const opened = new Set(); // groups that show their runs
let select = () => {};

export function onSelect(callback) {
  select = callback;
}

function changed(group) {
  return Math.max(...group.runs.map((run) => run.changed));
}

function accuracyOf(group) {
  const known = group.runs.map((run) => run.accuracy).filter((value) => value !== null);
  return known.length ? meanAndSpread(known) : null;
}

function stateOf(group) {
  const counts = new Map();
  for (const run of group.runs) counts.set(state(run), (counts.get(state(run)) ?? 0) + 1);
  if (counts.size === 1) return counts.keys().next().value;
  return [...counts].map(([name, count]) => `${count} ${name}`).join(", ");
}

function describe(group) {
  const first = group.runs[0];
  const done = Math.min(...group.runs.map((run) => run.done));
  const rounds = first.rounds ? `${done}/${first.rounds}` : done ? String(done) : "";
  const about = group.runs.length > 1 ? first.about.replace(/( · )?seed [^·]*$/, "") : first.about;
  return [stateOf(group), rounds, first.method, about].filter(Boolean).join(" · ");
}

function cached(key, make) {
  if (!items.has(key)) items.set(key, make());
  return items.get(key);
}

function setTicks(box, members) {
  const count = members.filter((run) => selected.has(run.id)).length;
  box.checked = count === members.length;
  box.indeterminate = count > 0 && count < members.length;
  return count > 0;
}

function makeRow(key) {
  const item = element("li");
  const row = element("label");
  const box = element("input");
  box.type = "checkbox";
  row.append(box, element("span", "swatch"), element("span", "name"), element("span", "value"), element("span", "more"));
  item.append(row);
  item.dataset.key = key;
  return item;
}

function updateGroup(group) {
  const item = cached(`group ${group.key}`, () => makeRow(group.key));
  const isSelected = group.runs.some((run) => selected.has(run.id));
  const ticks = group.runs.map((run) => [run.id, run.label, selected.has(run.id), run.accuracy, state(run), run.done]);
  const shown = JSON.stringify([group.label, isSelected && slotOf(group.key), describe(group), ticks]);
  if (item.shown === shown) return item;
  item.shown = shown;
  const box = item.querySelector("input");
  box.onchange = () => select(group.runs.map((run) => run.id), box.checked);
  const isOn = setTicks(box, group.runs);
  item.className = "group";
  item.firstChild.classList.toggle("on", isOn);
  item.firstChild.title = group.runs.length > 1 ? `${group.label}: ${group.runs.length} runs` : group.runs[0].name;
  item.querySelector(".swatch").replaceChildren(...(isOn ? [swatch(slotOf(group.key))] : []));
  item.querySelector(".name").textContent = group.comparison ? group.label.replace(`${group.comparison}/`, "") : group.label;
  const accuracy = accuracyOf(group);
  item.querySelector(".value").textContent = accuracy ? percentWithSpread(accuracy, group.runs.length) : "–";
  item.querySelector(".more").textContent = describe(group);
  item.querySelector(".seeds")?.remove();
  if (group.runs.length > 1) item.append(makeSeeds(group));
  return item;
}

function makeSeeds(group) {
  const details = element("details", "seeds");
  details.open = opened.has(group.key);
  details.append(element("summary", "", `${group.runs.length} seeds`));
  const fill = () => {
    if (details.children.length > 1) return;
    const list = element("ul");
    list.append(...group.runs.map(updateSeed));
    details.append(list);
  };
  if (details.open) fill();
  details.ontoggle = () => {
    opened[details.open ? "add" : "delete"](group.key);
    if (details.open) fill();
  };
  return details;
}

function updateSeed(run) {
  const item = cached(`run ${run.id}`, () => makeRow(run.id));
  const box = item.querySelector("input");
  box.onchange = () => select([run.id], box.checked);
  setTicks(box, [run]);
  item.firstChild.title = run.name;
  item.querySelector(".name").textContent = run.label;
  item.querySelector(".value").textContent = percent(run.accuracy);
  item.querySelector(".more").textContent = [state(run), run.rounds ? `${run.done}/${run.rounds}` : ""].filter(Boolean).join(" · ");
  return item;
}

function updateHeading(name, members) {
  const item = cached(`comparison ${name}`, () => {
    const created = element("li", "comparison");
    const row = element("div", "heading");
    const box = element("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", `Select all of ${name || "the single runs"}`);
    const button = element("button", "fold", name || "single runs");
    button.type = "button";
    row.append(box, button, element("span", "faint"));
    created.append(row);
    return created;
  });
  const all = members.flatMap((group) => group.runs);
  const box = item.querySelector("input");
  box.onchange = () => select(all.map((run) => run.id), box.checked);
  setTicks(box, all);
  const button = item.querySelector("button");
  button.setAttribute("aria-expanded", String(!closed.has(name)));
  button.onclick = () => {
    closed[closed.has(name) ? "delete" : "add"](name);
    updateList();
  };
  const count = all.length > members.length ? `${members.length} groups, ${all.length} runs` : `${members.length}`;
  item.querySelector(".faint").textContent = count;
  return item;
}

function matches(group, words) {
  return group.runs.some((run) => {
    const text = `${run.name} ${run.method} ${run.about} ${state(run)}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

export function listVisible() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [, compare] = SORTS[$("sort").value];
  const found = [...groups.values()].filter((group) => matches(group, words));
  return found.sort((a, b) => compare(a, b) || a.label.localeCompare(b.label, "en", { numeric: true }));
}

export function updateList() {
  const visible = listVisible();
  const comparisons = new Map(); // in the order of their first group
  for (const group of visible) {
    if (!comparisons.has(group.comparison)) comparisons.set(group.comparison, []);
    comparisons.get(group.comparison).push(group);
  }
  const hasHeadings = comparisons.size > 1 || !comparisons.has("");
  const lines = [...comparisons].flatMap(([name, members]) => [
    ...(hasHeadings ? [updateHeading(name, members)] : []),
    ...(hasHeadings && closed.has(name) ? [] : members.map(updateGroup)),
  ]);
  const list = $("list");
  // an item that is moved loses the focus
  if (lines.length !== list.children.length || lines.some((line, index) => line !== list.children[index])) {
    list.replaceChildren(...lines);
  }
  const shown = visible.reduce((sum, group) => sum + group.runs.length, 0);
  $("count").textContent = shown === runs.size ? `${runs.size}` : `${shown} of ${runs.size}`;
}

export function forgetItems() {
  const known = new Set([...runs.keys()].map((id) => `run ${id}`));
  for (const key of groups.keys()) known.add(`group ${key}`);
  for (const group of groups.values()) known.add(`comparison ${group.comparison}`);
  for (const key of [...items.keys()]) if (!known.has(key)) items.delete(key);
}
