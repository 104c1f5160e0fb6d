// The devices of one run over time, its tasks as a table, and its config.

import { showFleet } from "./fleet.js";
import { $, element, runs, selected } from "./state.js";
import { drawLanes, outcomeKind } from "./timeline.js";

let isFetching = false;
let mustFetchAgain = false;

export function updateRunChoice() {
  const before = $("run-choice").value;
  const options = [...selected.keys()].filter((id) => runs.has(id)).map((id) => {
    const option = element("option", "", runs.get(id).label);
    option.value = id;
    return option;
  });
  $("run-choice").replaceChildren(...options);
  if (selected.has(before)) $("run-choice").value = before;
  if ($("run-choice").value !== before) showRun();
}

export function showRun() {
  showFleet($("run-choice").value);
  updateLanes();
  updateConfig();
}

export async function updateLanes() {
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
    const tableRows = runs.get(id)?.table_rows ?? 0;
    const drawn = drawLanes($("lanes"), timeline, tableRows);
    describeTasks(timeline, drawn);
    describeShades(drawn.highest, tableRows);
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
  const units = timeline.unit === "version" ? "Versions" : "Rounds";
  $("lanes-text").textContent = tasks.length
    ? `${units} ${timeline.first} to ${timeline.last}, ${devices.length} devices, ${tasks.length} tasks: ${outcomes}. ` +
      `A bar is a mini-batch; the darker it is, the more of the network it trains.${note}`
    : "No tasks yet.";
  const heads = [...$("tasks").tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = tasks.map((task) => {
    const row = element("tr");
    const tableRows = task.rows.length ? `${Math.min(...task.rows)}–${Math.max(...task.rows)}` : "–";
    const times = [task.opened + (task.starts[0] ?? 0), task.opened + (task.ends.at(-1) ?? 0)];
    const cells = [task.round, task.device, task.end, task.starts.length, ...times.map((time) => time.toFixed(3)), tableRows];
    cells.forEach((text, index) => {
      const cell = element("td", "", text);
      cell.dataset.label = heads[index];
      row.append(cell);
    });
    return row;
  });
  $("tasks").tBodies[0].replaceChildren(...rows);
}

// What the ends of the colour scale mean; the full network is the last row of a table.
function describeShades(highest, tableRows) {
  const last = tableRows ? tableRows - 1 : highest;
  $("shade-low").textContent = last <= 0 ? "cheapest step" : "row 0, the cheapest step";
  $("shade-high").textContent =
    highest < 0 ? "full network" : tableRows ? `row ${last}, the full network` : `row ${last}, the largest here`;
}

async function updateConfig() {
  const id = $("run-choice").value;
  const response = id ? await fetch(`api/config?run=${encodeURIComponent(id)}`) : null;
  const { config, made } = response?.ok ? await response.json() : { config: null, made: {} };
  $("command").textContent = made.command ?? "";
  $("config").textContent = config ? JSON.stringify(config, null, 2) : "";
}
