"use strict";
// Draws what `charts.py` and `summary.py` say. All text goes in as text, never as markup.

const COLOURS = ["#4c9be8", "#e8884c", "#5bb974", "#d6616b", "#9d7fd1", "#b58863", "#d77fb3", "#8a94a0"];
const PHASE_COLOURS = { data: "#d9a531", compute: "#5bb974", waiting: "#d6616b", exchange: "#4c9be8", optimizer: "#49b6b0" };
const zoom = { from: null, to: null };

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  for (const child of children) made.append(child);
  return made;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (value, digits = 1) => (value === null || value === undefined ? "" : Number(value).toFixed(digits));
const ms = (value) => (value === null || value === undefined ? "" : `${(value * 1e3).toFixed(1)} ms`);

function table(head, rows, attributes = {}) {
  const made = node("table", attributes);
  made.append(node("thead", {}, node("tr", {}, ...head.map((text) => node("th", { scope: "col" }, text)))));
  made.append(node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((cell) => node("td", {}, String(cell)))))));
  return made;
}

function workersTable(figures) {
  const head = ["worker", "samples/step", "samples/s by itself", "data", "compute", "waiting", "exchange", "optimizer", "idle"];
  const rows = figures.workers.map((one) => [
    one.name, number(one.samples), number(one.samples_per_s, 0), ms(one.data_s), ms(one.compute_s), ms(one.waiting_s),
    ms(one.exchange_s), ms(one.optimizer_s), one.idle_share === null ? "" : `${(100 * one.idle_share).toFixed(0)} %`,
  ]);
  return table(head, rows, { class: "workers" });
}

function traces(chart) {
  if (chart.kind === "map") {
    return [{
      type: "heatmap", x: chart.x, y: chart.y, z: chart.z, colorscale: "Viridis", hoverongaps: false,
      colorbar: { title: { text: chart.unit || "samples" }, thickness: 12 },
      hovertemplate: `%{y}, step %{x}: %{z:.1f} ${chart.unit}<extra></extra>`,
    }];
  }
  if (chart.kind === "spans") {
    return chart.lines.map((line) => ({
      type: "bar", orientation: "h", name: line.name, base: line.base, x: line.x, y: line.y, marker: { color: PHASE_COLOURS[line.name] || COLOURS[7] },
      customdata: line.steps, hovertemplate: "%{y}, step %{customdata}: %{x:.2f} ms<extra>" + line.name + "</extra>",
    }));
  }
  if (chart.kind === "bars") {
    return chart.lines.map((line) => ({
      type: "bar", orientation: "h", name: line.name, x: line.x, y: line.y, marker: { color: PHASE_COLOURS[line.name] },
      hovertemplate: "%{y}: %{x:.1f} ms<extra>" + line.name + "</extra>",
    }));
  }
  return chart.lines.map((line, place) => ({
    type: "scatter", mode: line.x.length > 1 ? "lines" : "markers", name: line.name, x: line.x, y: line.y, connectgaps: false,
    line: { color: COLOURS[place % COLOURS.length], dash: line.dash || "solid", width: 2 },
  }));
}

function layout(chart) {
  const text = style("--text"), grid = style("--line");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid };
  const steps = chart.x_title === "step" && zoom.from !== null ? { range: [zoom.from, zoom.to] } : {};
  return {
    margin: { l: 70, r: 20, t: 30, b: 80 }, height: chart.kind === "lines" ? 310 : Math.max(250, 130 + 16 * new Set(chart.y || chart.lines[0].y).size),
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--dim"), activecolor: style("--mark") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 }, barmode: chart.kind === "spans" ? "overlay" : "stack",
    xaxis: { ...axis, title: { text: chart.x_title }, ...steps },
    yaxis: { ...axis, title: { text: chart.kind === "lines" ? chart.y_title : "" }, autorange: chart.kind === "lines" ? true : "reversed",
             rangemode: chart.kind === "lines" ? "tozero" : "normal", automargin: true },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal" }, showlegend: chart.kind !== "map" && chart.lines.length > 1, hovermode: "closest",
    uirevision: `${zoom.from} ${zoom.to}`,  // what is zoomed and hidden stays so when numbers change
  };
}

function draw(place, chart) {
  place.setAttribute("aria-label", `${chart.title}. ${chart.text}`);
  if (window.Plotly) {
    if (!place.zooms) place.textContent = "";
    Plotly.react(place, traces(chart), layout(chart), { responsive: true, displaylogo: false });
    if (!place.zooms) {
      place.zooms = true;
      place.on("plotly_relayout", (change) => {
        if (place.closest("section").chart.x_title !== "step") return;
        const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
        if (from !== undefined) zoomTo(Math.max(0, Number(from)), Number(to));
        else if (change["xaxis.autorange"]) zoomTo(null, null);
      });
    }
  } else {
    place.textContent = "not drawn yet; the numbers are below";
  }
}

function numbersOf(chart) {
  if (chart.kind === "map") {
    return [["", ...chart.x], chart.y.map((name, row) => [name, ...chart.z[row].map((value) => number(value))])];
  }
  if (chart.kind === "spans") {
    return [["worker", "step", "phase", "ms"], chart.lines.flatMap((line) => line.x.map((took, place) => [line.y[place], line.steps[place], line.name, number(took, 2)]))];
  }
  const lines = chart.lines, base = chart.kind === "bars" ? lines[0].y : lines[0].x;
  const value = (line, place) => number(chart.kind === "bars" ? line.x[place] : line.y[place], 3);
  return [[chart.kind === "bars" ? "worker" : chart.x_title, ...lines.map((line) => line.name)],
          base.map((at, place) => [at, ...lines.map((line) => value(line, place))])];
}

