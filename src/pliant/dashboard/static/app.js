// The page: a list of runs, what the ticked ones have come to, and news by server-sent events.

import { draw, percent, short, swatch } from "./chart.js";
import { drawLanes, kind } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const LIMIT = 3000; // points of a curve that are kept
const TICKED = 16; // runs at once
const AXES = {
  round: ["rounds", short],
  seconds: ["seconds", short],
  macs: ["MACs spent", short],
  bytes: ["bytes sent", short],
};
const VALUES = {
  accuracy: ["test accuracy", (value) => percent(value, 0), percent],
  loss: ["training loss", short, short],
  used: ["useful share of MACs", (value) => percent(value, 0), percent],
  merged: ["share of devices merged", (value) => percent(value, 0), percent],
};

const runs = new Map(); // id -> summary
const items = new Map(); // id -> its line in the list
const ticked = new Map(); // id -> { slot, known, columns, front }
let since = ""; // epoch and version of the list
let source = null;
let dirty = false;

function label(run) {
  const parts = run.name.split("/");
  const last = parts.pop();
  const words = last.split(",").map((part) => {
    const [key, value] = part.split("=");
    return value === undefined ? part : key.endsWith("seed") ? `seed ${value}` : value;
  });
  return { own: words.join(" · "), above: parts.join("/") };
}

function state(run) {
  if (run.rounds && run.done >= run.rounds) return "finished";
  if (!run.changed) return "waiting";
  return Date.now() / 1000 - run.changed < 30 ? "going on" : "stopped";
}

function element(name, kinds, text) {
  const made = document.createElement(name);
  if (kinds) made.className = kinds;
  if (text !== undefined) made.textContent = text;
  return made;
}

// the list ---------------------------------------------------------------------------------------

function line(run) {
  let item = items.get(run.id);
  if (!item) {
    item = element("li");
    const box = element("input");
    box.type = "checkbox";
    box.onchange = () => tick(run.id, box.checked);
    const row = element("label");
    row.append(box, element("span", "swatch"), element("span", "name"), element("span", "value"), element("span", "more"));
    item.append(row);
    items.set(run.id, item);
  }
  const { own, above } = label(run);
  const row = item.firstChild;
  row.title = run.name;
  row.classList.toggle("on", ticked.has(run.id));
  item.querySelector("input").checked = ticked.has(run.id);
  item.querySelector(".swatch").replaceChildren(...(ticked.has(run.id) ? [swatch(ticked.get(run.id).slot)] : []));
  item.querySelector(".name").textContent = own;
  item.querySelector(".value").textContent = percent(run.accuracy);
  const rounds = run.rounds ? `${run.done}/${run.rounds}` : run.done ? String(run.done) : "";
  const told = [state(run), rounds, run.method, run.about, above].filter(Boolean);
  item.querySelector(".more").textContent = told.join(" · ");
  return item;
}

function list() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (run) => {
    const text = `${run.name} ${run.method} ${run.about} ${state(run)}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const shown = [...runs.values()].filter(fits).sort((a, b) => b.changed - a.changed || a.name.localeCompare(b.name));
  $("list").replaceChildren(...shown.map(line));
  $("count").textContent = shown.length === runs.size ? `${runs.size}` : `${shown.length} of ${runs.size}`;
}

function take(news) {
  since = news.since;
  for (const run of news.runs) runs.set(run.id, run);
  if (news.count !== runs.size) {
    fetchRuns();
    return;
  }
  const isNew = news.runs.some((run) => !items.has(run.id));
  if (isNew) list();
  else for (const run of news.runs) line(run);
}

async function fetchRuns() {
  const news = await (await fetch("api/runs")).json();
  runs.clear();
  for (const run of news.runs) runs.set(run.id, run);
  since = news.since;
  list();
}

// ticking ----------------------------------------------------------------------------------------

function tick(id, isOn) {
  if (isOn && !ticked.has(id)) {
    if (ticked.size >= TICKED) ticked.delete(ticked.keys().next().value);
    const taken = new Set([...ticked.values()].map((one) => one.slot));
    let slot = 0;
    while (taken.has(slot)) slot += 1;
    ticked.set(id, { slot, known: 0, columns: null, front: null });
  } else if (!isOn) {
    ticked.delete(id);
  }
  history.replaceState(null, "", `#${[...ticked.keys()].map(encodeURIComponent).join("&")}`);
  for (const one of runs.values()) if (items.has(one.id)) line(one);
  chooseWhich();
  listen();
  redraw();
}

