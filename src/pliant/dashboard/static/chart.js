// Line charts in SVG: told apart by colour, dash and marker; the nearest point is named on hover.

const SPACE = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2.5 2.5", "9 3 2 3", "12 4"];
const MARKS = ["circle", "square", "up", "diamond", "down", "cross"];

export function node(name, values = {}, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
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
  const made = node("svg", { viewBox: "0 0 26 12", class: line, "aria-hidden": "true" });
  made.append(node("path", { d: "M0 6H26", class: "curve", "stroke-dasharray": dash }), mark(kind, 13, 6, 3.5));
  return made;
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

export function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

function span(values, pad) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = (high - low) * pad || Math.abs(high) * pad || 0.5;
  return [low - room, high + room];
}

// series: [{ label, slot, x: [], y: [], kind: "line" | "steps" | "cloud" }]
export function draw(svg, series, { xLabel, yLabel, xFormat, yFormat, tip }) {
  const { width, height } = svg.getBoundingClientRect();
  if (!width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const [left, right, top, bottom] = [66, 10, 8, 40];
  const [x0, x1] = span(series.flatMap((one) => one.x), 0.02);
  const [y0, y1] = span(series.flatMap((one) => one.y), 0.05);
  const px = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const py = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  for (const at of ticks(y0, y1, height / 55)) {
    svg.append(node("path", { d: `M${left} ${py(at)}H${width - right}`, class: "grid" }));
    svg.append(node("text", { x: left - 6, y: py(at) + 4, "text-anchor": "end" }, yFormat(at)));
  }
  for (const at of ticks(x0, x1, width / 110)) {
    svg.append(node("path", { d: `M${px(at)} ${height - bottom}v4`, class: "axis" }));
    svg.append(node("text", { x: px(at), y: height - bottom + 17, "text-anchor": "middle" }, xFormat(at)));
  }
  svg.append(node("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, class: "axis", fill: "none" }));
  svg.append(node("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  svg.append(node("text", { x: 0, y: 0, transform: `translate(12 ${(height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yLabel));
  const points = [];
  for (const one of series) drawOne(svg, one, px, py, points);
  hover(svg, points, { top, bottom: height - bottom, tip });
}

function drawOne(svg, one, px, py, points) {
  const { line, dash, mark: kind } = style(one.slot);
  const seen = [];
  one.x.forEach((x, at) => {
    if (x !== null && one.y[at] !== null) seen.push({ x: px(x), y: py(one.y[at]), at, series: one });
  });
  points.push(...seen);
  if (one.kind === "cloud") {
    for (const { x, y } of seen) svg.append(node("circle", { cx: x, cy: y, r: 2.2, class: "cloud" }));
    return;
  }
  const group = node("g", { class: line });
  let path = "";
  seen.forEach(({ x, y }, at) => {
    if (!at) path += `M${x.toFixed(1)} ${y.toFixed(1)}`;
    else if (one.kind === "steps") path += `H${x.toFixed(1)}V${y.toFixed(1)}`;
    else path += `L${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  group.append(node("path", { d: path, class: "curve", "stroke-dasharray": dash }));
  const every = Math.max(1, Math.ceil(seen.length / 8));
  seen.forEach(({ x, y }, at) => {
    if (at % every === one.slot % every || at === seen.length - 1) group.append(mark(kind, x, y));
  });
  svg.append(group);
}

function hover(svg, points, { top, bottom, tip }) {
  const cross = node("path", { class: "cross", d: "" });
  const ring = node("circle", { r: 6, fill: "none", class: "axis", visibility: "hidden" });
  svg.append(cross, ring);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [null, 60 ** 2];
    for (const point of points) {
      const apart = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (apart < least) [best, least] = [point, apart];
    }
    cross.setAttribute("d", best ? `M${best.x} ${top}V${bottom}` : "");
    ring.setAttribute("visibility", best ? "visible" : "hidden");
    if (best) {
      ring.setAttribute("cx", best.x);
      ring.setAttribute("cy", best.y);
    }
    showTip(best && tip(best.series, best.at), event);
  };
  svg.onpointerleave = () => {
    cross.setAttribute("d", "");
    ring.setAttribute("visibility", "hidden");
    showTip(null);
  };
}

export function showTip(text, event) {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 6))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - high - 6))}px`;
}