function chartSection(chart) {
  const plot = node("div", { class: "plot", role: "img", tabindex: "0" });
  const details = node("details", {}, node("summary", {}, "numbers"));
  details.addEventListener("toggle", () => fill(section, section.chart));
  const section = node("section", { class: "chart", id: "" }, node("h3", {}, chart.title), node("p", { class: "text" }, chart.text), plot, details);
  section.dataset.chart = chart.id;
  section.chart = chart;
  return section;
}

function fill(section, chart) {
  section.querySelector("h3").textContent = chart.title;
  section.querySelector(".text").textContent = chart.text;
  const details = section.querySelector("details");
  if (details.open) {
    let place = details.querySelector(".scroll");
    if (!place) { place = node("div", { class: "scroll", tabindex: "0" }); details.append(place); }
    swap(place, table(...numbersOf(chart)));
  }
}

function swap(place, made) {  // whoever reads or selects in it is left alone while nothing has changed
  if (!place.firstChild || place.firstChild.outerHTML !== made.outerHTML) place.replaceChildren(made);
}

function decisionsSection() {
  const filter = node("input", { type: "search", "aria-label": "filter decisions" });
  const kinds = node("select", { "aria-label": "kind of decision" });
  const body = node("div", { class: "scroll", tabindex: "0" });
  const title = node("h3", {}, "Decisions, newest first");
  const section = node("section", { class: "chart decisions" }, title,
    node("div", { class: "tools" }, node("label", {}, "filter", filter), node("label", {}, "kind", kinds)), body);
  section.show = (decisions, total) => {
    if (decisions) section.all = decisions;
    const known = ["all", ...new Set(section.all.map((one) => one.kind))];
    if (known.join() !== [...kinds.options].map((one) => one.value).join()) {
      const chosen = kinds.value;
      kinds.replaceChildren(...known.map((name) => node("option", { value: name }, name)));
      kinds.value = known.includes(chosen) ? chosen : "all";
    }
    const words = filter.value.toLowerCase();
    const chosen = section.all.filter((one) => (kinds.value === "all" || one.kind === kinds.value) && one.text.toLowerCase().includes(words));
    if (total !== undefined) title.textContent = "Decisions, newest first" + (total > section.all.length ? `: ${section.all.length} of ${total}` : "");
    swap(body, table(["step", "kind", "what and why"],
      chosen.map((one) => [one.step < 0 ? "" : one.step, one.kind + (one.worker < 0 ? "" : ` (worker ${one.worker})`), one.text]), { class: "left" }));
  };
  filter.addEventListener("input", () => section.show());
  kinds.addEventListener("change", () => section.show());
  return section;
}

function show(run, root) {
  let panel = root.querySelector(`[data-run="${CSS.escape(run.id)}"]`);
  if (!panel) {
    panel = node("article", { "data-run": run.id }, node("h2", {}, run.name), node("div", { class: "words" }),
      node("div", { class: "advice" }), node("div", { class: "charts" }), node("h3", {}, "Workers"), node("div", { class: "scroll table", tabindex: "0" }));
    panel.decisions = decisionsSection();
    panel.append(panel.decisions);
    root.append(panel);
  }
  panel.dataset.step = run.figures.steps;
  const said = run.figures.words.map((text) => node("p", {}, text));
  const words = panel.querySelector(".words");
  if (words.textContent !== run.figures.words.join("")) words.replaceChildren(...said);
  panel.querySelector(".advice").replaceChildren(...run.figures.advice.map((text) => node("p", {}, `Try next: ${text}.`)));
  const charts = panel.querySelector(".charts");
  for (const chart of run.charts) {
    let section = charts.querySelector(`[data-chart="${chart.id}"]`);
    if (!section) { section = chartSection(chart); charts.append(section); }
    section.chart = chart;
    fill(section, chart);
    draw(section.querySelector(".plot"), chart);
  }
  swap(panel.querySelector(".table"), workersTable(run.figures));
  panel.decisions.show(run.decisions, run.num_decisions);
}

function zoomTo(from, to) {
  zoom.from = from;
  zoom.to = to;
  for (const [id, value] of [["from", from], ["to", to]]) {
    const field = document.getElementById(id);
    if (field && document.activeElement !== field) field.value = value === null ? "" : Math.round(value);
  }
  redraw();
  window.dispatchEvent(new CustomEvent("zoomed", { detail: { from, to } }));
}

function redraw() {
  for (const section of document.querySelectorAll("section.chart")) if (section.chart) draw(section.querySelector(".plot"), section.chart);
}

function tools() {
  const from = node("input", { type: "number", min: "0", id: "from" }), to = node("input", { type: "number", min: "0", id: "to" });
  const all = node("button", { type: "button" }, "all steps");
  const wrong = node("span", { class: "dim", role: "status" });
  const apply = () => {
    const both = from.value !== "" && to.value !== "", first = Number(from.value), last = Number(to.value);
    wrong.textContent = both && last < first ? `the last step must not be before the first: ${first} to ${last}` : "";
    if (both && last >= first) zoomTo(first, last > first ? last : last + 1);
    else if (from.value === "" && to.value === "") zoomTo(null, null);  // else one of them is still to come
  };
  from.addEventListener("change", apply);
  to.addEventListener("change", apply);
  all.addEventListener("click", () => { from.value = to.value = ""; apply(); });
  return node("div", { class: "tools", role: "group", "aria-label": "steps shown" }, node("label", {}, "from step", from), node("label", {}, "to step", to), all, wrong);
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