function listen() {
  if (source) source.close();
  const asked = new URLSearchParams([...ticked.keys()].map((id) => ["run", id]));
  asked.set("since", since + [...ticked.values()].map((one) => one.known).join("-"));
  source = new EventSource(`api/stream?${asked}`);
  source.onopen = () => link(true);
  source.onerror = () => {
    link(false);
    // a refused connection is tried again by the browser, a refused answer is not
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
  source.addEventListener("runs", (event) => take(JSON.parse(event.data)));
  source.addEventListener("rounds", (event) => grow(JSON.parse(event.data)));
  source.addEventListener("front", (event) => {
    const news = JSON.parse(event.data);
    const one = ticked.get(news.run);
    if (!one) return;
    one.known = news.known;
    one.front = news;
    redraw();
  });
}

function link(isLive) {
  $("link").classList.toggle("live", isLive);
  $("link-told").textContent = isLive ? "live" : "reconnecting";
}

function grow(news) {
  const one = ticked.get(news.run);
  if (!one) return;
  if (!one.columns || news.from === 0) one.columns = news.columns;
  else for (const [name, values] of Object.entries(news.columns)) one.columns[name].push(...values);
  one.known = news.known;
  if (one.columns.round.length > LIMIT) {
    const last = one.columns.round.length - 1;
    for (const name of Object.keys(one.columns)) {
      one.columns[name] = one.columns[name].filter((_, at) => at % 2 === last % 2);
    }
  }
  redraw();
  if ($("which").value === news.run) lanes();
}

// figures ----------------------------------------------------------------------------------------

function redraw() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    const isSearch = (id) => runs.get(id)?.is_search;
    $("curves").hidden = $("time").hidden = ticked.size > 0 && [...ticked.keys()].every(isSearch);
    curves();
    newest();
    front();
  });
}

function chosen() {
  return [...ticked].filter(([id, one]) => one.columns && runs.has(id));
}

function curves() {
  const [x, y] = [$("x").value, $("y").value];
  const series = chosen().map(([id, one]) => {
    const kept = one.columns[y].map((value, at) => [one.columns[x][at], value, at]).filter(([, value]) => value !== null);
    const pick = (place) => kept.map((point) => point[place]);
    return { label: label(runs.get(id)).own, slot: one.slot, x: pick(0), y: pick(1), places: pick(2), columns: one.columns };
  });
  const [xLabel, xFormat] = AXES[x];
  const [yLabel, yFormat, full] = VALUES[y];
  const tip = (one, at) => {
    const c = one.columns;
    const place = one.places[at];
    return (
      `${one.label}\n${yLabel}: ${full(one.y[at])}\nround ${c.round[place]}, ${short(c.seconds[place])} s, ` +
      `${short(c.macs[place])}MACs, ${short(c.bytes[place])}B`
    );
  };
  draw($("chart"), series, { xLabel, yLabel, xFormat, yFormat, tip });
  const told = series.map((one) => `${one.label}: ${full(one.y.at(-1) ?? null)}`).join("; ");
  $("chart-told").textContent = series.length
    ? `Line chart of ${yLabel} against ${xLabel}. Newest values: ${told}.`
    : "Tick runs to see their curves.";
}

function newest() {
  const rows = chosen().map(([id, one]) => {
    const row = element("tr");
    const last = (name) => one.columns[name].findLast((value) => value !== null) ?? null;
    const name = element("td");
    name.append(swatch(one.slot), label(runs.get(id)).own);
    row.append(name);
    const cells = [short(last("round")), short(last("seconds")), short(last("macs")), short(last("bytes"))];
    for (const text of [...cells, percent(last("accuracy")), short(last("loss")), percent(last("used"), 0)]) {
      row.append(element("td", "", text));
    }
    return row;
  });
  $("newest").tBodies[0].replaceChildren(...rows);
}

function front() {
  const found = [...ticked].filter(([id, one]) => one.front && runs.has(id));
  $("front").hidden = !found.length;
  if (!found.length) return;
  const series = found.flatMap(([id, one]) => {
    const name = label(runs.get(id)).own;
    const [all, best] = [one.front.points, one.front.front];
    const at = (points, place) => points.map((point) => point[place]);
    return [
      { label: name, slot: one.slot, kind: "cloud", x: at(all, 0), y: at(all, 1) },
      { label: `${name}, front`, slot: one.slot, kind: "steps", x: at(best, 0), y: at(best, 1) },
    ];
  });
  const [xLabel, yLabel] = [found[0][1].front.cost, "accuracy after a short training"];
  const tip = (one, at) => `${one.label}\n${xLabel}: ${short(one.x[at])}\n${yLabel}: ${percent(one.y[at])}`;
  draw($("pareto"), series, { xLabel, yLabel, xFormat: short, yFormat: (value) => percent(value, 1), tip });
  $("pareto-told").textContent = found
    .map(([id, one]) => {
      const { known, front: best } = one.front;
      const ends = best.length ? `, from ${percent(best[0][1])} to ${percent(best.at(-1)[1])}` : "";
      return `${label(runs.get(id)).own}: ${known} short trainings, ${best.length} vectors on the front${ends}.`;
    })
    .join(" ");
}

