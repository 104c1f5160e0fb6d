// The page: a list of runs, figures of the selected ones, and updates by server-sent events.

import { draw, percent, short, swatch } from "./chart.js";
import { followFleets, showFleet } from "./fleet.js";
import { drawLanes, outcomeKind, pixels } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const MAX_POINTS = 3000; // per curve
const MAX_SELECTED = 16;
const AXES = {
  round: ["rounds", short],
  seconds: ["seconds", short],
  macs: ["MACs spent", short],
  bytes: ["bytes sent", short],
};
const VALUES = {
  accuracy: ["test accuracy", (value) => percent(value, 0), percent],
  devices: ["accuracy on devices", (value) => percent(value, 0), percent],
  spread: ["spread over devices", (value) => percent(value, 0), percent],
  worst: ["accuracy of the worst decile of devices", (value) => percent(value, 0), percent],
  loss: ["training loss", short, short],
  used: ["useful share of MACs", (value) => percent(value, 0), percent],
  merged: ["share of devices merged", (value) => percent(value, 0), percent],
  side: ["side of scaled images", short, short],
  staleness: ["staleness of updates", short, short],
};

const SORTS = {
  newest: ["newest first", (a, b) => b.changed - a.changed],
  name: ["name", () => 0],
  accuracy: ["accuracy", (a, b) => (b.accuracy ?? -1) - (a.accuracy ?? -1)],
  method: ["method", (a, b) => a.method.localeCompare(b.method)],
};

const runs = new Map(); // id -> summary
const nameCounts = new Map(); // short name -> how many runs have it
const items = new Map(); // id -> its line in the list
const selected = new Map(); // id -> { slot, known, columns, front }
let since = ""; // epoch and version of the list
let source = null;
let isRedrawPending = false;
let hasChosenAxis = false;

function label(run) {
  const folders = run.name.split("/");
  const name = folders.pop();
  const words = name.split(",").map((part) => {
    const [key, value] = part.split("=");
    return value === undefined ? part : key.endsWith("seed") ? `seed ${value}` : value;
  });
  return { short: words.join(" · "), parent: folders.join("/") };
}

// The short name, with its folder where another run has the same.
function uniqueLabel(run) {
  const { short: name, parent } = label(run);
  return nameCounts.get(name) > 1 && parent ? `${parent}/${name}` : name;
}

function countNames() {
  nameCounts.clear();
  for (const run of runs.values()) {
    const name = label(run).short;
    nameCounts.set(name, (nameCounts.get(name) ?? 0) + 1);
  }
}

function state(run) {
  if (run.has_table || (run.rounds && run.done >= run.rounds)) return "finished";
  if (!run.changed) return "waiting";
  return Date.now() / 1000 - run.changed < 30 ? "running" : "stopped";
}

function element(name, classes, text) {
  const created = document.createElement(name);
  if (classes) created.className = classes;
  if (text !== undefined) created.textContent = text;
  return created;
}

// the list ---------------------------------------------------------------------------------------

function updateItem(run) {
  let item = items.get(run.id);
  if (!item) {
    item = element("li");
    const box = element("input");
    box.type = "checkbox";
    box.onchange = () => select(run.id, box.checked);
    const row = element("label");
    row.append(box, element("span", "swatch"), element("span", "name"), element("span", "value"), element("span", "more"));
    item.append(row);
    items.set(run.id, item);
  }
  const name = label(run);
  const row = item.firstChild;
  const isSelected = selected.has(run.id);
  row.title = run.name;
  row.classList.toggle("on", isSelected);
  item.querySelector("input").checked = isSelected;
  item.querySelector(".swatch").replaceChildren(...(isSelected ? [swatch(selected.get(run.id).slot)] : []));
  item.querySelector(".name").textContent = uniqueLabel(run);
  item.querySelector(".value").textContent = percent(run.accuracy);
  const rounds = run.rounds ? `${run.done}/${run.rounds}` : run.done ? String(run.done) : "";
  const details = [state(run), rounds, run.method, run.about, name.parent].filter(Boolean);
  item.querySelector(".more").textContent = details.join(" · ");
  return item;
}

