// Draw line charts in SVG: lines differ in colour, dash and marker; hovering names the nearest point.

const SPACE = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2.5 2.5", "9 3 2 3", "12 4"];
const MARKS = ["circle", "square", "up", "diamond", "down", "cross"];

export function node(name, attributes = {}, text) {
  const created = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  if (text !== undefined) created.textContent = text;
  return created;
}

export function style(slot) {
  return { line: `line-${slot % 8}`, dash: DASHES[slot % DASHES.length], mark: MARKS[slot % MARKS.length] };
}

export function mark(kind, x, y, size = 4) {
  const [s, d] = [size, size * 1.25];
  const paths = {
    circle: `M${x - s} ${y}a${s} ${s} 0 1 0 ${2 * s} 0a${s} ${s} 0 1 0 ${-2 * s} 0`,
    square: `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    up: `M${x} ${y - d}L${x + d} ${y + s}H${x - d}z`,
    down: `M${x} ${y + d}L${x + d} ${y - s}H${x - d}z`,
    diamond: `M${x} ${y - d}L${x + d} ${y}L${x} ${y + d}L${x - d} ${y}z`,
    cross: `M${x - d} ${y - 1.5}h${d - 1.5}v${1.5 - d}h3v${d - 1.5}h${d - 1.5}v3h${1.5 - d}v${d - 1.5}h-3v${1.5 - d}h${1.5 - d}z`,
  };
  return node("path", { d: paths[kind], class: "mark" });
}

export function swatch(slot) {
  const { line, dash, mark: kind } = style(slot);
  const svg = node("svg", { viewBox: "0 0 26 12", class: line, "aria-hidden": "true" });
  svg.append(node("path", { d: "M0 6H26", class: "curve", "stroke-dasharray": dash }), mark(kind, 13, 6, 3.5));
  return svg;
}

export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [size, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${prefix}`;
  }
  return String(Number(value.toPrecision(3)));
}

export function percent(value, digits = 2) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function percentWithSpread([mean, spread], count) {
  return count > 1 ? `${(100 * mean).toFixed(2)} ± ${(100 * spread).toFixed(2)} %` : percent(mean);
}

export function ticks(low, high, count, isWhole = false) {
  const minStep = Math.max((high - low) / Math.max(1, count) || 1, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= minStep * 0.999 && !(isWhole && size % 1));
  const values = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) values.push(value);
  return values;
}

function span(values, pad) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const margin = (high - low) * pad || Math.abs(high) * pad || 0.5;
  return [low - margin, high + margin];
}

// The first point of a line from a quarter of the range on that all lines share.
function lateStart(series, line) {
  const end = Math.min(...series.filter((other) => other.x.length).map((other) => other.x.at(-1)));
  return Math.max(0, Math.min(line.x.length - 1, line.x.findIndex((x) => x >= end / 4)));
}

