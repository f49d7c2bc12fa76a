"use strict";
// The live page: everything once, then what changes, as the server sends it.

const runs = document.getElementById("runs");
const state = document.getElementById("state");
const clock = document.getElementById("clock");
const seen = new Map();

function say(text) {  // read aloud, so only when it is another one
  if (state.textContent !== text) state.textContent = text;
}

function take(told) {
  for (const run of told.runs) {
    seen.set(run.id, run);
    show(run, runs);
  }
  const reading = told.runs.filter((run) => run.read_share < 0.999 && !run.figures.problem);
  clock.textContent = reading.map((run) => `${run.name}: ${(100 * run.read_share).toFixed(0)} % read`).join(", ") || `at ${new Date().toLocaleTimeString()}`;
  say(reading.length ? "reading" : "up to date: " + told.runs.map((run) => `${run.name} ${run.figures.status}`).join(", "));
}

document.getElementById("tools").append(tools());

const source = new EventSource("api/live");
source.addEventListener("runs", (message) => take(JSON.parse(message.data)));
source.addEventListener("error", () => say("no connection to the server; trying again"));
// What is not drawn yet is drawn when the drawing library has arrived.
document.getElementById("plotly").addEventListener("load", () => { for (const run of seen.values()) show(run, runs); });

// A zoom into few enough steps asks for every one of them, by phase.
let asked = 0;
async function detail(run, from, to, number) {
  const panel = runs.querySelector(`[data-run="${CSS.escape(run.id)}"] .charts`);
  let chart = null;
  if (from !== null) {
    const answer = await fetch(`api/steps?run=${encodeURIComponent(run.place)}&from=${Math.floor(from)}&to=${Math.ceil(to)}`);
    if (answer.ok) chart = (await answer.json()).chart;
  }
  if (number !== asked) return;  // another zoom has come since
  let section = panel.querySelector('[data-chart="steps"]');
  if (!chart) {
    if (section) section.remove();
    return;
  }
  if (!section) {
    section = chartSection(chart);
    const lanes = panel.querySelector('[data-chart="lanes"]');
    if (lanes) lanes.after(section); else panel.prepend(section);
  }
  section.chart = chart;
  fill(section, chart);
  draw(section.querySelector(".plot"), chart);
}

let waiting = null;
window.addEventListener("zoomed", (event) => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    asked += 1;
    for (const run of seen.values()) detail(run, event.detail.from, event.detail.to, asked);
  }, 200);
});
