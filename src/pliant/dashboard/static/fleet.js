// The devices of a deployment, live: who is online, how fast each is, and how its tasks end.

import { short } from "./chart.js";

const $ = (id) => document.getElementById(id);
const SORTS = {
  number: ["number", (a, b) => a.device - b.device],
  problems: ["problems", (a, b) => problems(b) - problems(a)],
  speed: ["slowest", (a, b) => (a.speed ?? Infinity) - (b.speed ?? Infinity)],
  seen: ["not seen for longest", (a, b) => (a.last_seen ?? 0) - (b.last_seen ?? 0)],
};
const fleets = new Map(); // run -> its newest message, and when it came
let chosenRun = "";

function problems(device) {
  return 2 * !device.online + 2 * device.rejected + device.late;
}

export function followFleets(source) {
  source.addEventListener("fleet", (event) => {
    const fleet = JSON.parse(event.data);
    fleets.set(fleet.run, { ...fleet, receivedAt: performance.now() });
    if (fleet.run === chosenRun) render();
  });
}

export function showFleet(run) {
  chosenRun = run;
  render();
}

// Seconds since a time of the server, whose clock may differ from this machine's.
function ageOf(fleet, time) {
  return Math.max(0, fleet.time - time + (performance.now() - fleet.receivedAt) / 1000);
}

function formatAge(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 360000 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

function formatShares(device) {
  if (!device.shares) return "–";
  const [low, high] = device.shares.map((share) => `${Math.round(100 * share)}`);
  return low === high ? `${low} %` : `${low}–${high} %`;
}

function formatBattery(battery) {
  if (!battery) return "–";
  return `${Math.round(100 * battery.charge)} %${battery.is_charging ? ", charging" : ""}`;
}

function cell(label, text, classes = "") {
  const created = document.createElement("td");
  created.dataset.label = label;
  created.className = classes;
  created.textContent = text;
  return created;
}

function renderDevice(fleet, device) {
  const row = document.createElement("tr");
  row.classList.toggle("offline", !device.online);
  const online = cell("online", device.online ? "online" : "offline", device.online ? "online" : "");
  const seen = cell("last seen", device.last_seen === null ? "–" : "", "age");
  if (device.last_seen !== null) seen.dataset.time = device.last_seen;
  const bad = (count) => (count ? "bad" : "");
  row.append(
    cell("device", device.device),
    online,
    seen,
    cell("battery", formatBattery(device.battery)),
    cell("MAC/s", short(device.speed)),
    cell("step cost", formatShares(device)),
    cell("merged", device.merged),
    cell("late", device.late, bad(device.late)),
    cell("rejected", device.rejected, bad(device.rejected)),
    cell("last task", device.last_outcome || "–", "outcome"),
  );
  return row;
}

function render() {
  const fleet = fleets.get(chosenRun);
  $("fleet").hidden = !fleet;
  if (!fleet) return;
  const [, compare] = SORTS[$("fleet-sort").value];
  const devices = [...fleet.devices].sort((a, b) => compare(a, b) || a.device - b.device);
  $("fleet-devices").tBodies[0].replaceChildren(...devices.map((device) => renderDevice(fleet, device)));
  updateAges();
}

function updateAges() {
  const fleet = fleets.get(chosenRun);
  if (!fleet) return;
  for (const age of $("fleet-devices").querySelectorAll(".age[data-time]")) {
    age.textContent = formatAge(ageOf(fleet, Number(age.dataset.time)));
  }
  const looked = fleet.seen_at ? formatAge(ageOf(fleet, fleet.seen_at)) : "";
  const server = fleet.is_finished ? "the run is finished" : fleet.is_live ? `server seen ${looked} ago` : `no server for ${looked}`;
  const shown = fleet.known > fleet.devices.length ? `; the first ${fleet.devices.length} are listed` : "";
  $("fleet").classList.toggle("live", fleet.is_live && !fleet.is_finished);
  $("fleet-text").textContent =
    `${fleet.online} of ${fleet.size} devices online, ${fleet.rounds} of ${fleet.planned} rounds closed, ` +
    `tasks: ${fleet.merged} merged, ${fleet.late} late, ${fleet.rejected} rejected; ${server}${shown}`;
}

for (const [value, [text]] of Object.entries(SORTS)) {
  const option = document.createElement("option");
  option.value = value;
  option.textContent = text;
  $("fleet-sort").append(option);
}
$("fleet-sort").onchange = render;
setInterval(updateAges, 1000);
