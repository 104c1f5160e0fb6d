// The page: a list of runs, figures of the selected ones, and updates by server-sent events.

import { AXES, VALUES, chooseAxis, drawCurves } from "./curves.js";
import { showRun, updateLanes, updateRunChoice } from "./devices.js";
import { followFleets } from "./fleet.js";
import { drawFront } from "./front.js";
import { SORTS, forgetItems, listVisible, onSelect, updateList } from "./list.js";
import { $, element, releaseSlots, runs, selected, slotOf, updateGroups } from "./state.js";

const MAX_POINTS = 3000; // per curve
const MAX_SELECTED = 64; // runs
const FIRST_GROUPS = 6; // shown at first, of the newest comparison

let since = ""; // epoch and version of the list
let source = null;
let isRedrawPending = false;

// runs -------------------------------------------------------------------------------------------

function mergeRuns(update) {
  since = update.since;
  for (const run of update.runs) runs.set(run.id, run);
  if (update.count !== runs.size) fetchRuns();
  else showRuns();
}

async function fetchRuns() {
  const update = await (await fetch("api/runs")).json();
  runs.clear();
  for (const run of update.runs) runs.set(run.id, run);
  since = update.since;
  showRuns();
  forgetItems();
  const deleted = [...selected.keys()].filter((id) => !runs.has(id));
  if (deleted.length) select(deleted, false);
}

function showRuns() {
  updateGroups();
  updateList();
}

// selection --------------------------------------------------------------------------------------

function select(ids, isOn) {
  for (const id of ids) {
    if (!isOn) selected.delete(id);
    else if (!selected.has(id)) selected.set(id, { known: 0, columns: null, front: null });
    if (selected.size > MAX_SELECTED) selected.delete(selected.keys().next().value);
  }
  releaseSlots();
  for (const id of selected.keys()) if (runs.has(id)) slotOf(runs.get(id).group);
  history.replaceState(null, "", `#${[...selected.keys()].map(encodeURIComponent).join("&")}`);
  updateList();
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

function redraw() {
  if (isRedrawPending) return;
  isRedrawPending = true;
  requestAnimationFrame(() => {
    isRedrawPending = false;
    const isSearch = (id) => runs.get(id)?.is_search;
    $("curves").hidden = $("time").hidden = selected.size > 0 && [...selected.keys()].every(isSearch);
    drawCurves();
    drawFront();
  });
}

// links: a run, or a folder for all runs in it ---------------------------------------------------

function listLinked() {
  const names = location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
  const isIn = (id, name) => id === name || id.startsWith(`${name}/`);
  return [...runs.keys()].filter((id) => names.some((name) => isIn(id, name))).sort();
}

function selectLinked() {
  const linked = listLinked();
  select([...selected.keys()].filter((id) => !linked.includes(id)), false);
  select(linked, true);
}

function listNewest() {
  const visible = listVisible();
  const first = visible.filter((group) => group.comparison === visible[0]?.comparison).slice(0, FIRST_GROUPS);
  const newest = first.flatMap((group) => group.runs).slice(0, MAX_SELECTED);
  return newest.sort((a, b) => a.label.localeCompare(b.label, "en", { numeric: true })).map((run) => run.id);
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

async function start() {
  fillOptions("x", AXES);
  fillOptions("y", VALUES);
  fillOptions("sort", SORTS);
  onSelect(select);
  $("sort").onchange = $("filter").oninput = updateList;
  $("smooth").oninput = $("seeds").onchange = $("zoom").onchange = redraw;
  $("x").onchange = () => {
    chooseAxis();
    redraw();
  };
  const themes = ["system", "light", "dark"];
  $("theme").onclick = () => setTheme(themes[(themes.indexOf(storedTheme()) + 1) % 3]);
  $("deselect").onclick = () => select([...selected.keys()], false);
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
  select(linked.length ? linked : listNewest(), true);
}

start();