// series: [{ label, slot, x: [], y: [], band: [], isThin, kind: "line" | "steps" | "equal" | "cloud" }]
export function draw(svg, series, { xLabel, yLabel, xFormat, yFormat, tip, hasZoom = false, isWhole = false }) {
  const { width, height } = svg.getBoundingClientRect();
  if (!width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const [left, right, top, bottom] = [66, 10, 8, 40];
  const [x0, x1] = span(series.flatMap((line) => line.x), 0.02);
  const edges = (line) => line.y.flatMap((value, i) => [value - (line.band?.[i] ?? 0), value + (line.band?.[i] ?? 0)]);
  const [y0, y1] = span(series.flatMap((line) => (hasZoom ? edges(line).slice(2 * lateStart(series, line)) : edges(line))), 0.05);
  const px = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const py = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  for (const tick of ticks(y0, y1, height / 55)) {
    svg.append(node("path", { d: `M${left} ${py(tick)}H${width - right}`, class: "grid" }));
    svg.append(node("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, yFormat(tick)));
  }
  for (const tick of ticks(x0, x1, width / 110, isWhole)) {
    svg.append(node("path", { d: `M${px(tick)} ${height - bottom}v4`, class: "axis" }));
    svg.append(node("text", { x: px(tick), y: height - bottom + 17, "text-anchor": "middle" }, xFormat(tick)));
  }
  svg.append(node("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, class: "axis", fill: "none" }));
  svg.append(node("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  svg.append(node("text", { x: 0, y: 0, transform: `translate(12 ${(height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yLabel));
  const inside = node("svg", { x: left, y: top, width: width - left - right, height: height - top - bottom });
  inside.setAttribute("viewBox", `${left} ${top} ${width - left - right} ${height - top - bottom}`);
  inside.setAttribute("overflow", hasZoom ? "hidden" : "visible");
  svg.append(inside);
  const curves = series.map((line) => drawSeries(inside, line, px, py));
  hover(svg, curves, { top, bottom: height - bottom, tip });
}

function drawSeries(svg, series, px, py) {
  const { line, dash, mark: markKind } = style(series.slot);
  const known = [];
  series.x.forEach((x, index) => {
    const y = series.y[index];
    if (x !== null && y !== null) known.push({ x: px(x), y: py(y), index });
  });
  const group = node("g", { class: series.isThin ? `${line} thin` : line });
  svg.append(group);
  const drawn = { series, points: known, group };
  if (series.kind === "cloud") {
    for (const { x, y } of known) group.append(node("circle", { cx: x, cy: y, r: 2.2, class: "cloud" }));
    return drawn;
  }
  if (series.band) {
    const edge = (sign) => known.map(({ x, index }) => `${x.toFixed(1)} ${py(series.y[index] + sign * series.band[index]).toFixed(1)}`);
    group.append(node("path", { d: `M${[...edge(1), ...edge(-1).reverse()].join("L")}z`, class: "band" }));
  }
  let path = "";
  known.forEach(({ x, y }, i) => {
    if (!i) path += `M${x.toFixed(1)} ${y.toFixed(1)}`;
    else if (series.kind === "steps") path += `H${x.toFixed(1)}V${y.toFixed(1)}`;
    else path += `L${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  group.append(node("path", { d: path, class: "curve", "stroke-dasharray": series.kind === "equal" ? "3 4" : dash }));
  const every = Math.max(1, Math.ceil(known.length / 8));
  const isMarked = (i) => series.kind !== "equal" && !series.isThin && (i % every === series.slot % every || i === known.length - 1);
  known.forEach(({ x, y }, i) => {
    if (isMarked(i)) group.append(mark(markKind, x, y));
  });
  return drawn;
}

// The squared distance from a point to the stretch between two others.
function distanceToStretch(x, y, a, b) {
  const [dx, dy] = [b.x - a.x, b.y - a.y];
  const part = Math.max(0, Math.min(1, ((x - a.x) * dx + (y - a.y) * dy) / (dx * dx + dy * dy || 1)));
  return (a.x + part * dx - x) ** 2 + (a.y + part * dy - y) ** 2;
}

// The curve nearest to a place of the chart, however far, and its point nearest to it.
export function findNearest(curves, x, y) {
  let [nearest, nearestDistance] = [null, Infinity];
  for (const curve of curves) {
    const { points, series } = curve;
    points.forEach((point, i) => {
      const isJoined = i > 0 && series.kind !== "cloud";
      const distance = distanceToStretch(x, y, isJoined ? points[i - 1] : point, point);
      if (distance < nearestDistance) [nearest, nearestDistance] = [curve, distance];
    });
  }
  if (!nearest) return null;
  const apart = (point) => (point.x - x) ** 2 + (point.y - y) ** 2;
  return { curve: nearest, point: nearest.points.reduce((a, b) => (apart(b) < apart(a) ? b : a)) };
}

function hover(svg, curves, { top, bottom, tip }) {
  const cross = node("path", { class: "cross", d: "" });
  const ring = node("circle", { r: 6, fill: "none", class: "axis", visibility: "hidden" });
  svg.append(cross, ring);
  const highlight = (curve) => {
    for (const { group } of curves) group.classList.toggle("strong", group === curve?.group);
  };
  svg.onpointermove = (event) => {
    svg.pointer = event;
    const box = svg.getBoundingClientRect();
    const found = findNearest(curves, event.clientX - box.left, event.clientY - box.top);
    highlight(found?.curve);
    cross.setAttribute("d", found ? `M${found.point.x} ${top}V${bottom}` : "");
    ring.setAttribute("visibility", found ? "visible" : "hidden");
    if (found) {
      ring.setAttribute("cx", found.point.x);
      ring.setAttribute("cy", found.point.y);
    }
    showTip(found && tip(found.curve.series, found.point.index), event);
  };
  svg.onpointerleave = () => {
    svg.pointer = null;
    highlight(null);
    cross.setAttribute("d", "");
    ring.setAttribute("visibility", "hidden");
    showTip(null);
  };
  if (svg.pointer) svg.onpointermove(svg.pointer); // new rounds are drawn under a pointer at rest
}

export function showTip(text, event) {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 6))}px`;
}
