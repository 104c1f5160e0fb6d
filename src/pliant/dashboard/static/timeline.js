// The timeline of devices on a canvas: a bar is a mini-batch, stronger where more was trained.

import { short, showTip, ticks } from "./chart.js";

const LOST = ["late", "dropped", "rejected", "surplus", "void"];
const LANE = 19;
const LEFT = 46;
const TOP = 20;
const BOTTOM = 34;
// Ends of the cividis scale, which is even in lightness and the same for colour-blind people.
const LIGHT = [245, 225, 90];
const DARK = [20, 52, 108];
const MIDDLE = [124, 123, 120];

export function kind(task) {
  return task.end.split(":")[0];
}

function shade(share, isDark) {
  const part = isDark ? 1 - share : share; // what stands for more stands out from the ground
  const [from, to, at] = part < 0.5 ? [LIGHT, MIDDLE, part * 2] : [MIDDLE, DARK, part * 2 - 1];
  return `rgb(${from.map((one, place) => Math.round(one + (to[place] - one) * at)).join()})`;
}

export function drawLanes(canvas, shown) {
  const tasks = shown.rounds.flatMap((round, at) =>
    round.tasks.map((task) => ({ ...task, opened: round.opened, round: shown.first + at })),
  );
  const devices = [...new Set(tasks.map((task) => task.device))].sort((a, b) => a - b);
  const lane = new Map(devices.map((device, at) => [device, at]));
  const width = Math.max(300, canvas.parentElement.clientWidth - 2);
  const height = TOP + BOTTOM + LANE * Math.max(1, devices.length);
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  const look = getComputedStyle(document.documentElement);
  const colour = (name) => look.getPropertyValue(name).trim();
  const isDark = look.colorScheme === "dark";
  brush.font = "12px system-ui, sans-serif";
  const from = shown.rounds.length ? shown.rounds[0].opened : 0;
  const to = shown.rounds.length ? shown.rounds[shown.rounds.length - 1].closed : 1;
  const px = (at) => LEFT + ((at - from) / (to - from || 1)) * (width - LEFT - 12);
  frame(brush, { devices, px, from, to, width, height, colour, shown });
  const top = Math.max(1, ...tasks.flatMap((task) => task.rows));
  const boxes = [];
  for (const task of tasks) {
    const y = TOP + LANE * lane.get(task.device) + 2;
    bars(brush, task, { y, px, top, colour, isDark, boxes });
  }
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = boxes.find((one) => x >= one.x && x <= one.x + one.wide && y >= one.y && y <= one.y + LANE - 4);
    showTip(hit && told(hit), event);
  };
  canvas.onpointerleave = () => showTip(null);
  return { tasks, devices };
}

function frame(brush, { devices, px, from, to, width, height, colour, shown }) {
  brush.fillStyle = colour("--faint");
  brush.textAlign = "right";
  brush.textBaseline = "middle";
  devices.forEach((device, at) => brush.fillText(String(device), LEFT - 8, TOP + LANE * (at + 0.5)));
  brush.textAlign = "center";
  for (const at of ticks(from, to, width / 110)) brush.fillText(short(at), px(at), height - BOTTOM + 11);
  brush.fillText("seconds", (LEFT + width) / 2, height - 8);
  brush.textAlign = "left";
  brush.strokeStyle = colour("--faint");
  brush.setLineDash([4, 3]);
  shown.rounds.forEach((round, at) => {
    brush.beginPath();
    brush.moveTo(px(round.opened), 4);
    brush.lineTo(px(round.opened), height - BOTTOM);
    brush.stroke();
    brush.fillText(`round ${shown.first + at}`, px(round.opened) + 4, 10);
  });
  brush.setLineDash([]);
}

function bars(brush, task, { y, px, top, colour, isDark, boxes }) {
  const isLost = LOST.includes(kind(task));
  const high = LANE - 4;
  task.starts.forEach((start, at) => {
    const x = px(task.opened + start);
    const wide = Math.max(0.6, px(task.opened + task.ends[at]) - x - 0.8);
    brush.fillStyle = shade(((task.rows[at] ?? top) / top) * 0.9 + 0.05, isDark);
    brush.fillRect(x, y, wide, high);
    boxes.push({ x, y, wide, task, at });
  });
  if (!task.starts.length) return;
  const [x, end] = [px(task.opened + task.starts[0]), px(task.opened + task.ends[task.ends.length - 1])];
  if (isLost) hatch(brush, x, y, end - x, high, colour);
  if (kind(task) === "finished") return;
  brush.font = "10px system-ui, sans-serif";
  const text = kind(task);
  const wide = brush.measureText(text).width + 6;
  if (wide < end - x) {
    brush.fillStyle = colour("--panel");
    brush.fillRect(end - wide - 1, y + 2, wide, high - 4);
    brush.fillStyle = colour(isLost ? "--bad" : "--text");
    brush.textAlign = "left";
    brush.fillText(text, end - wide + 2, y + high / 2 + 0.5);
  }
  brush.font = "12px system-ui, sans-serif";
}

function hatch(brush, x, y, wide, high, colour) {
  brush.save();
  brush.beginPath();
  brush.rect(x, y, wide, high);
  brush.clip();
  brush.strokeStyle = colour("--panel");
  brush.lineWidth = 1.4;
  for (let at = x - high; at < x + wide; at += 6) {
    brush.beginPath();
    brush.moveTo(at, y + high);
    brush.lineTo(at + high, y);
    brush.stroke();
  }
  brush.restore();
  brush.strokeStyle = colour("--bad");
  brush.strokeRect(x, y, wide, high);
}

function told({ task, at }) {
  const [start, stop] = [task.opened + task.starts[at], task.opened + task.ends[at]];
  const row = task.rows[at] === undefined ? "" : `, row ${task.rows[at]}`;
  return (
    `device ${task.device}, round ${task.round}: ${task.end}\n` +
    `mini-batch ${at + 1} of ${task.starts.length}${row}\n` +
    `${start.toFixed(3)} to ${stop.toFixed(3)} s`
  );
}
