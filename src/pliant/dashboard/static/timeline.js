// Draw the timeline of devices on a canvas: a bar is a mini-batch, darker where more was trained.

import { short, showTip, ticks } from "./chart.js";

const LOST = ["late", "dropped", "rejected", "surplus", "void"];
const LANE = 19;
const LEFT = 46;
const TOP = 20;
const BOTTOM = 34;
// Ends and middle of the report's colours, the cividis scale, which is uniform in lightness and safe
// for colour blindness. The full network is the darkest in both themes.
const LIGHT = [245, 225, 90];
const DARK = [20, 52, 108];
const MIDDLE = [124, 123, 120];

export function outcomeKind(task) {
  return task.end.split(":")[0];
}

// The size of the training images, if they were scaled down.
export function pixels(side) {
  return side ? `, ${side}x${side} pixels` : "";
}

export function shade(level) {
  const [from, to, part] = level < 0.5 ? [LIGHT, MIDDLE, level * 2] : [MIDDLE, DARK, level * 2 - 1];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * part)).join()})`;
}

// How dark a step is, from 0 to 1; a single row is all there is, so it is the darkest.
export function getLevel(row, maxRow) {
  return maxRow > 0 ? (row ?? maxRow) / maxRow : 1;
}

// `tableRows` is how many rows the method's table has, if that is known.
export function drawLanes(canvas, timeline, tableRows) {
  const { rounds, first } = timeline;
  const tasks = rounds.flatMap((round, index) =>
    round.tasks.map((task) => ({ ...task, opened: round.opened, round: first + index, unit: timeline.unit })),
  );
  const devices = [...new Set(tasks.map((task) => task.device))].sort((a, b) => a - b);
  const lanes = new Map(devices.map((device, index) => [device, index]));
  const width = Math.max(300, canvas.parentElement.clientWidth - 2);
  const height = TOP + BOTTOM + LANE * Math.max(1, devices.length);
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const isDark = style.colorScheme === "dark";
  context.font = "12px system-ui, sans-serif";
  const begins = tasks.map((task) => task.opened + (task.starts[0] ?? 0)); // before the first version opened
  const from = rounds.length ? begins.reduce((a, b) => Math.min(a, b), rounds[0].opened) : 0;
  const to = rounds.length ? rounds.at(-1).closed : 1;
  const px = (seconds) => LEFT + ((seconds - from) / (to - from || 1)) * (width - LEFT - 12);
  drawFrame(context, { devices, px, from, to, width, height, colour, timeline });
  const highest = tasks.reduce((row, task) => Math.max(row, ...task.rows), -1);
  const maxRow = tableRows ? tableRows - 1 : highest;
  const bars = [];
  for (const task of tasks) {
    const y = TOP + LANE * lanes.get(task.device) + 2;
    drawTask(context, task, { y, px, maxRow, colour, isDark, bars });
  }
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = bars.find((bar) => x >= bar.x && x <= bar.x + bar.width && y >= bar.y && y <= bar.y + LANE - 4);
    showTip(hit && describeBar(hit), event);
  };
  canvas.onpointerleave = () => showTip(null);
  return { tasks, devices, highest };
}

function drawFrame(context, { devices, px, from, to, width, height, colour, timeline }) {
  context.fillStyle = colour("--faint");
  context.textAlign = "right";
  context.textBaseline = "middle";
  devices.forEach((device, index) => context.fillText(String(device), LEFT - 8, TOP + LANE * (index + 0.5)));
  context.textAlign = "center";
  for (const tick of ticks(from, to, width / 110)) context.fillText(short(tick), px(tick), height - BOTTOM + 11);
  context.fillText("seconds", (LEFT + width) / 2, height - 8);
  context.textAlign = "left";
  context.strokeStyle = colour("--faint");
  context.setLineDash([4, 3]);
  timeline.rounds.forEach((round, index) => {
    context.beginPath();
    context.moveTo(px(round.opened), 4);
    context.lineTo(px(round.opened), height - BOTTOM);
    context.stroke();
    context.fillText(`${timeline.unit} ${timeline.first + index}${pixels(round.side)}`, px(round.opened) + 4, 10);
  });
  context.setLineDash([]);
}

function drawTask(context, task, { y, px, maxRow, colour, isDark, bars }) {
  const kind = outcomeKind(task);
  const isLost = LOST.includes(kind);
  const height = LANE - 4;
  task.starts.forEach((start, step) => {
    const x = px(task.opened + start);
    const width = Math.max(0.6, px(task.opened + task.ends[step]) - x - 0.8);
    context.fillStyle = shade(getLevel(task.rows[step], maxRow) * 0.9 + 0.05);
    context.fillRect(x, y, width, height);
    bars.push({ x, y, width, task, step });
  });
  if (!task.starts.length) return;
  const [x, end] = [px(task.opened + task.starts[0]), px(task.opened + task.ends.at(-1))];
  if (isDark && !isLost) {
    context.strokeStyle = colour("--faint"); // dark bars on a dark ground need an edge
    context.strokeRect(x - 0.5, y - 0.5, end - x + 0.5, height + 1);
  }
  if (isLost) drawHatch(context, x, y, end - x, height, colour);
  if (kind === "finished") return;
  context.font = "10px system-ui, sans-serif";
  const width = context.measureText(kind).width + 6;
  if (width < end - x) {
    context.fillStyle = colour("--panel");
    context.fillRect(end - width - 1, y + 2, width, height - 4);
    context.fillStyle = colour(isLost ? "--bad" : "--text");
    context.textAlign = "left";
    context.fillText(kind, end - width + 2, y + height / 2 + 0.5);
  }
  context.font = "12px system-ui, sans-serif";
}

function drawHatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour("--panel");
  context.lineWidth = 1.4;
  for (let left = x - height; left < x + width; left += 6) {
    context.beginPath();
    context.moveTo(left, y + height);
    context.lineTo(left + height, y);
    context.stroke();
  }
  context.restore();
  context.strokeStyle = colour("--bad");
  context.strokeRect(x, y, width, height);
}

function describeBar({ task, step }) {
  const [start, end] = [task.opened + task.starts[step], task.opened + task.ends[step]];
  const row = task.rows[step] === undefined ? "" : `, row ${task.rows[step]}`;
  return (
    `device ${task.device}, ${task.unit} ${task.round}: ${task.end}\n` +
    `mini-batch ${step + 1} of ${task.starts.length}${row}\n` +
    `${start.toFixed(3)} to ${end.toFixed(3)} s`
  );
}