// devices ----------------------------------------------------------------------------------------

function chooseWhich() {
  const before = $("which").value;
  const options = [...ticked.keys()].filter((id) => runs.has(id)).map((id) => {
    const option = element("option", "", label(runs.get(id)).own);
    option.value = id;
    return option;
  });
  $("which").replaceChildren(...options);
  if (ticked.has(before)) $("which").value = before;
  const isOther = $("which").value !== before;
  if (isOther) {
    lanes();
    config();
  }
}

let asking = false;
let askAgain = false;

async function lanes() {
  const id = $("which").value;
  if (asking) {
    askAgain = true;
    return;
  }
  asking = true;
  try {
    const wanted = $("follow").checked ? "" : `&last=${$("round").value}`;
    const hasDevices = runs.has(id) && !runs.get(id).is_search;
    const answer = hasDevices ? await fetch(`api/timeline?run=${encodeURIComponent(id)}${wanted}`) : null;
    const shown = answer?.ok ? await answer.json() : { first: 1, last: 0, known: 1, rounds: [] };
    $("round").max = Math.max(1, shown.known);
    if ($("follow").checked) $("round").value = shown.known;
    $("round-told").textContent = $("round").value;
    tell(shown, drawLanes($("lanes"), shown));
  } catch {
    // the server is away: the next news draws again
  } finally {
    asking = false;
    if (askAgain) {
      askAgain = false;
      lanes();
    }
  }
}

function tell(shown, { tasks, devices }) {
  const counts = new Map();
  for (const task of tasks) counts.set(kind(task), (counts.get(kind(task)) ?? 0) + 1);
  const ends = [...counts].map(([end, count]) => `${count} ${end}`).join(", ");
  const cut = shown.rounds.every((round) => round.whole) ? "" : " Only the first tasks of each round are shown.";
  $("lanes-told").textContent = tasks.length
    ? `Rounds ${shown.first} to ${shown.last}, ${devices.length} devices, ${tasks.length} tasks: ${ends}. ` +
      `A bar is a mini-batch; the stronger it is, the more of the network it trains. Hatched tasks came to nothing.${cut}`
    : "No tasks yet.";
  const rows = tasks.map((task) => {
    const row = element("tr");
    const rowsUsed = task.rows.length ? `${Math.min(...task.rows)}–${Math.max(...task.rows)}` : "–";
    const times = [task.opened + (task.starts[0] ?? 0), task.opened + (task.ends.at(-1) ?? 0)];
    const cells = [task.round, task.device, task.end, task.starts.length, ...times.map((at) => at.toFixed(3)), rowsUsed];
    row.append(...cells.map((text) => element("td", "", text)));
    return row;
  });
  $("tasks").tBodies[0].replaceChildren(...rows);
}

async function config() {
  const id = $("which").value;
  const answer = id ? await fetch(`api/config?run=${encodeURIComponent(id)}`) : null;
  const found = answer?.ok ? await answer.json() : { config: null, made: {} };
  $("command").textContent = found.made.command ?? "";
  $("config").textContent = found.config ? JSON.stringify(found.config, null, 2) : "";
}

// start ------------------------------------------------------------------------------------------

function theme(chosen) {
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  $("theme").textContent = `Theme: ${chosen}`;
  localStorage.setItem("theme", chosen);
  redraw();
  lanes();
}

function options(id, choices) {
  for (const [value, [text]] of Object.entries(choices)) {
    const option = element("option", "", text);
    option.value = value;
    $(id).append(option);
  }
  $(id).onchange = redraw;
}

async function start() {
  options("x", AXES);
  options("y", VALUES);
  const themes = ["system", "light", "dark"];
  $("theme").onclick = () => theme(themes[(themes.indexOf(localStorage.getItem("theme") ?? "system") + 1) % 3]);
  $("filter").oninput = list;
  $("untick").onclick = () => [...ticked.keys()].forEach((id) => tick(id, false));
  $("which").onchange = () => {
    lanes();
    config();
  };
  $("round").oninput = () => {
    $("follow").checked = false;
    lanes();
  };
  $("follow").onchange = lanes;
  new ResizeObserver(() => {
    redraw();
    lanes();
  }).observe($("views"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(localStorage.getItem("theme") ?? "system"));
  await fetchRuns();
  theme(localStorage.getItem("theme") ?? "system");
  const asked = location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
  const first = [...runs.values()].slice(0, 3).map((run) => run.id);
  const wanted = (asked.length ? asked : first).filter((id) => runs.has(id));
  if (wanted.length) wanted.forEach((id) => tick(id, true));
  else listen();
}

start();
