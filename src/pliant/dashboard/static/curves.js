// The curves of the selected runs, the mean over seeds with a band, and the table of newest values.

import { draw, percent, percentWithSpread, short, swatch } from "./chart.js";
import { $, element, meanAndSpread, selectedGroups, slotOf, state } from "./state.js";
import { pixels } from "./timeline.js";

const whole = (value) => percent(value, 0);
export const AXES = {
  round: ["rounds", short],
  seconds: ["seconds", short],
  macs: ["MACs spent", short],
  bytes: ["bytes sent", short],
};
export const VALUES = {
  accuracy: ["test accuracy", whole, percent],
  devices: ["accuracy on devices", whole, percent],
  spread: ["spread over devices", whole, percent],
  worst: ["accuracy of the worst decile of devices", whole, percent],
  loss: ["training loss", short, short],
  used: ["useful share of MACs", whole, percent],
  merged: ["share of devices merged", whole, percent],
  side: ["side of scaled images", short, short],
  staleness: ["staleness of updates", short, short],
};
let hasChosenAxis = false;

export function chooseAxis() {
  hasChosenAxis = true;
}

// a run without rounds merges versions, which have a staleness
function countsVersions(view) {
  return view.columns.staleness.some((value) => value !== null);
}

function groupsWithRounds() {
  const pairs = selectedGroups().map(([group, members]) => [group, members.filter(([, view]) => view.columns)]);
  return pairs.filter(([, members]) => members.length);
}

function unitOfRuns(pairs) {
  const views = pairs.flatMap(([, members]) => members.map(([, view]) => view));
  const count = views.filter(countsVersions).length;
  return count === 0 ? "rounds" : count === views.length ? "versions" : "rounds or versions";
}

// The mean of each value and those before it, as many as the page says.
export function smooth(values, count) {
  return values.map((_, end) => meanAndSpread(values.slice(Math.max(0, end + 1 - count), end + 1))[0]);
}

function interpolate(line, x) {
  const after = line.x.findIndex((value) => value >= x);
  if (after < 0) return line.y.at(-1);
  if (after === 0 || line.x[after] === x) return line.y[after];
  const part = (x - line.x[after - 1]) / (line.x[after] - line.x[after - 1]);
  return line.y[after - 1] + part * (line.y[after] - line.y[after - 1]);
}

// The mean of some lines where all of them are known, with a band of one standard deviation.
export function average(lines) {
  const from = Math.max(...lines.map((line) => line.x[0]));
  const to = Math.min(...lines.map((line) => line.x.at(-1)));
  const first = lines[0];
  const kept = first.x.map((_, index) => index).filter((index) => first.x[index] >= from && first.x[index] <= to);
  const x = kept.map((index) => first.x[index]);
  const points = x.map((value) => meanAndSpread(lines.map((line) => interpolate(line, value))));
  const rows = kept.map((index) => first.rows[index]);
  return { ...first, x, rows, y: points.map(([mean]) => mean), band: points.map(([, spread]) => spread) };
}

// One line for the finished seeds of a group, or for all if none is finished, and one for each other.
function averageSeeds(group, lines) {
  const finished = lines.filter((line) => line.isFinished);
  const averaged = (finished.length ? finished : lines).filter((line) => line.x.length);
  if (averaged.length < 2) return lines;
  const count = averaged.length < group.runs.length ? `${averaged.length} of ${group.runs.length}` : averaged.length;
  const others = lines.filter((line) => !averaged.includes(line)).map((line) => ({ ...line, isThin: true }));
  return [{ ...average(averaged), label: `${group.label} (${count} seeds)`, seeds: averaged.length }, ...others];
}

function makeLine(run, view, x, y) {
  const { columns } = view;
  const points = columns[y].map((value, row) => [columns[x][row], value, row]).filter(([, value]) => value !== null);
  const pick = (field) => points.map((point) => point[field]);
  const window = Math.max(1, Math.min(99, Number($("smooth").value) || 1));
  const unit = countsVersions(view) ? "version" : "round";
  const isFinished = state(run) === "finished";
  const values = { x: pick(0), y: smooth(pick(1), window), rows: pick(2) };
  return { ...values, label: run.label, slot: slotOf(run.group), columns, unit, isFinished };
}

export function drawCurves() {
  const pairs = groupsWithRounds();
  const unit = unitOfRuns(pairs);
  AXES.round[0] = $("unit").textContent = $("x").options[0].textContent = unit;
  if (!hasChosenAxis) $("x").value = unit === "rounds" ? "round" : "seconds"; // which all runs share
  const [x, y] = [$("x").value, $("y").value];
  const series = pairs.flatMap(([group, members]) => {
    const lines = members.map(([run, view]) => makeLine(run, view, x, y));
    return $("seeds").checked ? averageSeeds(group, lines) : lines;
  });
  const [xLabel, xFormat] = AXES[x];
  const [yLabel, yFormat, format] = VALUES[y];
  const tip = (line, index) => {
    const c = line.columns;
    const row = line.rows[index];
    const spread = line.band ? ` ± ${format(line.band[index])}` : "";
    return (
      `${line.label}\n${yLabel}: ${format(line.y[index])}${spread}\n${line.unit} ${c.round[row]}, ${short(c.seconds[row])} s, ` +
      `${short(c.macs[row])}MACs, ${short(c.bytes[row])}B${pixels(c.side[row])}`
    );
  };
  draw($("chart"), series, { xLabel, yLabel, xFormat, yFormat, tip, hasZoom: $("zoom").checked, isWhole: x === "round" });
  const newest = series.map((line) => `${line.label}: ${format(line.y.at(-1) ?? null)}`).join("; ");
  $("chart-text").textContent = series.length
    ? `Line chart of ${yLabel} against ${xLabel}. Newest values: ${newest}.`
    : "Select runs to see their curves.";
  $("chart-empty").hidden = series.length > 0;
  updateNewest(pairs);
}

function updateNewest(pairs) {
  const last = (view, column) => view.columns[column].findLast((value) => value !== null) ?? null;
  const cells = [
    ["round", short], ["seconds", short], ["macs", short], ["bytes", short],
    ["accuracy", percent], ["loss", short], ["used", whole],
  ];
  const heads = [...$("newest").tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = pairs.flatMap(([group, members]) =>
    ($("seeds").checked ? [members] : members.map((member) => [member])).map((shown) => {
      const row = element("tr");
      const name = element("td");
      name.append(swatch(slotOf(group.key)), shown.length > 1 ? group.label : shown[0][0].label);
      if (shown.length > 1) name.append(` (${shown.length} seeds)`);
      row.append(name);
      cells.forEach(([column, format], index) => {
        const values = shown.map(([, view]) => last(view, column)).filter((value) => value !== null);
        const known = values.length ? meanAndSpread(values) : [null, 0];
        const text = column === "accuracy" && values.length ? percentWithSpread(known, values.length) : format(known[0]);
        const cell = element("td", "", text);
        cell.dataset.label = heads[index + 1];
        row.append(cell);
      });
      return row;
    }),
  );
  $("newest").tBodies[0].replaceChildren(...rows);
}
