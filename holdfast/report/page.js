// The legend chooses lines everywhere on the page; a pointer over a chart, or the arrow keys on it, read the values of a round; a click on
// the head of a table sorts it.
"use strict";
const tip = document.getElementById("tip");
const data = JSON.parse(document.getElementById("data").textContent);
const many = document.querySelector(".keys[data-many]") !== null; // more lines than can be told apart: those not chosen stay, in grey

for (const key of document.querySelectorAll(".key[data-key]")) {
  key.addEventListener("click", () => choose(key, key.getAttribute("aria-pressed") !== "true"));
}
for (const button of document.querySelectorAll(".key[data-all]")) {
  button.addEventListener("click", () => document.querySelectorAll(".key[data-key]").forEach((key) => choose(key, button.dataset.all === "true")));
}

function choose(key, shown) {
  for (const twin of document.querySelectorAll(`.key[data-key="${key.dataset.key}"]`)) twin.setAttribute("aria-pressed", String(shown));
  const line = `[data-line="${key.dataset.key}"]`;
  for (const part of document.querySelectorAll(many ? `svg[data-x] ${line}` : `svg ${line}, .lane${line}`)) {
    part.classList.toggle(many ? "muted" : "off", !shown);
    if (shown && many) part.parentNode.insertBefore(part, part.parentNode.querySelector(".cursor")); // above the grey ones
  }
  if (many) document.querySelectorAll("svg[data-x]").forEach(spreadLabels);
}

// Labels at the ends of lines, at least a gap apart where there is room.
function spreadLabels(chart) {
  const gap = 14, height = chart.viewBox.baseVal.height;
  const found = [...chart.querySelectorAll("[data-line]:not(.muted)")].filter((g) => g.querySelector(".label"));
  const ends = found.map((g) => ({ label: g.querySelector(".label"), at: Number(g.querySelector(".dot").getAttribute("cy")) }));
  ends.sort((a, b) => a.at - b.at);
  let floor = 18;
  for (const end of ends) { end.at = Math.max(end.at, floor); floor = end.at + gap; }
  let ceiling = height - 40;
  for (const end of ends.reverse()) { end.at = Math.min(end.at, ceiling); ceiling = end.at - gap; end.label.setAttribute("y", (end.at + 4).toFixed(1)); }
}

for (const chart of document.querySelectorAll("svg[data-x]")) {
  const holder = chart.closest("[data-chart]");
  const series = holder && data[holder.dataset.chart];
  if (series) reading(chart, series);
}

function reading(chart, series) {
  const [left, right, first, last] = chart.dataset.x.split(",").map(Number);
  const cursor = chart.querySelector(".cursor");
  const rounds = [...new Set(series.flatMap((s) => s.rounds))].sort((a, b) => a - b);
  let now = rounds.length - 1;
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  const show = (place, x, y) => {
    now = place;
    const at = left + ((rounds[now] - first) / Math.max(last - first, 1)) * (right - left);
    cursor.setAttribute("transform", `translate(${at} 0)`);
    cursor.setAttribute("visibility", "visible");
    tell(x, y, rounds[now], series, chart, at);
  };
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    if (point.x < left - 8 || point.x > right + 8) return hide();
    const wanted = first + ((point.x - left) / (right - left)) * (last - first);
    const nearest = rounds.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a), rounds[0]);
    show(rounds.indexOf(nearest), event.clientX, event.clientY);
  });
  chart.setAttribute("tabindex", "0");
  chart.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: rounds.length - 1 }[event.key];
    if (event.key === "Escape") return hide();
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(Math.max(to, 0), rounds.length - 1));
  });
}

function tell(x, y, round, series, chart, at) {
  const percent = chart.dataset.percent === "1";
  const rows = series
    .map((s) => ({ line: s.line, label: s.label, value: s.values[s.rounds.indexOf(round)] }))
    .filter((r) => r.value !== undefined && !chart.querySelector(`[data-line="${r.line}"]`)?.matches(".off, .muted"))
    .sort((a, b) => (percent ? b.value - a.value : a.value - b.value));
  tip.replaceChildren(element("b", `round ${round}`));
  for (const row of rows) {
    const line = element("div", "");
    line.className = `c${row.line % 7}`;
    line.append(element("i", ""), element("span", `${row.label}  ${percent ? (100 * row.value).toFixed(1) + " %" : row.value.toPrecision(3)}`));
    tip.append(line);
  }
  tip.hidden = false;
  if (x === undefined) { // by key: beside the cursor
    const place = new DOMPoint(at, 40).matrixTransform(chart.getScreenCTM());
    [x, y] = [place.x, place.y];
  }
  tip.style.left = Math.max(8, Math.min(x + 16, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, Math.min(y + 16, innerHeight - tip.offsetHeight - 8)) + "px";
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = element("button", head.textContent);
    button.type = "button";
    button.className = "sort";
    button.title = head.title || `sort by ${head.textContent}`;
    head.replaceChildren(button);
    button.addEventListener("click", () => sort(table, head, column));
  });
}

// Figures from the highest on at first, words from A on; what has no figure stays last.
function sort(table, head, column) {
  const rows = [...table.tBodies[0].rows];
  const value = (row) => (row.cells[column].dataset.value === undefined ? undefined : Number(row.cells[column].dataset.value));
  const figures = rows.some((row) => value(row) !== undefined);
  const before = head.getAttribute("aria-sort");
  const down = before === null ? figures : before === "ascending";
  rows.sort((a, b) => {
    if (!figures) return (down ? -1 : 1) * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
    const [x, y] = [value(a), value(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    return down ? y - x : x - y;
  });
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

// On a narrow screen the legend, or the title, names the lines: curves take the room of the names at their ends.
const narrow = matchMedia("(max-width: 560px)");
function fitCurves() {
  for (const chart of document.querySelectorAll("svg[data-x]")) {
    const right = Number(chart.dataset.x.split(",")[1]), height = chart.viewBox.baseVal.height;
    chart.dataset.whole ??= String(chart.viewBox.baseVal.width);
    const crop = narrow.matches;
    chart.setAttribute("viewBox", `0 0 ${crop ? right + 16 : chart.dataset.whole} ${height}`);
    chart.classList.toggle("nameless", crop);
  }
}
narrow.addEventListener("change", fitCurves);
fitCurves();

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
