// The Pareto fronts of the selected searches, beside equal rates for all sites.

import { draw, percent, short } from "./chart.js";
import { $, runs, selected, slotOf } from "./state.js";

export function drawFront() {
  const searches = [...selected].filter(([id, view]) => view.front && runs.has(id)).map(([id, view]) => [runs.get(id), view.front]);
  $("front").hidden = !searches.length;
  if (!searches.length) return;
  const pick = (pairs, field) => pairs.map((pair) => pair[field]);
  const series = searches.flatMap(([run, { points, front, equal }]) => {
    const slot = slotOf(run.group);
    const lines = [
      { label: run.label, slot, kind: "cloud", x: pick(points, 0), y: pick(points, 1) },
      { label: `${run.label}, front`, slot, kind: "steps", x: pick(front, 0), y: pick(front, 1) },
    ];
    if (equal.length) lines.push({ label: `${run.label}, equal rates`, slot, kind: "equal", x: pick(equal, 0), y: pick(equal, 1) });
    return lines;
  });
  const [xLabel, yLabel] = [searches[0][1].cost, "accuracy after a short training"];
  const tip = (line, index) => `${line.label}\n${xLabel}: ${short(line.x[index])}\n${yLabel}: ${percent(line.y[index])}`;
  draw($("pareto"), series, { xLabel, yLabel, xFormat: short, yFormat: (value) => percent(value, 1), tip });
  $("pareto-text").textContent = searches.map(([run, front]) => describe(run, front)).join(" ");
}

function describe(run, { known, front, equal }) {
  const range = front.length ? `, from ${percent(front[0][1])} to ${percent(front.at(-1)[1])}` : "";
  const line = equal.length ? ` Dotted: ${equal.length} vectors with equal rates for all sites.` : "";
  return `${run.label}: ${known} short trainings, ${front.length} vectors on the front${range}.${line}`;
}