function updateList() {
  countNames();
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (run) => {
    const text = `${run.name} ${run.method} ${run.about} ${state(run)}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const [, compare] = SORTS[$("sort").value];
  const visible = [...runs.values()].filter(matches).sort((a, b) => compare(a, b) || a.name.localeCompare(b.name));
  $("list").replaceChildren(...visible.map(updateItem));
  $("count").textContent = visible.length === runs.size ? `${runs.size}` : `${visible.length} of ${runs.size}`;
}

function mergeRuns(update) {
  since = update.since;
  for (const run of update.runs) runs.set(run.id, run);
  if (update.count !== runs.size) {
    fetchRuns();
    return;
  }
  const hasNew = update.runs.some((run) => !items.has(run.id));
  if (hasNew) updateList();
  else update.runs.forEach(updateItem);
}

async function fetchRuns() {
  const update = await (await fetch("api/runs")).json();
  runs.clear();
  for (const run of update.runs) runs.set(run.id, run);
  since = update.since;
  for (const id of [...items.keys()].filter((id) => !runs.has(id))) items.delete(id);
  updateList();
  for (const id of [...selected.keys()].filter((id) => !runs.has(id))) select(id, false); // deleted
}

// selection --------------------------------------------------------------------------------------

function select(id, isOn) {
  if (isOn && !selected.has(id)) {
    if (selected.size >= MAX_SELECTED) selected.delete(selected.keys().next().value);
    const usedSlots = new Set([...selected.values()].map((view) => view.slot));
    let slot = 0;
    while (usedSlots.has(slot)) slot += 1;
    selected.set(id, { slot, known: 0, columns: null, front: null });
  } else if (!isOn) {
    selected.delete(id);
  }
  history.replaceState(null, "", `#${[...selected.keys()].map(encodeURIComponent).join("&")}`);
  for (const run of runs.values()) if (items.has(run.id)) updateItem(run);
  updateRunChoice();
  listen();
  redraw();
}

function listen() {
  if (source) source.close();
  const query = new URLSearchParams([...selected.keys()].map((id) => ["run", id]));
  query.set("since", since + [...selected.values()].map((view) => view.known).join("-"));
  source = new EventSource(`api/stream?${query}`);
  source.onopen = () => showConnection(true);
  source.onerror = () => {
    showConnection(false);
    // the browser retries a refused connection, but not a refused response
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
  source.addEventListener("runs", (event) => mergeRuns(JSON.parse(event.data)));
  source.addEventListener("rounds", (event) => appendRounds(JSON.parse(event.data)));
  followFleets(source);
  source.addEventListener("front", (event) => {
    const update = JSON.parse(event.data);
    const view = selected.get(update.run);
    if (!view) return;
    view.known = update.known;
    view.front = update;
    redraw();
  });
}

function showConnection(isLive) {
  $("connection").classList.toggle("live", isLive);
  $("connection-text").textContent = isLive ? "live" : "reconnecting";
}

function appendRounds(update) {
  const view = selected.get(update.run);
  if (!view) return;
  if (!view.columns || update.from === 0) view.columns = update.columns;
  else for (const [name, values] of Object.entries(update.columns)) view.columns[name].push(...values);
  view.known = update.known;
  if (view.columns.round.length > MAX_POINTS) {
    const last = view.columns.round.length - 1;
    for (const name of Object.keys(view.columns)) {
      view.columns[name] = view.columns[name].filter((_, index) => index % 2 === last % 2);
    }
  }
  redraw();
  if ($("run-choice").value === update.run) updateLanes();
}

// figures ----------------------------------------------------------------------------------------

function redraw() {
  if (isRedrawPending) return;
  isRedrawPending = true;
  requestAnimationFrame(() => {
    isRedrawPending = false;
    const isSearch = (id) => runs.get(id)?.is_search;
    $("curves").hidden = $("time").hidden = selected.size > 0 && [...selected.keys()].every(isSearch);
    drawCurves();
    updateNewest();
    drawFront();
  });
}

function viewsWithRounds() {
  return [...selected].filter(([id, view]) => view.columns && runs.has(id));
}

// a run without rounds merges versions, which have a staleness
function countsVersions(view) {
  return view.columns.staleness.some((value) => value !== null);
}

function unitOfRuns() {
  const views = viewsWithRounds().map(([, view]) => view);
  const count = views.filter(countsVersions).length;
  return count === 0 ? "rounds" : count === views.length ? "versions" : "rounds or versions";
}

// The mean of each value and those before it, as many as the page says.
function smooth(values) {
  const count = Math.max(1, Math.min(99, Number($("smooth").value) || 1));
  return values.map((_, end) => {
    const window = values.slice(Math.max(0, end + 1 - count), end + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

// One line per group of runs that differ in their seed: the mean, and a band of one standard deviation.
function averageSeeds(lines) {
  const groups = new Map();
  for (const line of lines) {
    const key = runs.get(line.id).name.replace(/,?\bseed=[^,/]*/g, "");
    groups.set(key, [...(groups.get(key) ?? []), line]);
  }
  return [...groups].map(([key, members]) => {
    if (members.length === 1) return members[0];
    const first = members[0];
    const end = Math.min(...members.map((line) => line.x.at(-1) ?? 0));
    const x = first.x.filter((value) => value <= end);
    const columns = x.map((value) => members.map((line) => interpolate(line, value)));
    const y = columns.map((values) => values.reduce((sum, value) => sum + value, 0) / values.length);
    const band = columns.map((values, i) => Math.sqrt(values.reduce((sum, value) => sum + (value - y[i]) ** 2, 0) / (values.length - 1)));
    const name = label({ name: key }).short || key;
    return { ...first, label: `${name} (${members.length} seeds)`, x, y, band };
  });
}

function interpolate(line, x) {
  const after = line.x.findIndex((value) => value >= x);
  if (after < 0) return line.y.at(-1);
  if (after === 0 || line.x[after] === x) return line.y[after];
  const part = (x - line.x[after - 1]) / (line.x[after] - line.x[after - 1]);
  return line.y[after - 1] + part * (line.y[after] - line.y[after - 1]);
}

function drawCurves() {
  const unit = unitOfRuns();
  AXES.round[0] = $("unit").textContent = $("x").options[0].textContent = unit;
  if (!hasChosenAxis) $("x").value = unit === "rounds" ? "round" : "seconds"; // which all runs share
  const [x, y] = [$("x").value, $("y").value];
  const lines = viewsWithRounds().map(([id, view]) => {
    const { columns, slot } = view;
    const points = columns[y].map((value, row) => [columns[x][row], value, row]).filter(([, value]) => value !== null);
    const pick = (field) => points.map((point) => point[field]);
    const unit = countsVersions(view) ? "version" : "round";
    return { id, label: uniqueLabel(runs.get(id)), slot, x: pick(0), y: smooth(pick(1)), rows: pick(2), columns, unit };
  });
  const series = $("seeds").checked ? averageSeeds(lines) : lines;
  const [xLabel, xFormat] = AXES[x];
  const [yLabel, yFormat, format] = VALUES[y];
  const tip = (line, index) => {
    const c = line.columns;
    const row = line.rows[index];
    return (
      `${line.label}\n${yLabel}: ${format(line.y[index])}\n${line.unit} ${c.round[row]}, ${short(c.seconds[row])} s, ` +
      `${short(c.macs[row])}MACs, ${short(c.bytes[row])}B${pixels(c.side[row])}`
    );
  };
  draw($("chart"), series, { xLabel, yLabel, xFormat, yFormat, tip });
  const newest = series.map((line) => `${line.label}: ${format(line.y.at(-1) ?? null)}`).join("; ");
  $("chart-text").textContent = series.length
    ? `Line chart of ${yLabel} against ${xLabel}. Newest values: ${newest}.`
    : "Select runs to see their curves.";
}

function updateNewest() {
  const rows = viewsWithRounds().map(([id, view]) => {
    const row = element("tr");
    const last = (column) => view.columns[column].findLast((value) => value !== null) ?? null;
    const name = element("td");
    name.append(swatch(view.slot), uniqueLabel(runs.get(id)));
    row.append(name);
    const cells = [short(last("round")), short(last("seconds")), short(last("macs")), short(last("bytes"))];
    for (const text of [...cells, percent(last("accuracy")), short(last("loss")), percent(last("used"), 0)]) {
      row.append(element("td", "", text));
    }
    return row;
  });
  $("newest").tBodies[0].replaceChildren(...rows);
}

function drawFront() {
  const searches = [...selected].filter(([id, view]) => view.front && runs.has(id));
  $("front").hidden = !searches.length;
  if (!searches.length) return;
  const series = searches.flatMap(([id, view]) => {
    const name = label(runs.get(id)).short;
    const { points, front } = view.front;
    const pick = (pairs, field) => pairs.map((pair) => pair[field]);
    return [
      { label: name, slot: view.slot, kind: "cloud", x: pick(points, 0), y: pick(points, 1) },
      { label: `${name}, front`, slot: view.slot, kind: "steps", x: pick(front, 0), y: pick(front, 1) },
    ];
  });
  const [xLabel, yLabel] = [searches[0][1].front.cost, "accuracy after a short training"];
  const tip = (line, index) => `${line.label}\n${xLabel}: ${short(line.x[index])}\n${yLabel}: ${percent(line.y[index])}`;
  draw($("pareto"), series, { xLabel, yLabel, xFormat: short, yFormat: (value) => percent(value, 1), tip });
  $("pareto-text").textContent = searches
    .map(([id, view]) => {
      const { known, front } = view.front;
      const range = front.length ? `, from ${percent(front[0][1])} to ${percent(front.at(-1)[1])}` : "";
      return `${label(runs.get(id)).short}: ${known} short trainings, ${front.length} vectors on the front${range}.`;
    })
    .join(" ");
}

// devices ----------------------------------------------------------------------------------------

function updateRunChoice() {
  const before = $("run-choice").value;
  const options = [...selected.keys()].filter((id) => runs.has(id)).map((id) => {
    const option = element("option", "", uniqueLabel(runs.get(id)));
    option.value = id;
    return option;
  });
  $("run-choice").replaceChildren(...options);
  if (selected.has(before)) $("run-choice").value = before;
  if ($("run-choice").value !== before) showRun();
}

function showRun() {
  showFleet($("run-choice").value);
  updateLanes();
  updateConfig();
}

let isFetching = false;
let mustFetchAgain = false;

async function updateLanes() {
  const id = $("run-choice").value;
  if (isFetching) {
    mustFetchAgain = true;
    return;
  }
  isFetching = true;
  try {
    const query = $("follow").checked ? "" : `&last=${$("round").value}`;
    const hasDevices = runs.has(id) && !runs.get(id).is_search;
    const response = hasDevices ? await fetch(`api/timeline?run=${encodeURIComponent(id)}${query}`) : null;
    const timeline = response?.ok ? await response.json() : { first: 1, last: 0, known: 1, rounds: [], unit: "round" };
    $("round").max = Math.max(1, timeline.known);
    if ($("follow").checked) $("round").value = timeline.known;
    $("round-text").textContent = $("round").value;
    $("round-unit").textContent = $("task-unit").textContent = timeline.unit;
    describeTasks(timeline, drawLanes($("lanes"), timeline));
  } catch {
    // the server is down: the next update draws again
  } finally {
    isFetching = false;
    if (mustFetchAgain) {
      mustFetchAgain = false;
      updateLanes();
    }
  }
}

function describeTasks(timeline, { tasks, devices }) {
  const counts = new Map();
  for (const task of tasks) counts.set(outcomeKind(task), (counts.get(outcomeKind(task)) ?? 0) + 1);
  const outcomes = [...counts].map(([kind, count]) => `${count} ${kind}`).join(", ");
  const note = timeline.rounds.every((round) => round.whole) ? "" : ` Only the first tasks of each ${timeline.unit} are shown.`;
  $("lanes-text").textContent = tasks.length
    ? `${timeline.unit === "version" ? "Versions" : "Rounds"} ${timeline.first} to ${timeline.last}, ${devices.length} devices, ${tasks.length} tasks: ${outcomes}. ` +
      `A bar is a mini-batch; the stronger it is, the more of the network it trains. Hatched tasks were not merged.${note}`
    : "No tasks yet.";
  const rows = tasks.map((task) => {
    const row = element("tr");
    const tableRows = task.rows.length ? `${Math.min(...task.rows)}–${Math.max(...task.rows)}` : "–";
    const times = [task.opened + (task.starts[0] ?? 0), task.opened + (task.ends.at(-1) ?? 0)];
    const cells = [task.round, task.device, task.end, task.starts.length, ...times.map((time) => time.toFixed(3)), tableRows];
    row.append(...cells.map((text) => element("td", "", text)));
    return row;
  });
  $("tasks").tBodies[0].replaceChildren(...rows);
}

async function updateConfig() {
  const id = $("run-choice").value;
  const response = id ? await fetch(`api/config?run=${encodeURIComponent(id)}`) : null;
  const { config, made } = response?.ok ? await response.json() : { config: null, made: {} };
  $("command").textContent = made.command ?? "";
  $("config").textContent = config ? JSON.stringify(config, null, 2) : "";
}

// start ------------------------------------------------------------------------------------------

function storedTheme() {
  return localStorage.getItem("theme") ?? "system";
}

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("theme", name);
  redraw();
  updateLanes();
}

function fillOptions(id, choices) {
  for (const [value, [text]] of Object.entries(choices)) {
    const option = element("option", "", text);
    option.value = value;
    $(id).append(option);
  }
  $(id).onchange = redraw;
}

function listLinked() {
  return location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
}

function selectLinked() {
  const linked = listLinked().filter((id) => runs.has(id));
  for (const id of [...selected.keys()]) if (!linked.includes(id)) select(id, false);
  for (const id of linked) select(id, true);
}

async function start() {
  fillOptions("x", AXES);
  fillOptions("y", VALUES);
  fillOptions("sort", SORTS);
  $("sort").onchange = updateList;
  $("smooth").oninput = $("seeds").onchange = redraw;
  $("x").onchange = () => {
    hasChosenAxis = true;
    redraw();
  };
  const themes = ["system", "light", "dark"];
  $("theme").onclick = () => setTheme(themes[(themes.indexOf(storedTheme()) + 1) % 3]);
  $("filter").oninput = updateList;
  $("deselect").onclick = () => [...selected.keys()].forEach((id) => select(id, false));
  $("run-choice").onchange = showRun;
  $("round").oninput = () => {
    $("follow").checked = false;
    updateLanes();
  };
  $("follow").onchange = updateLanes;
  new ResizeObserver(() => {
    redraw();
    updateLanes();
  }).observe($("views"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(storedTheme()));
  await fetchRuns();
  setTheme(storedTheme());
  addEventListener("hashchange", selectLinked); // a link that is opened in this page
  const linked = listLinked();
  const newest = [...runs.values()].slice(0, 3).map((run) => run.id);
  const initial = (linked.length ? linked : newest).filter((id) => runs.has(id));
  if (initial.length) initial.forEach((id) => select(id, true));
  else listen();
}

start();
